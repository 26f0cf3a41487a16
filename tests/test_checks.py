"""The check of a run against the live engine, as its file tells it."""

import json

import numpy as np
import pandas as pd
import pytest

from specsel.logs import LogError, read_log, write_log
from specsel.study import checks
from specsel.study.simulation import Model, simulate_positions


@pytest.fixture
def log():
    return simulate_positions(Model(requests_per_workload=6, output_len=(10, 20)), rng=np.random.default_rng(0))


def test_the_engine_check_must_belong_to_the_log(log, tmp_path):
    """A stale check would vouch for another log; a run without one gives an empty table."""
    assert not len(checks.engine_check(tmp_path, log))
    counts = {"requests": 3, "equal": 2, "blocks": 30, "differences": [{"margin": 0.001, "position": 7}]}
    path = tmp_path / checks.FILE
    path.write_text(json.dumps({"log_sha256": log.sha256, "arms": {"dflash": counts}}), encoding="utf-8")
    row = checks.engine_check(tmp_path, log).iloc[0]
    assert (row["requests"], row["equal"], row["differences"], row["largest_margin"]) == (3, 2, 1, 0.001)
    assert row["first_difference"] == 7
    path.write_text(json.dumps({"log_sha256": "other", "arms": {}}), encoding="utf-8")
    with pytest.raises(LogError, match="another log"):
        checks.engine_check(tmp_path, log)


def test_checks_of_runs_in_a_lower_precision_are_told_apart(log, tmp_path):
    """Two requests of the run beside part at outputs 5 and 9, at margins of at most 0.2; another arm has no
    difference."""
    nothing = checks.checks_beside(tmp_path / "run", "_bf16*")
    assert not len(nothing)
    path = write_log(tmp_path / "run_bf16", log, {"dtype": "bfloat16"})
    parted = [{"margin": 4.0, "position": 5}, {"margin": 0.1, "position": 9}]
    counts = {"requests": 4, "equal": 4, "blocks": 30, "differences": [], "same_output": 4, "output_differences": []}
    outputs = [{"margin": 0.125, "position": 20}, {"margin": 0.0, "position": 30}, {"margin": 0.0, "position": 40}]
    other = {"equal": 2, "differences": parted, "same_output": 1, "output_differences": outputs}
    arms = {"dflash": counts | other, "eagle": counts}
    check = {"log_sha256": read_log(path).sha256, "arms": arms}
    (path / checks.FILE).write_text(json.dumps(check), encoding="utf-8")
    found = checks.checks_beside(tmp_path / "run", "_bf16*")
    assert found["first_difference"].tolist() == [9, pd.NA] and found["largest_margin"].tolist()[0] == 4.0
    assert found["output_parts"].tolist()[0] == 30 and found["precision"].tolist() == ["bfloat16"] * 2
