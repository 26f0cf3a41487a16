"""The race: policies decoded in the real engine against the clock, plain decoding among them, on the requests of a
run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

from specsel import logs
from specsel.engine.decode import Decide, always, plain, redrafting
from specsel.engine.equality import decoder_of, logged_requests
from specsel.engine.provenance import cpu_name
from specsel.engine.target import Features
from specsel.logs import SpecselError
from specsel.selection.selector import Selector

FILE = "race.json"


class RaceError(SpecselError):
    """A policy that the live engine cannot run."""


def decide_by_name(name: str, arms: tuple[str, ...], draft_len: int) -> Decide:
    """``plain``, ``fixed:ARM``, ``union`` (draft with every arm, verify all in one pass, keep the longest), or
    ``selector:FILE`` (a redraft selector; one that was fitted for another pool is refused)."""
    if name == "plain":
        return plain
    if name == "union":
        return lambda position, state: (list(arms), None)
    if name.startswith("selector:"):
        path = name.removeprefix("selector:")
        return redrafting(Selector.load(path, arms=arms, draft_len=draft_len, features=logs.STATS), arms)
    if name.startswith("fixed:") and name.removeprefix("fixed:") in arms:
        return always(name.removeprefix("fixed:"))
    raise RaceError(
        f"policy '{name}' cannot run in the live engine; "
        f"use plain, union, selector:FILE, or fixed:ARM with ARM one of {', '.join(arms)}."
    )


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
                records.append(
                    {
                        "policy": name if not name.startswith("selector:") else f"selector:{Path(name).name}",
                        "workload": log.workloads[log.workload[r]],
                        "request": log.requests[r],
                        "seconds": seconds,
                        "tokens": len(trace.output),
                        "blocks": len(trace.blocks),
                        "same_output": trace.output == truth,
                    }
                )
    result = {
        "schema": 1,
        "log_sha256": log.sha256,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "hardware": {"cpu": cpu_name(), "threads": torch.get_num_threads()},
        "records": records,
    }
    logs.write_bytes_atomically(run / FILE, json.dumps(result, indent=1).encode() + b"\n")
    return run / FILE
