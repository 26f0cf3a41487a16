"""The commands that need the engine, through the command line, on the tiny target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, prompts
from test_harness import config  # noqa: F401  (a fixture)
from test_training import answers  # noqa: F401  (a fixture)

from specsel import engine
from specsel.engine import data
from specsel.engine import target as targets
from specsel.engine.harness import collect


@pytest.fixture
def specsel(specsel, monkeypatch, target, pool):
    """The command line with the tiny target and its pool."""
    monkeypatch.setattr(engine, "load_target", lambda **options: target, raising=False)
    monkeypatch.setattr(engine, "load_pool", lambda loaded, options: (loaded, pool), raising=False)
    yield specsel
    torch.set_flush_denormal(False)  # `specsel train` flushes the tiny numbers of its process


@pytest.fixture
def folder(answers, tmp_path):  # noqa: F811
    """Training data of two shards, the last of which is held out."""
    found = shutil.copytree(answers, tmp_path / "data")
    shutil.copy(data.shard_path(found, 0), data.shard_path(found, 1))
    data.write_prompt_counts(found, prompts(), VOCAB)
    return found


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_drafter_is_trained_its_training_repeated_and_gone_on_with(specsel, folder, tmp_path, kind):
    """New; repeated, which says that the end is the same; further, with the rate of a further training."""
    status, out, err = specsel("train", kind, "--data", folder, "--out", tmp_path / "a", "--steps", 2)
    assert status == 0, err
    step, end = out.splitlines()
    assert step.startswith("step 2: ") and "tokens per block" in step and end.startswith(f"{kind} rises from")
    told = ("train", kind, "--data", folder, "--resume", tmp_path / "a", "--out")
    status, out, _ = specsel(*told, tmp_path / "b")
    assert status == 0 and "inside the interval" in out
    assert out.endswith("2 of its 2 files of answers are the same bytes.\n")
    for name in ("model.safetensors", "training.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    data.shard_path(folder, 1).rename(folder / "away")
    status, _, err = specsel(*told, tmp_path / "d")
    assert status == 2 and "1 shards, the training had 2" in err and not (tmp_path / "d").exists()
    (folder / "away").rename(data.shard_path(folder, 1))
    further = ("train", kind, "--data", folder, "--after", tmp_path / "a", "--out", tmp_path / "c", "--steps", 2)
    assert specsel(*further)[0] == 0
    recipes = [json.loads((tmp_path / f / "training.json").read_text())["recipe"] for f in "ac"]
    assert [r["steps"] for r in recipes] == [2, 2] and recipes[1]["rate"] == recipes[0]["rate"] / 2


@pytest.fixture
def run(target, pool, config, tmp_path):  # noqa: F811
    return collect(target, pool, tmp_path / "run", config)


def test_a_run_is_timed(specsel, run, monkeypatch):
    from specsel.engine import timing

    few = timing.TimingConfig(contexts=(16,), rows=(1, 2), samples=1, draft_len=4)
    monkeypatch.setattr(engine, "TimingConfig", lambda **options: few, raising=False)
    status, out, err = specsel("time", run)
    assert status == 0 and out.strip() == str(run / "timings.json"), err
    assert json.loads((run / "timings.json").read_text())["samples"]


def test_a_run_is_raced(specsel, run, config):  # noqa: F811
    words = ("race", run, "--policy", "fixed:ngram", "--requests", 1, "--prompts", config.prompts)
    status, out, err = specsel(*words)
    assert status == 0 and out.strip() == str(run / "race.json"), err
    records = json.loads((run / "race.json").read_text())["records"]
    assert {r["policy"] for r in records} == {"plain", "fixed:ngram"} and all(r["same_output"] for r in records)


@pytest.mark.parametrize(("name", "field"), [("ngram", "n_max"), ("eagle", "sha256"), ("target", "sha256")])
def test_another_pool_than_that_of_the_run_is_not_raced(specsel, run, name, field):
    """The manifest says what a run was collected with; one entry of it is changed."""
    manifest = json.loads((run / "manifest.json").read_text())
    entries = manifest["drafters"] | {name: {field: "other"}} if name != "target" else manifest["drafters"]
    changed = manifest | {"drafters": entries} | ({"target": {field: "other"}} if name == "target" else {})
    (run / "manifest.json").write_text(json.dumps(changed))
    status, out, err = specsel("race", run)
    assert status == 2 and out == "" and f"another {name}: {field} other there" in err and "Traceback" not in err
    assert not (run / "race.json").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("time", "nosuch"), "nosuch"),
        (("race", "nosuch"), "nosuch"),
        (("collect", "--out", "x", "--requests", 0), "--requests"),
        (("collect", "--out", "x", "--max-new", 1), "--max-new"),
        (("collect", "--out", "x", "--draft-len", 0), "--draft-len"),
        (("collect", "--out", "x", "--temperature", -1), "--temperature"),
        (("collect", "--out", "x", "--check", "eagel"), "eagel"),
        (("train", "data", "--tokens", 0), "--tokens"),
        (("train", "eagle", "--steps", 0), "--steps"),
        (("train", "eagle", "--data", "nosuch"), "nosuch"),
        (("train", "dflash", "--resume", "nosuch"), "nosuch"),
        (("train", "dflash", "--after", "nosuch"), "nosuch"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(specsel, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    status, out, err = specsel(*words)
    assert status == 2 and out == "" and part in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(targets.TargetError, match="device 'nonsense'"):
        targets.check_device("nonsense")
    targets.check_device("cpu")


def test_no_public_name_of_the_engine_is_hidden_by_a_module():
    """Importing a module sets an attribute of its name on the package, which would then stand for the function."""
    hidden = {path.stem for path in Path(engine.__file__).parent.glob("*.py")} & set(engine.__all__)
    assert not hidden
