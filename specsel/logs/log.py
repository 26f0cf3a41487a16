"""Position logs as columns, parts of them, the blocks of one arm, and a summary.

A log holds, for every position of every request's greedy output, what each arm proposed there and how much of it
the target accepts, so that any policy replays exactly. Not handled here: files, averages over policies, intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from specsel.logs.files import LogError, SpecselError


@dataclass(frozen=True, slots=True)
class PositionLog:
    """One row per position; requests are contiguous, positions ascend inside them (R requests, N rows, K arms)."""

    arms: tuple[str, ...]  # K names; an arm is its index, ties go to the lowest
    draft_len: int  # L, cap on drafted tokens per block
    workloads: tuple[str, ...]  # W names
    requests: tuple[str, ...]  # R ids, unique inside their workload
    workload: np.ndarray  # (R,) index into workloads
    starts: np.ndarray  # (R+1,) rows of request r are starts[r]:starts[r+1]
    proposed: np.ndarray  # (N, K) int16, 0..L; -1 = the arm was not asked
    accepted: np.ndarray  # (N, K) int16, 0..proposed, bonus excluded; 0 where not asked
    on_path: np.ndarray  # (N,) bool, as logged: a block of path_arm starts here
    position: np.ndarray  # (N,) int32, index of the anchor in the output, 0..T-1
    remaining: np.ndarray  # (N,) int32, output tokens after the anchor, T - position
    context: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # name -> (N,) float64, known before drafting; nan = missing
    stats: dict[str, np.ndarray] = field(default_factory=dict)  # name -> (N, K) float64, known after drafting; nan
    source: np.ndarray | None = None  # (N, K) int8: arm whose draft a composite arm used; -1 none, -2 not in the pool
    complete: bool = True  # every position of every request is here: exact replay is allowed
    run: str = ""  # name of the run
    label: str = "UNLABELLED"  # or "MEASURED", "SIM": what the file says
    path_arm: str | None = None  # arm whose blocks on_path marks; None when no arm fits
    sha256: str = ""  # over the log files; "" when the log comes from no file
    request_table: pd.DataFrame | None = None  # one row per request: workload, request, category, looping, ...
    manifest: dict = field(default_factory=dict)  # what the run says of itself; "selection" names the parts taken of it

    @property
    def n_positions(self) -> int:
        """Number of rows N."""
        return len(self.position)

    @property
    def n_requests(self) -> int:
        """Number of requests R that have at least one position."""
        return len(self.requests)

    @property
    def n_arms(self) -> int:
        """Number of arms K."""
        return len(self.arms)

    @property
    def emitted(self) -> np.ndarray:
        """(N, K) int16: accepted + 1, cut at the end of the output; computed at each access, so keep it."""
        longest = np.iinfo(np.int16).max
        return np.minimum(self.accepted + np.int16(1), np.minimum(self.remaining, longest).astype(np.int16)[:, None])

    @property
    def request_of(self) -> np.ndarray:
        """(N,) int64: the request of every row."""
        return np.repeat(np.arange(self.n_requests), np.diff(self.starts))

    @property
    def workload_of(self) -> np.ndarray:
        """(N,) workload of every row."""
        return self.workload[self.request_of]

    @property
    def looping(self) -> np.ndarray | None:
        """(R,) bool: requests whose output repeats itself (less than half of its 4-grams distinct); None: unknown."""
        return None if (found := self.request_column("looping")) is None else found.astype(bool)

    def request_column(self, name: str) -> np.ndarray | None:
        """(R,) values of one column of the request table, in the order of ``requests``; None when it is not there."""
        table = self.table
        known = name in table and len(table) == self.n_requests and not table[name].isna().any()
        return table[name].to_numpy() if known else None

    def at(self, rows: np.ndarray, **changes) -> PositionLog:
        """The log of some rows; ``changes`` are further fields (default: ascending rows of the same requests)."""
        names = ("proposed", "accepted", "on_path", "position", "remaining")
        columns = {n: getattr(self, n).take(rows, axis=0) for n in names}
        columns |= {n: {m: v.take(rows, axis=0) for m, v in getattr(self, n).items()} for n in ("context", "stats")}
        columns |= {"source": None if self.source is None else self.source.take(rows, axis=0)}
        return replace(self, **{"starts": np.searchsorted(rows, self.starts)} | columns | changes)

    def select(self, requests: np.ndarray) -> PositionLog:
        """The log of some requests only (bool mask or indices, order kept as given); arms and workloads stay."""
        chosen = np.arange(self.n_requests)[requests]
        lengths = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(self.starts[chosen] - starts[:-1], lengths) + np.arange(starts[-1])
        names = tuple(self.requests[r] for r in chosen)
        part = self._part({"requests": len(chosen)})
        return part.at(rows, requests=names, workload=self.workload[chosen], starts=starts)

    def only(self, workloads: Iterable[str]) -> PositionLog:
        """The log of some workloads only, in the order of the log; SpecselError for one that it does not have."""
        names = _chosen(self.run, "workload", workloads, self.workloads)
        kept = [w for w, name in enumerate(self.workloads) if name in names]
        log = self.select(np.isin(self.workload, kept))
        code = np.searchsorted(kept, log.workload)
        manifest = self._part({"workloads": [self.workloads[w] for w in kept]}).manifest
        return replace(log, workloads=tuple(self.workloads[w] for w in kept), workload=code, manifest=manifest)

    def pool(self, arms: Iterable[str]) -> PositionLog:
        """The log of some arms only, in the order given: exact, because every arm was asked at every position.

        SpecselError for an arm that the log does not have. The source of a composite arm that leaves is -2.
        """
        names = _chosen(self.run, "arm", arms, self.arms)
        at = [self.arms.index(name) for name in names]
        code = np.array([*(names.index(name) if name in names else -2 for name in self.arms), -2, -1], dtype=np.int8)
        source = None if self.source is None else code[self.source[:, at]]
        return self._part(
            {"arms": list(names)},
            arms=names,
            proposed=self.proposed[:, at],
            accepted=self.accepted[:, at],
            stats={n: v[:, at] for n, v in self.stats.items()},
            source=None if source is None or (source == -1).all() else source,
            path_arm=self.path_arm if self.path_arm in names else None,
        )

    def cap(self, draft_len: int) -> PositionLog:
        """The log with drafts of at most ``draft_len`` tokens: exact, since accepted is the smaller of count and cap.

        Statistics over a draft that is cut are unknown (nan); the first confidence stays.
        """
        if not 1 <= draft_len <= self.draft_len:
            raise SpecselError(f"{self.run}: a draft length of {draft_len} is not in 1 to {self.draft_len}, as logged")
        capped = self.shortened(np.int16(draft_len))._part({"draft_len": draft_len}, draft_len=draft_len)
        return capped.with_path() if self.complete and self.path_arm is not None else capped

    def with_path(self) -> PositionLog:
        """The log whose ``on_path`` marks the blocks of its path arm; it must be complete."""
        return replace(self, on_path=np.isin(np.arange(self.n_positions), block_rows(self)))

    def shortened(self, longest: np.ndarray) -> PositionLog:
        """The log with drafts of at most so many tokens, one number for all, or (N, K); `cap` says what stays known."""
        cut, whole = self.proposed > longest, ("conf_first", "match_length")
        stats = {n: v if n in whole else np.where(cut, np.nan, v) for n, v in self.stats.items()}
        counts = {n: np.minimum(getattr(self, n), longest) for n in ("proposed", "accepted")}
        return replace(self, stats=stats, **counts)

    def _part(self, step: dict, **columns) -> PositionLog:
        """The log with other columns; the manifest notes what was taken, so that it stays true of the part."""
        steps = [*self.manifest.get("selection", []), step]
        return replace(self, manifest=self.manifest | {"selection": steps}, **columns)

    @property
    def composites(self) -> tuple[str, ...]:
        """Arms that hand on other arms' drafts: fixed rules that are themselves selectors."""
        if self.source is None:
            return ()
        return tuple(name for name, used in zip(self.arms, (self.source != -1).any(axis=0), strict=True) if used)

    @property
    def table(self) -> pd.DataFrame:
        """One row per request (R): workload, request, and what the request table says about it (nan = unknown)."""
        names = np.array(self.workloads, dtype=object)[self.workload]
        found = pd.DataFrame({"workload": names, "request": list(self.requests)})
        return found if self.request_table is None else found.merge(self.request_table, "left", [*found])


def _chosen(run: str, kind: str, asked: Iterable[str], there: tuple[str, ...]) -> tuple[str, ...]:
    """Names that were asked for; SpecselError where there are none, one twice, or one that the log does not have."""
    names = tuple(asked)
    unknown = [name for name in names if name not in there]
    if unknown or not names or len(set(names)) < len(names):
        what = f"has no {kind} {unknown[0]!r}" if unknown else f"needs one or more different {kind}s, got {names}"
        raise SpecselError(f"{run}: {what}; it has {', '.join(there)}")
    return names


def require_complete(log: PositionLog) -> None:
    """Refuse exact replay on a log that holds block starts only."""
    if not log.complete:
        raise LogError(
            f"{log.run}: this log is block-anchored (only the blocks of {log.path_arm or 'one arm'} are in it), "
            "so no other policy can be replayed exactly; gap and selector figures are allowed, "
            "replay needs a log of every position (`specsel collect`)"
        )


def block_rows(log: PositionLog, arm: int | None = None) -> np.ndarray:
    """(B,) rows where the blocks of ``arm`` (default: ``log.path_arm``) start when it always runs.

    Recomputed by walking on a complete log; on a block-anchored log the logged blocks, there for its path arm only.
    """
    arm = log.arms.index(log.path_arm) if arm is None and log.path_arm in log.arms else arm
    if log.complete and arm is not None:
        return walk(log.starts, log.emitted[:, arm])
    if (None if arm is None else log.arms[arm]) != log.path_arm:
        require_complete(log)
    return np.flatnonzero(log.on_path)


def block_view(log: PositionLog, arm: int | None = None) -> PositionLog:
    """The log of the rows of ``block_rows``, a round per row, never to be replayed; its ``path_arm`` is their arm."""
    name = log.path_arm if arm is None else log.arms[arm]
    return replace(log.at(block_rows(log, arm)), path_arm=name if name in log.arms else None, complete=False)


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


def summary(log: PositionLog) -> dict:
    """What ``specsel log summary --json`` prints: counts, and per workload and arm the two means (ratios of sums).

    Means are over the blocks of an arm that always runs; on a block-anchored log the accepted means are over the
    logged blocks and block efficiency is None, because no arm but the logged one could be replayed.
    """
    names, blocks = np.array(log.workloads, dtype=object), []
    for k, arm in enumerate(log.arms):
        view = block_view(log, k if log.complete else None)
        counts = {"accepted": view.accepted[:, k], "emitted": view.emitted[:, k]}
        blocks.append(pd.DataFrame({"workload": names[view.workload_of], "arm": arm} | counts))
    means = pd.concat(blocks).groupby(["workload", "arm"])[["accepted", "emitted"]].mean()
    table = log.table if log.request_table is None else log.request_table  # requests that ended at once are in it, too
    requests, positions = table["workload"].value_counts(), pd.Series(names[log.workload_of]).value_counts()

    def per_arm(mean: pd.Series) -> dict:
        return {w: {arm: mean.get((w, arm)) for arm in log.arms} for w in log.workloads}

    return {
        "run": log.run,
        "label": log.label,
        "arms": list(log.arms),
        "draft_len": log.draft_len,
        "requests": {w: int(requests.get(w, 0)) for w in log.workloads},
        "positions": {w: int(positions.get(w, 0)) for w in log.workloads},
        "mean_accepted": per_arm(means["accepted"]),
        "block_efficiency": per_arm(means["emitted"] if log.complete else pd.Series(dtype=float)),
    }
