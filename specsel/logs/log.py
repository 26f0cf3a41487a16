"""Position logs in files: reading with every check, writing, and a summary.

A log holds, for every position of every request's greedy output, what each arm proposed there and how much of it
the target accepts, so that any policy replays exactly. Not handled here: averages over policies, intervals, figures.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from glob import escape, glob
from pathlib import Path

import numpy as np
import pandas as pd

from specsel.logs import cache
from specsel.logs.columns import Columns, read_columns
from specsel.logs.manifest import UNLABELLED, file_name, header, line_faults, merged, read_table, source
from specsel.logs.position import BlockLog, PositionLog, block_view, require_complete
from specsel.logs.records import (
    CONTEXT,
    SCHEMA,
    STATS,
    Fault,
    LogError,
    SpecselError,
    encode_row,
    file_entry,
    gzip_bytes,
    readable,
    sha256_of,
    write_bytes_atomically,
)

__all__ = [
    "CONTEXT",
    "STATS",
    "BlockLog",
    "Fault",
    "LogError",
    "LogWarning",
    "PositionLog",
    "SpecselError",
    "beside",
    "block_view",
    "convert",
    "drafter_sha256",
    "encode_row",
    "file_entry",
    "read_log",
    "read_logs",
    "readable",
    "require_complete",
    "sha256_of",
    "summary",
    "validate",
    "write_bytes_atomically",
    "write_log",
]


class LogWarning(UserWarning):
    """Something in a log that is tolerated and worth knowing: identical repeats, unknown fields."""


def read_log(path: str | Path | Iterable[str | Path], *, verify: bool = True) -> PositionLog:
    """Read a run folder, or one or several .jsonl / .jsonl.gz files that form one log.

    Any line order gives the same log: workloads in the order of the files (by name inside a file), requests by name.
    ``verify=False`` skips the hashes of the manifest only. Raises LogError with the first fault and how many there are.
    """
    log, faults, repeats = _read(path, verify)
    if faults:
        n = len(faults) - 1
        more = f" ({n} more fault{'s' * (n > 1)}: `specsel log validate` names them all)" if n else ""
        raise LogError(f"{faults[0]}{more}")
    if repeats:
        warnings.warn(
            f"{len(repeats)} identical repeats of a line were read once, the first: {repeats[0]}",
            LogWarning,
            stacklevel=2,
        )
    return log


def read_logs(run: str | Path, ending: str) -> list[PositionLog]:
    """The logs of the run folders beside a run whose names are its own and an ending (a glob pattern), by name; an
    empty list where there are none."""
    return [read_log(path) for path in beside(run, ending)]


def beside(run: str | Path, ending: str) -> list[Path]:
    """The run folders beside a run whose names are its own and an ending (a glob pattern), by name."""
    return [Path(path) for path in sorted(glob(escape(str(Path(run))) + ending))]


def validate(path: str | Path | Iterable[str | Path]) -> list[Fault]:
    """All faults of a run folder, or of one or several files that form one log, in order of file and line."""
    try:
        _, faults, repeats = _read(path, verify=True)
    except LogError as error:
        name, _, message = str(error).partition(": ")
        return [Fault(name, None, None, message)]
    return sorted(faults + repeats, key=lambda f: (f.file, f.line or 0, f.field or ""))


def _read(path: str | Path | Iterable[str | Path], verify: bool) -> tuple[PositionLog | None, list[Fault], list[Fault]]:
    """The log (None when nothing usable is there), all faults, and the identical repeats."""
    parts = [source(Path(p), verify) for p in ([path] if isinstance(path, (str, Path)) else path)]
    manifest, faults = merged(parts), [fault for part in parts for fault in part.faults]
    files = [file for part in parts for file in part.files]
    if not files:
        nothing = Fault(str(parts[0].path), None, None, "holds no log files (blocks_<workload>.jsonl.gz)")
        return None, faults or [nothing], []
    hashes = [sha256_of(file.read_bytes()) if file.is_file() else "" for file in files]
    asked = {"arms": manifest.get("arms"), "draft_len": manifest.get("draft_len"), "path_arm": manifest.get("path_arm")}
    named = [file.name if part.is_folder else None for part in parts for file in part.files]
    kept = cache.place(hashes, (asked, named))
    large = "" not in hashes and sum(file.stat().st_size for file in files) >= cache.SMALLEST
    columns, found = (cache.load(kept) if large and verify else None), []
    if columns is None:
        columns, found = read_columns(files, **asked, named=named)
        found = [*(fault for part in parts if verify and not faults for fault in line_faults(part)), *found]
        if large and not (faults or found or columns.repeats):
            cache.keep(kept, columns)
    for note in columns.notes:
        warnings.warn(note, LogWarning, stacklevel=4)
    tables = [part.path / "requests.jsonl.gz" for part in parts if part.is_folder]
    tables = [read_table(file) for file in tables if not faults and file.exists()]
    faults = faults + found
    if not len(columns.position):
        return None, faults or [Fault(str(files[0]), None, None, "is empty: it holds no record; collect it again")], []
    table = pd.concat(tables, ignore_index=True) if tables else None
    run = manifest.get("run") or re.sub(r"\.jsonl(\.gz)?$", "", parts[0].path.name)
    given = {f.name: getattr(columns, f.name) for f in fields(Columns) if f.name not in ("notes", "repeats")}
    log = PositionLog(
        **given,
        draft_len=manifest.get("draft_len", max(int(columns.proposed.max()), 0)),
        run=run,
        label=manifest.get("label", UNLABELLED),
        sha256=sha256_of("".join(hashes).encode()),  # over the hashes of the files, in their order
        request_table=table,
        manifest=manifest,
    )
    return log, faults, columns.repeats


# ---- writing


def log_rows(log: PositionLog, workload: int) -> Iterable[dict]:
    """The records of one workload, in the order of the log; fields that an arm nowhere has are left out."""
    kept = [[n for n, v in log.stats.items() if not np.isnan(v[:, k]).all()] for k in range(log.n_arms)]
    whole = [(n, v.astype(object)) for n, v in (("proposed", log.proposed), ("accepted", log.accepted))]
    for request in np.flatnonzero(log.workload == workload):
        for row in range(log.starts[request], log.starts[request + 1]):
            asked = log.proposed[row] >= 0
            arms = {
                name: {n: v[row, k] if asked[k] else None for n, v in whole}
                | {n: _number(n, log.stats[n][row, k]) for n in kept[k]}
                for k, name in enumerate(log.arms)
            }
            if log.source is not None:
                arms = {
                    n: a if s < 0 else a | {"source": log.arms[s]}
                    for (n, a), s in zip(arms.items(), log.source[row], strict=True)
                }
            yield {
                "workload": log.workloads[workload],
                "request": log.requests[request],
                "position": log.position[row],
                "remaining": log.remaining[row],
                "on_path": log.on_path[row],
                "context": {n: _number(n, v[row]) for n, v in log.context.items()},
                "arms": arms,
            }


def _number(name: str, value: float) -> float | int:
    """Match lengths are whole numbers in a file, everything else is real; nan stays."""
    return int(value) if name == "match_length" and value == value else value


def write_log(folder: str | Path, log: PositionLog, manifest_extra: Mapping | None = None) -> Path:
    """Write a log as a run folder (a gzip file per workload, request table, manifest); equal logs give equal bytes."""
    folder = Path(folder)
    _refuse_existing(folder)
    names = []
    for w in sorted(set(log.workload.tolist())):
        names.append(file_name(log.workloads[w]))
        write_bytes_atomically(folder / names[-1], gzip_bytes(b"".join(map(encode_row, log_rows(log, w)))))
    if log.request_table is not None:
        names.append("requests.jsonl.gz")
        text = log.request_table.to_json(orient="records", lines=True, force_ascii=False)
        write_bytes_atomically(folder / names[-1], gzip_bytes(text.encode()))
    entries = [file_entry(folder / n) for n in names]
    manifest = {**log.manifest, "schema": SCHEMA, **_said(log), **(manifest_extra or {}), "files": entries}
    write_bytes_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, allow_nan=False).encode() + b"\n")
    return folder


def _said(log: PositionLog) -> dict:
    """What a manifest says about all records of a log."""
    return {"label": log.label, "run": log.run, "arms": list(log.arms), "path_arm": log.path_arm} | {
        "draft_len": log.draft_len
    }


def _refuse_existing(path: Path) -> None:
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise LogError(f"{path}: exists already and was left alone; name a new place or remove it first")


def convert(source: str | Path | Iterable[str | Path], target: str | Path) -> Path:
    """Copy a log into another form: a .jsonl or .jsonl.gz file, else a run folder; several sources are merged.

    A plain file begins with a line that holds what its records do not say: run, label, arms, draft length.
    """
    log, target = read_log(source), Path(target)
    if not re.search(r"\.jsonl(\.gz)?$", target.name):
        return write_log(target, log)
    _refuse_existing(target)
    rows = [encode_row(row) for w in range(len(log.workloads)) for row in log_rows(log, w)]
    data = b"".join([header(_said(log)), *rows])
    write_bytes_atomically(target, gzip_bytes(data) if target.suffix == ".gz" else data)
    return target


# ---- summary


def summary(log: PositionLog) -> dict:
    """What ``specsel log summary --json`` prints: counts, and per workload and arm the two means (ratios of sums).

    Means are over the blocks of an arm that always runs; on a block-anchored log the accepted means are over the
    logged blocks and block efficiency is None, because no arm but the logged one could be replayed.
    """
    views = [block_view(log, k if log.complete else None) for k in range(log.n_arms)]
    accepted = [[v.accepted[v.workload_of == w, k] for k, v in enumerate(views)] for w in range(len(log.workloads))]
    emitted = [[v.emitted[v.workload_of == w, k] for k, v in enumerate(views)] for w in range(len(log.workloads))]

    def means(values: list[list[np.ndarray]]) -> dict:
        return {
            w: {a: float(x.sum() / len(x)) if len(x) else None for a, x in zip(log.arms, row, strict=False)}
            for w, row in zip(log.workloads, values, strict=False)
        }

    table = log.request_table
    counts = (
        np.bincount(log.workload, minlength=len(log.workloads))
        if table is None
        else table["workload"].value_counts().reindex(log.workloads, fill_value=0)
    )
    rows = np.bincount(log.workload, weights=np.diff(log.starts), minlength=len(log.workloads))
    efficiency = means(emitted) if log.complete else {w: dict.fromkeys(log.arms) for w in log.workloads}
    return {
        "run": log.run,
        "label": log.label,
        "arms": list(log.arms),
        "draft_len": log.draft_len,
        "requests": {w: int(n) for w, n in zip(log.workloads, counts, strict=False)},
        "positions": {w: int(n) for w, n in zip(log.workloads, rows, strict=False)},
        "mean_accepted": means(accepted),
        "block_efficiency": efficiency,
    }


def drafter_sha256(folder: Path) -> str:
    """Hash of a drafter's folder as a manifest states it: over the hashes of its weight and configuration files, by
    name; what tells of its training does not count."""
    told = ("training.json", "checkpoint.json")
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".json") and p.name not in told]
    return sha256_of("".join(sha256_of(p.read_bytes()) for p in sorted(files)).encode())
