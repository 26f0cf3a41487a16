"""Intervals for functions of sums over requests: requests are resampled, because blocks of one request are not
independent.

A statistic maps *sums over requests* to a number. Whatever has to be chosen from data (the best fixed arm, say) is
chosen inside it, so it is chosen anew in every resample. One ``Resampling`` serves a log: requests are drawn within
workloads from its seed alone, so every quantity of the same requests sees the same draws, and all of them are paired.
What is undefined says so in its ``Estimate``, with the reason, and never becomes nan or a warning.

Method: bootstrap with bias-corrected and accelerated limits (Efron & Tibshirani 1993, chapters 13 and 14), from the
draws and with the limits of `scipy.stats.bootstrap`. Sums come from matrix products with the counts of the drawn
requests, not from gathered copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri
from threadpoolctl import threadpool_limits

SMALLEST_BCA = 10  # requests; with fewer, the jackknife says nothing about skewness
LARGEST_BCA = 5_000  # requests; with more, the two methods agree and a jackknife costs more than all resamples
CHUNK = 2_000_000  # drawn requests that are held as numbers at once
KEPT = 300_000_000  # drawn requests up to which the counts are kept for the next quantity, one byte each


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; ``method`` says how the interval came about or why there is none."""

    value: float | None  # None: undefined, see method
    low: float | None  # lower limit; None when there is no interval
    high: float | None  # upper limit; None when there is no interval
    level: float  # nominal coverage, 0..1
    n: int  # requests (or rows, for by_rows)
    method: str  # "BCa", "percentile", "degenerate" (all resamples equal) or "undefined: <reason>"
    n_resamples: int  # asked for
    seed: int | None
    dropped: int = 0  # resamples in which the statistic had no value
    p: float | None = None  # two-sided bootstrap p-value of the null value, where one was given

    @property
    def defined(self) -> bool:
        """Is there an interval?"""
        return self.low is not None


@dataclass(frozen=True, slots=True)
class Resampling:
    """How requests are resampled: the same for every quantity of a log. ValueError for numbers without meaning."""

    n_resamples: int = 10_000
    level: float = 0.95  # nominal coverage of the intervals, between 0 and 1
    seed: int = 7
    method: str = "BCa"  # or "percentile"

    def __post_init__(self) -> None:
        if self.n_resamples < 1 or not 0 < self.level < 1 or self.method not in ("BCa", "percentile"):
            raise ValueError(f"{self}: expected 1 or more resamples, a level between 0 and 1, 'BCa' or 'percentile'")

    def draws(self, sizes: tuple[int, ...]) -> Iterator[tuple[int, slice, np.ndarray]]:
        """How often each request is drawn, as (group, resamples, counts (resamples, size of the group) as float)."""
        if self.n_resamples * sum(sizes) > KEPT:
            yield from _drawn(self.seed, self.n_resamples, sizes)
            return
        for group, counts in enumerate(_kept(self.seed, self.n_resamples, sizes)):
            for rows in _chunks(self.n_resamples, sizes[group]):
                yield group, rows, counts[rows].astype(float)


def _chunks(n_resamples: int, size: int) -> Iterator[slice]:
    step = max(1, CHUNK // size)
    return (slice(first, min(first + step, n_resamples)) for first in range(0, n_resamples, step))


def _drawn(seed: int, n_resamples: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, slice, np.ndarray]]:
    """The draws themselves: one stream, group after group, so that the size of a chunk changes nothing."""
    rng = np.random.default_rng(seed)
    for group, size in enumerate(sizes):
        for rows in _chunks(n_resamples, size):
            index = rng.integers(0, size, (rows.stop - rows.start, size))
            index += np.arange(len(index))[:, None] * size
            yield group, rows, np.bincount(index.ravel(), minlength=index.size).reshape(index.shape).astype(float)


@lru_cache(maxsize=2)
def _kept(seed: int, n_resamples: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """The same draws in one small whole number each; a request that is drawn more than 255 times does not occur."""
    kept = [np.empty((n_resamples, size), dtype=np.uint8) for size in sizes]
    for group, rows, counts in _drawn(seed, n_resamples, sizes):
        kept[group][rows] = counts
    return kept


# ---- sums of resampled requests


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sums of every request (R, C) and the workloads within which they are drawn."""

    sums: np.ndarray  # (R, C) float
    codes: np.ndarray  # (R,) workload of each request, 0..G-1
    groups: tuple[np.ndarray, ...]  # requests that are drawn from each other; all together where each workload has one
    n_workloads: int

    @classmethod
    def of(cls, sums: np.ndarray, workload: Sequence[Hashable] | np.ndarray) -> _Sample:
        """Raises ValueError for nan or infinity, and for another number of workloads than requests."""
        codes, names = pd.factorize(np.asarray(workload))
        if len(codes) != len(sums):
            raise ValueError(f"there are {len(codes)} workloads for {len(sums)} requests; give one per request")
        if not np.isfinite(sums).all():
            raise ValueError("sums hold nan or infinity; a request without a value belongs out of the table")
        rows = [np.flatnonzero(codes == g) for g in range(len(names))]
        alone = len(codes) > 1 and len(names) == len(codes)
        groups = [np.arange(len(codes))] if alone else [r for r in rows if len(r) > 1]
        return cls(sums, codes, tuple(groups), len(names))

    @property
    def merged(self) -> bool:
        """Are requests drawn from all workloads together?"""
        return len(self.groups) == 1 < self.n_workloads and len(self.groups[0]) == self.n_workloads == len(self.codes)

    def totals(self) -> np.ndarray:
        """(G, C) sums of each workload."""
        found = np.zeros((self.n_workloads, self.sums.shape[1]))
        np.add.at(found, self.codes, self.sums)
        return found

    def resampled(self, resampling: Resampling) -> np.ndarray:
        """(n_resamples, G, C); a workload of one request stays as it is."""
        found = np.repeat(self.totals()[None], resampling.n_resamples, axis=0)
        for group, rows, counts in resampling.draws(tuple(map(len, self.groups))):
            self._add(found[rows], self.groups[group], counts)
        return found

    def jackknife(self) -> Iterator[np.ndarray]:
        """Per group of n requests: (n, G, C) sums without one of them, scaled so that workloads keep their weights."""
        for members in self.groups:
            found = np.repeat(self.totals()[None], len(members), axis=0)
            self._add(found, members, (1 - np.eye(len(members))) * (len(members) / (len(members) - 1)))
            yield found

    def _add(self, found: np.ndarray, members: np.ndarray, counts: np.ndarray) -> None:
        """Put the sums of a group, counted so often, into (n, G, C)."""
        for g in np.unique(self.codes[members]):
            mine = self.codes[members] == g
            found[:, g] = counts[:, mine] @ self.sums[members[mine]]


Function = Callable[[np.ndarray], np.ndarray]  # of (n, G, C) sums per workload


def _estimates(
    sample: _Sample, functions: Sequence[Function], about: np.ndarray, nulls: Sequence[float | None], how: Resampling
) -> list[Estimate]:
    """One Estimate per function, about some requests (R,) bool, all from the same draws."""
    if not functions:
        return []
    drawn_apart = np.zeros(len(about), dtype=bool)
    drawn_apart[np.concatenate([*sample.groups, np.zeros(0, dtype=int)])] = True
    n, varies = int(about.sum()), about.sum() > 1 and bool(drawn_apart[about].any())
    empty = Estimate(None, None, None, how.level, n, "", how.n_resamples, how.seed)
    sample = replace(sample, sums=sample.sums * about[:, None])  # a request that is not asked about adds nothing
    with np.errstate(all="ignore"), threadpool_limits(1, "blas"):  # what is undefined is said by the Estimate

        def values(sums: np.ndarray) -> np.ndarray:
            return np.stack([np.broadcast_to(f(sums), (len(sums),)) for f in functions]).astype(float)

        point = values(sample.totals()[None])[:, 0]
        drawn = values(sample.resampled(how)) if varies else [None] * len(functions)
        wanted = how.method == "BCa" and varies and SMALLEST_BCA <= n and len(about) <= LARGEST_BCA
        left_out = [values(sums) for sums in sample.jackknife()] if wanted else []
        note = ", workloads of one request merged" if sample.merged and about.all() else ""
        return [
            _estimate(point[i], drawn[i], [v[i] for v in left_out], empty, nulls[i], note)
            for i in range(len(functions))
        ]


def _estimate(
    value: float,
    drawn: np.ndarray | None,
    left_out: list[np.ndarray],
    empty: Estimate,
    null: float | None = None,
    note: str = "",
) -> Estimate:
    """The Estimate of one quantity; ``drawn`` None: nothing could be drawn; ``left_out`` empty: percentile limits."""
    if not math.isfinite(value):
        return replace(empty, method="undefined: the denominator is 0")
    found = replace(empty, value=float(value))
    if drawn is None:
        return replace(found, method="undefined: one request has no spread")
    kept = np.sort(drawn[np.isfinite(drawn)])
    if not len(kept):
        return replace(found, method="undefined: no resample has a value", dropped=len(drawn))
    found = replace(found, dropped=len(drawn) - len(kept), p=None if null is None else _p_value(kept - null))
    if np.ptp(kept) <= 1e-12 * max(1.0, abs(value)):
        return replace(found, low=found.value, high=found.value, method="degenerate" + note)
    tails = np.array([(1 - empty.level) / 2, (1 + empty.level) / 2])
    corrected = _bca_tails(value, kept, left_out, tails) if left_out and not found.dropped else np.full(2, np.nan)
    exact = bool(np.isfinite(corrected).all())
    low, high = np.quantile(kept, corrected if exact else tails)
    return replace(found, low=float(low), high=float(high), method=("BCa" if exact else "percentile") + note)


def _bca_tails(value: float, drawn: np.ndarray, left_out: list[np.ndarray], tails: np.ndarray) -> np.ndarray:
    """(2,) shares at which the limits stand: corrected for bias and skewness; nan where that cannot be (Efron &
    Tibshirani 1993, 14.10 and 14.15; several samples as in scipy)."""
    below = (np.searchsorted(drawn, value, "left") + np.searchsorted(drawn, value, "right")) / (2 * len(drawn))
    influence = [(v.mean() - v) * (len(v) - 1) / len(v) for v in left_out]
    cubes, squares = (sum(float((u**power).sum()) for u in influence) for power in (3, 2))
    skew = cubes / (6 * squares**1.5) if squares > 0 else np.nan
    shift = ndtri(below) + ndtri(tails)
    return ndtr(ndtri(below) + shift / (1 - skew * shift))


def _p_value(drawn: np.ndarray) -> float:
    """Two-sided bootstrap p-value of zero: twice the smaller tail, never 0 (one is added to both counts)."""
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return float(min(1.0, 2 * (tail + 1) / (len(drawn) + 1)))


# ---- tables of requests


class Sums:
    """Resampled sums of a table's columns, by name: ``s.blocks``, ``s["blocks", "eagle"]``; a name that begins tuples
    gives all of their columns, (n, K), or (n, K, W) where sums come per workload."""

    def __init__(self, values: np.ndarray, columns: Sequence[Hashable]):
        self._values, self._columns = values, list(columns)

    def __getitem__(self, name: Hashable) -> np.ndarray:
        if name in self._columns:
            return self._values[:, self._columns.index(name)]
        at = [i for i, c in enumerate(self._columns) if isinstance(c, tuple) and c[0] == name]
        if not at:
            raise KeyError(f"the table of requests has no column {name!r}; it has {self._columns}")
        return self._values[:, at]

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None


def by(
    requests: pd.DataFrame,
    quantities: Mapping[Hashable, Callable[[Sums], np.ndarray]],
    *,
    resampling: Resampling,
    groups: Sequence[str] = ("all", "workload"),
    null: Mapping[Hashable, float] | None = None,
    split: Collection[Hashable] = (),
) -> pd.DataFrame:
    """Each quantity over all requests and over every group of them, with intervals: the figures of a chapter.

    ``requests`` has one row per request: workload, request, then sums (numbers; labels may be tuples). A quantity is a
    name, or a tuple of a name and keys, and a function of `Sums`; one of ``split`` gets its sums per workload, in a
    trailing axis. ``groups``: "all", or a column whose values are asked one by one. ``null`` gives a two-sided p-value.

    Returns a row per group and quantity: quantity, key (the value of the group, then the keys of the quantity), value,
    low, high, n (requests), method, p, estimate.

    >>> table = pd.DataFrame({"workload": ["w"] * 3, "request": [1, 2, 3], "tokens": [4, 6, 8], "blocks": [2, 2, 2]})
    >>> by(table, {"efficiency": lambda s: s.tokens / s.blocks}, resampling=Resampling(99)).value.tolist()
    [3.0, 3.0]
    """
    labels = {"workload", "request", *groups}
    numbers = [c for c in requests.columns if c not in labels and requests[c].dtype.kind in "biuf"]
    sample = _Sample.of(requests[numbers].to_numpy(dtype=float), requests["workload"].to_numpy())
    functions = [_seen(function, numbers, name in split) for name, function in quantities.items()]
    nulls = [(null or {}).get(name) for name in quantities]
    rows = []
    for group in groups:
        values = requests[group].dropna().unique() if group != "all" else [None]
        for value in values:
            about = np.ones(len(requests), dtype=bool) if group == "all" else (requests[group] == value).to_numpy()
            for name, e in zip(quantities, _estimates(sample, functions, about, nulls, resampling), strict=True):
                quantity, *keys = name if isinstance(name, tuple) else (name,)
                key = (*([] if group == "all" else [value]), *keys)
                limits = {"value": e.value, "low": e.low, "high": e.high, "n": e.n, "method": e.method, "p": e.p}
                rows.append({"quantity": quantity, "key": key, **limits, "estimate": e})
    return pd.DataFrame(rows, columns=[*COLUMNS])


COLUMNS = ("quantity", "key", "value", "low", "high", "n", "method", "p", "estimate")  # of the figures of `by`


def _seen(function: Callable[[Sums], np.ndarray], columns: Sequence[Hashable], split: bool) -> Function:
    """The function of named sums as one of (n, G, C) sums."""
    return lambda sums: function(Sums(np.moveaxis(sums, 1, 2) if split else sums.sum(axis=1), columns))


def estimate(
    statistic: Function,
    totals: np.ndarray,
    *,
    workload: np.ndarray,
    resampling: Resampling,
    null: float | None = None,
    split: bool = False,
) -> Estimate:
    """`by` for one statistic of an array of sums per request (R, *S): (n, *S) -> (n,), or (n, G, *S) if ``split``."""
    totals = np.asarray(totals, dtype=float)
    sample = _Sample.of(totals.reshape(len(totals), math.prod(totals.shape[1:])), workload)

    def function(sums: np.ndarray) -> np.ndarray:
        sums = sums.reshape(*sums.shape[:2], *totals.shape[1:])
        return statistic(sums if split else sums.sum(axis=1))

    return _estimates(sample, [function], np.ones(len(totals), dtype=bool), [null], resampling)[0]


def by_rows(statistic: Function, rows: np.ndarray, *, workload: np.ndarray, resampling: Resampling) -> Estimate:
    """The percentile interval that ignores requests and resamples blocks: too narrow, for comparison; rows (B, *S).

    Equal rows are drawn together (multinomial), so that millions of blocks with few distinct counts cost little.
    """
    rows, rng = np.asarray(rows), np.random.default_rng(resampling.seed)
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    counts = pd.DataFrame(flat).assign(workload=workload).value_counts(sort=False).rename("n").reset_index()
    drawn = 0.0
    with np.errstate(all="ignore"):
        for _, part in counts.groupby("workload", sort=False):
            times = rng.multinomial(part.n.sum(), part.n / part.n.sum(), size=resampling.n_resamples)
            drawn = drawn + times @ part[[*range(flat.shape[1])]].to_numpy(dtype=float)
        value = float(np.ravel(statistic(rows.sum(axis=0)[None]))[0])
        values = np.broadcast_to(statistic(drawn.reshape(-1, *rows.shape[1:])), (resampling.n_resamples,))
    empty = Estimate(None, None, None, resampling.level, len(rows), "", resampling.n_resamples, resampling.seed)
    return _estimate(value, values if len(rows) > 1 else None, [], empty, None, ", blocks resampled (too narrow)")


# ---- small things


def ratio(numerator: np.ndarray | float, denominator: np.ndarray | float) -> np.ndarray | float:
    """numerator / denominator, nan (no warning) where the denominator is 0; arrays broadcast.

    >>> ratio(6, 4), ratio(np.array([3.0, 1.0]), np.array([2.0, 0.0]))
    (1.5, array([1.5, nan]))
    """
    below = np.asarray(denominator, dtype=float)
    found = np.divide(numerator, np.where(below == 0, np.nan, below))
    return float(found) if found.ndim == 0 else found


def request_sums(values: np.ndarray, request_of: np.ndarray, n_requests: int) -> np.ndarray:
    """Sums over the rows of every request: values (B,) or (B, C), request_of (B,) -> (R,) or (R, C).

    >>> request_sums(np.array([3, 1, 2]), np.array([0, 0, 2]), 3)
    array([4., 0., 2.])
    """
    columns = values.reshape(len(values), math.prod(values.shape[1:])).T
    sums = [np.bincount(request_of, weights=c, minlength=n_requests) for c in columns]
    return np.stack(sums, axis=1).reshape(n_requests, *values.shape[1:])


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's (1979) step-down adjustment of p-values for a family of comparisons, shape kept.

    >>> holm(np.array([0.01, 0.04, 0.03]))
    array([0.03, 0.06, 0.06])
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return adjusted[np.argsort(order, kind="stable")]
