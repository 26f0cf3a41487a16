"""From a log to files: run folders and plain files, byte for byte the same for equal logs, nothing lost on the way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from specsel.logs.files import LogError, file_entry, gzip_bytes, refuse_existing, write_bytes_atomically
from specsel.logs.log import PositionLog
from specsel.logs.read import line_faults, log_name, read_log
from specsel.logs.schema import CONTEXT, DRAFT_FIELDS, SCHEMA


def encode_rows(records: Iterable[Mapping]) -> bytes:
    """Lines of a log, ready to append: strict JSON, keys in schema order, missing values null, byte-deterministic.

    Parameters: each record has the schema's keys except ``schema``; ``arms`` and ``context`` map names to values,
    where nan means missing. Raises LogError instead of writing a record that the reader would refuse.

    >>> encode_rows([{"workload": "w", "request": "w/0", "position": 0, "remaining": 3, "on_path": True,
    ...             "arms": {"a": {"proposed": 9, "accepted": 2, "conf_mean": 1 / 3, "conf_min": float("nan")}}}])
    b'{"schema":1,"workload":"w","request":"w/0","position":0,"remaining":3,"on_path":true,"arms":{"a":{"proposed":9,"accepted":2,"conf_mean":0.333333,"conf_min":null}}}\\n'
    """
    rows = [_row(record) for record in records]
    text = "\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)
    for fault in line_faults(text) if rows else ():
        row = rows[(fault.line or 1) - 1]
        place = f"{row['request']}, position {row['position']}"
        raise LogError(f"{place}: field '{fault.field}' {fault.message}; nothing was written")
    return text.encode() + b"\n" * bool(rows)


def _row(record: Mapping) -> dict:
    row = {"schema": SCHEMA}
    row |= _plain(record, ("workload", "request", "position", "remaining", "on_path"))
    if record.get("context"):
        row["context"] = _plain(record["context"], CONTEXT)
    return row | {"arms": {name: _plain(draft, DRAFT_FIELDS) for name, draft in record["arms"].items()}}


def _plain(values: Mapping, names: Iterable[str]) -> dict:
    """Those of the named values that are there, for JSON: numpy scalars converted, nan to None, floats to six
    significant digits, match lengths to whole numbers."""
    plain = {name: values[name] for name in names if name in values}
    for name, value in plain.items():
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, float):
            whole = name == "match_length" and value.is_integer()
            value = None if math.isnan(value) else int(value) if whole else float(f"{value:.6g}")
        plain[name] = value
    return plain


def log_rows(log: PositionLog, workload: int) -> Iterator[dict]:
    """The records of one workload, in the order of the log; fields that an arm nowhere has are left out."""
    kept = [[n for n, v in log.stats.items() if not np.isnan(v[:, k]).all()] for k in range(log.n_arms)]
    request_of = log.request_of
    for row in np.flatnonzero(log.workload[request_of] == workload):
        arms = {}
        for k, name in enumerate(log.arms):
            asked = log.proposed[row, k] >= 0
            arms[name] = {n: getattr(log, n)[row, k] if asked else None for n in ("proposed", "accepted")}
            arms[name] |= {n: log.stats[n][row, k] for n in kept[k]}
            if log.source is not None and (used := log.source[row, k]) >= 0:
                arms[name]["source"] = log.arms[used]
        yield {
            "workload": log.workloads[workload],
            "request": log.requests[request_of[row]],
            **{n: getattr(log, n)[row] for n in ("position", "remaining", "on_path")},
            "context": {n: v[row] for n, v in log.context.items()},
            "arms": arms,
        }


def _manifest(log: PositionLog, extra: Mapping | None = None) -> dict:
    """What a log says of itself, the list of files aside."""
    said = {n: v for n, v in log.manifest.items() if n != "files"}
    named = {"schema": SCHEMA, "label": log.label, "run": log.run, "arms": list(log.arms)}
    return said | named | {"path_arm": log.path_arm, "draft_len": log.draft_len} | dict(extra or {})


def write_log(folder: str | Path, log: PositionLog, manifest_extra: Mapping | None = None) -> Path:
    """Write a log as a run folder (a gzip file per workload, request table, manifest); equal logs give equal bytes."""
    folder = Path(folder)
    refuse_existing(folder)
    names = []
    for w in sorted(set(log.workload.tolist())):
        names.append(f"{log_name(log.workloads[w])}.gz")
        write_bytes_atomically(folder / names[-1], gzip_bytes(encode_rows(log_rows(log, w))))
    if log.request_table is not None:
        names.append("requests.jsonl.gz")
        table = log.request_table.to_json(orient="records", lines=True, force_ascii=False)
        write_bytes_atomically(folder / names[-1], gzip_bytes(table.encode()))
    manifest = _manifest(log, manifest_extra) | {"files": [file_entry(folder / n) for n in names]}
    write_bytes_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, allow_nan=False).encode() + b"\n")
    return folder


def convert(source: str | Path | Iterable[str | Path], target: str | Path) -> Path:
    """Copy a log into another form: a .jsonl or .jsonl.gz file, else a run folder; several sources are merged.

    A plain file begins with one line that holds what a folder says in its manifest and table of requests.
    """
    log, target = read_log(source), Path(target)
    if not re.search(r"\.jsonl(\.gz)?$", target.name):
        return write_log(target, log)
    refuse_existing(target)
    rows = None if log.request_table is None else json.loads(log.request_table.to_json(orient="records"))
    head = json.dumps({"manifest": _manifest(log), "requests": rows}, separators=(",", ":"), allow_nan=False)
    data = head.encode() + b"\n" + b"".join(encode_rows(log_rows(log, w)) for w in range(len(log.workloads)))
    write_bytes_atomically(target, gzip_bytes(data) if target.suffix == ".gz" else data)
    return target
