"""Plans, routers and their comparison replay exactly and see only what is free before drafting."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsel.costs import read_costs
from specsel.logs import LogError, SpecselError, block_rows, read_log
from specsel.replay.replay import fixed, oracle_dp
from specsel.study import oldrouting as rt
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
MODEL = Model(requests_per_workload=6, output_len=(40, 60), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def log():
    return simulate_positions(MODEL, rng=np.random.default_rng(3))


@pytest.fixture(scope="module")
def costs(log):
    samples = [
        {"what": "t_draft", "arm": a, "context": 100, "seconds": s}
        for a, s in zip(log.arms, (0.01, 0.03, 0.0005, 0.01), strict=True)
    ]
    samples += [
        {"what": "t_verify", "rows": r, "context": 100, "seconds": s} for r, s in ((1, 0.05), (10, 0.07), (40, 0.12))
    ]
    return read_costs({"samples": [*samples, {"what": "catch_up", "arm": "eagle", "context": 100, "seconds": 0.005}]})


@pytest.fixture(scope="module")
def runs(log, costs):
    return rt.decision_runs(log, rng=np.random.default_rng(1), costs=costs)


def test_the_plan_of_one_arm_is_that_fixed_arm(log):
    for k in range(log.n_arms):
        mine, other = rt.run_plan(log, rt.one_arm(log, k), name="x"), fixed(log, k)
        assert np.array_equal(mine.blocks, other.blocks) and np.array_equal(mine.pulls, other.pulls)


def test_running_every_arm_is_the_per_block_oracle_of_the_golden_log():
    """expected.json: 9 blocks for the greedy oracle; 11 for dflash alone, which is redrafting never."""
    log = read_log(CASES / "golden_small.jsonl")
    every = rt.run_plan(log, np.ones((log.n_positions, 4), dtype=bool), name="x")
    never = rt.run_plan(log, rt.redraft_plan(log, 0, np.zeros(log.n_positions)), name="x")
    assert every.blocks.sum() == 9 and never.blocks.sum() == 11 and every.pulls.sum() == 36


def test_every_output_token_is_emitted_once_by_every_decision(log, runs):
    for run in runs.values():
        assert np.array_equal(run.emitted, np.diff(log.starts)), run.policy


def test_no_decision_needs_fewer_blocks_than_the_best_sequence(log, runs):
    best = oracle_dp(log).blocks
    assert all((run.blocks >= best).all() for run in runs.values())


def test_drafts_are_counted_per_arm(log, runs):
    assert runs["all arms"].pulls.sum() == log.n_arms * runs["all arms"].blocks.sum()
    assert runs["route (logistic)"].pulls.sum() == runs["route (logistic)"].blocks.sum()
    assert runs["plain decoding"].pulls.sum() == 0 and runs["plain decoding"].blocks.sum() == log.n_positions


def test_seconds_of_a_block_add_up(log, costs):
    """Plain decoding costs one row per token; a fixed arm its draft and a verification of its proposed tokens + 1."""
    plain = rt.plain_decoding(log, costs)
    assert plain.seconds == pytest.approx(np.diff(log.starts) * 0.05)
    one = rt.run_plan(log, rt.one_arm(log, 1), name="x", costs=costs)
    rows = block_rows(log, 1)
    seconds = 0.03 * len(rows) + sum(float(costs.verify_s(1 + log.proposed[row, 1], 100)) for row in rows)
    assert one.seconds.sum() == pytest.approx(seconds)


def test_shared_accepted_tokens_are_verified_once_and_a_rested_arm_catches_up(costs):
    """Request code/0 starts with accepted 1, 3, 2, 0 of proposed 7, 7, 7, 0: 1 + 3 + (6 + 4 + 5) = 19 rows."""
    log = read_log(CASES / "golden_small.jsonl").select(np.array([1]))
    rows, same = np.array([0, 4]), np.zeros(2, dtype=int)
    ran = np.array([[True, True, True, True], [True, False, False, False]])
    first = rt._seconds(log, rows, same, ran, costs)[0]
    assert log.requests == ("code/0",) and first == pytest.approx(0.01 + 0.03 + 0.0005 + 0.01 + costs.verify_s(19, 1))
    again = rt._seconds(log, rows, same, ran[::-1], costs)[1]
    width = 1 + log.accepted[4].max() + (np.maximum(log.proposed[4], 0) - log.accepted[4]).sum()
    assert again == pytest.approx(0.0505 + 0.005 + costs.verify_s(width, 5))


def test_a_composite_arm_costs_its_parts_and_nothing_twice(log):
    """Without timings of its own: the lookup always, the fallback where its draft was used; beside dflash only the
    lookup more.
    """
    source = np.full(log.proposed.shape, -1, dtype=np.int8)
    source[:, 3] = np.where(log.position % 2 == 0, 2, 0)
    proposed, accepted = log.proposed.copy(), log.accepted.copy()
    proposed[:, 3], accepted[:, 3] = (
        np.where(source[:, 3] == 2, a[:, 2], a[:, 0]) for a in (log.proposed, log.accepted)
    )
    made = replace(log, source=source, proposed=proposed, accepted=accepted)
    seconds = {"dflash": 0.01, "eagle": 0.03, "ngram": 0.0005}
    samples = [{"what": "t_draft", "arm": a, "context": 1, "seconds": s} for a, s in seconds.items()]
    costs = read_costs(
        {"samples": [*samples, *({"what": "t_verify", "rows": r, "context": 1, "seconds": 0.1} for r in (1, 50))]}
    )
    rows = np.array([0, 1])

    def cost(*arms):
        return rt._seconds(made, rows, np.zeros(2, int), np.tile(np.isin(np.arange(4), arms), (2, 1)), costs).tolist()

    assert cost(3) == pytest.approx([0.1005, 0.1105])
    assert cost(0, 3) == pytest.approx([0.1105, 0.1105]) and cost(0, 2, 3) == pytest.approx([0.1105, 0.1105])


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


def test_routers_of_a_workload_ignore_its_outcomes(log):
    held = log.workload[log.request_of] == 0
    changed = replace(log, accepted=np.where(held[:, None], 0, log.accepted))
    routers = [
        rt.fit_router(one.select(one.workload != 0), kind="logistic", rng=np.random.default_rng(2))
        for one in (log, changed)
    ]
    x = np.random.default_rng(0).random((5, len(routers[0].names)))
    assert np.array_equal(routers[0].expected(x), routers[1].expected(x))


def test_routing_finds_a_signal_that_is_there():
    """Two arms, and a match length that says which one accepts everything."""
    log = simulate_positions(replace(MODEL, requests_per_workload=8), rng=np.random.default_rng(0))
    good = np.random.default_rng(1).random(log.n_positions) < 0.5
    accepted = np.zeros_like(log.accepted)
    accepted[:, 0], accepted[:, 1] = np.where(good, 4, 0), np.where(good, 0, 4)
    accepted = np.minimum(accepted, log.remaining[:, None]).astype(np.int16)
    planted = replace(log, accepted=accepted, proposed=np.full_like(accepted, 9), context={"match_length": good * 9.0})
    runs = rt.decision_runs(planted, rng=np.random.default_rng(1))
    for kind in rt.KINDS:
        assert runs[f"route ({kind})"].block_efficiency > 0.99 * runs["all arms"].block_efficiency


def test_same_seed_same_choices(log, runs):
    again = rt.decision_runs(log, rng=np.random.default_rng(1), kinds=("logistic",))
    assert all(np.array_equal(again[name].blocks, runs[name].blocks) for name in ("redraft", "route (logistic)"))


def test_the_table_has_plain_decoding_gains_and_speeds_with_limits(runs):
    table = rt.decision_table(runs, "always eagle", rng=np.random.default_rng(0), n_resamples=300).set_index("policy")
    assert table.loc["always eagle", ["gain", "gain_low", "gain_high", "speed"]].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert table.loc["plain decoding", "block_efficiency"] == 1 and table.loc["plain decoding", "speed"] < 1
    rest = table.drop(index=["always eagle", "plain decoding"])
    assert (rest["gain_low"] <= rest["gain"]).all() and (rest["gain"] <= rest["gain_high"]).all()
    assert np.isnan(table.loc["best sequence (hindsight)", "speed"])


def test_no_costs_no_speeds(log):
    runs = {"a": rt.run_plan(log, rt.one_arm(log, 0), name="a")}
    assert "speed" not in rt.decision_table(runs, "a", rng=np.random.default_rng(0), n_resamples=50)


def test_one_workload_routes_nowhere_and_says_nothing_wrong(log):
    runs = rt.decision_runs(log.select(log.workload == 1), rng=np.random.default_rng(0), kinds=("logistic",))
    assert (
        runs["redraft"].block_efficiency
        == runs["route (logistic)"].block_efficiency
        == max(runs[f"always {a}"].block_efficiency for a in log.arms)
    )


def test_a_block_anchored_log_and_an_unknown_kind_are_refused(log):
    anchored = read_log(CASES / "anchored_only.jsonl")
    with pytest.raises(LogError, match="block-anchored"):
        rt.run_plan(anchored, rt.one_arm(anchored, 0), name="x")
    with pytest.raises(SpecselError, match="logistic or boosting"):
        rt.fit_router(log, kind="forest", rng=np.random.default_rng(0))
