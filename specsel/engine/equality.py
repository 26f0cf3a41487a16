"""The proof obligation: the live engine's blocks against exact replay of the position log, request by request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from specsel import log as logs
from specsel.engine.decode import Decoder, Trace, always
from specsel.engine.generate import choice_rule
from specsel.engine.harness import cpu_name
from specsel.engine.prompts import encode, load_prompts
from specsel.engine.target import Features
from specsel.log import PositionLog

FILE = "engine_check.json"


def first_difference(log: PositionLog, request: int, arm: int, trace: Trace) -> int | None:
    """Output index of the first block in which the engine and replay differ (start, accepted or emitted tokens); None
    when all agree."""
    rows = slice(int(log.starts[request]), int(log.starts[request + 1]))
    accepted, emitted = log.accepted[rows, arm], log.emitted[rows, arm]
    p = 0
    for block in trace.blocks:
        if p >= len(accepted) or (block.position, block.accepted[log.arms[arm]], block.emitted) != (
            p,
            accepted[p],
            emitted[p],
        ):
            return min(p, block.position)
        p += block.emitted
    return None if p == len(accepted) else p


def margin_at(trace: Trace, where: int, draft_len: int) -> float:
    """Smallest top-1/top-2 logit margin among the tokens of the block that starts at ``where``: what could explain a
    difference there. Ties elsewhere explain nothing."""
    return min(trace.margins[where + 1 : where + draft_len + 2], default=float("inf"))


def _needed(pool: dict, arm: str) -> dict:
    """The drafters that an arm drafts with; the others need not be kept in step."""
    parts = (arm, "ngram", pool[arm].config.fallback) if arm == "cascade" else (arm,)
    return {name: drafter for name, drafter in pool.items() if name in parts}


def _decoder(features: Features, pool: dict, log: PositionLog) -> Decoder:
    """The live engine with the choice rule of a log; requests by their index in the log."""
    decoding = log.manifest["decoding"]
    keys = [f"{log.workloads[w]}/{r}" for w, r in zip(log.workload, log.requests, strict=True)]
    choose = choice_rule(decoding["temperature"], decoding["seed"], keys)
    return Decoder(features, pool, draft_len=log.draft_len, choose=choose)


def check_engine(
    features: Features,
    pool: dict,
    run: Path,
    *,
    arms: tuple[str, ...] = (),
    per_workload: int | None = None,
    prompts: Path | None = None,
) -> dict:
    """Decodes the first ``per_workload`` logged requests of each workload (None = all) with each fixed arm (default:
    every arm) and compares every block; with the noise streams of the log when it was sampled.

    Adds the result to ``engine_check.json`` of the run: per arm the requests, how many are equal in every block, and
    each difference with the margin of its own block. A difference with a margin far above rounding would be a bug.
    Results for another log (other hash) are dropped.
    """
    log, target = logs.read_log(run), features.target
    path = run / FILE
    result = {"schema": 1, "arms": {}}
    if path.is_file():
        with logs.readable(path, "remove it"):
            saved = json.loads(path.read_text(encoding="utf-8"))
            result = saved | {"arms": dict(saved["arms"])} if saved["log_sha256"] == log.sha256 else result
    result |= {
        "log_sha256": log.sha256,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
    chosen = [r for w in range(len(log.workloads)) for r in np.flatnonzero(log.workload == w)[:per_workload]]
    texts = {w: {p.id: p for p in load_prompts(w, "eval", prompts)} for w in log.workloads}
    for name in arms or log.arms:
        decoder = _decoder(features, _needed(pool, name), log)
        counts = {"requests": 0, "equal": 0, "blocks": 0, "tokens": 0, "differences": []}
        for r in tqdm(chosen, desc=name, unit="request", disable=None):
            workload, request = log.workloads[log.workload[r]], log.requests[r]
            ids = encode(target.tokenizer, texts[workload][request])
            trace = decoder.run(ids, always(name), max_new=log.manifest["max_new_tokens"], index=r)
            where = first_difference(log, r, log.arms.index(name), trace)
            counts["requests"] += 1
            counts["equal"] += where is None
            counts["blocks"] += len(trace.blocks)
            counts["tokens"] += len(trace.output)
            if where is not None:
                margin = margin_at(trace, where, log.draft_len)
                counts["differences"].append(
                    {"workload": workload, "request": request, "position": where, "margin": margin}
                )
        result["arms"][name] = counts
        logs.write_bytes_atomically(path, json.dumps(result, indent=1).encode() + b"\n")
    return result
