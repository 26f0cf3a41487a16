"""From files to a log: every fault named with file, line and field, nothing dropped in silence.

Lines are validated one by one against the schema and become columns in chunks; what compares fields or records (counts,
repeats, gaps) is checked on the columns of all files. A log without faults is read from the cache the next time.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
from pydantic import ValidationError

from specsel.logs import cache
from specsel.logs.checks import ABSENT, DRAFT_NUMBERS, Rows
from specsel.logs.files import Fault, LogError, line_count, read_text, sha256_of
from specsel.logs.log import PositionLog
from specsel.logs.schema import (
    CONTEXT,
    DRAFT_FIELDS,
    HEAD,
    MANIFEST,
    RECORD,
    RECORD_FIELDS,
    SCHEMA,
    faults_of,
    repeated_keys,
    shown,
)

CHUNK = 8192  # lines
SETTINGS = ("label", "arms", "path_arm", "draft_len")  # what all parts of one log have in common


class LogWarning(UserWarning):
    """Something in a log that is tolerated and worth knowing: identical repeats, unknown fields."""


# ---- lines


class Lines:
    """State of reading the lines of one log: what is said about it, request numbers, columns, faults."""

    def __init__(self):
        self.said: dict = {}  # the manifest of the folder, or the head of the plain file
        self.said_by = ""
        self.bare: list[str] = []  # files about which nothing is said
        self.table: list[dict] = []  # rows of the table of requests
        self.arms: tuple[str, ...] = ()
        self.keys: dict[tuple[str, str], int] = {}  # (workload, request) -> number
        self.first_file: dict[str, int] = {}  # workload -> first file that has it
        self.given: dict[str, str] = {}  # field -> file where first seen
        self.refused: set[tuple] = set()  # (workload, request, position) of faulty records: there, but not usable
        self.faults: list[Fault] = []
        self.parts: list[dict[str, np.ndarray]] = []

    def take(self, said: dict, name: str) -> None:
        """Note what a folder or file says about its lines; parts of one log have equal settings."""
        if not self.said:
            self.said, self.said_by, self.arms = said, name, self.arms or tuple(said["arms"])
            return
        for field in SETTINGS:
            if said[field] != (there := self.said[field]):
                hint = "only logs of equal settings can be read as one"
                message = f"is {json.dumps(said[field])}, but {json.dumps(there)} in {self.said_by}; {hint}"
                self.faults.append(Fault(name, None, field, message))
        runs = f"{self.said.get('run')} + {said.get('run')}"
        self.said = {field: self.said[field] for field in SETTINGS} | {"run": runs}

    def read(self, text: str, name: str, *, number: int = 0, named: bool = False) -> None:
        """Add the lines of a file; ``named``: its name says which workload alone it holds."""
        lines = text.split("\n")
        if not text.strip():
            self.faults.append(Fault(name, None, None, "is empty: it holds no record; collect it again"))
        if '"manifest"' in lines[0][:200]:
            self.head(lines[0], name)
            lines[0] = ""
        elif not named:
            self.bare.append(name)
        for start in range(0, len(lines), CHUNK):
            numbers, records = [], []
            for at, line in enumerate(lines[start : start + CHUNK], start + 1):
                if line and not line.isspace():
                    record, found = self.record(line)
                    if found and at == len(lines) and found[0][0] is None:  # no line end after it
                        hint = "and the file ends inside it: it is cut short; resume the collection"
                        found = [(None, f"{found[0][1]}, {hint}")]
                    self.faults += [Fault(name, at, field, message) for field, message in found]
                    if not found:
                        numbers.append(at)
                        records.append(record)
            if records:
                self.add(numbers, records, number, name, named)

    def head(self, line: str, name: str) -> None:
        """Take what the first line of a plain file says about the log."""
        try:
            HEAD.validate_json(line.strip())
        except ValidationError as error:
            self.faults += [Fault(name, 1, field, message) for field, message in faults_of(error)]
            return
        head = json.loads(line)  # as it is written: validation turns whole numbers into reals
        self.take(head["manifest"], name)
        self.table += head.get("requests") or []

    def record(self, line: str) -> tuple[dict | None, list[tuple[str | None, str]]]:
        """The record of a line and what is wrong with it; the first good one settles the arms."""
        try:
            record = RECORD.validate_json(line)
        except ValidationError as error:
            self.refuse(line)
            return None, faults_of(error)
        drafts = record["arms"]
        self.arms = self.arms or tuple(drafts)
        found = []
        if drafts.keys() != set(self.arms):
            unknown = f"is an unknown arm, expected {', '.join(self.arms)}"
            missing = 'is missing; an arm that was not asked has "proposed":null'
            found = [(f"arms.{n}", unknown) for n in drafts if n not in self.arms]
            found += [(f"arms.{n}", missing) for n in self.arms if n not in drafts]
        n_keys = len(record) + len(record.get("context") or ()) + len(drafts) + sum(map(len, drafts.values()))
        if line.count('":') != n_keys or '" ' in line or '"\t' in line:  # counting is fast: looked at only if it may be
            found += [(key, "stands there twice; keep one") for key in repeated_keys(line)]
        if found:
            self.refuse(line)
        return record, found

    def refuse(self, line: str) -> None:
        """Note which position a faulty line is about, if it tells: it is not missing."""
        try:
            raw = json.loads(line)
            self.refused.add(tuple(str(raw.get(f)) for f in ("workload", "request", "position")))
        except (ValueError, AttributeError, RecursionError):
            pass

    def add(self, numbers: list[int], records: list[dict], number: int, name: str, named: bool) -> None:
        """Keep the columns of some good records, with where they came from and which fields they have."""
        drafts = [[r["arms"][arm] for r in records] for arm in self.arms]
        contexts = [r.get("context") or {} for r in records]
        for field in set().union(*records):
            self.given.setdefault(field, name)
        for field in set().union(*contexts):
            self.given.setdefault(f"context.{field}", name)
        for field in set().union(*map(frozenset, {tuple(d) for arm in drafts for d in arm})):
            self.given.setdefault(f"arms.*.{field}", name)
        keys = [(r["workload"], r["request"]) for r in records]
        for at, workload in {r["workload"]: at for at, r in zip(numbers, records, strict=True)}.items():
            self.first_file.setdefault(at, number)
            if named and Path(name).name.removesuffix(".gz") not in (f"blocks_{at}.jsonl", log_name(at)):
                message = f"is {at!r} in the file of workload {unquote(Path(name).name.split('.jsonl')[0][7:])!r}"
                self.faults.append(Fault(name, workload, "workload", message))
        code = {None: -1} | {arm: k for k, arm in enumerate(self.arms)}
        source = np.array([[code.get(d.get("source"), -2) for d in arm] for arm in drafts], dtype=np.int8).T
        for row, k in np.argwhere(source == -2):
            message = f"is {shown(drafts[k][row]['source'])}, expected one of the arms {', '.join(self.arms)}"
            self.faults.append(Fault(name, numbers[row], f"arms.{self.arms[k]}.source", message))
        self.parts.append(
            {f: np.array([r[f] for r in records], dtype=int) for f in ("position", "remaining")}
            | {"on_path": np.array([r["on_path"] for r in records])}
            | {f"context.{f}": np.array([c.get(f) for c in contexts], dtype=float) for f in CONTEXT}
            | {f: np.array([[d.get(f, ABSENT) for d in arm] for arm in drafts], dtype=float).T for f in DRAFT_NUMBERS}
            | {"source": source}
            | {"id": np.array([self.keys.setdefault(key, len(self.keys)) for key in keys])}
            | {"line": np.array(numbers), "file": np.full(len(numbers), number)}
        )

    def unknown(self) -> list[str]:
        """A sentence about every field that the schema does not have."""
        known = {*RECORD_FIELDS, *(f"context.{f}" for f in CONTEXT), *(f"arms.*.{f}" for f in DRAFT_FIELDS)}
        found = sorted((field, name) for field, name in self.given.items() if field not in known)
        return [f"{name}: unknown field '{field}' is ignored" for field, name in found]


def log_name(workload: str) -> str:
    """File name of a workload in a run folder, before ``.gz``: any name is safe, a plain one stays readable.

    >>> log_name("mt_bench:writing"), log_name("x/../../y")
    ('blocks_mt_bench%3Awriting.jsonl', 'blocks_x%2F..%2F..%2Fy.jsonl')
    """
    safe = quote(workload, safe="")
    return f"blocks_{safe if len(safe) <= 150 else safe[:100] + sha256_of(workload.encode())[:32]}.jsonl"


def line_faults(text: str) -> list[Fault]:
    """What is wrong with single lines of a log; which lines are missing or repeated is not asked."""
    lines = Lines()
    lines.read(text, "log")
    return lines.faults + (Rows(lines, ["log"]).check_lines() if lines.parts else [])


# ---- files and folders


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
        told = f"{len(repeats)} identical repeats of a line were read once, the first: {repeats[0]}"
        warnings.warn(told, LogWarning, stacklevel=2)
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


def grouped(faults: list[Fault]) -> Iterator[str]:
    """Faults as sentences, one for all lines of a file with the same message."""
    groups: dict[tuple, list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.file, fault.field, fault.message), []).append(fault)
    for same in groups.values():
        n = len(same) - 1
        yield f"{same[0]}" + (f" (and so {n:,} more line{'s' * (n > 1)}, to line {same[-1].line:,})" if n else "")


def _read(path, verify: bool) -> tuple[PositionLog | None, list[Fault], list[Fault]]:
    """The log (None when nothing usable is there), all faults, and the identical repeats."""
    sources = [Path(p) for p in ([path] if isinstance(path, (str, Path)) else path)]
    faults: list[Fault] = []
    said: list[tuple[dict, str]] = []  # what folders say
    table: list[dict] = []
    files: list[tuple[Path, int | None]] = []  # with the number of lines that the manifest says
    for source in sources:
        if not source.is_dir():
            files.append((source, None))
            continue
        manifest, found = _read_manifest(source, verify)
        faults += found
        said.append((manifest, str(source)))
        entries = [e for e in manifest["files"] if e["name"].startswith("blocks_")]
        files += [(source / e["name"], e["lines"]) for e in entries if (source / e["name"]).is_file()]
        if not found and (source / "requests.jsonl.gz").exists():
            table += _read_table(source / "requests.jsonl.gz")
    if not files:
        return None, faults or [Fault(str(path), None, None, "holds no log files (blocks_<workload>.jsonl.gz)")], []
    digests = [sha256_of(f) if f.is_file() else "" for f, _ in files]
    key = [digests, [str(f) for f, _ in files], said, table, verify]
    kept = None if faults else cache.load(key)
    if kept is None:
        lines = _read_lines(files, said, verify)
        if not lines.parts:
            return None, faults + lines.faults, []
        rows = Rows(lines, [str(f) for f, _ in files])
        arrays, found = rows.columns()
        faults += lines.faults + found
        facts = {"notes": lines.unknown(), "repeats": [[f.file, f.line, f.field, f.message] for f in rows.repeats]}
        facts |= {"said": lines.said, "table": table + lines.table} | rows.facts()
        if not faults and sum(f.stat().st_size for f, _ in files) >= cache.WORTH:
            cache.save(key, arrays, facts)
    else:
        arrays, facts = kept
    for note in facts["notes"]:
        warnings.warn(note, LogWarning, stacklevel=4)
    log = _position_log(arrays, facts, files[0][0].name, sha256_of("".join(digests).encode()))
    return log, faults, [Fault(*repeat) for repeat in facts["repeats"]]


def _read_lines(files: list[tuple[Path, int | None]], said: list[tuple[dict, str]], verify: bool) -> Lines:
    """The lines of all files; there must be as many as the manifest says."""
    lines = Lines()
    for manifest, name in said:
        lines.take(manifest, name)
    for number, (path, expected) in enumerate(files):
        try:
            text = read_text(path)
        except LogError as error:
            lines.faults.append(Fault(str(path), None, None, str(error).removeprefix(f"{path}: ")))
            continue
        if verify and expected not in (None, found := line_count(text)):
            message = f"is {expected} in manifest.json, but the file has {found}; collect the run again"
            lines.faults.append(Fault(str(path), None, "lines", message))
        lines.read(text, str(path), number=number, named=expected is not None)
    if lines.said:
        message = f"is not stated, but it is {lines.said['label']} in {lines.said_by}; read the two apart"
        lines.faults += [Fault(name, None, "label", message) for name in lines.bare]
    return lines


def _position_log(arrays: dict, facts: dict, file: str, digest: str) -> PositionLog:
    """Columns with what is said about them; ``sha256`` is over the hashes of the files, in their order."""
    said = facts["said"]
    columns: dict = {"source": None, "context": {}, "stats": {}}
    for name, values in arrays.items():
        part, _, inner = name.partition(".")
        (columns[part] if inner else columns)[inner or part] = values
    return PositionLog(
        arms=tuple(facts["arms"]),
        draft_len=said.get("draft_len") or max(int(arrays["proposed"].max()), 0),
        workloads=tuple(facts["workloads"]),
        requests=tuple(facts["requests"]),
        **columns,
        complete=facts["complete"],
        run=said.get("run") or re.sub(r"\.jsonl(\.gz)?$", "", file),
        label=said.get("label", "UNLABELLED"),
        path_arm=facts["path_arm"],
        sha256=digest,
        request_table=pd.DataFrame(facts["table"]) if facts["table"] else None,
        manifest=said,
    )


def _read_table(path: Path) -> list[dict]:
    """The rows of the request table of a run folder."""
    try:
        rows = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
        if len({(row["workload"], row["request"]) for row in rows}) < len(rows):
            raise ValueError("a request is there twice")
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{path}: is not a table of requests ({error}); collect it again") from None
    return rows


def _read_manifest(folder: Path, verify: bool) -> tuple[dict, list[Fault]]:
    """The manifest of a run folder and its faults: unreadable, another schema, files missing, changed or not listed."""
    path = folder / "manifest.json"
    if not path.exists():
        hint = "finish it with `specsel collect` or name the .jsonl.gz files themselves"
        raise LogError(f"{path}: is missing, so this is no finished run; {hint}")
    try:
        manifest = MANIFEST.validate_json(read_text(path))
        found = [("files", f"is missing; schema {SCHEMA} has it")] if "files" not in manifest else []
        if manifest["path_arm"] not in (None, *manifest["arms"]):
            found += [("path_arm", f"is {shown(manifest['path_arm'])}, expected one of the arms")]
    except ValidationError as error:
        found = faults_of(error)
    if found:
        field, message = found[0]
        raise LogError(str(Fault(str(path), None, field, f"{message}; restore it or collect the run again")))
    manifest = json.loads(read_text(path))  # as it is written: validation turns whole numbers into reals
    listed = {entry["name"] for entry in manifest["files"]}
    extra = [f for f in sorted(folder.glob("blocks_*.jsonl*")) if f.name not in listed]
    hint = "is not listed in manifest.json; remove it or collect the run again"
    faults = [Fault(str(f), None, None, hint) for f in extra]
    return manifest, faults + [f for entry in manifest["files"] if (f := _file_fault(folder, entry, verify))]


def _file_fault(folder: Path, entry: dict, verify: bool) -> Fault | None:
    """What is wrong with a file that the manifest lists, if anything."""
    path = folder / entry["name"]
    if not path.is_file():
        message = "is missing, but manifest.json lists it; restore it or collect the run again"
        return Fault(str(path), None, None, message)
    if not verify:
        return None
    if (found := sha256_of(path)) == entry["sha256"]:
        n = entry["lines"] if path.name.startswith("blocks_") else line_count(read_text(path))  # logs: as they are read
        message = f"is {entry['lines']} in manifest.json, but the file has {n}; collect the run again"
        return None if n == entry["lines"] else Fault(str(path), None, "lines", message)
    said = f"is {found[:12]}..., but manifest.json says {entry['sha256'][:12]}..."
    hint = "the file was changed after collection; restore it or collect the run again"
    return Fault(str(path), None, "sha256", f"{said}: {hint}")
