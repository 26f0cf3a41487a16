"""Many intervals from one set of resamples: all statistics of a log see the same requests, so all of them are paired.

Equal, draw by draw, to `specsel.statistics.bootstrap_requests` for each statistic alone; what differs is the time,
because drawing is most of it. Not handled here: what a statistic means.
"""
from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specsel import statistics as st
from specsel.statistics import Estimate, Statistic


def bootstrap_many(statistics: Mapping[Hashable, Statistic], totals: np.ndarray, *, strata: np.ndarray | None,
                   rng: np.random.Generator,
                   n_resamples: int = 10_000, level: float = 0.95, columns: Mapping[Hashable, Any] | None = None,
                   within: Mapping[Hashable, Iterable[int]] | None = None, split: Iterable[Hashable] = (),
                   null: Mapping[Hashable, float] | None = None) -> dict[Hashable, Estimate]:
    """One Estimate per statistic of per-request sums (R, *S); each maps sums (..., *S) to (...).

    strata (R,) are integers, None is one stratum. By name: columns, the index into S that a statistic sees; within, the
    strata that it is about (default: all; its n counts their requests); split, statistics that get the sums of each
    stratum, (..., strata, *S); null, the value against which a two-sided bootstrap p-value is given. Where every
    stratum holds one request, requests are drawn from all of them together and the method says so.
    """
    totals = np.asarray(totals, dtype=float)
    labels, codes = np.unique(np.zeros(len(totals), dtype=int) if strata is None else strata, return_inverse=True)
    merged = 1 < len(totals) == len(labels)
    sums = _stratum_sums(totals, codes, len(labels), merged, rng, n_resamples)
    seed = rng.bit_generator.seed_seq.entropy
    frame = {"level": level, "n_resamples": n_resamples, "seed": seed if isinstance(seed, int) else None}
    found = {}
    for name, statistic in statistics.items():
        used = np.isin(labels, list(within[name])) if within and name in within else np.ones(len(labels), dtype=bool)
        rows, at = used[codes], _index((columns or {}).get(name, Ellipsis))
        # slice columns first: a view
        values, drawn, group = totals[at][rows], sums[:, :, *at[1:]][:, used], codes[rows]
        if name in split:
            values = _spread(values, np.unique(group, return_inverse=True)[1], int(used.sum()))
        else:
            drawn = drawn.sum(axis=1)
        whole = merged and used.all()
        found[name] = _estimate(statistic, values, drawn, group * 0 if whole else group, frame, (null or {}).get(name))
        if whole and found[name].defined:
            found[name] = replace(found[name], method=f"{found[name].method}, strata of one request merged")
    return found


def _index(at: Any) -> tuple:
    return (slice(None), *at) if isinstance(at, tuple) else (slice(None), at)


def _spread(values: np.ndarray, codes: np.ndarray, n: int) -> np.ndarray:
    """(R, *S) -> (R, n, *S): every request's sums in the row of its stratum, zeros elsewhere."""
    out = np.zeros((len(values), n, *values.shape[1:]))
    out[np.arange(len(values)), codes] = values
    return out


def _stratum_sums(totals: np.ndarray, codes: np.ndarray, n_strata: int, merged: bool, rng: np.random.Generator,
                  n_resamples: int) -> np.ndarray:
    """(n_resamples, strata, *S) sums over requests that are drawn with replacement within every stratum."""
    flat = totals.reshape(len(totals), math.prod(totals.shape[1:]))
    strata = [np.flatnonzero(codes == g) for g in range(n_strata)]
    groups = [np.arange(len(totals))] if merged else strata
    out, batch = np.zeros((n_resamples, n_strata, flat.shape[1])), max(1, st.BATCH // max(len(totals), 1))
    for start in range(0, n_resamples, batch):
        n = min(batch, n_resamples - start)
        weights = [st._weights(np.ones(len(rows), dtype=int), n, rng) for rows in groups]
        for g, rows in enumerate(strata):
            out[start:start + n, g] = (weights[0][:, rows] if merged else weights[g]) @ flat[rows]
    return out.reshape(n_resamples, n_strata, *totals.shape[1:])


def _estimate(statistic: Statistic, totals: np.ndarray, sums: np.ndarray, codes: np.ndarray, frame: dict,
              null: float | None) -> Estimate:
    """One statistic of sums (n_resamples, *S) that are there already."""
    frame = {**frame, "n": len(totals)}
    with np.errstate(all="ignore"):
        value = float(np.ravel(statistic(totals.sum(axis=0)[None]))[0])
        if not math.isfinite(value):
            return Estimate(None, None, None, method="undefined: the denominator is 0", **frame)
        if np.bincount(codes).max() < 2:
            return Estimate(value, None, None, method="undefined: one request has no spread", **frame)
        drawn = np.broadcast_to(statistic(sums), (len(sums),)).astype(float)
        kept = drawn[np.isfinite(drawn)]
        if not len(kept):
            return Estimate(value, None, None, method="undefined: no resample has a value", **frame)
        codes = np.unique(codes, return_inverse=True)[1]
        counts = np.ones(len(totals), dtype=int)
        shape = st._bca_shape(statistic, totals, counts, codes, kept, value) if len(totals) >= st.SMALLEST_BCA else None
    low, high, method = st._limits(kept, shape, value, frame["level"])
    return Estimate(value, low, high, method=method, dropped=len(drawn) - len(kept),
                    p=None if null is None else st._p_value(kept - null), **frame)
