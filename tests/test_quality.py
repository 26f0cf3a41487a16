"""The quality sweep: every run is a point of the drafter it is about, and the answers follow from the points."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from specsel.logs import block_view, read_logs, write_log
from specsel.replay.replay import fixed
from specsel.study import quality
from specsel.study.oldredraft import dominant_blocks
from specsel.study.simulation import Model, simulate_positions

MODEL = Model(requests_per_workload=5, output_len=(20, 40), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


def log_of(step, shift=0.0, **said):
    """A simulated log in which the second arm is better by `shift`, and what its manifest says of drafters."""
    odds = ((0.3, 0.3 + shift, -1.0, 0.2),) * 4
    log = simulate_positions(replace(MODEL, logit=odds), rng=np.random.default_rng(step))
    return replace(log, run=f"sweep_{step}", manifest={"drafters": said})


def test_a_run_is_about_its_unfinished_drafters_or_else_all_that_say():
    early, final = {"checkpoint": "early", "step": 40}, {"checkpoint": "final", "step": 400}
    assert quality.swept(log_of(0, dflash=final, eagle=early, ngram={"kind": "lookup"})) == {"eagle": early}
    assert quality.swept(log_of(0, dflash=final, eagle=final)) == {"dflash": final, "eagle": final}
    silent = log_of(0, dflash={"id": "dflash", "step": None, "checkpoint": None})
    assert quality.swept(silent) == {dominant_blocks(silent).path_arm: {"checkpoint": "sweep_0", "step": None}}


@pytest.fixture(scope="module")
def points():
    logs = [log_of(0, -2.0, eagle={"checkpoint": "random", "step": 0}), log_of(9, 1.0, eagle={"checkpoint": "late"})]
    return quality.points(logs, rng=np.random.default_rng(0), n_resamples=200), logs


def test_every_run_gives_every_quantity_with_an_interval(points):
    table, logs = points
    assert tuple(table.columns) == quality.COLUMNS and len(table) == 2 * 8 and set(table["drafter"]) == {"eagle"}
    known = table.dropna(subset=["value"])
    assert (known["low"] <= known["high"]).all() and known["low"].notna().all() and (table["n"] == 20).all()
    for log in logs:
        rows = table[table["run"] == log.run].set_index("quantity")
        assert rows["efficiency"].iloc[0] == pytest.approx(fixed(log, 1).block_efficiency)
        view = block_view(log, 1)
        gap = view.emitted.max(axis=1).sum() / view.emitted[:, 1].sum() - 1
        assert rows.loc["oracle gap", "value"] == pytest.approx(gap)
        both = (1 + rows["value"]["redraft gain"]) * (1 + rows["value"]["routing over redrafting"])
        assert both == pytest.approx(1 + rows["value"]["routing gain"])


def test_rows_for_a_chart_are_in_order_of_quality(points):
    rows = quality.of(points[0], "skill")
    assert rows["efficiency"].is_monotonic_increasing and (rows["series"] == "eagle").all()
    assert set(quality.of(points[0], "skill", "capture")["series"]) == {"skill, eagle", "capture, eagle"}


def test_a_sweep_is_read_by_name_and_may_be_missing(tmp_path):
    for step in (9, 3):
        log = log_of(step, eagle={"checkpoint": "early", "step": step})
        write_log(tmp_path / f"log_sweep_{step}", log)
    found = read_logs(tmp_path / "log", "_sweep_*")
    assert [log.run for log in found] == ["sweep_3", "sweep_9"] and quality.swept(found[0])["eagle"]["step"] == 3
    assert read_logs(tmp_path / "log", "_nothing_*") == []


def sweep(quantity, *intervals):
    rows = [
        {
            "drafter": "eagle",
            "checkpoint": f"c{i}",
            "efficiency": 1.0 + i / 2,
            "quantity": quantity,
            "low": low,
            "high": high,
            "value": (low + high) / 2,
        }
        for i, (low, high) in enumerate(intervals)
    ]
    return pd.DataFrame(rows)


def test_signal_says_from_which_quality_on():
    late = quality.signal(sweep("skill", (0.8, 1.2), (0.9, 1.4), (1.2, 1.6)))
    assert late == "The confidence of eagle carries a signal once it emits 2.00 tokens per block, and not before."
    assert "at every checkpoint" in quality.signal(sweep("skill", (1.1, 1.2), (1.2, 1.6)))
    assert "at no checkpoint" in quality.signal(sweep("skill", (0.8, 1.2), (0.2, 0.6)))
    assert "at 1 of 2 checkpoints, in no order" in quality.signal(sweep("skill", (1.1, 1.2), (0.2, 1.6)))
    assert quality.signal(sweep("skill", (1.1, 1.2))) == quality.NO_SWEEP


def test_worth_compares_the_ends_of_the_sweep():
    said = quality.worth(sweep("routing over redrafting", (0.1, 0.2), (-0.1, 0.1), (-0.2, -0.1)))
    assert said == "With eagle, routing is worth more at its weakest (c0) and less at its best (c2) than redrafting."
    assert quality.worth(sweep("routing over redrafting", (0.1, 0.2))) == quality.NO_SWEEP
