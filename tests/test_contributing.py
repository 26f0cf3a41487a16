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
