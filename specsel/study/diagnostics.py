"""Why the selector works, or does not: coefficients, importance, reliability, spread of features, learning curve,
transfer.

Everything is computed on the blocks of the dominant arm and returned as a small table with limits. Not handled here:
charts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from specsel.logs import STATS, BlockLog
from specsel.study.oldlogistic import NotFitted, feature_matrix, fit_selector, untuned
from specsel.study.oldredraft import capture, first_arm, gains, oracle_gap, redraft_rate, redraft_sums, skill
from specsel.study.oldselector import LowoTable
from specsel.study.oldstats import bootstrap_many, ratio, request_sums

TRANSFERRED = {"skill": skill, "capture": capture, "redraft_rate": redraft_rate, "oracle_gap": oracle_gap}
OUTCOMES = {
    "conf_first": "first token accepted",
    "conf_mean": "share of drafted tokens accepted",
    "conf_min": "whole draft accepted",
}


def coefficients(
    blocks: BlockLog,
    *,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    features: Sequence[str] = STATS,
) -> pd.DataFrame:
    """Log-odds per standard deviation of each feature, with limits from resampled requests.

    A resample moves the coefficients by one Newton step from the fit on all blocks, (curvature)^-1 x (change of the
    score), so that it costs a sum over requests and no refit. Columns: feature, coefficient, low, high, requests,
    method; no rows where nothing can be fitted.
    """
    try:
        fitted = untuned(blocks, np.ones(blocks.n_blocks, dtype=bool), features)
    except NotFitted:
        return pd.DataFrame(columns=["feature", "coefficient", "low", "high", "requests", "method"])
    z = np.column_stack([fitted.standardised(blocks.stats), np.ones(blocks.n_blocks)])
    p = fitted.probability(blocks.stats)
    penalty = np.diag([1.0] * (z.shape[1] - 1) + [0.0])  # of the library's default, C = 1
    steps = (((gains(blocks) > 0) - p)[:, None] * z) @ np.linalg.inv((z * (p * (1 - p))[:, None]).T @ z + penalty)
    sums = request_sums(steps[:, : len(features)], blocks.request_of, len(blocks.requests))
    found = bootstrap_many(
        {j: lambda s, j=j: fitted.weights[j] + s[..., j] - sums[:, j].sum() for j in range(len(features))},
        sums,
        strata=blocks.workload,
        rng=rng,
        n_resamples=n_resamples,
        level=level,
    )
    return pd.DataFrame(
        [
            {
                "feature": name,
                "coefficient": e.value,
                "low": e.low,
                "high": e.high,
                "requests": e.n,
                "method": f"{e.method}, one Newton step per resample",
            }
            for name, e in zip(features, found.values(), strict=True)
        ]
    )


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Probability that a block worth a redraft has the higher score (ties count half); nan with one class."""
    return float(roc_auc_score(label, score)) if 0 < label.sum() < len(label) else math.nan


def importance(
    blocks: BlockLog, table: LowoTable, *, rng: np.random.Generator, n_repeats: int = 20, level: float = 0.95
) -> pd.DataFrame:
    """How much the ranking (AUC) of a held-out workload loses when one feature is shuffled among its blocks.

    The models are those of leave-one-workload-out. Columns: workload, feature, auc (unshuffled), drop, low, high
    (spread over shuffles).
    """
    rows, label = [], gains(blocks) > 0
    for w, row in enumerate(table.rows):
        at = blocks.workload_of == w
        if row.selector is None or not 0 < label[at].sum() < at.sum():
            continue
        stats = {name: blocks.stats[name][at] for name in blocks.stats}
        whole = auc(row.selector.probability(stats), label[at])
        for name in row.selector.features:
            drops = [
                whole - auc(row.selector.probability({**stats, name: rng.permutation(stats[name])}), label[at])
                for _ in range(n_repeats if name in stats else 0)
            ] or [0.0]
            low, high = np.quantile(drops, ((1 - level) / 2, (1 + level) / 2))
            rows.append(
                {
                    "workload": row.workload,
                    "feature": name,
                    "auc": whole,
                    "drop": float(np.mean(drops)),
                    "low": low,
                    "high": high,
                }
            )
    return pd.DataFrame(rows, columns=["workload", "feature", "auc", "drop", "low", "high"])


def reliability(
    blocks: BlockLog, *, stat: str = "conf_first", bins: int = 10, rng: np.random.Generator, n_resamples: int = 2_000
) -> pd.DataFrame:
    """Stated confidence against observed acceptance, per arm, in bins of equal width; a calibrated arm lies on the
    diagonal.

    conf_first is compared with "first token accepted", conf_mean with accepted / proposed, conf_min with "everything
    accepted". Blocks without a draft or a value are left out. Columns: arm, confidence, acceptance, low, high, blocks,
    outcome.
    """
    rows = []
    for k, arm in enumerate(blocks.arms):
        value = blocks.stats.get(stat, np.full((blocks.n_blocks, len(blocks.arms)), np.nan))[:, k]
        known = np.isfinite(value) & (blocks.proposed[:, k] > 0)
        accepted, proposed = blocks.accepted[known, k], blocks.proposed[known, k]
        hit, of = {
            "conf_first": (accepted > 0, 1),
            "conf_mean": (accepted, proposed),
            "conf_min": (accepted == proposed, 1),
        }[stat]
        cell = np.minimum((value[known] * bins).astype(int), bins - 1)
        columns = np.stack(
            [hit * np.ones(len(cell)), of * np.ones(len(cell)), value[known], np.ones(len(cell))], axis=1
        )
        sums = request_sums(columns, blocks.request_of[known] * bins + cell, len(blocks.requests) * bins)
        rows += _bins(arm, stat, sums.reshape(-1, bins, 4), blocks.workload, rng, n_resamples)
    return pd.DataFrame(rows, columns=["arm", "confidence", "acceptance", "low", "high", "blocks", "outcome"])


def _bins(
    arm: str, stat: str, sums: np.ndarray, strata: np.ndarray, rng: np.random.Generator, n_resamples: int
) -> list[dict]:
    filled = [b for b in range(sums.shape[1]) if sums[:, b, 3].sum() > 0]
    found = bootstrap_many(
        dict.fromkeys(filled, lambda s: ratio(s[..., 0], s[..., 1])),
        sums,
        strata=strata,
        rng=rng,
        n_resamples=n_resamples,
        columns={b: b for b in filled},
    )
    totals = sums.sum(axis=0)
    return [
        {
            "arm": arm,
            "confidence": totals[b, 2] / totals[b, 3],
            "acceptance": found[b].value,
            "low": found[b].low,
            "high": found[b].high,
            "blocks": int(totals[b, 3]),
            "outcome": OUTCOMES[stat],
        }
        for b in filled
    ]


def feature_spread(blocks: BlockLog, *, features: Sequence[str] = STATS) -> pd.DataFrame:
    """Quantiles of each feature per workload, the share of missing values, and how well it ranks alone.

    A nearly constant feature (small p75 - p25) cannot carry a signal. `auc` is max(AUC, 1 - AUC) of the feature for
    "another arm emits more" inside the workload; `worth_it` is the share of such blocks. Undefined values are None.
    """
    x, label, rows = feature_matrix(blocks.stats, first_arm(blocks), features), gains(blocks) > 0, []
    for w, workload in enumerate(blocks.workloads):
        at = blocks.workload_of == w
        for j, name in enumerate(features):
            known = at & np.isfinite(x[:, j])
            values = x[known, j]
            ranked = auc(values, label[known]) if len(values) else np.nan
            quantiles = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist() if len(values) else [None] * 5
            rows.append(
                {
                    "workload": workload,
                    "feature": name,
                    **dict(zip(("p05", "p25", "p50", "p75", "p95"), quantiles, strict=True)),
                    "missing": float(ratio(at.sum() - known.sum(), at.sum())),
                    "worth_it": float(ratio(label[at].sum(), at.sum())),
                    "auc": max(ranked, 1 - ranked) if np.isfinite(ranked) else None,
                    "blocks": int(at.sum()),
                }
            )
    return pd.DataFrame(rows)


def learning_curve(
    blocks: BlockLog,
    *,
    rng: np.random.Generator,
    shares: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    n_repeats: int = 5,
    n_resamples: int = 2_000,
    features: Sequence[str] = STATS,
) -> pd.DataFrame:
    """Capture, redraft rate and skill on held-out workloads against the number of training blocks.

    Each point averages n_repeats random subsets of the training requests (sums first, then ratios); limits from
    resampled test requests. Columns: share, blocks (mean training blocks), skill, low, high, capture, redraft_rate,
    fitted (share of fits that worked).
    """
    rows = []
    for share in shares:
        sums, sizes, fitted = np.zeros((len(blocks.requests), 5)), [], []
        repeats = 1 if share >= 1 else n_repeats
        for _ in range(repeats):
            kept = rng.random(len(blocks.requests)) < share if share < 1 else np.ones(len(blocks.requests), dtype=bool)
            for w in range(len(blocks.workloads)):
                train = kept[blocks.request_of] & (blocks.workload_of != w)
                redraft, worked = _decided(blocks, train, blocks.workload_of == w, features)
                sums[blocks.workload == w] += redraft_sums(blocks, redraft)[blocks.workload == w] * worked / repeats
                sizes.append(train.sum())
                fitted.append(worked)
        found = bootstrap_many(
            {"skill": skill, "capture": capture, "rate": redraft_rate},
            sums,
            strata=blocks.workload,
            rng=rng,
            n_resamples=n_resamples,
        )
        rows.append(
            {
                "share": share,
                "blocks": float(np.mean(sizes)),
                "skill": found["skill"].value,
                "low": found["skill"].low,
                "high": found["skill"].high,
                "capture": found["capture"].value,
                "redraft_rate": found["rate"].value,
                "fitted": float(np.mean(fitted)),
            }
        )
    return pd.DataFrame(rows)


def _decided(blocks: BlockLog, train: np.ndarray, held: np.ndarray, features: Sequence[str]) -> tuple[np.ndarray, bool]:
    """(B,) redraft decisions on the held rows, False elsewhere and where nothing can be fitted."""
    redraft = np.zeros(blocks.n_blocks, dtype=bool)
    try:
        selector = fit_selector(blocks, train, features=features)
    except NotFitted:
        return redraft, False
    redraft[held] = selector.redraft(blocks.stats, held)
    return redraft, True


def transfer(
    blocks: BlockLog, *, rng: np.random.Generator, n_resamples: int = 2_000, features: Sequence[str] = STATS
) -> pd.DataFrame:
    """Train on one workload, test on each: skill with limits. On the diagonal, five folds of requests keep training and
    test apart.

    Columns: train, test, skill, low, high, capture, redraft_rate, oracle_gap, requests, reason (why there is no skill,
    or "").
    """
    rows, everything = [], np.ones(blocks.n_blocks, dtype=bool)
    for a, train_name in enumerate(blocks.workloads):
        mine = blocks.workload_of == a
        redraft, worked = _decided(blocks, mine, everything, features)
        own, own_worked = _cross_fitted(blocks, mine, features)
        sums, fitted = redraft_sums(blocks, np.where(mine, own, redraft)), [worked] * len(blocks.workloads)
        fitted[a] = own_worked
        found = bootstrap_many(
            {(b, name): f for b in range(len(fitted)) for name, f in TRANSFERRED.items()},
            sums,
            strata=blocks.workload,
            rng=rng,
            n_resamples=n_resamples,
            within={(b, name): [b] for b in range(len(fitted)) for name in TRANSFERRED},
        )
        for b, test_name in enumerate(blocks.workloads):
            e = {name: found[b, name] for name in TRANSFERRED}
            known = fitted[b] and e["skill"].value is not None
            why = "no gain, or nothing redrafted" if fitted[b] else "not fitted: one class"
            rows.append(
                {
                    "train": train_name,
                    "test": test_name,
                    "low": e["skill"].low if known else None,
                    "high": e["skill"].high if known else None,
                    "oracle_gap": e["oracle_gap"].value,
                    **{q: e[q].value if fitted[b] else None for q in ("skill", "capture", "redraft_rate")},
                    "requests": e["skill"].n,
                    "reason": "" if known else why,
                }
            )
    return pd.DataFrame(rows)


def _cross_fitted(blocks: BlockLog, held: np.ndarray, features: Sequence[str]) -> tuple[np.ndarray, bool]:
    """Decisions inside one workload: threshold and model from four fifths of its requests, applied to the fifth."""
    redraft, worked = np.zeros(blocks.n_blocks, dtype=bool), False
    for fold in range(5):
        test = held & (blocks.request_of % 5 == fold)
        decided, fine = _decided(blocks, held & ~test, test, features)
        redraft, worked = redraft | decided, worked or fine
    return redraft, worked


# ---- the pool itself
