"""The requests of a run decoded again by the live engine: every block against exact replay of the position log, and
policies against the clock, plain decoding among them."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from specsel import logs
from specsel.engine.decode import Decide, Decoder, Trace, always, plain, redrafting
from specsel.engine.generate import choice_rule
from specsel.engine.prompts import encode, load_prompts
from specsel.engine.provenance import cpu_name
from specsel.engine.target import Features, Target
from specsel.logs import PositionLog, SpecselError
from specsel.selection.selector import Selector

CHECK_FILE, RACE_FILE = "engine_check.json", "race.json"
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
        logged = (p, accepted[p], emitted[p]) if p < len(accepted) else None
        if (block.position, block.accepted[log.arms[arm]], block.emitted) != logged:
            return min(p, block.position)
        p += block.emitted
    return None if p == len(accepted) else p


def margin_at(trace: Trace, where: int, draft_len: int) -> float:
    """Smallest top-1/top-2 logit margin among the tokens of the block that starts at ``where``: what could explain a
    difference there. Ties elsewhere explain nothing."""
    return min(trace.margins[where + 1 : where + draft_len + 2], default=float("inf"))


def parting(trace: Trace, truth: Trace) -> tuple[int, float] | None:
    """Output index at which an answer leaves that of plain decoding, and how far the two best tokens of the target are
    apart there; None when the two are the same."""
    pairs = itertools.zip_longest(trace.output, truth.output)
    where = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    return None if where is None else (where, truth.margins[min(where, len(truth.margins) - 1)])


def _needed(pool: dict, arm: str) -> dict:
    """The drafters that an arm drafts with; the others need not be kept in step."""
    parts = (arm, *pool[arm].parts)
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
    every arm) and compares every block with the log, and the answer with that of plain decoding; with the noise streams
    of the log when it was sampled.

    Adds the result to ``engine_check.json`` of the run: per arm the requests, how many are equal in every block and
    each difference with the margin of its own block; how many have the output of plain decoding, and where the others
    leave it with the margin of that token. In float32 a difference with a margin far above rounding would be a bug.
    Results for another log (other hash) are dropped.
    """
    log, target = logs.read_log(run), features.target
    path = run / CHECK_FILE
    result = {"schema": 1, "arms": {}}
    if path.is_file():
        with logs.readable(path, "remove it"):
            saved = json.loads(path.read_text(encoding="utf-8"))
            result = saved | {"arms": dict(saved["arms"])} if saved["log_sha256"] == log.sha256 else result
    result |= {"log_sha256": log.sha256, "dtype": target.dtype, "cpu": cpu_name(), "threads": torch.get_num_threads()}
    chosen, limit = dict(logged_requests(log, target, per_workload, prompts)), log.manifest["max_new_tokens"]
    alone = decoder_of(log, features, {})
    truth = functools.cache(lambda r: alone.run(chosen[r], plain, max_new=limit, index=r))
    for name in arms or log.arms:
        decoder = decoder_of(log, features, _needed(pool, name))
        requests = tqdm(chosen.items(), desc=name, unit="request", disable=None)
        traces = {r: decoder.run(ids, always(name), max_new=limit, index=r) for r, ids in requests}
        result["arms"][name] = _compared(log, name, traces, truth)
        logs.write_bytes_atomically(path, json.dumps(result, indent=1).encode() + b"\n")
    return result


def _compared(log: PositionLog, arm: str, traces: dict[int, Trace], truth: Callable[[int], Trace]) -> dict:
    """What ``check_engine`` says of an arm: its answers by request against the log, and against plain decoding."""
    differences, partings = [], []
    for r, trace in traces.items():
        told = {"workload": log.workloads[log.workload[r]], "request": log.requests[r]}
        where, left = first_difference(log, r, log.arms.index(arm), trace), parting(trace, truth(r))
        if where is not None:
            differences.append(told | {"position": where, "margin": margin_at(trace, where, log.draft_len)})
        if left is not None:
            partings.append(told | dict(zip(("position", "margin"), left, strict=True)))
    n, found = len(traces), traces.values()
    counts = {"requests": n, "equal": n - len(differences), "same_output": n - len(partings)}
    counts |= {"blocks": sum(len(t.blocks) for t in found), "tokens": sum(len(t.output) for t in found)}
    return counts | {"differences": differences, "output_differences": partings}


class RaceError(SpecselError):
    """A policy that the live engine cannot run."""


def decide_by_name(name: str, arms: tuple[str, ...], draft_len: int) -> Decide:
    """``plain``, ``fixed:ARM``, ``union`` (draft with every arm, verify all in one pass, keep the longest), or
    ``selector:FILE`` (a redraft selector; one that was fitted for another pool is refused)."""
    known = {"plain": plain, "union": lambda position, state: (list(arms), None)}
    known |= {f"fixed:{arm}": always(arm) for arm in arms}
    if name.startswith("selector:"):
        path = name.removeprefix("selector:")
        return redrafting(Selector.load(path, arms=arms, draft_len=draft_len, features=logs.STATS), arms)
    if name not in known:
        raise RaceError(
            f"policy '{name}' cannot run in the live engine; "
            f"use plain, union, selector:FILE, or fixed:ARM with ARM one of {', '.join(arms)}."
        )
    return known[name]


def race(
    features: Features,
    pool: dict,
    run: Path,
    *,
    policies: tuple[str, ...] = (),
    per_workload: int = 4,
    prompts: Path | None = None,
    max_new: int | None = None,
    selector: Path | None = None,
) -> Path:
    """Decodes the first ``per_workload`` requests of each workload with every policy in turn and writes ``race.json``
    into the run folder, under the choice rule of the run (greedy, or its noise streams); ``selector`` names a file of a
    redraft selector that races as well.

    Policies take turns request by request, so that a slow moment of the machine falls on all; one request per policy is
    a warm-up and not recorded. A record holds policy, workload, request, seconds (prefill included), tokens, blocks,
    and whether the output equals that of plain decoding.
    """
    log, arms, target = logs.read_log(run), tuple(pool), features.target
    names = policies or ("plain", *(f"fixed:{arm}" for arm in arms), "union")
    names = (*names, *([f"selector:{selector}"] if selector else []))
    decides = {"plain": plain} | {name: decide_by_name(name, arms, log.draft_len) for name in names}
    decoder, chosen, records = decoder_of(log, features, pool), logged_requests(log, target, per_workload, prompts), []
    for turn, (r, ids) in enumerate(tqdm([chosen[0], *chosen], unit="request", disable=None)):
        truth = None
        for name, decide in decides.items():
            start = time.perf_counter()
            trace = decoder.run(ids, decide, max_new=max_new or log.manifest["max_new_tokens"], index=r)
            seconds = time.perf_counter() - start
            truth = trace.output if truth is None else truth
            if turn:
                policy = f"selector:{Path(name).name}" if name.startswith("selector:") else name
                told = {"policy": policy, "workload": log.workloads[log.workload[r]], "request": log.requests[r]}
                told |= {"seconds": seconds, "tokens": len(trace.output), "blocks": len(trace.blocks)}
                records.append(told | {"same_output": trace.output == truth})
    result = {"schema": 1, "log_sha256": log.sha256, "dtype": target.dtype}
    result |= {"hardware": {"cpu": cpu_name(), "threads": torch.get_num_threads()}, "records": records}
    logs.write_bytes_atomically(run / RACE_FILE, json.dumps(result, indent=1).encode() + b"\n")
    return run / RACE_FILE
