"""The blocks of the arm that drafts first, and sums and ratios of redrafting some of them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from specsel.logs import CONTEXT, STATS, SpecselError, read_log
from specsel.selection import redraft as rd
from specsel.selection.blocks import blocks, dominant_arm
from specsel.stats import Resampling, by
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def log():
    model = Model(requests_per_workload=8, output_len=(30, 60), passage=((0.0,) * 4, (-1.5, 1.0, 2.0, -1.5)))
    return simulate_positions(model, rng=np.random.default_rng(1))


@pytest.fixture(scope="module")
def table(log):
    return blocks(log)


def figures(table, redraft):
    """The five quantities over all requests, by name."""
    totals = SimpleNamespace(**rd.requests(table, redraft).drop(columns=["workload", "request"]).sum())
    return {name: quantity(totals) for name, quantity in rd.QUANTITIES.items()}


@pytest.mark.parametrize("name, arm", [("golden_small.jsonl", "dflash"), ("anchored_only.jsonl", None)])
def test_the_gap_of_the_golden_log_is_0_6_without_the_bonus_and_6_over_21_with_it(name, arm):
    """README of the cases: 10 accepted tokens and 6 more available on 11 blocks that emit 21 tokens."""
    found = blocks(read_log(CASES / name), arm)
    sums = rd.requests(found, np.zeros(len(found))).sum()
    assert found.attrs["dominant"] == "dflash" and sums.gain_accepted / sums.own_accepted == pytest.approx(0.6)
    if arm:  # all arms of the block-anchored log accept the same, but it does not hold the last tokens
        assert (sums.blocks, sums.own, sums.gain) == (11, 21, 6)


def test_a_block_says_what_was_drafted_there_and_what_the_best_arm_emits(log, table):
    arm = log.arms.index(table.attrs["dominant"])
    assert np.array_equal(table.best, log.emitted[table.row].max(axis=1))
    assert np.array_equal(table.own, log.emitted[table.row, arm]) and np.array_equal(
        table.position, log.position[table.row]
    )
    assert np.array_equal(table.conf_min, log.stats["conf_min"][table.row, arm], equal_nan=True)
    alone = table[table.best_arm != "tie"]
    assert all(
        log.emitted[row, log.arms.index(best)] == log.emitted[row].max()
        for row, best in zip(alone.row, alone.best_arm, strict=True)
    )
    assert ((log.emitted[table.row] == table.best.to_numpy()[:, None]).sum(axis=1) == 1).tolist() == (
        table.best_arm != "tie"
    ).tolist()


def test_every_output_token_is_in_one_block(log):
    for arm in log.arms:
        assert (
            blocks(log, arm).groupby(["workload", "request"], sort=False).own.sum().tolist()
            == np.diff(log.starts).tolist()
        )


def test_statistics_that_no_arm_has_are_missing_and_not_an_error(log):
    from dataclasses import replace

    found = blocks(replace(log, stats={}, context={}))
    assert found[[*STATS, *CONTEXT]].isna().all(axis=None)


def test_the_dominant_arm_needs_the_fewest_blocks():
    """11 blocks against 12, 13, 17; 35 against 37, 45, 54."""
    assert dominant_arm(read_log(CASES / "golden_small.jsonl")) == "dflash"
    assert dominant_arm(read_log(CASES / "loop_inflated.jsonl")) == "cascade"
    assert dominant_arm(read_log(CASES / "all_tied.jsonl")) == "dflash"


def test_an_arm_that_is_not_there_and_blocks_of_an_unlogged_arm_are_refused(log):
    with pytest.raises(SpecselError, match="no arm 'x'"):
        blocks(log, "x")
    with pytest.raises(SpecselError, match="block-anchored"):
        blocks(read_log(CASES / "anchored_only.jsonl"), "eagle")


def test_identical_arms_have_gap_zero_and_undefined_capture_and_skill():
    tied = blocks(read_log(CASES / "all_tied.jsonl"))
    found = by(rd.requests(tied, np.ones(len(tied))), rd.QUANTITIES, groups=["all"], resampling=Resampling(100))
    found = found.set_index("quantity")
    assert found.value["oracle_gap"] == 0 and found.method["oracle_gap"].startswith("degenerate")
    assert found.value[["capture", "skill"]].isna().all()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_random_redraft_captures_what_it_pays_for(table, share):
    """Averaged over many random masks capture equals the redraft rate; the tolerance is four standard errors."""
    rng = np.random.default_rng(7)
    found = pd.DataFrame([figures(table, rng.random(len(table)) < share) for _ in range(100)])
    excess = found.capture - found.redraft_rate
    assert abs(excess.mean()) < 4 * excess.std() / 10 and excess.std() > 0


def test_redrafting_everything_captures_everything_and_nothing_nothing(table):
    whole, nothing = (figures(table, np.full(len(table), value)) for value in (1, 0))
    assert whole["capture"] == whole["redraft_rate"] == whole["skill"] == 1
    assert whole["token_gain"] == whole["oracle_gap"] == nothing["oracle_gap"]
    assert nothing["capture"] == nothing["token_gain"] == 0 and np.isnan(nothing["skill"])


def test_token_gain_is_capture_times_gap_and_capture_is_skill_times_rate(table):
    f = figures(table, np.random.default_rng(0).random(len(table)) < 0.4)
    assert f["token_gain"] == pytest.approx(f["capture"] * f["oracle_gap"])
    assert f["capture"] == pytest.approx(f["skill"] * f["redraft_rate"])
