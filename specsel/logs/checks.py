"""What compares fields or records of a log, on columns of all its lines: counts, repeats, ends, gaps, the path.

Not handled here: single values (``schema``), lines and files (``read``).
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import numpy as np

from specsel.logs.files import Fault
from specsel.logs.log import walk
from specsel.logs.schema import SLACK, STATS

if TYPE_CHECKING:
    from specsel.logs.read import Lines

ABSENT = -1.0  # in a column: the line does not have the field, which is not the same as null (nan)
ARM_STATS = (*STATS, "match_length")
DRAFT_NUMBERS = ("proposed", "accepted", *ARM_STATS)


def natural(text: str) -> list:
    """Sort key under which "r2" comes before "r10".

    >>> sorted(["r10", "r2"], key=natural)
    ['r2', 'r10']
    """
    return [(p, 0) if k % 2 == 0 else ("", int(p)) for k, p in enumerate(re.split(r"([0-9]+)", text))]


class Rows:
    """All rows of a log in canonical order: by workload (in the order of files), request, position."""

    def __init__(self, lines: Lines):
        self.lines, self.arms = lines, lines.arms
        self.path_arm = said if (said := lines.said.get("path_arm")) in self.arms else None
        self.repeats: list[Fault] = []  # identical lines, read once
        self.complete = False
        self.keys = sorted(lines.keys, key=lambda k: (lines.first_file[k[0]], natural(k[0]), natural(k[1])))
        order = np.empty(len(self.keys), dtype=int)
        order[[lines.keys[k] for k in self.keys]] = np.arange(len(self.keys))
        self.c = {name: np.concatenate([part[name] for part in lines.parts]) for name in lines.parts[0]}
        self.c["id"] = order[self.c["id"]]
        self.take(np.lexsort([self.c[n] for n in ("line", "file", "position", "id")]))
        self.absent = {n: self.c[n] == ABSENT for n in ARM_STATS}
        self.c |= {n: np.where(self.c[n] == ABSENT, np.nan, self.c[n]) for n in DRAFT_NUMBERS}

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order."""
        self.c = {n: v[rows] for n, v in self.c.items()}
        self.starts = np.searchsorted(self.c["id"], np.arange(len(self.keys) + 1))

    def fault(self, row: int, field: str | None, message: str) -> None:
        """Note a fault of one row."""
        self.lines.faults.append(Fault(*self.place(row), field, message))

    def place(self, row: int) -> tuple[str, int]:
        """File and line of a row."""
        return self.lines.files[self.c["file"][row]], int(self.c["line"][row])

    @property
    def end(self) -> np.ndarray:
        """(N,) where the output of the row's request ends, as the row says."""
        return self.c["position"] + self.c["remaining"]

    @property
    def emitted(self) -> np.ndarray:
        """(N, K) accepted + 1, cut at the end of the output."""
        return np.fmin(np.nan_to_num(self.c["accepted"]) + 1, self.c["remaining"][:, None]).astype(int)

    def columns(self) -> tuple[dict[str, np.ndarray], dict]:
        """After all checks: the arrays of ``PositionLog`` (in its dictionaries as "stats.conf_mean"), and its names."""
        self.check_drafts()
        self.check_statistics()
        self.check_repeats()
        self.check_ends()
        self.check_gaps()
        c, (workloads, requests) = self.c, zip(*self.keys, strict=True)
        facts = {"arms": self.arms, "workloads": list(dict.fromkeys(workloads)), "requests": requests}
        workload = np.array([facts["workloads"].index(name) for name in workloads])
        arrays = {"workload": workload, "starts": self.starts} | {n: c[n] for n in ("on_path", "source")}
        arrays |= {n: c[n].astype(np.int32) for n in ("position", "remaining")}
        for name, missing in (("proposed", -1), ("accepted", 0)):
            arrays[name] = np.nan_to_num(c[name], nan=missing).astype(np.int16)
        arrays |= {n: v for n, v in c.items() if n in self.lines.given and n.startswith("context.")}
        arrays |= {f"stats.{n}": c[n] for n in ARM_STATS}
        return arrays, facts | {"complete": self.complete, "path_arm": self.path_arm}

    def check_drafts(self) -> None:
        """Counts and confidences of one draft must fit together."""
        c, left, draft_len = self.c, self.c["remaining"][:, None], self.lines.said.get("draft_len", np.inf)
        proposed, accepted, low = c["proposed"], c["accepted"], c["conf_min"]
        asked = ~np.isnan(proposed)
        rules = [
            ("accepted", asked & ~(accepted >= 0), "is missing or null, expected a whole number, 0 or more"),
            ("accepted", ~asked & (accepted > 0), "is {accepted:g}, but proposed is null (not asked)"),
            ("accepted", accepted > proposed, "is {accepted:g}, above proposed = {proposed:g}"),
            ("accepted", asked & (accepted > left), "is {accepted:g}, above remaining = {remaining:g}"),
            ("proposed", proposed > draft_len, f"is {{proposed:g}}, above the draft length {draft_len}"),
            ("conf_min", low > c["conf_mean"] + SLACK, "is {conf_min:g}, above conf_mean = {conf_mean:g}"),
            ("conf_min", low > c["conf_first"] + SLACK, "is {conf_min:g}, above conf_first = {conf_first:g}"),
        ]
        for field, broken, message in rules:
            for row, k in np.argwhere(broken):
                values = {n: c[n][row, k] for n in DRAFT_NUMBERS} | {"remaining": c["remaining"][row]}
                self.fault(row, f"arms.{self.arms[k]}.{field}", message.format(**values))

    def check_statistics(self) -> None:
        """A statistic that an arm has on some lines and not on others (two writers): missing is null, never 0."""
        hint = "write null for a missing value, or keep the lines of one writer"
        for (k, arm), field in itertools.product(enumerate(self.arms), ARM_STATS):
            drafted, sources = self.c["proposed"][:, k] > 0, self.c["source"][:, k]
            for source in np.unique(sources):
                rows = np.flatnonzero(drafted & (sources == source))
                lacking = rows[self.absent[field][rows, k]]
                if 0 < (n := len(lacking)) < len(rows):
                    first = lacking[np.argmin(self.c["line"][lacking])]
                    message = f"is missing on {n} of {len(rows)} lines with a draft of this arm; {hint}"
                    self.fault(first, f"arms.{arm}.{field}", message)

    def check_repeats(self) -> None:
        """Name every repeated (request, position); keep the first of identical lines."""
        c = self.c
        same = np.concatenate([[False], (np.diff(c["id"]) == 0) & (np.diff(c["position"]) == 0)])
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
        values = [v for n, v in c.items() if n not in ("file", "line")]
        for row in np.flatnonzero(same):
            one = first[row]
            (file, line), (other, at) = self.place(row), self.place(one)
            where = f"line {at}" + (f" of {other}" if other != file else "")
            place = f"request {self.keys[c['id'][row]][1]!r}, position {int(c['position'][row])}"
            if all(np.array_equal(v[row], v[one], equal_nan=v.dtype.kind == "f") for v in values):
                self.repeats.append(Fault(file, line, "position", f"repeats {place} of {where}"))
            else:
                self.fault(row, "position", f"contradicts {where}: {place} is there with other values; keep one")
        if same.any():
            self.take(np.flatnonzero(~same))

    def check_ends(self) -> None:
        """position + remaining must be the same inside a request."""
        total = self.end
        low, high = (f.reduceat(total, self.starts[:-1]) for f in (np.minimum, np.maximum))
        for r in np.flatnonzero(low != high):
            rows = np.arange(self.starts[r], self.starts[r + 1])
            values, counts = np.unique(total[rows], return_counts=True)
            usual = int(values[counts.argmax()])
            for row in rows[total[rows] != usual]:
                found, expected = int(self.c["remaining"][row]), usual - int(self.c["position"][row])
                end = f"the output of request {self.keys[r][1]!r} ends {usual} tokens after its start"
                self.fault(row, "remaining", f"is {found}, but {end} (expected {expected})")

    def check_gaps(self) -> None:
        """Is every position of every request here? Otherwise the log must be the blocks of one arm, or it has gaps."""
        step = np.ones((len(self.end), 1), dtype=int)
        self.complete = not self.breaks(step).any()
        if not self.complete and self.c["on_path"].all():
            step = self.emitted
            k = self.arms.index(self.path_arm) if self.path_arm else int(self.breaks(step).sum(axis=0).argmin())
            self.path_arm, step = self.arms[k], step[:, [k]]
        following = self.following
        for row in np.flatnonzero(self.breaks(step)):
            self.gap(row, int(step[row, 0]), int(following[row]))
        if self.complete:
            self.check_path()

    @property
    def following(self) -> np.ndarray:
        """(N,) position of the next row of the request, or its end."""
        following = np.append(self.c["position"][1:], 0)
        following[self.starts[1:] - 1] = self.end[self.starts[1:] - 1]
        return following

    def breaks(self, step: np.ndarray) -> np.ndarray:
        """(N, columns of ``step``): does the row not lead to the next one of its request, or to the end?"""
        position = self.c["position"][:, None]
        broken = position + step != self.following[:, None]
        broken[self.starts[:-1]] |= position[self.starts[:-1]] != 0
        return broken

    def gap(self, row: int, step: int, following: int) -> None:
        """Name the positions that are missing around a row, unless they are lines already named as faulty."""
        r, position = self.c["id"][row], int(self.c["position"][row])
        name, before = self.keys[r][1], range(position) if row == self.starts[r] else range(0)
        for missing in (before, range(position + step, following)):
            if not all((*self.keys[r], str(p)) in self.lines.refused for p in missing):
                gone = f"positions {missing.start} to {missing.stop - 1} of request {name!r} are missing"
                hint = "it is not complete and cannot be replayed; resume the collection"
                self.fault(row, "position", f"is {position}, and {gone}: {hint}")
        if following < position + step:
            emits = f"where a block of {self.path_arm} emits {step} tokens"
            found = f"but the next record of request {name!r} is at {following}: not the blocks of one arm"
            self.fault(row, "position", f"is {position}, {emits}, {found}")

    def check_path(self) -> None:
        """on_path must mark the blocks of the declared arm; without a declared arm, find one that fits."""
        marked, emitted = self.c["on_path"], self.emitted
        for arm in [self.path_arm] if self.path_arm else self.arms:
            expected = np.isin(np.arange(len(marked)), walk(self.starts, emitted[:, self.arms.index(arm)]))
            if (expected == marked).all():
                self.path_arm = arm
                return
        if self.path_arm:
            row = int(np.argmax(expected != marked))
            found, block = str(bool(marked[row])).lower(), "a" if expected[row] else "no"
            told = f"is {found}, but {block} block of {arm} (path_arm of the manifest) starts here"
            self.fault(row, "on_path", told)
