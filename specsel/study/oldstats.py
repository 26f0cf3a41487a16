"""Intervals for ratios of sums: requests are resampled, because blocks of one request are not independent.

A statistic here is a function of *sums over requests*: it maps an array of shape (..., *S) to (...). Whatever has to
be chosen from data (the best fixed arm, say) is chosen inside it, so it is chosen anew in every resample. Results are
always an ``Estimate``; what is undefined says so, with its reason, and never becomes nan or a warning.

Method: `scipy.stats.bootstrap` (Efron & Tibshirani 1993, chapters 13 and 14) on the indices of the requests of every
stratum, with one statistic of many rows: all numbers of a log see the same resamples, so all of them are paired. Sums
come from matrix products with the counts of the drawn indices, not from gathered copies; these products are too narrow
to gain from threads of their own.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from threadpoolctl import threadpool_limits

__all__ = [
    "Estimate",
    "bootstrap_many",
    "bootstrap_requests",
    "bootstrap_rows",
    "request_sums",
    "ratio",
    "pooled_ratio",
    "holm",
]

Statistic = Callable[[np.ndarray], np.ndarray]
BATCH = 640_000  # draws held in memory at once; the caches of a processor like it small
MANY = 64  # resamples at once where a batch would hold fewer, so that the sums of many requests are not read for each
PARTS = 4  # into which the resamples of so many requests are split, each with its own stream of random numbers
LARGEST_BATCH = 32_000_000  # draws at once all the same: 256 MB
SMALLEST_BCA = 10  # requests; with fewer, the jackknife says nothing about skewness
LARGEST_BCA = 5_000  # requests; with more, the two methods agree and a jackknife costs more than all resamples


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval; ``method`` says how the interval came about or why there is none."""

    value: float | None  # None: undefined, see method
    low: float | None  # lower limit; None when there is no interval
    high: float | None  # upper limit; None when there is no interval
    level: float  # nominal coverage, 0..1
    n: int  # requests (or rows, for bootstrap_rows)
    method: str  # "BCa", "percentile", "degenerate" (all resamples equal) or "undefined: <reason>"
    n_resamples: int  # asked for
    seed: int | None  # of the generator, when it was made from one number
    dropped: int = 0  # resamples in which the statistic had no value
    p: float | None = None  # two-sided bootstrap p-value of the null value, where one was given

    @property
    def defined(self) -> bool:
        """Is there an interval?"""
        return self.low is not None


def ratio(numerator: np.ndarray | float, denominator: np.ndarray | float) -> np.ndarray | float:
    """numerator / denominator, nan (no warning) where the denominator is 0; arrays broadcast.

    >>> ratio(6, 4), ratio(np.array([3.0, 1.0]), np.array([2.0, 0.0]))
    (1.5, array([1.5, nan]))
    """
    below = np.asarray(denominator, dtype=float)
    found = np.divide(numerator, np.where(below == 0, np.nan, below))
    return float(found) if found.ndim == 0 else found


def pooled_ratio(sums: np.ndarray) -> np.ndarray | float:
    """First sum over second sum, (..., 2) -> (...): block efficiency from (emitted, blocks).

    >>> pooled_ratio(np.array([8, 4]))
    2.0
    """
    return ratio(sums[..., 0], sums[..., 1])


def request_sums(values: np.ndarray, request_of: np.ndarray, n_requests: int) -> np.ndarray:
    """Sums over the rows of every request: values (B,) or (B, C), request_of (B,) -> (R,) or (R, C).

    >>> request_sums(np.array([3, 1, 2]), np.array([0, 0, 2]), 3)
    array([4., 0., 2.])
    """
    columns = values.reshape(len(values), math.prod(values.shape[1:])).T
    sums = [np.bincount(request_of, weights=c, minlength=n_requests) for c in columns]
    return np.stack(sums, axis=1).reshape(n_requests, *values.shape[1:])


def bootstrap_requests(
    statistic: Statistic,
    totals: np.ndarray,
    *,
    strata: np.ndarray | None,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    method: str = "BCa",
) -> Estimate:
    """Interval of one statistic by resampling requests within strata (workloads); see `bootstrap_many`."""
    return bootstrap_many(
        {0: statistic}, totals, strata=strata, rng=rng, n_resamples=n_resamples, level=level, method=method
    )[0]


def bootstrap_many(
    statistics: Mapping[Hashable, Statistic],
    totals: np.ndarray,
    *,
    strata: np.ndarray | None,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    method: str = "BCa",
    columns: Mapping[Hashable, Any] | None = None,
    within: Mapping[Hashable, Iterable[int]] | None = None,
    split: Iterable[Hashable] = (),
    null: Mapping[Hashable, float] | None = None,
) -> dict[Hashable, Estimate]:
    """One Estimate per statistic of per-request sums (R, *S), all from the same resamples of requests within strata.

    ``strata`` (R,), None is one stratum; ``method`` "BCa" (percentile where BCa is undefined, a resample has no value,
    or requests are very many) or "percentile". By name: ``columns``, the index into S that a statistic sees;
    ``within``, the strata that it is about (default: all; its n counts their requests); ``split``, statistics that get
    the sums of each stratum, (..., strata, *S); ``null``, the value against which a two-sided bootstrap p-value is
    given. Where every stratum holds one request, requests are drawn from all of them together and the method says so.
    """
    totals = np.asarray(totals, dtype=float)
    _check(totals, strata, n_resamples, level, method)
    labels, codes = np.unique(np.zeros(len(totals)) if strata is None else strata, return_inverse=True)
    sizes, split = np.bincount(codes, minlength=len(labels)), set(split)
    merged = len(totals) > 1 and sizes.max(initial=0) == 1
    used = {
        name: np.isin(labels, list(within[name])) if within and name in within else np.ones(len(labels), dtype=bool)
        for name in statistics
    }
    views = {
        name: _view(statistic, (columns or {}).get(name, Ellipsis), used[name], name in split)
        for name, statistic in statistics.items()
    }
    flat = totals.reshape(len(totals), math.prod(totals.shape[1:]))
    sample = _sample(flat, totals.shape[1:], codes, len(labels), merged, tuple(views.values()))
    values, drawn, limits = _resample(
        sample, rng, n_resamples, level, method if len(totals) <= LARGEST_BCA else "percentile"
    )
    found = {}
    for i, name in enumerate(statistics):
        n, alone = int(sizes[used[name]].sum()), sizes[used[name]].max(initial=0) < 2
        whole = merged and used[name].all()
        frame = {"level": level, "n": n, "n_resamples": n_resamples, "seed": _seed(rng)}
        found[name] = _estimate(
            values[i],
            None if alone and not whole else drawn[i],
            limits[i] if n >= SMALLEST_BCA else None,
            frame,
            (null or {}).get(name),
            ", strata of one request merged" if whole else "",
        )
    return found


def bootstrap_rows(
    statistic: Statistic,
    rows: np.ndarray,
    *,
    strata: np.ndarray | None,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
) -> Estimate:
    """The percentile interval that ignores requests and resamples blocks: too narrow, for comparison; rows (B, *S).

    Equal rows are drawn together (multinomial), so that millions of blocks with few distinct counts cost little.
    """
    rows = np.asarray(rows)
    _check(rows, strata, n_resamples, level, "percentile")
    group = np.zeros(len(rows)) if strata is None else strata
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    counts = pd.DataFrame(flat).assign(group=group).value_counts(["group", *range(flat.shape[1])], sort=False)
    distinct = counts.index.to_frame(index=False).to_numpy(dtype=float)
    frame = {"level": level, "n": len(rows), "n_resamples": n_resamples, "seed": _seed(rng)}
    parts = [(distinct[at, 1:], counts.to_numpy()[at]) for at in (distinct[:, 0] == g for g in np.unique(group))]
    with np.errstate(all="ignore"):
        value = float(np.ravel(statistic(rows.sum(axis=0)[None]))[0])
        if len(rows) < 2:
            return _estimate(value, None, None, frame, None)
        sums = sum(rng.multinomial(n.sum(), n / n.sum(), size=n_resamples) @ part for part, n in parts)
        drawn = np.broadcast_to(statistic(sums.reshape(n_resamples, *rows.shape[1:])), (n_resamples,))
    return _estimate(value, drawn, None, frame, None)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's (1979) step-down adjustment of p-values for a family of comparisons, shape kept.

    >>> holm(np.array([0.01, 0.04, 0.03]))
    array([0.03, 0.06, 0.06])
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return adjusted[np.argsort(order, kind="stable")]


# ---- how


def _check(values: np.ndarray, strata: np.ndarray | None, n_resamples: int, level: float, method: str) -> None:
    """Refuse what would give a number without meaning."""
    if strata is not None and len(strata) != len(values):
        raise ValueError(f"strata has {len(strata)} entries for {len(values)} requests; give one per request")
    if not np.isfinite(values).all():
        raise ValueError("totals hold nan or infinity; a request without a value belongs out of the table")
    if n_resamples < 1 or not 0 < level < 1 or method not in ("BCa", "percentile"):
        raise ValueError(
            f"n_resamples={n_resamples}, level={level}, method={method!r}: expected 1 or more, a number "
            "between 0 and 1, 'BCa' or 'percentile'"
        )


def _seed(rng: np.random.Generator) -> int | None:
    """The number that a generator was made from; None where it was made otherwise."""
    seed = rng.bit_generator.seed_seq.entropy
    return seed if isinstance(seed, int) else None


def _view(statistic: Statistic, columns: Any, used: np.ndarray, split: bool) -> Callable[..., np.ndarray]:
    """The statistic as a function of the sums of all strata (n, G, *S) and of their total (n, *S)."""
    at = columns if isinstance(columns, tuple) else (columns,)

    def view(sums: np.ndarray, total: np.ndarray) -> np.ndarray:
        if used.all() and not split:
            seen = total[:, *at]
        else:
            seen = sums[:, :, *at][:, used]
            seen = seen if split else seen.sum(axis=1)
        return np.broadcast_to(statistic(seen), (len(sums),))

    return view


@dataclass(frozen=True, slots=True)
class _Sample:
    """Per-request sums, how requests are drawn, and what is computed from a draw."""

    groups: tuple[tuple[_Part, ...], ...]  # requests that are drawn from each other, by stratum
    fixed: np.ndarray  # (G, C) sums of the strata of one request, which stay as they are
    whole: np.ndarray  # (G, C) sums of all requests
    shape: tuple[int, ...]  # of one request's sums
    views: tuple[Callable[..., np.ndarray], ...]

    def __call__(self, *drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        """Values (views, n) of drawn indices, one array (n, requests drawn) per group; (views,) of one draw, 1-D.

        The jackknife draws one request fewer from one group: sums are scaled, so that strata keep their weights.
        """
        if drawn[0].ndim == 1:
            return self(*(index[None] for index in drawn))[:, 0]
        sums = np.repeat(self.fixed[None], max(map(len, drawn)), axis=0)
        for parts, index in zip(self.groups, drawn, strict=True):
            counts = _counts(index, sum(len(part.sums) for part in parts))
            for part in parts:
                sums[:, part.stratum] = counts[:, part.where] @ part.sums
        return self.evaluate(sums)

    def evaluate(self, sums: np.ndarray) -> np.ndarray:
        """(views, n) values of sums (n, G, C) of every stratum."""
        sums = sums.reshape(*sums.shape[:2], *self.shape)
        total = sums.sum(axis=1)
        return np.stack([view(sums, total) for view in self.views]).astype(float)


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of one stratum within a group that is drawn together."""

    stratum: int
    where: np.ndarray | slice  # their places in the group
    sums: np.ndarray  # (requests, C)


def _sample(
    flat: np.ndarray,
    shape: tuple[int, ...],
    codes: np.ndarray,
    n_strata: int,
    merged: bool,
    views: tuple[Callable[..., np.ndarray], ...],
) -> _Sample:
    """The sample of sums (R, C) with strata (R,); ``merged``: requests are drawn from all strata together."""
    rows = [np.flatnonzero(codes == g) for g in range(n_strata)]
    fixed, whole = np.zeros((2, n_strata, flat.shape[1]))
    np.add.at(whole, codes, flat)
    if merged:
        groups: list[tuple[_Part, ...]] = [tuple(_Part(g, rows[g], flat[rows[g]]) for g in range(n_strata))]
    else:
        groups = [(_Part(g, slice(None), flat[rows[g]]),) for g in range(n_strata) if len(rows[g]) > 1]
        alone = [g for g in range(n_strata) if len(rows[g]) == 1]
        fixed[alone] = whole[alone]
    return _Sample(tuple(groups), fixed, whole, shape, views)


def _counts(index: np.ndarray, size: int) -> np.ndarray:
    """(n, size) how often each of `size` requests is drawn, scaled to `size` draws; one row where all are the same."""
    index = index[:1] if index.strides[0] == 0 else index
    offset = np.arange(len(index))[:, None] * size
    counts = np.bincount((index + offset).ravel(), minlength=len(index) * size).reshape(len(index), size)
    counts = counts.astype(float)
    return counts if index.shape[1] == size else counts * (size / index.shape[1])


def _resample(
    sample: _Sample, rng: np.random.Generator, n_resamples: int, level: float, method: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (S,), drawn values (S, n_resamples) and BCa limits (S, 2), nan where there are none."""
    sizes, n_views = [sum(len(part.sums) for part in group) for group in sample.groups], len(sample.views)
    with np.errstate(all="ignore"), warnings.catch_warnings(), threadpool_limits(1, "blas"):
        warnings.simplefilter("ignore")  # what is undefined is said by the Estimate
        values = sample.evaluate(sample.whole[None])[:, 0] if n_views else np.zeros(0)
        nothing = np.full((n_views, 2), np.nan)
        if not sizes or not np.isfinite(values).any():
            return values, np.full((n_views, 1), np.nan), nothing
        whole = [np.arange(size) for size in sizes]

        def draw(rng: np.random.Generator, n: int) -> Any:
            return stats.bootstrap(
                whole,
                sample,
                vectorized=True,
                axis=-1,
                n_resamples=n,
                confidence_level=level,
                method=method,
                rng=rng,
                batch=_batch(sum(sizes)),
            )

        if sum(sizes) <= LARGEST_BCA:
            found = draw(rng, n_resamples)
            drawn, limits = found.bootstrap_distribution, np.stack(found.confidence_interval, axis=-1)
            return values, drawn, limits if method == "BCa" else nothing
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # as many parts on every machine: equal numbers everywhere
            parts = [len(part) for part in np.array_split(np.arange(n_resamples), PARTS) if len(part)]
            found = list(pool.map(draw, rng.spawn(len(parts)), parts))
        return values, np.concatenate([part.bootstrap_distribution for part in found], axis=-1), nothing


def _batch(n_requests: int) -> int:
    """Resamples that are computed at once."""
    return max(1, BATCH // n_requests, min(MANY, LARGEST_BATCH // n_requests))


def _estimate(
    value: float,
    drawn: np.ndarray | None,
    bca: np.ndarray | None,
    frame: dict[str, Any],
    null: float | None,
    note: str = "",
) -> Estimate:
    """The Estimate of one statistic: `drawn` None means that nothing could be drawn, `bca` None or nan: percentile."""
    if not math.isfinite(value):
        return Estimate(None, None, None, method="undefined: the denominator is 0", **frame)
    if drawn is None:
        return Estimate(float(value), None, None, method="undefined: one request has no spread", **frame)
    kept = drawn[np.isfinite(drawn)]
    frame = {**frame, "dropped": frame["n_resamples"] - len(kept)}
    if not len(kept):
        return Estimate(float(value), None, None, method="undefined: no resample has a value", **frame)
    p = None if null is None else _p_value(kept - null)
    if np.ptp(kept) <= 1e-12 * max(1.0, abs(value)):
        return Estimate(float(value), float(value), float(value), method="degenerate" + note, p=p, **frame)
    if bca is not None and np.isfinite(bca).all() and not frame["dropped"]:
        return Estimate(float(value), *map(float, bca), method="BCa" + note, p=p, **frame)
    low, high = np.quantile(kept, ((1 - frame["level"]) / 2, (1 + frame["level"]) / 2))
    return Estimate(float(value), float(low), float(high), method="percentile" + note, p=p, **frame)


def _p_value(drawn: np.ndarray) -> float:
    """Two-sided bootstrap p-value of zero: twice the smaller tail, never 0 (one is added to both counts)."""
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return float(min(1.0, 2 * (tail + 1) / (len(drawn) + 1)))
