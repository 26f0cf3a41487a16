"""Sums and ratios of the redraft study, and intervals of many of them at once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsel.logs.log import block_view, read_log
from specsel.selection import redraft as rd
from specsel.study.oldstats import bootstrap_many
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def blocks():
    model = Model(requests_per_workload=8, output_len=(30, 60), passage=((0.0,) * 4, (-1.5, 1.0, 2.0, -1.5)))
    return rd.dominant_blocks(simulate_positions(model, rng=np.random.default_rng(1)))


def test_the_gap_of_the_golden_log_is_0_6_without_the_bonus_and_6_over_21_with_it():
    """README of the cases: 10 accepted tokens and 6 more available on 11 blocks that emit 21 tokens."""
    view = block_view(read_log(CASES / "golden_small.jsonl"), 0)
    none = np.zeros(view.n_blocks, dtype=bool)
    assert rd.oracle_gap(rd.redraft_sums(view, none, count="accepted").sum(axis=0)) == pytest.approx(0.6)
    assert rd.oracle_gap(rd.redraft_sums(view, none).sum(axis=0)) == pytest.approx(6 / 21)


def test_a_block_anchored_log_has_the_same_gap():
    view = rd.dominant_blocks(read_log(CASES / "anchored_only.jsonl"))
    sums = rd.redraft_sums(view, np.zeros(view.n_blocks, dtype=bool), count="accepted").sum(axis=0)
    assert view.path_arm == "dflash" and rd.oracle_gap(sums) == pytest.approx(0.6)


def test_identical_arms_have_gap_zero_and_undefined_capture_and_skill():
    view = rd.dominant_blocks(read_log(CASES / "all_tied.jsonl"))
    sums = rd.redraft_sums(view, np.ones(view.n_blocks, dtype=bool))
    found = bootstrap_many(
        {f.__name__: f for f in (rd.oracle_gap, rd.capture, rd.skill)},
        sums,
        strata=None,
        rng=np.random.default_rng(1),
        n_resamples=100,
    )
    assert view.path_arm == "dflash"
    assert (found["oracle_gap"].value, found["oracle_gap"].method) == (0.0, "degenerate")
    assert found["capture"].value is None and found["skill"].value is None


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1))
def test_random_redraft_has_skill_one(blocks, seed, share):
    """Averaged over many random masks capture equals the redraft rate; the tolerance is four standard errors."""
    rng, gain = np.random.default_rng(seed), rd.gains(blocks)
    masks = rng.random((400, blocks.n_blocks)) < share
    captured = masks @ gain / gain.sum()
    assert abs((captured - masks.mean(axis=1)).mean()) < 4 * (captured - masks.mean(axis=1)).std() / 20 + 1e-12


def test_redrafting_everything_captures_everything_and_nothing_nothing(blocks):
    whole = rd.redraft_sums(blocks, np.ones(blocks.n_blocks, dtype=bool)).sum(axis=0)
    nothing = rd.redraft_sums(blocks, np.zeros(blocks.n_blocks, dtype=bool)).sum(axis=0)
    assert rd.capture(whole) == 1 and rd.redraft_rate(whole) == 1 and rd.skill(whole) == 1
    assert rd.token_gain(whole) == rd.oracle_gap(whole) == rd.oracle_gap(nothing)
    assert rd.capture(nothing) == 0 and np.isnan(rd.skill(nothing)) and rd.token_gain(nothing) == 0


def test_token_gain_is_capture_times_gap_and_capture_is_skill_times_rate(blocks):
    sums = rd.redraft_sums(blocks, np.random.default_rng(0).random(blocks.n_blocks) < 0.4).sum(axis=0)
    assert rd.token_gain(sums) == pytest.approx(rd.capture(sums) * rd.oracle_gap(sums))
    assert rd.capture(sums) == pytest.approx(rd.skill(sums) * rd.redraft_rate(sums))


def test_the_dominant_arm_needs_the_fewest_blocks(blocks):
    log = read_log(CASES / "golden_small.jsonl")
    assert rd.dominant_blocks(log).path_arm == "dflash"  # 11 blocks against 12, 13, 17
    # 35 blocks against 37, 45, 54
    assert rd.dominant_blocks(read_log(CASES / "loop_inflated.jsonl")).path_arm == "cascade"
