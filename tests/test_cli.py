"""The command line is a contract: names, JSON keys, exit statuses; bad input gives one sentence and no traceback."""

import gzip
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from specsel.logs import write_log
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
GOLDEN = str(CASES / "golden_small.jsonl")
COMMANDS = [
    "fetch",
    "train data",
    "train eagle",
    "train dflash",
    "collect",
    "time",
    "race",
    "log validate",
    "log summary",
    "log convert",
    "log import",
    "replay",
    "selector fit",
    "headline",
    "breakeven",
    "book",
    "doctor",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    model = Model(
        requests_per_workload=6, output_len=(20, 30), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9
    )
    folder = tmp_path_factory.mktemp("runs") / "simulated"
    return write_log(folder, simulate_positions(model, rng=np.random.default_rng(0)))


def read(result):
    status, out, _ = result
    assert status == 0
    return json.loads(out)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(specsel, command):
    status, out, _ = specsel(*command.split(), "--help")
    assert status == 0 and f"Example: specsel {command}" in " ".join(out.split())


def test_summary_has_the_keys_and_figures_of_the_contract(specsel):
    found = read(specsel("log", "summary", GOLDEN, "--json"))
    assert set(found) == {
        "run",
        "label",
        "arms",
        "draft_len",
        "requests",
        "positions",
        "mean_accepted",
        "block_efficiency",
    }
    assert found["positions"] == {"chat": 9, "code": 12} and found["requests"] == {"chat": 1, "code": 1}
    assert found["block_efficiency"]["code"]["dflash"] == pytest.approx(12 / 7)
    assert "dflash" in specsel("log", "summary", GOLDEN)[1]


def test_validate_names_faults_and_exits_with_1(specsel):
    assert read(specsel("log", "validate", GOLDEN, "--json")) == {"ok": True, "faults": []}
    status, out, _ = specsel("log", "validate", CASES / "truncated_last_line.jsonl", GOLDEN, "--json")
    found = json.loads(out)
    assert status == 1 and found["ok"] is False and 21 in {f["line"] for f in found["faults"]}
    assert all(set(f) == {"file", "line", "field", "message"} for f in found["faults"])


def test_replay_gives_blocks_per_workload_and_arm(specsel):
    found = read(specsel("replay", GOLDEN, "--policy", "oracle_dp", "--json"))
    assert found["policy"] == "oracle_dp" and set(found) == {"policy", "feedback", "by_workload"}
    assert (
        sum(w["blocks"] for w in found["by_workload"].values()) == 7
        and sum(w["emitted"] for w in found["by_workload"].values()) == 21
    )
    code = read(specsel("replay", GOLDEN, "--policy", "fixed:ngram", "--json"))["by_workload"]["code"]
    assert (
        set(code) == {"requests", "blocks", "emitted", "block_efficiency", "pulls", "neural_passes"}
        and code["pulls"]["ngram"] == code["blocks"]
    )
    random = [
        read(specsel("replay", GOLDEN, "--policy", "random", "--seed", "3", "--reset", "never", "--json"))
        for _ in range(2)
    ]
    assert random[0] == random[1]
    assert (
        read(specsel("replay", GOLDEN, "--policy", "hedge", "--feedback", "delayed", "--seed", "1", "--json"))[
            "feedback"
        ]
        == "delayed"
    )


def test_a_fitted_selector_is_written_and_replayed(specsel, run_folder, tmp_path):
    made = read(specsel("selector", "fit", run_folder, "-o", tmp_path / "s.json", "--json"))
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["threshold"] == made["threshold"] and written["trained_on"]["log_sha256"]
    found = read(specsel("replay", run_folder, "--selector", tmp_path / "s.json", "--json"))
    fixed = read(specsel("replay", run_folder, "--policy", f"fixed:{made['dominant']}", "--json"))
    blocks = [sum(w["blocks"] for w in r["by_workload"].values()) for r in (found, fixed)]
    assert blocks[0] < blocks[1] and found["policy"] == "selector:s.json"
    status, _, err = specsel("replay", GOLDEN, "--selector", tmp_path / "s.json")
    assert status == 2 and "was trained for" in err


def test_headline_prints_the_claims_of_the_contract(specsel, run_folder):
    found = read(specsel("headline", run_folder, "--resamples", "50", "--json"))
    names = {claim["name"] for claim in found["claims"]}
    assert {
        "workload_headroom",
        "oracle_gap",
        "oracle_dp_headroom",
        "capture",
        "skill:code",
        "threshold:chat",
        "break_even_rho",
    } <= names
    assert {"name", "value", "unit", "label", "low", "high", "level", "n", "method"} == set(found["claims"][0])
    assert "oracle_gap " in specsel("headline", run_folder, "--resamples", "50")[1]


def test_breakeven_prints_the_published_table(specsel):
    words = ("breakeven", "--gap", "0.133", "--capture", "0.61", "--rate", "0.43", "--json")
    found = read(specsel(*words, "--rho", "0.02", "0.1", "--alpha", "0"))
    assert [round(row["best_of_n"], 6) for row in found["rows"]] == [1.111212, 1.038583]
    assert [round(row["selector"], 6) for row in found["rows"]] == [1.072091, 1.040458]
    assert round(found["break_even_rho"], 3) == 0.233 and round(found["max_alpha"], 2) == 0.19
    assert read(specsel(*words, "--rho", "0.02", "--rho", "0.1")) == found
    always = read(specsel("breakeven", "--gap", "3", "--capture", "1", "--rate", "0.5", "--rho", "0.1", "--json"))
    assert always["break_even_rho"] is None
    assert "break-even rho: 0.233" in specsel(*words[:-1], "--rho", "0.02")[1]
    never = ("breakeven", "--gap", "0.1", "--capture", "0", "--rate", "0", "--rho", "0.1")
    assert read(specsel(*never, "--json"))["max_alpha"] is None
    assert "break-even rho: never redrafts; largest alpha: undefined" in specsel(*never)[1]


def test_convert_keeps_the_numbers(specsel, tmp_path):
    status, out, _ = specsel("log", "convert", GOLDEN, "-o", tmp_path / "run")
    assert status == 0 and Path(out.strip()) == tmp_path / "run"
    assert (
        read(specsel("log", "summary", tmp_path / "run", "--json"))["block_efficiency"]
        == read(specsel("log", "summary", GOLDEN, "--json"))["block_efficiency"]
    )


def test_import_makes_a_run_folder(specsel, tmp_path):
    rows = [{"id": 1, "prompt": [1, 2], "generated": [3, 4, 5], "ngram": [1, 1, 1], "eagle": [2, 1, 1]}]
    (tmp_path / "combined_x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, _, err = specsel("log", "import", tmp_path / "nothing_here", "-o", tmp_path / "run")
    assert status == 2 and err.startswith("error: ") and not (tmp_path / "run").exists()


def test_doctor_says_what_is_installed(specsel):
    found = read(specsel("doctor", "--json"))
    assert {
        "specsel",
        "python",
        "platform",
        "engine",
        "cache",
        "disk_free_gb",
        "package numpy",
        "package torch",
    } <= set(found)
    assert found["package numpy"] == np.__version__ and found["engine"] == (
        importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    )


@pytest.mark.parametrize(
    "words, part",
    [
        (("log", "summary", "no/such/run"), "no/such/run"),
        (("log", "validate", "no/such/run"), "does not exist"),
        (("log", "summary", CASES / "mixed_schema.jsonl"), "line"),
        (("headline", CASES / "truncated.jsonl.gz"), "truncated.jsonl.gz"),
        (("replay", GOLDEN, "--policy", "nonsense"), "nonsense"),
        (("replay", GOLDEN), "--policy"),
        (("replay", GOLDEN, "--policy", "fixed:zzz"), "zzz"),
        (("replay", CASES / "anchored_only.jsonl", "--policy", "oracle_dp"), "block-anchored"),
        (("headline", GOLDEN, "--dominant", "zzz"), "zzz"),
        (("headline", GOLDEN, "--without-loops"), "loop"),
        (("selector", "fit", CASES / "all_tied.jsonl", "-o", "never.json"), "one class"),
        (("breakeven", "--gap", "0.1", "--capture", "-0.1", "--rate", "0.4", "--rho", "0.1"), "capture"),
        (("breakeven", "--gap", "0.1", "--capture", "0.5", "--rate", "1.2", "--rho", "0.1"), "redraft rate"),
        (("breakeven", "--gap", "0.1", "--capture", "0.5", "--rate", "0.4", "--rho", "-0.1"), "rho"),
        (("breakeven", "--gap", "0.1", "--capture", "0.5", "--rate", "0.4", "--rho", "x"), "rho"),
        (("replay", GOLDEN, "--policy", "random", "--no-such-option"), "no-such-option"),
        (("book", "-p", "seed"), "name=value"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(specsel, words, part):
    status, out, err = specsel(*words)
    assert status == 2 and out == "" and part in err and "Traceback" not in err
    assert not Path("never.json").exists()


def test_warnings_go_to_stderr_and_json_stays_alone(specsel):
    status, out, err = specsel("log", "summary", CASES / "duplicates_identical.jsonl", "--json")
    assert status == 0 and json.loads(out)["positions"] == {"chat": 9, "code": 12} and err.startswith("warning: ")


def test_a_damaged_run_folder_is_refused_before_anything_is_written(specsel, run_folder, tmp_path):
    damaged = shutil.copytree(run_folder, tmp_path / "damaged")
    (damaged / "blocks_code.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    status, _, err = specsel("selector", "fit", damaged, "-o", tmp_path / "s.json")
    assert status == 2 and "blocks_code.jsonl.gz" in err and not (tmp_path / "s.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_engine_commands_without_torch_say_what_to_install(specsel, tmp_path):
    for words in (
        ("fetch",),
        ("collect", "--out", tmp_path / "x"),
        ("train", "eagle"),
        ("time", tmp_path),
        ("race", tmp_path),
    ):
        status, _, err = specsel(*words)
        assert status == 2 and "specsel[engine]" in err and "Traceback" not in err


def test_repeating_and_going_on_exclude_each_other(specsel, tmp_path):
    status, out, err = specsel("train", "eagle", "--resume", tmp_path, "--after", tmp_path)
    assert status == 2 and not out and "give one" in err
