"""What a log holds, counted by hand on small logs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specsel.logs import LogError, read_log, write_log
from specsel.paper import words as verdicts
from specsel.replay.replay import fixed
from specsel.study import overview
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"


@pytest.fixture
def log():
    """24 requests; every third repeats itself, every second stopped by itself, copy prompts have three tiers."""
    made = simulate_positions(Model(requests_per_workload=6, output_len=(10, 20)), rng=np.random.default_rng(0))
    names = [made.workloads[w] for w in made.workload]
    tiers = ["real:edit", "task:split", "derived:quote"]
    table = pd.DataFrame(
        {
            "workload": names,
            "request": made.requests,
            "looping": [i % 3 == 0 for i in range(24)],
            "stop": ["eos" if i % 2 else "length" for i in range(24)],
            "category": [tiers[i % 3] if w == "copy" else "" for i, w in enumerate(names)],
        }
    )
    return replace(made, request_table=table)


def test_composition_counts_the_golden_log():
    """21 positions: 9 of chat, 12 of code, one request each; nothing says whether they loop."""
    rows = overview.composition(read_log(CASES / "golden_small.jsonl")).to_dict("records")
    assert [(r["workload"], r["requests"], r["positions"], r["repeating"]) for r in rows] == [
        ("chat", 1, 9, None),
        ("code", 1, 12, None),
    ]


def test_every_request_has_exactly_one_ending(log):
    """6 of 24 loop in each pair of counts: 8 loop (every third); of the other 16, half stopped by themselves."""
    found = overview.endings(log).groupby("ending")["requests"].sum().to_dict()
    assert found == {"repeats itself": 8, "stopped by itself": 8, "cut at the length limit": 8}
    assert overview.endings(replace(log, request_table=None))["ending"].unique().tolist() == ["not recorded"]


def test_subsets_are_those_that_the_log_records(log):
    found = {name: part.n_requests for name, part in overview.subsets(log).items()}
    assert found == {
        "all requests": 24,
        "without repeating answers": 16,
        "copy, derived prompts": 2,
        "copy, real prompts": 2,
        "copy, task prompts": 2,
    }
    assert list(overview.subsets(replace(log, request_table=None))) == ["all requests"]


def test_the_arm_table_is_exact_replay(log):
    """Its values are block efficiencies of fixed arms on the subset."""
    parts = overview.subsets(log)
    rows = overview.arm_table(parts, rng=np.random.default_rng(0), n_resamples=50)
    for row in rows.to_dict("records"):
        run = fixed(parts[row["subset"]], log.arms.index(row["arm"]))
        assert row["block_efficiency"] == pytest.approx(run.block_efficiency)


def test_identical_arms_never_get_further_than_each_other():
    log = read_log(CASES / "all_tied.jsonl")
    assert set(overview.agreement(log, rng=np.random.default_rng(0), n_resamples=20)["share"]) == {0.0}


def test_the_engine_check_must_belong_to_the_log(log, tmp_path):
    """A stale check would vouch for another log; a run without one gives an empty table."""
    assert not len(overview.engine_check(tmp_path, log))
    counts = {"requests": 3, "equal": 2, "blocks": 30, "differences": [{"margin": 0.001, "position": 7}]}
    path = tmp_path / overview.CHECK_FILE
    path.write_text(json.dumps({"log_sha256": log.sha256, "arms": {"dflash": counts}}), encoding="utf-8")
    row = overview.engine_check(tmp_path, log).iloc[0]
    assert (row["requests"], row["equal"], row["differences"], row["largest_margin"]) == (3, 2, 1, 0.001)
    assert row["first_difference"] == 7
    path.write_text(json.dumps({"log_sha256": "other", "arms": {}}), encoding="utf-8")
    with pytest.raises(LogError, match="another log"):
        overview.engine_check(tmp_path, log)


def test_checks_of_runs_in_a_lower_precision_are_told_apart(log, tmp_path):
    """Two requests of the run beside part at outputs 5 and 9, at margins of at most 0.2; another arm has no
    difference."""
    nothing = overview.checks_beside(tmp_path / "run", "_bf16*")
    assert not len(nothing) and verdicts.low_precision(nothing).startswith("No run in a lower precision")
    path = write_log(tmp_path / "run_bf16", log, {"dtype": "bfloat16"})
    parted = [{"margin": 4.0, "position": 5}, {"margin": 0.1, "position": 9}]
    counts = {"requests": 4, "equal": 4, "blocks": 30, "differences": [], "same_output": 4, "output_differences": []}
    outputs = [{"margin": 0.125, "position": 20}, {"margin": 0.0, "position": 30}, {"margin": 0.0, "position": 40}]
    other = {"equal": 2, "differences": parted, "same_output": 1, "output_differences": outputs}
    arms = {"dflash": counts | other, "eagle": counts}
    check = {"log_sha256": read_log(path).sha256, "arms": arms}
    (path / overview.CHECK_FILE).write_text(json.dumps(check), encoding="utf-8")
    found = overview.checks_beside(tmp_path / "run", "_bf16*")
    assert found["first_difference"].tolist() == [9, pd.NA] and found["largest_margin"].tolist()[0] == 4.0
    assert verdicts.low_precision(found) == (
        "In bfloat16, 6 of 8 requests have the same blocks live and in replay. The answer is that of plain decoding in "
        "5 of them; the others leave it at output token 30, where the target's two best tokens are at most 0.12 apart."
    )
    assert verdicts.low_precision(found.assign(same_output=pd.NA)).endswith("live and in replay.")


def test_provenance_says_what_was_not_recorded(log):
    found = overview.provenance(log).set_index("item")["value"]
    assert found["target"] == "not recorded" and found["label"] == "SIM" and found["draft length"] == "9"


def test_requests_without_a_position_are_counted_by_reason(log):
    """Two more rows in the request table than in the log: one prompt too long, one answer of a single token."""
    table = log.request_table.assign(output_tokens=15, ties=1)
    extra = pd.DataFrame({"workload": "copy", "request": ["a", "b"], "output_tokens": [0, 1], "ties": [0, 0]})
    more = replace(log, request_table=pd.concat([table, extra], ignore_index=True))
    assert overview.left_out(more) == {"asked": 26, "too_long": 1, "ended_at_once": 1, "near_ties": 24}
    assert set(overview.left_out(replace(log, request_table=None)).values()) == {None}


def test_subset_sizes_add_up(log):
    sizes = overview.subset_sizes(log).set_index("subset")
    assert sizes.loc["all requests"].tolist() == [24, log.n_positions]
    assert sizes.loc["without repeating answers", "subset_requests"] == 16
