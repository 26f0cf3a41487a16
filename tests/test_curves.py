"""Regret and shares of pulls on the way, by hand and against totals."""

import numpy as np
import pytest
from test_replay import log_of
from test_tuning import _best_fixed as oracle_fixed
from test_tuning import simulated

from specsel.policies.plain import UCB1, FollowTheLeader
from specsel.replay import fixed, replay
from specsel.study.curves import PARTS, curves, over_log, running_ratio, within_request


def test_regret_within_a_request_by_hand():
    """Follow-the-leader on (a, b) = (1, 3) (2, 1) (1, 2) (1, 1): a by tie, then b (sums 1, 3), then b (3, 4).

    Best fixed arm: b with 0 3 4 = 2 blocks (a: 0 1 3 4 = 3). Tokens behind b: 2, 0, 0; behind the better one: 2, 1, 0.
    """
    log = log_of([[[1, 3], [2, 1], [1, 2], [1, 1]]], draft_len=3)
    found = replay(log, FollowTheLeader(), keep_path=True, name="ftl")
    regret, shares = within_request(log, found, rng=np.random.default_rng(0), n_resamples=9)
    assert fixed(log, 1).blocks[0] == 2 and regret["block"].tolist() == [1, 2, 3] * 2
    assert regret["regret"].tolist() == [2, 2, 2, 2, 3, 3]
    assert shares["share"].to_numpy() == pytest.approx([1, 1 / 2, 1 / 3, 0, 1 / 2, 2 / 3])


def test_curves_end_at_the_totals_of_the_replay():
    log = simulated(requests_per_workload=4)
    one, base = replay(log, UCB1(), name="ucb1"), oracle_fixed(log)
    extra, shares = over_log(one, base)
    assert extra["extra"].iloc[-1] == pytest.approx(one.blocks.sum() / base.blocks.sum() - 1)
    assert shares.groupby("series", sort=False)["share"].last().to_numpy() == pytest.approx(one.shares)
    assert extra["request"].iloc[-1] == log.n_requests and len(extra) <= 30


def test_limits_over_the_log_hold_the_truth_at_their_level():
    """400 logs of 60 requests with gains drawn around 0.1: 95 % limits hold it in 364 to 396 (4 standard errors)."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        below = rng.integers(20, 60, 60)
        last = running_ratio(0.1 * below + rng.normal(0, 4, 60), below).iloc[-1]
        held += last["low"] <= 0.1 <= last["high"]
    assert 362 <= held <= 397


def test_a_log_without_context_shows_two_policies_that_need_none():
    log = log_of([[[2, 1]] * 6] * 12, draft_len=3)
    found = curves(log, rng=np.random.default_rng(0), n_resamples=9)
    assert {n for part in PARTS for n in getattr(found, part)["policy"]} == {"ucb1", "hedgespec"}
    assert set(found.of(1).shares["policy"]) == {"hedgespec"} and set(found.of(0).extra["policy"]) == {"ucb1"}
    assert (found.regret["low"] <= found.regret["high"]).all() and found.shares["share"].between(0, 1).all()
