"""The walks of CONTRIBUTING.md, each done in a copy of the repository with the files that stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specsel.logs import read_log
from specsel.paper.claims import read_claims

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^`([^`\n]+)`\n```(\w+)\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.S | re.M)


@pytest.fixture
def copy(tmp_path):
    """The package, the notebooks and the pages of the book, and the data by reference."""
    for name in ("specsel", "notebooks", "book"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    return tmp_path


def add(copy: Path, *names: str) -> None:
    """Write the blocks of these files: whole files, or the added lines of a difference behind its first line."""
    for name, kind, text in BLOCKS:
        if name not in names:
            continue
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "diff":
            before, *added = text.rstrip("\n").split("\n")
            there = path.read_text("utf-8")
            assert there.count(f"{before[1:]}\n") == 1 and all(line.startswith("+") for line in added)
            text = there.replace(f"{before[1:]}\n", "\n".join([before[1:], *(line[1:] for line in added), ""]))
        path.write_text(text, encoding="utf-8")


def run(copy: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "cwd": copy, "env": environment}
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_drafter_is_a_module_and_a_line_and_a_workload_is_a_file(copy):
    """The embedded target answers two poems; the new arm is logged, checked live, timed and described."""
    pytest.importorskip("torch", reason="collection needs the extra 'engine'")
    add(copy, "specsel/engine/drafters/echo.py", "specsel/engine/pool.py", "prompts/poems.eval.jsonl")
    options = ["--max-new", "12", "--check", "echo", "--out", "run"]
    run(copy, "-m", "specsel.cli", "collect", "--prompts", "prompts", *options)
    log = read_log(copy / "run")
    echo = log.arms.index("echo")
    assert log.workloads == ("poems",) and log.n_requests == 2
    assert (log.proposed[:, echo] == log.draft_len).all() and "echo" in log.manifest["drafters"]
    assert log.manifest["prompts"]["poems"]["published"] is False
    check = json.loads((copy / "run" / "engine_check.json").read_text("utf-8"))
    assert check["arms"]["echo"]["equal"] == check["arms"]["echo"]["requests"] == 2


def test_a_policy_is_a_class_and_a_row(copy):
    """Two arms in turn: the first block of each request is the first arm's."""
    add(copy, "specsel/policies/plain.py", "specsel/policies/catalogue.py")
    golden = str(ROOT / "tests" / "cases" / "golden_small.jsonl")
    options = ["--policy", "alternate", "--arms", "dflash,ngram", "--json"]
    found = json.loads(run(copy, "-m", "specsel.cli", "replay", golden, *options))["by_workload"]
    for counts in found.values():
        first, second = counts["pulls"].values()
        assert counts["requests"] == 1 and first - second in (0, 1) and first + second == counts["blocks"]


@pytest.mark.slow
def test_a_chapter_is_a_notebook_and_a_line(copy):
    """It is in the book's list, runs on a pool of two arms, and its claims are those of a loop."""
    add(copy, "notebooks/10_first_token.ipynb", "_toc.yml")
    code = """
from pathlib import Path
from specsel.paper.build import kernel_environment, list_notebooks, run_notebook
path = list_notebooks(Path("."))[1]
with kernel_environment(Path("work")):
    run_notebook(path, Path("out.ipynb"), {"arms": ["ngram", "eagle"], "n_resamples": 50}, Path("."))
"""
    run(copy, "-c", code)
    claims = read_claims(copy / "work" / "values")["10_first_token"]
    log = read_log(ROOT / "data" / "runs" / "campaign")
    assert set(claims) == {"first_right:ngram", "first_right:eagle"}
    share = (log.accepted[:, log.arms.index("eagle")] > 0).mean()
    assert claims["first_right:eagle"].value == pytest.approx(share) and claims["first_right:eagle"].low < share
