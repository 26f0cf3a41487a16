"""From files to a log: every fault named with file, line and field, nothing dropped in silence.

Lines are validated one by one against the schema and become columns in chunks; what compares fields or records (counts,
repeats, gaps) is checked on the columns of all files. A log without faults is read from the cache the next time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
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
    faults_of,
    repeated_keys,
    shown,
)

CHUNK = 8192  # lines
SETTINGS = ("label", "arms", "path_arm", "draft_len")  # what all parts of one log have in common


class LogWarning(UserWarning):
    """Something in a log that is tolerated and worth knowing: identical repeats, unknown fields."""


# ---- lines


@dataclass
class Lines:
    """What is read of one log: the columns of its good lines, what is said about them, and all faults."""

    said: dict = field(default_factory=dict)  # the manifest of the folder, or the head of the plain file
    said_by: str = ""
    table: list[dict] = field(default_factory=list)  # rows of the table of requests
    arms: tuple[str, ...] = ()
    files: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)  # files about which nothing is said
    keys: dict[tuple[str, str], int] = field(default_factory=dict)  # (workload, request) -> number
    first_file: dict[str, int] = field(default_factory=dict)  # workload -> first file that has it
    given: dict[str, str] = field(default_factory=dict)  # field -> file where first seen
    refused: set[tuple] = field(default_factory=set)  # (workload, request, position) of faulty records: not missing
    faults: list[Fault] = field(default_factory=list)
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)

    def take(self, said: dict, name: str) -> None:
        """Note what a folder or file says about its lines; parts of one log have equal settings."""
        if not self.said:
            self.said, self.said_by, self.arms = said, name, self.arms or tuple(said["arms"])
            return
        for setting in SETTINGS:
            if said[setting] != (there := self.said[setting]):
                hint = "only logs of equal settings can be read as one"
                message = f"is {json.dumps(said[setting])}, but {json.dumps(there)} in {self.said_by}; {hint}"
                self.faults.append(Fault(name, None, setting, message))
        runs = f"{self.said.get('run')} + {said.get('run')}"
        self.said = {setting: self.said[setting] for setting in SETTINGS} | {"run": runs}

    def read(self, text: str, name: str, *, named: bool = False) -> None:
        """Add the lines of a file; ``named``: its name says which workload alone it holds."""
        self.files.append(name)
        lines = text.split("\n")
        if not text.strip():
            self.faults.append(Fault(name, None, None, "is empty: it holds no record; collect it again"))
        if '"manifest"' in lines[0][:200]:
            self.head(lines[0], name)
            lines[0] = ""
        elif not named:
            self.bare.append(name)
        for start in range(0, len(lines), CHUNK):
            records = {}
            for at, line in enumerate(lines[start : start + CHUNK], start + 1):
                if line and not line.isspace():
                    records[at], found = self.record(line)
                    if found:
                        del records[at]
                        self.refuse(line)
                        if at == len(lines) and found[0][0] is None:  # no line end after it
                            hint = "and the file ends inside it: it is cut short; resume the collection"
                            found = [(None, f"{found[0][1]}, {hint}")]
                        self.faults += [Fault(name, at, field, message) for field, message in found]
            if records:
                self.add(records, name, named)

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

    def record(self, line: str) -> tuple[dict, list[tuple[str | None, str]]]:
        """The record of a line and what is wrong with it; the first good one settles the arms."""
        try:
            record = RECORD.validate_json(line)
        except ValidationError as error:
            return {}, faults_of(error)
        drafts = record["arms"]
        arms = self.arms = self.arms or tuple(drafts)
        known, expected = (None, *arms), ", ".join(arms)
        missing = 'is missing; an arm that was not asked has "proposed":null'
        found = [(f"arms.{n}", f"is an unknown arm, expected {expected}") for n in drafts if n not in arms]
        found += [(f"arms.{n}", missing) for n in arms if n not in drafts]
        for name, source in ((n, s) for n, draft in drafts.items() if (s := draft.get("source")) not in known):
            found.append((f"arms.{name}.source", f"is {shown(source)}, expected one of the arms {expected}"))
        n_keys = len(record) + len(record.get("context") or ()) + len(drafts) + sum(map(len, drafts.values()))
        if line.count('":') != n_keys or '" ' in line or '"\t' in line:  # counting is fast: looked at only if it may be
            found += [(key, "stands there twice; keep one") for key in repeated_keys(line)]
        return record, found

    def refuse(self, line: str) -> None:
        """Note which position a faulty line is about, if it tells: it is not missing."""
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            raw = json.loads(line)
            self.refused.add(tuple(str(raw.get(key)) for key in ("workload", "request", "position")))

    def add(self, records: dict[int, dict], name: str, named: bool) -> None:
        """Keep the columns of some good records, by number of their line, and where their fields were first seen."""
        rows, number = list(records.values()), len(self.files) - 1
        code = {None: -1} | {arm: k for k, arm in enumerate(self.arms)}
        contexts = [row.get("context") or {} for row in rows]
        drafts = [[row["arms"][arm] for row in rows] for arm in self.arms]
        for above, objects in (("", rows), ("context.", contexts), ("arms.*.", itertools.chain(*drafts))):
            for key in set().union(*objects):
                self.given.setdefault(above + key, name)
        for workload, at in {row["workload"]: at for at, row in records.items()}.items():
            if named and Path(name).name.removesuffix(".gz") not in (f"blocks_{workload}.jsonl", log_name(workload)):
                message = f"is {workload!r} in the file of workload {unquote(Path(name).name.split('.jsonl')[0][7:])!r}"
                self.faults.append(Fault(name, at, "workload", message))
            self.first_file.setdefault(workload, number)
        self.parts.append(
            {f: np.array([row[f] for row in rows], dtype=int) for f in ("position", "remaining")}
            | {"on_path": np.array([row["on_path"] for row in rows])}
            | {f"context.{f}": np.array([c.get(f) for c in contexts], dtype=float) for f in CONTEXT}
            | {f: np.array([[d.get(f, ABSENT) for d in arm] for arm in drafts], dtype=float).T for f in DRAFT_NUMBERS}
            | {"source": np.array([[code[d.get("source")] for d in arm] for arm in drafts], dtype=np.int8).T}
            | {"id": np.array([self.keys.setdefault((r["workload"], r["request"]), len(self.keys)) for r in rows])}
            | {"line": np.array(list(records)), "file": np.full(len(rows), number)}
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
    if lines.parts:
        Rows(lines).check_drafts()
    return lines.faults


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
        return list(error.args)
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
    lines = Lines()
    files: list[tuple[Path, int | None]] = []  # with the number of lines that the manifest says
    for source in [Path(p) for p in ([path] if isinstance(path, (str, Path)) else path)]:
        files += _read_folder(source, lines, verify) if source.is_dir() else [(source, None)]
    if not files:
        none = Fault(str(path), None, None, "holds no log files (blocks_<workload>.jsonl.gz)")
        return None, lines.faults or [none], []
    digests = [sha256_of(file) if file.is_file() else "" for file, _ in files]
    key = [digests, [str(file) for file, _ in files], lines.said, lines.table, verify]
    kept = None if lines.faults else cache.load(key)
    if kept is None:
        _read_lines(files, lines, verify)
        if not lines.parts:
            return None, lines.faults, []
        rows = Rows(lines)
        arrays, facts = rows.columns()
        facts |= {"notes": lines.unknown(), "repeats": list(map(astuple, rows.repeats))}
        facts |= {"manifest": lines.said, "table": lines.table}
        if not lines.faults and sum(file.stat().st_size for file, _ in files) >= cache.WORTH:
            cache.save(key, arrays, facts)
    else:
        arrays, facts = kept
    for note in facts["notes"]:
        warnings.warn(note, LogWarning, stacklevel=4)
    log = _position_log(arrays, facts, files[0][0].name, sha256_of("".join(digests).encode()))
    return log, lines.faults, [Fault(*repeat) for repeat in facts["repeats"]]


def _read_folder(folder: Path, lines: Lines, verify: bool) -> list[tuple[Path, int | None]]:
    """Notes what a run folder says; its log files, with the number of lines that the manifest says."""
    path = folder / "manifest.json"
    if not path.exists():
        hint = "finish it with `specsel collect` or name the .jsonl.gz files themselves"
        raise LogError(Fault(str(path), None, None, f"is missing, so this is no finished run; {hint}"))
    text = read_text(path)
    try:
        MANIFEST.validate_json(text)
    except ValidationError as error:
        field, message = faults_of(error)[0]
        told = Fault(str(path), None, field, f"{message}; restore it or collect the run again")
        raise LogError(told) from None
    manifest = json.loads(text)  # as it is written: validation turns whole numbers into reals
    listed = {folder / entry["name"]: entry for entry in manifest["files"]}
    hint = "is not listed in manifest.json; remove it or collect the run again"
    faults = [Fault(str(f), None, None, hint) for f in sorted(folder.glob("blocks_*.jsonl*")) if f not in listed]
    faults += [fault for file, entry in listed.items() for fault in _file_faults(file, entry, verify)]
    lines.take(manifest, str(folder))
    lines.faults += faults
    if not faults and (table := folder / "requests.jsonl.gz").exists():
        lines.table += _read_table(table)
    return [(f, entry["lines"]) for f, entry in listed.items() if f.name.startswith("blocks_") and f.is_file()]


def _file_faults(path: Path, entry: dict, verify: bool) -> list[Fault]:
    """What is wrong with a file that the manifest lists; the lines of a log are counted when they are read."""
    if not path.is_file():
        message = "is missing, but manifest.json lists it; restore it or collect the run again"
        return [Fault(str(path), None, None, message)]
    if verify and (found := sha256_of(path)) != entry["sha256"]:
        said = f"is {found[:12]}..., but manifest.json says {entry['sha256'][:12]}..."
        hint = "the file was changed after collection; restore it or collect the run again"
        return [Fault(str(path), None, "sha256", f"{said}: {hint}")]
    return [] if path.name.startswith("blocks_") else _count_faults(path, read_text(path), entry["lines"] * verify)


def _count_faults(path: Path, text: str, expected: int | None) -> list[Fault]:
    """A file must have as many lines as the manifest says."""
    if not expected or expected == (found := line_count(text)):
        return []
    message = f"is {expected} in manifest.json, but the file has {found}; collect the run again"
    return [Fault(str(path), None, "lines", message)]


def _read_table(path: Path) -> list[dict]:
    """The rows of the request table of a run folder."""
    try:
        rows = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
        if len({(row["workload"], row["request"]) for row in rows}) < len(rows):
            raise ValueError("a request is there twice")
    except (ValueError, KeyError, TypeError) as error:
        told = Fault(str(path), None, None, f"is not a table of requests ({error}); collect it again")
        raise LogError(told) from None
    return rows


def _read_lines(files: list[tuple[Path, int | None]], lines: Lines, verify: bool) -> None:
    """Read the lines of all files; there must be as many as the manifest says."""
    for path, expected in files:
        try:
            text = read_text(path)
        except LogError as error:
            lines.faults += error.args
            continue
        if verify:
            lines.faults += _count_faults(path, text, expected)
        lines.read(text, str(path), named=expected is not None)
    for name in lines.bare if lines.said else ():
        message = f"is not stated, but it is {lines.said['label']} in {lines.said_by}; read the two apart"
        lines.faults.append(Fault(name, None, "label", message))


def _position_log(arrays: dict, facts: dict, file: str, digest: str) -> PositionLog:
    """Columns with what is said about them; ``sha256`` is over the hashes of the files, in their order."""
    said, columns = facts["manifest"], {"context": {}, "stats": {}}
    for name, values in arrays.items():
        part, _, inner = name.partition(".")
        (columns[part] if inner else columns)[inner or part] = values
    if (columns["source"] < 0).all():
        columns["source"] = None
    return PositionLog(
        **columns,
        **{name: tuple(facts[name]) for name in ("arms", "workloads", "requests")},
        **{name: facts[name] for name in ("complete", "path_arm", "manifest")},
        draft_len=said.get("draft_len") or max(int(arrays["proposed"].max()), 0),
        run=said.get("run") or re.sub(r"\.jsonl(\.gz)?$", "", file),
        label=said.get("label", "UNLABELLED"),
        sha256=digest,
        request_table=pd.DataFrame(facts["table"]) if facts["table"] else None,
    )
