"""The coverage study counts correctly, and the intervals of this book hold the truth as often as they say."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from specsel.logs import SpecselError, block_view
from specsel.study import coverage
from specsel.study.simulation import simulate_positions

ROOT = Path(__file__).parent.parent
SMALL = replace(coverage.CORRELATED, requests_per_workload=10)


@pytest.fixture(scope="module")
def stored():
    return coverage.read_study(ROOT / coverage.FILE)


def test_the_stored_study_is_large_enough_and_of_this_model(stored):
    table, settings = stored
    assert settings["corpora"] >= 1000 and settings["model"] == json.loads(json.dumps(asdict(coverage.CORRELATED)))
    assert set(table.loc[table["unit"] == "requests", "quantity"]) == set(coverage.QUANTITIES)


def test_every_published_interval_covers_and_resampling_blocks_does_not(stored):
    """Nominal 95 %; 93 to 97 % was demanded before the first run, of logs as large as a campaign."""
    table, _ = stored
    campaign = table[(table["unit"] == "requests") & (table["requests"] >= 300)].set_index("quantity")["coverage"]
    assert len(campaign) == len(coverage.QUANTITIES) and campaign.between(0.93, 0.97).all(), campaign
    assert (table.loc[table["unit"] == "blocks", "high"] < 0.93).all()


def test_the_stored_study_is_what_this_code_computes(stored):
    """Its first chunk of corpora, computed anew, holds the truth exactly as often."""
    file, settings = json.loads((ROOT / coverage.FILE).read_text("utf-8")), stored[1]
    rows = {(row["quantity"], row["unit"]): row for row in file["rows"] if row["requests"] == 40}
    again = coverage._chunk(
        coverage.CORRELATED, coverage.CHUNK, (settings["seed"], 40, 0), settings["n_resamples"], settings["level"]
    )
    for key, estimates in again.items():
        assert sum(e.low <= rows[key]["truth"] <= e.high for e in estimates) == rows[key]["held"][0], key


@pytest.mark.slow
def test_request_bootstrap_covers_the_truth_at_its_nominal_rate_with_another_seed():
    """400 fresh corpora: 92 to 98 % of the intervals of every kind hold the truth (2.75 binomial standard errors)."""
    for row in coverage.coverage_study(sizes=(300,), seed=7, corpora=400)["rows"]:
        held = sum(row["held"])
        assert 368 <= held <= 392 if row["unit"] == "requests" else held < 368, (row["quantity"], row["unit"], held)


def test_corpora_side_by_side_are_the_same_corpora_one_by_one():
    """Three corpora of ten requests per workload: values equal those of each corpus cut out of the log."""
    found = coverage._chunk(SMALL, 3, (5, 0), 50, 0.95)
    log = simulate_positions(replace(SMALL, requests_per_workload=30), rng=np.random.default_rng((5, 0)))
    for c in range(3):
        emitted = block_view(log.select(np.arange(log.n_requests) % 30 // 10 == c), 0).emitted
        for unit in ("requests", "blocks"):
            assert found["block efficiency", unit][c].value == pytest.approx(emitted[:, 0].mean())
            assert found["oracle gap", unit][c].value == pytest.approx(emitted.max(1).mean() / emitted[:, 0].mean() - 1)


def test_a_changed_study_is_refused_and_an_equal_one_has_equal_bytes(tmp_path):
    study = coverage.coverage_study(SMALL, sizes=(10,), seed=3, corpora=4, n_resamples=60)
    paths = [coverage.save(study, tmp_path / name) for name in ("a.json", "b.json")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    table, settings = coverage.read_study(paths[0])
    assert settings["corpora"] == 4 and (table["coverage"] == table["held"] / 4).all()
    assert ((table["low"] <= table["coverage"]) & (table["coverage"] <= table["high"])).all()
    paths[1].write_text(paths[1].read_text("utf-8").replace('"corpora": 4', '"corpora": 5'), encoding="utf-8")
    with pytest.raises(SpecselError, match="hash"):
        coverage.read_study(paths[1])
    with pytest.raises(SpecselError, match="specsel.study.coverage"):
        coverage.read_study(tmp_path / "none.json")
