"""The chapters on the collection and on fixed arms, executed on logs whose figures are counted by hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specsel.logs import read_log, write_log
from specsel.paper.build import kernel_environment, run_notebook
from specsel.replay import fixed
from specsel.study.simulation import Model, simulate_positions

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests/cases"
EXPECTED = json.loads((CASES / "expected.json").read_text("utf-8"))["golden_small.jsonl"]
pytestmark = pytest.mark.slow


def claims_of(chapter: str, run: Path, work: Path) -> dict:
    """Name -> value of the claims of a chapter that is executed on a run."""
    given = {"run": str(run), "n_resamples": 20}
    with kernel_environment(work):
        run_notebook(ROOT / f"notebooks/{chapter}.ipynb", work / f"{chapter}.ipynb", given, ROOT)
    found = json.loads((work / f"values/{chapter}.json").read_text("utf-8"))
    return {claim["name"]: claim["value"] for claim in found}


def test_what_was_collected_is_counted(tmp_path):
    """24 requests, of which every third repeats itself, and two more rows in the request table: one prompt too long,
    one answer of a single token."""
    log = simulate_positions(Model(requests_per_workload=6, output_len=(10, 20)), rng=np.random.default_rng(0))
    table = log.table.assign(looping=np.arange(24) % 3 == 0, stop="eos", category="", output_tokens=15, ties=1)
    extra = {"looping": False, "output_tokens": [0, 1], "ties": 0}
    table = pd.concat([table, pd.DataFrame({"workload": "copy", "request": ["a", "b"]} | extra)], ignore_index=True)
    path = write_log(tmp_path / "run", replace(log, request_table=table), {"dtype": "float32"})
    found = claims_of("01_collection", path, tmp_path)
    assert (found["requests"], found["positions"], found["repeating:chat"]) == (24, log.n_positions, 2)
    assert [found[n] for n in ("asked", "too_long", "ended_at_once", "near_ties")] == [26, 1, 1, 24]
    assert found["precision"] == "float32"


def test_survival_and_efficiency_of_the_golden_log_are_the_expected_ones(tmp_path):
    """expected.json: survival of the drafts of dflash, and the blocks of each arm for the 21 tokens."""
    run = CASES / "golden_small.jsonl"
    found = claims_of("01_collection", run, tmp_path)
    survival = [found[f"survival:{k}:dflash"] for k in range(1, 8)]
    assert survival == pytest.approx(EXPECTED["dflash_run"]["survival"], abs=1e-6)
    assert (found["positions:chat"], found["positions:code"]) == (9, 12)
    found = claims_of("02_sweep", run, tmp_path)
    for arm, blocks in EXPECTED["blocks_fixed"].items():
        assert found[f"block_efficiency:{arm}"] == pytest.approx(EXPECTED["tokens"] / blocks)
    blocks = np.array([fixed(read_log(run), k).blocks for k in range(4)])
    assert found["workload_headroom"] == pytest.approx(blocks.sum(axis=1).min() / blocks.min(axis=0).sum() - 1)
    assert found["dominant"] == "dflash"


def test_identical_arms_never_get_further_than_each_other(tmp_path):
    found = claims_of("01_collection", CASES / "all_tied.jsonl", tmp_path)
    assert {value for name, value in found.items() if name.startswith("gets_further")} == {0.0}
