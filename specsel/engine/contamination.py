"""Do evaluation prompts stand among the training prompts? Exact copies, and prompts that share most of their runs of
words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from specsel.engine.prompts import SHA256, WORKLOADS, Prompt, load_prompts
from specsel.logs import write_bytes_atomically

RUN = 8
"""Words of a run."""

NEAR = 0.5
"""A prompt is a near copy when this share of its runs stands in one training prompt."""


def words(prompt: Prompt) -> str:
    """The words of a prompt: lower case, single spaces, no punctuation.

    >>> words(Prompt("1", "chat", ({"role": "user", "content": "Say  HELLO,\\n please!"},)))
    'say hello please'
    """
    return " ".join(re.findall(r"\w+", " ".join(message["content"] for message in prompt.messages).lower()))


def shared_runs(evaluation: list[str], training: list[str]) -> np.ndarray:
    """Largest share of the runs of RUN words of each evaluation text that stands in one training text, (n,).

    Runs that stand in more than one of a hundred evaluation texts are the wording of the task and do not count. A text
    shorter than a run is one run. A text without a run of its own shares 0.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    def runs(text: str) -> list[str]:
        parts = text.split()
        return [" ".join(parts[i : i + RUN]) for i in range(max(1, len(parts) - RUN + 1))]

    count = CountVectorizer(analyzer=runs, binary=True)
    asked, seen = count.fit_transform(evaluation), count.transform(training)
    rare = asked.sum(axis=0).A1 <= max(1, len(evaluation) / 100)
    asked, seen = asked[:, rare], seen[:, rare]
    own, best = asked.sum(axis=1).A1, (asked @ seen.T).max(axis=1).toarray().ravel()
    return np.divide(best, own, out=np.zeros(len(evaluation)), where=own > 0)


def write_overlap(out: Path, prompts: Path | None = None) -> list[dict]:
    """One row per workload: evaluation prompts, exact copies of a training prompt of any workload, near copies, and the
    largest share of runs in one training prompt. Writes the rows to a JSON file, with the hashes of the prompt
    files."""
    training = [words(p) for workload in WORKLOADS for p in load_prompts(workload, "train", prompts)]
    known, rows = set(training), []
    for workload in WORKLOADS:
        texts = [words(p) for p in load_prompts(workload, "eval", prompts)]
        share = shared_runs(texts, training)
        row = {"workload": workload, "prompts": len(texts), "training_prompts": len(training)}
        row |= {"exact": sum(text in known for text in texts), "near": int((share >= NEAR).sum())}
        rows.append(row | {"largest_share": round(float(share.max()), 4)})
    report = {"run": RUN, "near": NEAR, "files": SHA256, "workloads": rows}
    write_bytes_atomically(out, (json.dumps(report, indent=1) + "\n").encode())
    return rows
