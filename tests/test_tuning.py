"""Tuning, the policy table, and what a policy does on the way, on simulated logs and by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_replay import log_of

from specsel.policies.catalogue import CATALOGUE
from specsel.policies.plain import UCB1, FollowTheLeader, Random
from specsel.replay import best_arms, fixed, replay
from specsel.study.policies import best_settings, play, policy_table, running_ratio, split_requests, steps, trials
from specsel.study.simulation import Model, simulate_positions

FLIPPING = Model(
    requests_per_workload=15,
    output_len=(40, 60),
    logit=((1.5, -1.0, -1.6, 0.0), (-1.0, 1.5, -1.6, 0.0)) * 2,
    request_sd=0.2,
)
NAMES = ("fixed:dflash", "best_fixed_workload", "oracle_dp", "random", "ucb1", "ftl", "contextual_thompson", "memspec")


def simulated(seed=1, **changes):
    return simulate_positions(replace(FLIPPING, **changes), rng=np.random.default_rng(seed))


def test_splits_are_disjoint_complete_and_stratified():
    log = simulated()
    train, test = split_requests(log, share=0.4, rng=np.random.default_rng(0))
    assert np.bincount(train.workload).tolist() == [6] * 4 and np.bincount(test.workload).tolist() == [9] * 4
    both = [set(zip(part.workload.tolist(), part.requests, strict=True)) for part in (train, test)]
    assert len(both[0] | both[1]) == log.n_requests and not both[0] & both[1]
    one = simulated(requests_per_workload=1)
    assert split_requests(one, share=0.5, rng=np.random.default_rng(0)) == (one, one)


def test_trials_are_the_grid_and_tuning_takes_the_first_of_the_best():
    log, grid = simulated(requests_per_workload=4), CATALOGUE["ucb1"].grid
    table, found = trials(log, {"ucb1": UCB1(), "hedgespec": CATALOGUE["hedgespec"].policy})
    assert table.value[:-1].tolist() == list(grid) and table.place.tolist() == [1, 2, 3, 4, 5, 6, 1]
    expected = [replay(log, UCB1(c=c)).blocks.sum() for c in grid]
    assert [run.blocks.sum() for run in found[:-1]] == expected
    assert best_settings(table, found)["ucb1"] == UCB1(c=grid[int(np.argmin(expected))])
    tied = log_of([[[2, 2]] * 6], draft_len=3)
    assert best_settings(*trials(tied, {"ucb1": UCB1()})) == {"ucb1": UCB1(c=grid[0])}


def test_totals_are_means_over_seeds_and_their_spread_is_told():
    log = simulated(requests_per_workload=3)
    random, ucb1 = play(log, [(Random(), "bandit"), (UCB1(), "bandit")], seeds=range(3))
    runs = [replay(log, Random(), seed=s) for s in range(3)]
    for name in ("blocks", "pulls", "neural_passes"):
        assert getattr(random, name) == pytest.approx(np.mean([getattr(r, name) for r in runs], axis=0))
    assert random.seed_sd == pytest.approx(np.std([r.block_efficiency for r in runs], ddof=1))
    assert ucb1.seed_sd is None and (ucb1.blocks == replay(log, UCB1()).blocks).all()


@pytest.fixture(scope="module")
def table():
    train, test = split_requests(simulated(), share=0.3, rng=np.random.default_rng(0))
    return train, test, *policy_table(train, test, names=NAMES, seeds=range(2))


def test_the_policy_table_has_a_named_row_for_every_setup(table):
    *_, found, runs = table
    rows = list(found[["policy", "feedback", "reset"]].itertuples(index=False, name=None))
    assert rows == [
        ("fixed:dflash", "", ""),
        ("best_fixed_workload", "", ""),
        ("oracle_dp", "", ""),
        ("random", "", "request"),
        ("ucb1", "bandit", "request"),
        ("ucb1", "bandit", "never"),
        *(("ftl", f, r) for r in ("request", "never") for f in ("full", "delayed")),
        *(("contextual_thompson", f, r) for r in ("request", "never") for f in ("bandit", "full", "delayed")),
        ("memspec", "", "request"),
    ]
    assert found.index.is_unique and list(runs) == list(found.index)
    assert {"fixed dflash", "ucb1, state kept", "ftl, full", "ftl, delayed, state kept"} <= set(found.index)


def test_every_row_is_the_replay_that_it_names(table):
    train, test, found, runs = table
    best = min((replay(train, UCB1(c=c)) for c in CATALOGUE["ucb1"].grid), key=lambda r: r.blocks.sum())
    assert found.setting["ucb1"] == best.policy
    given = policy_table(train, test, names=["ucb1"], settings={"ucb1": UCB1(c=7.0)})[0]
    assert given.setting["ucb1"] == repr(UCB1(c=7.0)) != given.setting["ucb1, state kept"]
    assert (runs["fixed dflash"].blocks == fixed(test, 0).blocks).all()
    leader = replay(test, FollowTheLeader(), feedback="delayed", reset="never")
    assert (runs["ftl, delayed, state kept"].blocks == leader.blocks).all()


def test_context_by_workload_pays_where_rankings_flip_between_workloads(table):
    _, test, _, runs = table
    best = fixed(test, best_arms(test, "log")[0]).block_efficiency
    assert min(runs[n].block_efficiency for n in ("best_fixed_workload", "contextual_thompson, state kept")) > best


def test_two_processes_give_the_same_table(table, monkeypatch):
    monkeypatch.setattr("specsel.study.policies.LARGE", 0)
    train, test, found, runs = table
    again, other = policy_table(train, test, names=NAMES, seeds=range(2), workers=2)
    pd.testing.assert_frame_equal(found, again)
    assert all((runs[name].blocks == other[name].blocks).all() for name in runs)


def test_policies_that_the_log_does_not_allow_are_left_out():
    log = log_of([[[2, 1]] * 6] * 12, draft_len=3)
    assert set(policy_table(log, log, names=["match_gate", "lints", "ftl"])[0].policy) == {"ftl"}


def test_steps_of_a_request_by_hand():
    """Follow-the-leader on (a, b) = (1, 3) (2, 1) (1, 2) (1, 1): a by tie, then b (sums 1, 3), then b (3, 4).

    Best fixed arm: b with 0 3 4 = 2 blocks (a: 0 1 3 4 = 3).
    """
    log = log_of([[[1, 3], [2, 1], [1, 2], [1, 1]], [[4, 1]] * 4], draft_len=3)
    table = steps(log, replay(log, FollowTheLeader(), keep_path=True))
    assert fixed(log, 1).blocks[0] == 2 and table.request.tolist() == ["r0"] * 3 + ["r1"]
    assert table.block.tolist() == [1, 2, 3, 1] and table.arm.tolist() == ["a", "b", "b", "a"]
    assert table.emitted.tolist() == [1, 1, 2, 4] and table.best_fixed.tolist() == [3, 1, 2, 4]
    assert table.best.tolist() == [3, 2, 2, 4]


def test_running_ratios_end_at_the_totals():
    log = simulated(requests_per_workload=10)
    run, base = replay(log, UCB1()), fixed(log, 0)
    found = running_ratio(run.blocks - base.blocks, base.blocks)
    assert found.value.iloc[-1] == pytest.approx(run.blocks.sum() / base.blocks.sum() - 1)
    assert found.request.iloc[-1] == log.n_requests and len(found) <= 30


def test_limits_of_running_ratios_hold_the_truth_at_their_level():
    """400 logs of 60 requests with gains drawn around 0.1: 95 % limits hold it in 364 to 396 (4 standard errors)."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        below = rng.integers(20, 60, 60)
        last = running_ratio(0.1 * below + rng.normal(0, 4, 60), below).iloc[-1]
        held += last["low"] <= 0.1 <= last["high"]
    assert 362 <= held <= 397
