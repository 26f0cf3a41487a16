"""What a log holds: composition, endings, subsets worth looking at apart, provenance, and the check against the live
engine.

Tables for the first chapters of the book. Not handled here: what choosing gains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
import pandas as pd

from specsel.logs import LogError, PositionLog, beside, read_log, readable
from specsel.replay.replay import fixed
from specsel.study.oldstats import bootstrap_many, ratio, request_sums

ENDINGS = ("stopped by itself", "cut at the length limit", "repeats itself", "not recorded")
CHECK_FILE = "engine_check.json"
CHECKED = ("arm", "requests", "equal", "blocks", "differences", "first_difference", "largest_margin")
OUTPUTS = ("same_output", "output_parts", "output_margin")


def composition(log: PositionLog) -> pd.DataFrame:
    """One row per workload: requests, positions, median output tokens, looping requests (None: not recorded)."""
    lengths, looping = np.diff(log.starts), log.looping
    rows = []
    for w, name in enumerate(log.workloads):
        mine = log.workload == w
        rows.append(
            {
                "workload": name,
                "requests": int(mine.sum()),
                "positions": int(lengths[mine].sum()),
                "median_output": int(np.median(lengths[mine])),
                "repeating": None if looping is None else int(looping[mine].sum()),
            }
        )
    return pd.DataFrame(rows)


def endings(log: PositionLog) -> pd.DataFrame:
    """Requests per workload and ending: columns workload, ending, requests; a looping request counts as repeating
    itself.
    """
    stop, looping = log.request_column("stop"), log.looping
    kind = np.full(log.n_requests, ENDINGS[3], dtype=object)
    if stop is not None:
        kind = np.where(stop == "eos", ENDINGS[0], ENDINGS[1])
    if looping is not None:
        kind = np.where(looping, ENDINGS[2], kind)
    rows = [
        {"workload": name, "ending": ending, "requests": int(((log.workload == w) & (kind == ending)).sum())}
        for w, name in enumerate(log.workloads)
        for ending in ENDINGS
    ]
    return pd.DataFrame([row for row in rows if row["requests"]])


def subsets(log: PositionLog) -> dict[str, PositionLog]:
    """All requests; those that do not repeat themselves; and, by the prefix of `category`, the tiers of the prompts
    (where recorded).
    """
    found = {"all requests": log}
    looping, category = log.looping, log.request_column("category")
    if looping is not None and 0 < looping.sum() < log.n_requests:
        found["without repeating answers"] = log.select(~looping)
    if category is not None:
        tier = np.array([text.partition(":")[0] if ":" in (text := str(c)) else "" for c in category])
        for w, t in sorted({(log.workloads[w], t) for w, t in zip(log.workload, tier, strict=True) if t}):
            found[f"{w}, {t} prompts"] = log.select((tier == t) & (log.workload == log.workloads.index(w)))
    return found


def subset_sizes(log: PositionLog) -> pd.DataFrame:
    """Requests and positions of every subset: columns subset, subset_requests, subset_positions."""
    return pd.DataFrame(
        [
            {"subset": name, "subset_requests": part.n_requests, "subset_positions": part.n_positions}
            for name, part in subsets(log).items()
        ]
    )


def left_out(log: PositionLog) -> dict[str, int | None]:
    """Requests without a logged position, by reason, and output tokens that were close to a tie (None: not
    recorded)."""
    table = log.request_table
    if table is None or "output_tokens" not in table:
        return dict.fromkeys(("asked", "too_long", "ended_at_once", "near_ties"))
    return {
        "asked": len(table),
        "too_long": int((table["output_tokens"] == 0).sum()),
        "ended_at_once": int((table["output_tokens"] == 1).sum()),
        "near_ties": int(table["ties"].sum()) if "ties" in table else None,
    }


def arm_table(parts: Mapping[str, PositionLog], *, rng: np.random.Generator, n_resamples: int = 10_000) -> pd.DataFrame:
    """Block efficiency of every arm on every subset of a log: subset, arm, block_efficiency, low, high, requests."""
    rows = []
    for name, log in parts.items():
        blocks = np.stack([np.diff(log.starts), *(fixed(log, k).blocks for k in range(log.n_arms))], axis=1)
        statistics = {arm: lambda s, k=k: ratio(s[..., 0], s[..., k + 1]) for k, arm in enumerate(log.arms)}
        found = bootstrap_many(statistics, blocks, strata=log.workload, rng=rng, n_resamples=n_resamples)
        rows += [
            {"subset": name, "arm": arm, "block_efficiency": e.value, "low": e.low, "high": e.high, "requests": e.n}
            for arm, e in found.items()
        ]
    return pd.DataFrame(rows)


def by_decoding(logs: Iterable[PositionLog]) -> dict[str, PositionLog]:
    """Logs by how their target decodes and by the name of their run, such as "greedy (campaign)"."""
    return {f"{_decoding(log)} ({log.run})": log for log in logs}


def _decoding(log: PositionLog) -> str:
    said = log.manifest.get("decoding") or {}
    temperature = said.get("temperature")
    return f"temperature {temperature:g}" if temperature else str(said.get("mode") or "decoding not recorded")


def agreement(log: PositionLog, *, rng: np.random.Generator, n_resamples: int = 2_000) -> pd.DataFrame:
    """Share of positions where `arm` gets more tokens accepted than `other`, ties being the rest: arm, other, share,
    low, high.

    Taken over every position of every request, whichever arm would have run there.
    """
    pairs = [(a, b) for a in range(log.n_arms) for b in range(log.n_arms) if a != b]
    more = np.stack(
        [log.accepted[:, a] > log.accepted[:, b] for a, b in pairs] + [np.ones(log.n_positions, dtype=bool)], axis=1
    )
    sums = request_sums(more.astype(float), log.request_of, log.n_requests)
    found = bootstrap_many(
        {pair: lambda s, i=i: ratio(s[..., i], s[..., -1]) for i, pair in enumerate(pairs)},
        sums,
        strata=log.workload,
        rng=rng,
        n_resamples=n_resamples,
    )
    return pd.DataFrame(
        [
            {"arm": log.arms[a], "other": log.arms[b], "share": e.value, "low": e.low, "high": e.high}
            for (a, b), e in found.items()
        ]
    )


def provenance(log: PositionLog) -> pd.DataFrame:
    """What the manifest says about a run, as a table of item and value; "not recorded" where it says nothing."""
    m = log.manifest
    target, hardware = m.get("target") or {}, m.get("hardware") or {}
    drafters = {f"drafter {name}": _drafter(entry) for name, entry in (m.get("drafters") or {}).items()}
    items = {
        "run": log.run,
        "label": log.label,
        "arms, in order": ", ".join(log.arms),
        "arm of the logged path": log.path_arm,
        "draft length": log.draft_len,
        "output limit": m.get("max_new_tokens"),
        "decoding": _words(m.get("decoding")),
        "precision": m.get("dtype"),
        "target": target.get("name"),
        "target weights": _short(target.get("sha256")),
        **drafters,
        "processor": hardware.get("cpu"),
        "accelerator": hardware.get("gpu"),
        "threads": hardware.get("threads"),
        "versions": _words(m.get("versions")),
        "log": _short(log.sha256),
        "collected": m.get("started"),
        "code": _short(m.get("git_commit")),
    }
    return pd.DataFrame(
        {"item": list(items), "value": ["not recorded" if v in (None, "") else str(v) for v in items.values()]}
    )


def _words(entry: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (entry or {}).items() if value is not None)


def _drafter(entry: Mapping[str, Any]) -> str:
    """Kind, settings and weights of one drafter."""
    settings = {k: v for k, v in entry.items() if k not in ("id", "kind", "sha256")}
    weights = f"weights {_short(entry.get('sha256'))}" if entry.get("sha256") else ""
    return "; ".join(filter(None, [entry.get("kind"), _words(settings), weights])) or str(entry.get("id") or "")


def _short(digest: str | None) -> str:
    return str(digest)[:12] if digest else ""


def engine_check(run: str | Path, log: PositionLog) -> pd.DataFrame:
    """Live engine against replay, per arm: requests, equal (in every block), blocks, differences, median output index
    of the first difference of a request, largest margin of a difference.

    And against plain decoding: requests with the same output, median index at which the others part, largest margin
    there; missing in older checks. Empty when the run has no check. Raises LogError when the check belongs to another
    log. A margin is the distance between the two best logits of the target: a difference at a margin of rounding size
    is a tie.
    """
    path = Path(run) / CHECK_FILE
    if not path.is_file():
        return pd.DataFrame(columns=[*CHECKED, *OUTPUTS])
    with readable(path, "run the engine check again (`specsel collect --check all`)"):
        found = json.loads(path.read_text("utf-8"))
        rows = [
            (arm, *(int(c[name]) for name in ("requests", "equal", "blocks")), len(c["differences"]))
            + _parted(c["differences"])
            + (c.get("same_output"), *_parted(c.get("output_differences", [])))
            for arm, c in found["arms"].items()
        ]
    if found.get("log_sha256") != log.sha256:
        raise LogError(f"{path}: field 'log_sha256' belongs to another log; run the engine check again on this run")
    table = pd.DataFrame(rows, columns=[*CHECKED, *OUTPUTS])
    return table.astype(dict.fromkeys(("first_difference", "same_output", "output_parts"), "Int64"))


def _parted(differences: Iterable[Mapping[str, Any]]) -> tuple[int | None, float | None]:
    """Median position and largest margin; None without any."""
    found = [(int(d["position"]), float(d["margin"])) for d in differences]
    return (median_high(p for p, _ in found), max(m for _, m in found)) if found else (None, None)


def checks_beside(run: str | Path, ending: str) -> pd.DataFrame:
    """`engine_check` of the runs beside a run (see `log.beside`) with the precision of each; empty without one."""
    paths = beside(run, ending)
    logs = [read_log(path) for path in paths]
    checks = [
        engine_check(path, log).assign(precision=log.manifest.get("dtype", "a precision that is not recorded"))
        for path, log in zip(paths, logs, strict=True)
    ]
    return pd.concat(checks) if checks else pd.DataFrame(columns=[*CHECKED, *OUTPUTS, "precision"])
