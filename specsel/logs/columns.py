"""From the lines of log files to checked columns: every fault named, nothing dropped in silence.

Lines become columns in chunks. A chunk whose columns have the expected types and ranges is taken as it is; in any
other chunk every record is judged by itself (``records.record_faults``), so that the common case is fast and the
messages have one source. What needs several records (repeats, gaps) is checked on the columns at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specsel.logs.manifest import file_name, is_header, workload_of
from specsel.logs.records import (
    ARM_FIELDS,
    CONTEXT,
    LARGEST,
    RECORD_FIELDS,
    REQUIRED,
    SCHEMA,
    SLACK,
    STATS,
    Fault,
    LogError,
    highest_of,
    parse_line,
    read_text,
    record_faults,
)

CHUNK = 4096  # lines
ARM_STATS = (*STATS, "match_length")
TOLERATED = {*RECORD_FIELDS, "schema_version"}


@dataclass(slots=True)
class Columns:
    """The rows of some files in canonical order (see ``PositionLog`` for shapes), with where each row came from."""

    arms: tuple[str, ...]
    workloads: tuple[str, ...]
    requests: tuple[str, ...]
    workload: np.ndarray
    starts: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    on_path: np.ndarray
    position: np.ndarray
    remaining: np.ndarray
    context: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    source: np.ndarray | None
    complete: bool
    path_arm: str | None
    notes: list[str]  # what is tolerated
    repeats: list[Fault]  # identical lines, read once


class _Reader:
    """State of reading one log: arms (from the manifest or the first good line), request numbers, faults, notes."""

    def __init__(self, arms: tuple[str, ...] | None, draft_len: int | None):
        self.arms, self.draft_len = arms, draft_len
        self.keys: dict[tuple[str, str], int] = {}  # (workload, request) -> number
        self.first_file: dict[str, int] = {}  # workload -> first file that has it
        self.faults: list[Fault] = []
        self.unknown: dict[str, str] = {}  # field -> where first seen
        self.refused: set[tuple] = set()  # (workload, request, position) of faulty records: there, but not usable
        self.parts: list[dict[str, np.ndarray]] = []

    def read(self, number: int, path: Path, named: str | None) -> None:
        """Add the lines of one file; ``named``: its name, where that says which workload is in it."""
        name = str(path)
        try:
            text = read_text(path)
        except LogError as error:
            self.faults.append(Fault(name, None, None, str(error).removeprefix(f"{name}: ")))
            return
        for lines, records in _chunks(text, name, self.faults):
            columns = self.columns(records)
            if columns is None:
                lines, records = self.judge(name, lines, records)
                columns = self.columns(records) if records else None
            if columns is not None:
                self.add(columns, records, lines, number, named, name)
            elif records:  # never in silence, should the two ways to judge a record ever differ
                self.faults.append(Fault(name, lines[0], None, "starts lines that cannot be read as records"))

    def judge(self, name: str, lines: list[int], records: list) -> tuple[list[int], list[dict]]:
        """The records without fault; the faults of the others are noted. The first good record settles the arms."""
        good = []
        for line, record in zip(lines, records, strict=False):
            found = record_faults(record, self.arms, self.draft_len)
            self.faults += [Fault(name, line, f, m) for f, m in found]
            if not found:
                good.append((line, record))
                self.arms = self.arms or tuple(record["arms"])
            elif isinstance(record, dict):
                self.refused.add(tuple(str(record.get(f)) for f in REQUIRED[:3]))
        return [line for line, _ in good], [record for _, record in good]

    def columns(self, records: list) -> dict[str, np.ndarray] | None:
        """Columns of some records, or None when any of them may be faulty."""
        try:
            self.arms = self.arms or tuple(records[0]["arms"])
            return _columns(records, self.arms, self.draft_len)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            return None

    def add(
        self, columns: dict, records: list[dict], lines: list[int], number: int, named: str | None, name: str
    ) -> None:
        """Keep one chunk: number its requests, remember where its rows came from, note unknown fields."""
        for field in {f for keys in set(map(tuple, records)) for f in keys} - TOLERATED:
            self.unknown.setdefault(field, name)
        given = {f for r in records for f in r.get("context") or ()}
        for field in given - set(CONTEXT):
            self.unknown.setdefault(f"context.{field}", name)
        drafts = {keys for r in records for keys in map(tuple, r["arms"].values())}
        for field in {f for keys in drafts for f in keys} - set(ARM_FIELDS):
            self.unknown.setdefault(f"arms.*.{field}", name)
        ids = [self.keys.setdefault((r["workload"], r["request"]), len(self.keys)) for r in records]
        for found in {r["workload"] for r in records}:
            self.first_file.setdefault(found, number)
        mine = {named, f"{named}.gz"}  # a file may be packed or plain, and its name escaped or not
        there = {r["workload"] for r in records} if named else ()
        wrong = {w for w in there if not mine & {file_name(w), f"blocks_{w}.jsonl.gz"}}
        if wrong:
            self.faults += [
                Fault(name, n, "workload", f"is {r['workload']!r} in the file of workload {workload_of(named)!r}")
                for n, r in zip(lines, records, strict=True)
                if r["workload"] in wrong
            ]
        n = len(records)
        self.parts.append(columns | {"id": np.array(ids), "line": np.array(lines), "file": np.full(n, number)})


def _chunks(text: str, name: str, faults: list[Fault]) -> Iterator[tuple[list[int], list]]:
    """Line numbers and JSON values of the lines of a file, chunk by chunk; blank lines are skipped."""
    lines = text.split("\n")
    if not text.strip():
        faults.append(Fault(name, None, None, "is empty: it holds no record; collect it again"))
    for start in range(0, len(lines), CHUNK):
        numbers, records = [], []
        for number, line in enumerate(lines[start : start + CHUNK], start + 1):
            if not line or line.isspace():
                continue
            try:
                record = parse_line(line)
                if number > 1 or not is_header(record):
                    records.append(record)
                    numbers.append(number)
            except ValueError as error:
                torn = number == len(lines)  # no line end after it
                faults.append(
                    Fault(
                        name,
                        number,
                        None,
                        f"is cut short: the file ends inside this record ({error}); resume the collection"
                        if torn
                        else str(error),
                    )
                )
        if records:
            yield numbers, records


def _columns(records: list[dict], arms: tuple[str, ...], draft_len: int | None) -> dict[str, np.ndarray] | None:
    """Columns of records that are all as expected, else None."""
    fields = {f: [r[f] for r in records] for f in REQUIRED}
    versions = [r[f] for r in records for f in ("schema", "schema_version") if f in r]
    if (
        not _only(fields["workload"], str)
        or not _only(fields["request"], str)
        or not _only(fields["on_path"], bool)
        or not all(fields["workload"] + fields["request"])
        or not "".join(fields["workload"] + fields["request"]).isprintable()
        or not set(map(type, versions)) <= {int, float}
        or set(versions) - {SCHEMA}
        or set(map(len, fields["arms"])) != {len(arms)}
    ):
        return None
    drafts = [[entry[name] for entry in fields["arms"]] for name in arms]
    found = {f: _numbers(fields[f]) for f in ("position", "remaining")}
    found["on_path"] = np.array(fields["on_path"])
    found |= {
        f: np.stack(
            [_numbers([d[f] for d in arm] if f == "proposed" else [d.get(f) for d in arm]) for arm in drafts], axis=1
        )
        for f in ("proposed", "accepted")
    }
    found |= {f: np.stack([_numbers([d.get(f) for d in arm]) for arm in drafts], axis=1) for f in ARM_STATS}
    given = [{} if r.get("context") is None else r["context"] for r in records]
    if not _only(given, dict):
        return None
    found |= {f"context.{f}": _numbers([c.get(f) for c in given]) for f in CONTEXT if any(f in c for c in given)}
    kinds = [set(map(tuple, arm)) for arm in drafts]  # mostly one set of fields per arm
    found |= {
        f"has.{f}": np.stack([_has(f, arm, kind) for arm, kind in zip(drafts, kinds, strict=True)], axis=1)
        for f in ARM_STATS
    }
    codes = {None: -1} | {name: k for k, name in enumerate(arms)}
    found["source"] = np.stack([[codes[d.get("source")] for d in arm] for arm in drafts], axis=1)
    return found if _in_range(found, draft_len) else None


def _has(field: str, drafts: list[dict], kinds: set[tuple[str, ...]]) -> np.ndarray:
    """Which of one arm's entries, of these sets of fields, have a field (null counts as having it)?"""
    found = {field in kind for kind in kinds}
    return np.full(len(drafts), found.pop()) if len(found) == 1 else np.array([field in d for d in drafts])


def _only(values: list, kind: type) -> bool:
    """Are all values of exactly this type?"""
    return set(map(type, values)) <= {kind}


def _numbers(values: list) -> np.ndarray:
    """Numbers as float64, None as nan; TypeError when there is anything else (true is not a number)."""
    if not set(map(type, values)) <= {int, float, type(None)}:
        raise TypeError
    return np.array(values, dtype=float)


def _in_range(c: dict[str, np.ndarray], draft_len: int | None) -> bool:
    """Do all values of a chunk obey the schema? The same rules as ``record_faults``, on columns."""
    proposed, accepted, left = c["proposed"], c["accepted"], c["remaining"][:, None]
    asked = ~np.isnan(proposed)
    counts = [np.where(asked, accepted, 0), np.where(asked, proposed, 0)]
    cap = LARGEST["proposed"] if draft_len is None else draft_len
    matches = [c[f] for f in ("match_length", "context.match_length") if f in c]
    reals = [(f, c[f]) for f in (*STATS, *(f"context.{n}" for n in CONTEXT[1:])) if f in c]
    return bool(
        _whole(c["position"], 0)
        and _whole(c["remaining"], 1)
        and all(_whole(x, 0) for x in counts)
        and (counts[0] <= np.minimum(counts[1], left)).all()
        and (counts[1] <= cap).all()
        and (asked | np.isnan(accepted) | (accepted == 0)).all()
        and all(_whole(np.where(np.isnan(m), 0, m), 0) for m in matches)
        and all(((x >= 0) & (x <= highest_of(f) + SLACK) & np.isfinite(x) | np.isnan(x)).all() for f, x in reals)
        and not any((c["conf_min"] > c[f] + SLACK).any() for f in ("conf_mean", "conf_first"))
    )


def _whole(values: np.ndarray, least: int) -> bool:
    return bool(((values >= least) & (values <= LARGEST["position"]) & (values == np.floor(values))).all())


# ---- checks that need several records


def read_columns(
    files: list[Path],
    *,
    arms: Sequence[str] | None,
    draft_len: int | None,
    path_arm: str | None,
    named: Sequence[str | None],
) -> tuple[Columns, list[Fault]]:
    """Columns of the files, in canonical order, and all faults; ``named``: the name of a file that holds only the
    workload that it is named after (`manifest.file_name`), else None."""
    reader = _Reader(None if arms is None else tuple(arms), draft_len)
    for number, (path, name) in enumerate(zip(files, named, strict=True)):
        reader.read(number, path, name)
    notes = [f"{name}: unknown field '{field}' is ignored" for field, name in sorted(reader.unknown.items())]
    if not reader.parts:
        return _empty(reader.arms or ()), reader.faults
    return _Table(reader, [str(f) for f in files], path_arm).columns(notes)


def _empty(arms: tuple[str, ...]) -> Columns:
    none = np.zeros(0, dtype=int)
    return Columns(arms, (), (), *[none] * 7, {}, {}, None, False, None, [], [])


def natural(text: str) -> list:
    """Sort key under which "r2" comes before "r10".

    >>> sorted(["r10", "r2"], key=natural)
    ['r2', 'r10']
    """
    return [(p, 0) if k % 2 == 0 else ("", int(p)) for k, p in enumerate(re.split(r"([0-9]+)", text))]


class _Table:
    """All rows of a log in canonical order; methods find what is wrong between rows."""

    def __init__(self, reader: _Reader, files: list[str], path_arm: str | None):
        self.reader, self.files, self.path_arm, self.faults = reader, files, path_arm, list(reader.faults)
        keys = sorted(reader.keys, key=lambda k: (reader.first_file[k[0]], natural(k[0]), natural(k[1])))
        order = np.empty(len(keys), dtype=int)
        order[[reader.keys[k] for k in keys]] = np.arange(len(keys))
        self.keys, self.repeats = keys, []
        names = {n for part in reader.parts for n in part}
        self.c = {n: _joined([p.get(n) for p in reader.parts], reader.parts) for n in names}
        self.c["id"] = order[self.c["id"]]
        self.take(np.lexsort([self.c[n] for n in ("line", "file", "position", "id")]))

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order."""
        self.c = {n: v[rows] for n, v in self.c.items()}
        self.starts = np.searchsorted(self.c["id"], np.arange(len(self.keys) + 1))

    def fault(self, row: int, field: str | None, message: str) -> None:
        """Note a fault of one row."""
        self.faults.append(Fault(self.files[self.c["file"][row]], int(self.c["line"][row]), field, message))

    def columns(self, notes: list[str]) -> tuple[Columns, list[Fault]]:
        """The checked columns and all faults."""
        self.check_repeats()
        self.check_ends()
        self.check_statistics()
        complete = self.check_gaps()
        c, arms = self.c, self.reader.arms
        workloads = tuple(dict.fromkeys(w for w, _ in self.keys))
        counts = {
            n: np.nan_to_num(c[n], nan=-1 if n == "proposed" else 0).astype(np.int16) for n in ("proposed", "accepted")
        }
        columns = Columns(
            arms,
            workloads,
            tuple(r for _, r in self.keys),
            np.array([workloads.index(w) for w, _ in self.keys]),
            self.starts,
            counts["proposed"],
            counts["accepted"],
            c["on_path"],
            c["position"].astype(np.int32),
            c["remaining"].astype(np.int32),
            {n: c[f"context.{n}"] for n in CONTEXT if f"context.{n}" in c},
            {n: c[n] for n in ARM_STATS},
            c["source"].astype(np.int8) if (c["source"] >= 0).any() else None,
            complete,
            self.path_arm,
            notes,
            self.repeats,
        )
        return columns, self.faults

    def check_repeats(self) -> None:
        """Name every repeated (request, position); keep the first of identical lines."""
        c = self.c
        same = np.concatenate([[False], (np.diff(c["id"]) == 0) & (np.diff(c["position"]) == 0)])
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
        for row in np.flatnonzero(same):
            equal = all(
                np.array_equal(v[row], v[first[row]], equal_nan=v.dtype.kind == "f")
                for n, v in c.items()
                if n not in ("file", "line") and not n.startswith("has.")
            )
            where = f"line {int(c['line'][first[row]])}" + (
                f" of {self.files[c['file'][first[row]]]}" if c["file"][row] != c["file"][first[row]] else ""
            )
            place = f"request {self.keys[c['id'][row]][1]!r}, position {int(c['position'][row])}"
            if equal:
                name = self.files[c["file"][row]]
                self.repeats.append(Fault(name, int(c["line"][row]), "position", f"repeats {place} of {where}"))
            else:
                self.fault(row, "position", f"contradicts {where}: {place} is there with other values; keep one")
        if same.any():
            self.take(np.flatnonzero(~same))

    def check_ends(self) -> None:
        """position + remaining must be the same inside a request."""
        total = self.c["position"] + self.c["remaining"]
        low, high = (f.reduceat(total, self.starts[:-1]) for f in (np.minimum, np.maximum))
        for r in np.flatnonzero(low != high):
            rows = np.arange(self.starts[r], self.starts[r + 1])
            values, counts = np.unique(total[rows], return_counts=True)
            usual = values[counts.argmax()]
            for row in rows[total[rows] != usual]:
                self.fault(
                    row,
                    "remaining",
                    f"is {int(self.c['remaining'][row])}, but the output of request "
                    f"{self.keys[r][1]!r} ends {int(usual)} tokens after its start (expected "
                    f"{int(usual - self.c['position'][row])})",
                )

    def check_statistics(self) -> None:
        """A statistic that an arm has on some lines and not on others (two writers): missing is null, never 0."""
        drafted = np.nan_to_num(self.c["proposed"]) > 0
        for field in ARM_STATS:
            has = self.c[f"has.{field}"]
            for k, name in enumerate(self.reader.arms):
                for source in np.unique(self.c["source"][:, k]):
                    rows = np.flatnonzero(drafted[:, k] & (self.c["source"][:, k] == source))
                    lacking = rows[~has[rows, k]]
                    if 0 < len(lacking) < len(rows):
                        self.fault(
                            lacking[np.argmin(self.c["line"][lacking])],
                            f"arms.{name}.{field}",
                            f"is missing on {len(lacking)} of {len(rows)} lines with a draft of this arm; "
                            "write null for a missing value, or keep the lines of one writer",
                        )

    def check_gaps(self) -> bool:
        """Is every position of every request here? Otherwise the log must be the blocks of one arm, or it has gaps."""
        c, size = self.c, np.diff(self.starts)
        last = self.starts[1:] - 1
        total = (c["position"] + c["remaining"])[last]
        full = (size == total) & (c["position"][self.starts[:-1]] == 0) & (c["remaining"][last] == 1)
        anchored = not full.all() and bool(c["on_path"].all())
        step = (
            np.fmin(np.nan_to_num(c["accepted"]) + 1, c["remaining"][:, None])
            if anchored
            else np.ones((len(c["id"]), 1))
        )
        broken = self._breaks(step)
        if anchored:
            arms = self.reader.arms
            k = arms.index(self.path_arm) if self.path_arm in arms else int(broken.sum(axis=0).argmin())
            self.path_arm, broken = arms[k], broken[:, [k]]
        elif full.all():
            self._check_path()
        for row in np.flatnonzero(broken[:, 0]):
            self._gap(row, int(step[row, k]) if anchored else 1)
        return bool(full.all())

    def _breaks(self, step: np.ndarray) -> np.ndarray:
        """(N, arms of ``step``): does the row not lead to the next row of its request, or the last not to the end?"""
        c = self.c
        following = np.append(c["position"][1:], 0)
        following[self.starts[1:] - 1] = (c["position"] + c["remaining"])[self.starts[1:] - 1]
        broken = (c["position"][:, None] + step) != following[:, None]
        broken[self.starts[:-1]] |= (c["position"][self.starts[:-1]] != 0)[:, None]
        return broken

    def _gap(self, row: int, step: int) -> None:
        """Name the positions that are missing around a row, unless they are lines already named as faulty."""
        c, r = self.c, self.c["id"][row]
        name, position, following = self.keys[r][1], int(c["position"][row]), int(c["position"][row]) + step
        is_last = row == self.starts[r + 1] - 1
        end = position + int(c["remaining"][row]) if is_last else int(c["position"][row + 1])
        before = range(position) if row == self.starts[r] else range(0)
        for missing in (before, range(following, end)):
            if not all((*self.keys[r], str(p)) in self.reader.refused for p in missing):
                self.fault(
                    row,
                    "position",
                    f"is {position}, and positions {missing.start} to {missing.stop - 1} of request "
                    f"{name!r} are missing: it is not complete and cannot be replayed; resume the collection",
                )
        if end < following:
            self.fault(
                row,
                "position",
                f"is {position}, where a block of {self.path_arm} emits {step} tokens, but the next "
                f"record of request {name!r} is at {end}: not the blocks of one arm",
            )

    def _check_path(self) -> None:
        """on_path must mark the blocks of the declared arm; without a declared arm, find one that fits."""
        c, arms = self.c, self.reader.arms
        emitted = np.fmin(np.nan_to_num(c["accepted"]) + 1, c["remaining"][:, None]).astype(int)
        for name in (self.path_arm,) if self.path_arm in arms else arms:
            marks = np.zeros(len(c["id"]), dtype=bool)
            marks[walk(self.starts, emitted[:, arms.index(name)])] = True
            if (marks == c["on_path"]).all():
                self.path_arm = name
                return
        if self.path_arm is not None:
            row = int(np.argmax(marks != c["on_path"]))
            self.fault(
                row,
                "on_path",
                f"is {str(bool(c['on_path'][row])).lower()}, but {'a' if marks[row] else 'no'} block "
                f"of {self.path_arm} (path_arm of the manifest) starts here",
            )


def walk(starts: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Rows reached from every request's first row by always going ``step`` rows ahead, ascending.

    >>> walk(np.array([0, 4]), np.array([3, 1, 1, 1]))
    array([0, 3])
    """
    reached = np.zeros(len(step), dtype=bool)
    row, end = starts[:-1], starts[1:]
    while len(row):
        inside = row < end
        row, end = row[inside], end[inside]
        reached[row] = True
        row = row + step[row]
    return np.flatnonzero(reached)


def _joined(values: list, parts: list[dict]) -> np.ndarray:
    """One column over all chunks; nan where a chunk does not have it."""
    pairs = zip(values, parts, strict=True)
    return np.concatenate([np.full(len(p["line"]), np.nan) if v is None else v for v, p in pairs])
