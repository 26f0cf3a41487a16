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
from specsel.engine.target import Features, Target
from specsel.log import PositionLog, SpecselError

FILE = "engine_check.json"
NAMES = ("id", "kind", "step", "checkpoint")  # of a drafter's entry in the manifest: what it is called


class RunError(SpecselError):
    """A run that was collected with something else than what is loaded."""


def check_loaded(log: PositionLog, target: Target, drafters: dict[str, dict]) -> None:
    """Raises RunError when a run was collected with another target or other drafters than the loaded ones, which
    ``drafters`` describes as `pool.describe` does. What the manifest does not tell is not compared."""
    told = {"target": log.manifest.get("target") or {}, **(log.manifest.get("drafters") or {})}
    for name, here in {"target": {"sha256": target.sha256}, **drafters}.items():
        for field in here.keys() & told.get(name, {}).keys() - {*NAMES}:
            if told[name][field] != here[field]:
                raise RunError(
                    f"run '{log.run}' was collected with another {name}: {field} {told[name][field]} there, "
                    f"{here[field]} here. Load the one of the run, or collect a run with this one."
                )


def logged_requests(
    log: PositionLog, target: Target, per_workload: int | None, prompts: Path | None
) -> list[tuple[int, list[int]]]:
    """The first ``per_workload`` logged requests of each workload (None: all): index in the log and prompt tokens.
    Raises RunError when a prompt is not the one that the log was collected with."""
    texts = {(w, p.id): p for w in log.workloads for p in load_prompts(w, "eval", prompts)}
    logged, found = log.request_column("prompt_sha256"), []
    for w, workload in enumerate(log.workloads):
        for r in np.flatnonzero(log.workload == w)[:per_workload].tolist():
            prompt = texts.get((workload, log.requests[r]))
            if prompt is None or logged is not None and logged[r] != prompt.sha256:
                raise RunError(
                    f"run '{log.run}': prompt {workload}/{log.requests[r]} of the log is not in the prompt files, or "
                    "has another text there; give the prompts that it was collected with (--prompts)."
                )
            found.append((r, encode(target.tokenizer, prompt)))
    return found


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


def decoder_of(log: PositionLog, features: Features, pool: dict) -> Decoder:
    """The live engine with the choice rule of a log; requests by their index in the log. Raises RunError when the
    manifest does not tell the rule."""
    if missing := {"decoding", "max_new_tokens"} - log.manifest.keys():
        raise RunError(
            f"run '{log.run}': its manifest does not tell {min(missing)}; only a run made by `specsel collect` can be "
            "decoded again."
        )
    decoding = log.manifest["decoding"]
    keys = [f"{log.workloads[w]}/{r}" for w, r in zip(log.workload, log.requests, strict=True)]
    choose = choice_rule(decoding.get("temperature", 0.0), decoding.get("seed", 0), keys)
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
    chosen = logged_requests(log, target, per_workload, prompts)
    for name in arms or log.arms:
        decoder = decoder_of(log, features, _needed(pool, name))
        counts = {"requests": 0, "equal": 0, "blocks": 0, "tokens": 0, "differences": []}
        for r, ids in tqdm(chosen, desc=name, unit="request", disable=None):
            trace = decoder.run(ids, always(name), max_new=log.manifest["max_new_tokens"], index=r)
            where = first_difference(log, r, log.arms.index(name), trace)
            counts["requests"] += 1
            counts["equal"] += where is None
            counts["blocks"] += len(trace.blocks)
            counts["tokens"] += len(trace.output)
            if where is not None:
                margin = margin_at(trace, where, log.draft_len)
                counts["differences"].append(
                    {
                        "workload": log.workloads[log.workload[r]],
                        "request": log.requests[r],
                        "position": where,
                        "margin": margin,
                    }
                )
        result["arms"][name] = counts
        logs.write_bytes_atomically(path, json.dumps(result, indent=1).encode() + b"\n")
    return result
