"""Evaluation prompts rebuilt from the public hub data sets at pinned revisions, checked against
``data/prompts/index.jsonl.gz``.

Only the sources that the hub carries unchanged are here (GSM8K, HumanEval, MBPP); the others come from the local prompt
files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specsel.engine.prompts import Prompt, PromptError

INDEX = Path(__file__).parents[2] / "data" / "prompts" / "index.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Source:
    """One hub data set: where it is, at which revision, and how a row becomes (prompt id, text, category)."""

    hub: str
    config: str
    revision: str
    build: Callable[[int, dict], tuple[str, str, str]]


def tidy(text: str) -> str:
    """White space as in the published prompts: plain spaces, no trailing blanks, no carriage returns."""
    lines = text.replace("\u00a0", " ").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def gsm8k(number: int, row: dict) -> tuple[str, str, str]:
    """The question as it stands, with plain spaces."""
    return f"gsm8k/test/{number}", tidy(row["question"]), ""


def human_eval(number: int, row: dict) -> tuple[str, str, str]:
    """The signature and docstring in a Python fence under a one-line instruction."""
    return (
        f"humaneval/test/{number}",
        f"Complete the following Python function. Return the full function.\n\n```python\n{tidy(row['prompt'])}\n```",
        "",
    )


def mbpp(number: int, row: dict) -> tuple[str, str, str]:
    """The task and its tests in the wording of the MBPP paper."""
    tests = "\n".join(row["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {row['text'].strip()}"
    text = f"{task} Your code should pass these tests:\n\n{tests}"
    return f"mbpp/test/{row['task_id']}", tidy(text), "natural-language"


SOURCES = {
    "gsm8k": (Source("openai/gsm8k", "main", "740312add88f781978c0658806c59bc2815b9866", gsm8k),),
    "code": (
        Source("openai/openai_humaneval", "openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", human_eval),
        Source("google-research-datasets/mbpp", "full", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", mbpp),
    ),
}


def index(workload: str) -> dict[str, str]:
    """Prompt id -> sha256 of its messages, in file order, for one workload's evaluation prompts."""
    with gzip.open(INDEX, "rt", encoding="utf-8") as handle:
        rows = map(json.loads, handle)
        return {row["id"]: row["sha256"] for row in rows if row["workload"] == workload}


def load_from_hub(workload: str, *, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` evaluation prompts of a workload, rebuilt from the hub; every text is checked against its
    published hash.

    Raises PromptError for a workload that the hub does not carry, a missing library, or a text that differs.
    """
    if workload not in SOURCES:
        raise PromptError(
            f"the prompts of '{workload}' are not on the hub; "
            f"take {workload}.eval.jsonl and name its folder with --prompts."
        )
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise PromptError("reading prompts from the hub needs the library 'datasets': pip install datasets.") from error
    rows = (
        (source, i, row)
        for source in SOURCES[workload]
        for i, row in enumerate(load_dataset(source.hub, source.config, split="test", revision=source.revision))
    )
    return check({built[0]: built for source, i, row in rows if (built := source.build(i, row))}, workload, limit)


def check(built: dict[str, tuple[str, str, str]], workload: str, limit: int | None) -> list[Prompt]:
    """Prompts in published order from rebuilt (id, text, category); PromptError names the first that is missing or
    differs."""
    prompts = []
    for id_, expected in list(index(workload).items())[:limit]:
        if id_ not in built:
            raise PromptError(f"{workload}: prompt {id_} is not in the hub data set at its pinned revision.")
        _, text, category = built[id_]
        prompt = Prompt(id_, workload, ({"role": "user", "content": text},), category)
        if prompt.sha256 != expected:
            raise PromptError(
                f"{workload}: prompt {id_} differs from the published one "
                f"(sha256 {prompt.sha256[:12]}..., expected {expected[:12]}...)."
            )
        prompts.append(prompt)
    return prompts
