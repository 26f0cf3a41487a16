"""Routers see only what is free before drafting, and every decision is a plan that replays exactly."""

from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from specsel.costs import read_costs
from specsel.logs import SpecselError
from specsel.replay.replay import Plan, follow
from specsel.selection import route as rt
from specsel.study.simulation import Model, simulate_positions

pytestmark = pytest.mark.skipif(not hasattr(Plan, "one"), reason="plans of one arm only")

MODEL = Model(requests_per_workload=6, output_len=(40, 60), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def log():
    return simulate_positions(MODEL, rng=np.random.default_rng(3))


@pytest.fixture(scope="module")
def costs(log):
    drafts = zip(log.arms, (0.01, 0.03, 0.0005, 0.01), strict=True)
    samples = [{"what": "t_draft", "arm": a, "context": 100, "seconds": s} for a, s in drafts]
    verify = ((1, 0.05), (10, 0.07), (40, 0.12))
    samples += [{"what": "t_verify", "rows": r, "context": 100, "seconds": s} for r, s in verify]
    return read_costs({"samples": samples})


@pytest.fixture(scope="module")
def runs(log, costs):
    plans = rt.decision_plans(log, rng=np.random.default_rng(1), costs=costs)
    return {name: follow(log, plan, costs=costs) for name, plan in plans.items()}


def test_every_output_token_is_emitted_once_and_no_decision_beats_the_best_sequence(log, runs):
    for run in runs.values():
        assert np.array_equal(run.emitted, np.diff(log.starts)), run.policy
        assert (run.blocks >= runs["best sequence (hindsight)"].blocks).all()


def test_drafts_are_counted_per_arm(log, runs):
    assert runs["all arms"].pulls.sum() == log.n_arms * runs["all arms"].blocks.sum()
    assert runs["route (logistic)"].pulls.sum() == runs["route (logistic)"].blocks.sum()
    assert runs["plain decoding"].pulls.sum() == 0 and runs["plain decoding"].blocks.sum() == log.n_positions
    both, one = runs["route (boosting) + redraft"], runs["route (boosting)"]
    assert both.blocks.sum() < one.blocks.sum() and both.pulls.sum() > both.blocks.sum()


def test_a_router_for_time_is_faster_and_needs_no_fewer_blocks(runs):
    time, tokens = runs["route (boosting) for time"], runs["route (boosting)"]
    assert time.seconds.sum() < tokens.seconds.sum() and time.blocks.sum() >= tokens.blocks.sum()


def test_a_router_does_not_see_counts_of_arms_that_did_not_run(log):
    """Altered counts of arms that never ran leave features and choices as they were."""

    def never_two(x):
        return np.where(np.nan_to_num(x[:, -8]) > 0.2, 1, 0)

    rows, ran, x = rt.roam(log, never_two)
    accepted = log.accepted.copy()
    accepted[:, 2:] = 9
    other = rt.roam(replace(log, accepted=accepted), never_two)
    assert np.array_equal(rows, other[0]) and np.array_equal(x, other[2], equal_nan=True) and not ran[:, 2:].any()


def test_features_use_only_what_is_known_before_the_decision(log):
    """Changing everything from the middle of each request on leaves the features seen before as they were."""
    late = log.remaining <= 20
    changed = replace(log, accepted=np.where(late[:, None], 0, log.accepted))
    rows, _, x = rt.roam(log, lambda x: np.zeros(len(x), int))
    rows2, _, x2 = rt.roam(changed, lambda x: np.zeros(len(x), int))
    both = np.intersect1d(rows[~late[rows]], rows2[~late[rows2]])
    assert len(both) > 100 and np.array_equal(x[np.isin(rows, both)], x2[np.isin(rows2, both)], equal_nan=True)


def test_plans_of_a_workload_ignore_its_outcomes(log):
    """With other outcomes in one workload the first decision of each of its requests is still the same."""
    held = log.workload == 0
    changed = replace(log, accepted=np.where(held[log.request_of][:, None], 0, log.accepted))
    first = log.starts[:-1][held]
    plans = [rt.decision_plans(x, rng=np.random.default_rng(2), kinds=("logistic",)) for x in (log, changed)]
    assert np.array_equal(*(p["route (logistic)"].arms[first] for p in plans))
    assert not np.array_equal(*(p["route (logistic)"].arms for p in plans))


def test_routing_finds_a_signal_that_is_there():
    """Two arms, and a match length that says which one accepts everything."""
    log = simulate_positions(replace(MODEL, requests_per_workload=8), rng=np.random.default_rng(0))
    good = np.random.default_rng(1).random(log.n_positions) < 0.5
    accepted = np.zeros_like(log.accepted)
    accepted[:, 0], accepted[:, 1] = np.where(good, 4, 0), np.where(good, 0, 4)
    accepted = np.minimum(accepted, log.remaining[:, None]).astype(np.int16)
    planted = replace(log, accepted=accepted, proposed=np.full_like(accepted, 9), context={"match_length": good * 9.0})
    plans = rt.decision_plans(planted, rng=np.random.default_rng(1))
    runs = {name: follow(planted, plan) for name, plan in plans.items()}
    for kind in rt.KINDS:
        assert runs[f"route ({kind})"].block_efficiency > 0.99 * runs["all arms"].block_efficiency


def test_same_seed_same_plans(log):
    one, two = (rt.decision_plans(log, rng=np.random.default_rng(1), kinds=("logistic",)) for _ in range(2))
    assert one.keys() == two.keys() and all(np.array_equal(one[name].arms, two[name].arms) for name in one)


def test_a_stated_threshold_reaches_the_redrafts(log, runs):
    plans = rt.decision_plans(log, rng=np.random.default_rng(1), kinds=(), threshold=0.0)
    assert np.array_equal(follow(log, plans["redraft"]).pulls, runs["all arms"].pulls)


def test_what_one_workload_cannot_train_is_left_out(log):
    plans = rt.decision_plans(log.select(log.workload == 1), rng=np.random.default_rng(0))
    assert [name for name in plans if "route" in name or "redraft" in name] == []


def test_an_unknown_kind_is_refused(log):
    with pytest.raises(SpecselError, match="logistic or boosting"):
        rt.fit_router(log, kind="forest", rng=np.random.default_rng(0))


def test_boosting_runs_on_one_thread_whatever_the_machine_offers(log, monkeypatch):
    threads, fit = set(), rt.HistGradientBoostingRegressor.fit

    def counted(*args):
        threads.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp")
        return fit(*args)

    monkeypatch.setattr(rt.HistGradientBoostingRegressor, "fit", counted)
    with threadpool_limits(2, "openmp"):
        rt.fit_router(log, kind="boosting", rng=np.random.default_rng(0))
    assert threads == {1}
