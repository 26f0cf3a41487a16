"""Intervals for ratios of sums: requests are resampled, because blocks of one request are not independent.

A statistic here is a function of *sums over requests*: it maps an array of shape (..., *S) to (...). Whatever has to
be chosen from data (the best fixed arm, say) is chosen inside it, so it is chosen anew in every resample. Results are
always an ``Estimate``; what is undefined says so, with its reason, and never becomes nan or a warning.

Method: percentile and BCa intervals (Efron & Tibshirani 1993, chapters 13 and 14), stratified; equal to
``scipy.stats.bootstrap`` draw by draw, with sums by matrix products instead of gathered copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

__all__ = [
    "Estimate",
    "bootstrap_requests",
    "bootstrap_rows",
    "paired_difference",
    "paired_gain",
    "request_sums",
    "ratio",
    "pooled_ratio",
    "holm",
]

Statistic = Callable[[np.ndarray], np.ndarray]
BATCH = 4_000_000  # draws held in memory at once
SMALLEST_BCA = 10  # requests; with fewer, the jackknife says nothing about skewness


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
    p: float | None = None  # two-sided bootstrap p-value of "the difference is 0"; differences only

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


def bootstrap_requests(statistic: Statistic, totals: np.ndarray, *, strata: np.ndarray | None, rng: np.random.Generator,
                       n_resamples: int = 10_000, level: float = 0.95, method: str = "BCa") -> Estimate:
    """Interval of a statistic by resampling requests within strata (workloads).

    Parameters: ``totals`` (R, *S), sums of every request; ``statistic`` maps sums (..., *S) to (...); ``strata`` (R,)
    stratum of every request, or None for one; ``method`` "BCa" (percentile where BCa is undefined) or "percentile".
    """
    totals = np.asarray(totals, dtype=float)
    return _bootstrap(statistic, totals, np.ones(len(totals), dtype=int), strata, rng, (n_resamples, level, method))


def bootstrap_rows(statistic: Statistic, rows: np.ndarray, *, strata: np.ndarray | None, rng: np.random.Generator,
                   n_resamples: int = 10_000, level: float = 0.95, method: str = "BCa") -> Estimate:
    """The interval that ignores requests and resamples blocks: too narrow, for comparison only; rows (B, *S).

    Equal rows are drawn together (multinomial), so that millions of blocks with few distinct counts cost little.
    """
    rows = np.asarray(rows, dtype=float)
    group = np.zeros(len(rows)) if strata is None else strata
    table = np.column_stack([group, rows.reshape(len(rows), math.prod(rows.shape[1:]))])
    distinct, counts = np.unique(table, axis=0, return_counts=True)
    return _bootstrap(statistic, distinct[:, 1:].reshape(-1, *rows.shape[1:]), counts, distinct[:, 0], rng,
                      (n_resamples, level, method))


def paired_difference(statistic: Statistic, first: np.ndarray, second: np.ndarray, *, strata: np.ndarray | None,
                      rng: np.random.Generator, n_resamples: int = 10_000, level: float = 0.95) -> Estimate:
    """statistic(first) - statistic(second), both (R, *S) over the same requests, resampled together; with p-value."""
    return _bootstrap(
        lambda s: statistic(s[:, 0]) - statistic(s[:, 1]),
        np.stack([first, second], axis=1).astype(float),
        np.ones(len(first), dtype=int),
        strata,
        rng,
        (n_resamples, level, "BCa"),
        with_p=True,
    )


def paired_gain(statistic: Statistic, first: np.ndarray, second: np.ndarray, *, strata: np.ndarray | None,
                rng: np.random.Generator, n_resamples: int = 10_000, level: float = 0.95) -> Estimate:
    """statistic(first) / statistic(second) - 1, requests resampled together: headroom, when ``first`` is an oracle."""
    return bootstrap_requests(
        lambda s: ratio(statistic(s[:, 0]), statistic(s[:, 1])) - 1,
        np.stack([first, second], axis=1),
        strata=strata,
        rng=rng,
        n_resamples=n_resamples,
        level=level,
    )


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


def _bootstrap(statistic: Statistic, values: np.ndarray, counts: np.ndarray, strata: np.ndarray | None,
               rng: np.random.Generator, options: tuple[int, float, str], with_p: bool = False) -> Estimate:
    """Resample rows of ``values`` (U, *S), each standing for ``counts`` equal units, within strata."""
    n_resamples, level, method = options
    _check(values, strata, options)
    codes = np.zeros(len(values), dtype=int) if strata is None else np.unique(strata, return_inverse=True)[1]
    sizes = np.bincount(codes, weights=counts).astype(int)
    seed = rng.bit_generator.seed_seq.entropy
    frame = {
        "level": level,
        "n": int(counts.sum()),
        "n_resamples": n_resamples,
        "seed": seed if isinstance(seed, int) else None,
    }
    with np.errstate(all="ignore"):
        value = float(np.ravel(statistic(np.tensordot(counts.astype(float), values, axes=1)[None]))[0])
        if not math.isfinite(value):
            return Estimate(None, None, None, method="undefined: the denominator is 0", **frame)
        if not (sizes > 1).any():
            return Estimate(value, None, None, method="undefined: one request has no spread", **frame)
        drawn = _resample(statistic, values, counts, codes, rng, n_resamples)
        kept = drawn[np.isfinite(drawn)]
        frame["dropped"] = n_resamples - len(kept)
        if not len(kept):
            return Estimate(value, None, None, method="undefined: no resample has a value", **frame)
        use_bca = method == "BCa" and counts.sum() >= SMALLEST_BCA
        shape = _bca_shape(statistic, values, counts, codes, kept, value) if use_bca else None
    low, high, method = _limits(kept, shape, value, level)
    return Estimate(value, low, high, method=method, p=_p_value(kept) if with_p else None, **frame)


def _check(values: np.ndarray, strata: np.ndarray | None, options: tuple[int, float, str]) -> None:
    """Refuse what would give a number without meaning."""
    n_resamples, level, method = options
    if strata is not None and len(strata) != len(values):
        raise ValueError(f"strata has {len(strata)} entries for {len(values)} requests; give one per request")
    if not np.isfinite(values).all():
        raise ValueError(
            "totals hold nan or infinity; a request without a value belongs out of the table, not in a sum"
        )
    if n_resamples < 1 or not 0 < level < 1 or method not in ("BCa", "percentile"):
        raise ValueError(f"n_resamples={n_resamples}, level={level}, method={method!r}: expected 1 or more, a number "
                         "between 0 and 1, 'BCa' or 'percentile'")


def _resample(statistic: Statistic, values: np.ndarray, counts: np.ndarray, codes: np.ndarray, rng: np.random.Generator,
              n_resamples: int) -> np.ndarray:
    """(n_resamples,) values of the statistic; units are drawn with replacement within every stratum."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    groups = [np.flatnonzero(codes == g) for g in range(codes.max() + 1)]
    batch = max(1, BATCH // max(len(values), 1))
    drawn = []
    for start in range(0, n_resamples, batch):
        n = min(batch, n_resamples - start)
        sums = sum(_weights(counts[rows], n, rng) @ flat[rows] for rows in groups)
        drawn.append(np.broadcast_to(statistic(sums.reshape(n, *values.shape[1:])), (n,)))
    return np.concatenate(drawn).astype(float)


def _weights(counts: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """(n, U) float: how often each row is drawn when as many units as there are are drawn with replacement."""
    total = int(counts.sum())
    if total != len(counts):
        return rng.multinomial(total, counts / total, size=n).astype(float)
    chosen = rng.integers(0, total, size=(n, total))
    chosen += np.arange(n)[:, None] * total
    return np.bincount(chosen.ravel(), minlength=n * total).reshape(n, total).astype(float)


def _bca_shape(statistic: Statistic, values: np.ndarray, counts: np.ndarray, codes: np.ndarray, drawn: np.ndarray,
               value: float) -> tuple[float, float] | None:
    """Bias and acceleration of BCa; None where they are undefined.

    Acceleration from the jackknife within strata: a unit is left out and its stratum scaled back to its size, so that
    strata keep their weights (for one stratum and a ratio the scaling cancels).
    """
    bias = ndtri(((drawn < value).mean() + (drawn <= value).mean()) / 2)
    sizes = np.bincount(codes, weights=counts)
    sums = np.stack([np.tensordot(counts * (codes == g), values, axes=1) for g in range(len(sizes))])
    n = sizes[codes]
    scale = (n / np.maximum(n - 1, 1)).reshape(-1, *[1] * (values.ndim - 1))
    left_out = sums.sum(axis=0) - sums[codes] + (sums[codes] - values) * scale
    found = np.broadcast_to(statistic(left_out), (len(values),))
    centre = np.bincount(codes, weights=counts * found) / sizes
    influence = np.where(n > 1, (n - 1) * (centre[codes] - found), 0.0)
    cubes, squares = (np.sum(counts * influence**k / n**k) for k in (3, 2))
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else math.nan
    return (bias, acceleration) if math.isfinite(bias) and math.isfinite(acceleration) else None


def _limits(
    drawn: np.ndarray, shape: tuple[float, float] | None, value: float, level: float
) -> tuple[float, float, str]:
    """Lower limit, upper limit, and the method that gave them."""
    span = drawn.max() - drawn.min()
    if span <= 1e-12 * max(1.0, abs(value)):
        return value, value, "degenerate"
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    if shape is not None:
        bias, acceleration = shape
        z = bias + ndtri(tails)
        with np.errstate(all="ignore"):
            tails = ndtr(bias + z / (1 - acceleration * z))
    low, high = np.quantile(drawn, tails)
    return float(low), float(high), "percentile" if shape is None else "BCa"


def _p_value(drawn: np.ndarray) -> float:
    """Two-sided bootstrap p-value of zero: twice the smaller tail, never 0 (one is added to both counts)."""
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return float(min(1.0, 2 * (tail + 1) / (len(drawn) + 1)))
