"""The redraft selector: after the dominant arm has drafted, decide from its confidence whether the other arms draft too.

Features are statistics of the dominant arm's draft, the label is "another arm emits more", the model is a logistic regression on
standardised features, judged on workloads that neither the model nor its threshold has seen. Everything is computed from
per-request sums, so that requests can be resampled. Not handled here: routing before drafting, diagnostics, charts.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from specsel.intervals import bootstrap_many
from specsel.log import STATS, BlockLog, PositionLog, SpecselError, write_bytes_atomically
from specsel.redraft import (
    BLOCKS,
    GAIN,
    capture,
    first_arm,
    gains,
    oracle_gap,
    redraft_rate,
    redraft_sums,
    skill,
    token_gain,
)
from specsel.statistics import Estimate, holm

MAX_ROWS = 200_000  # training blocks of one fit, thinned evenly; the learning curve is flat long before
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
CRITERION = ("highest mean of capture - redraft rate (height above random redrafting) over the training workloads, each judged by "
             "a model that has not seen it; ties go to the highest threshold")


class NotFitted(SpecselError):
    """A selector that these blocks cannot give; the message starts with 'not fitted:' and says why."""


# ---- the model


@dataclass(frozen=True, slots=True)
class Selector:
    """A fitted redraft selector: everything that is needed to apply it, and what it was trained on."""

    arms: tuple[str, ...]  # the pool, in order
    dominant: str  # the arm that drafts first
    draft_len: int
    features: tuple[str, ...]  # F statistics of the dominant arm's draft
    fill: tuple[float, ...]  # (F,) training means that replace missing values
    center: tuple[float, ...]  # (2F,) of the filled features, then of their missing indicators (0 or 1)
    scale: tuple[float, ...]  # (2F,)
    weights: tuple[float, ...]  # (2F,) change in log-odds per standard deviation
    intercept: float
    threshold: float  # redraft when the probability that another arm emits more is at least this
    search: tuple[tuple[float, float], ...] = ()  # (threshold, criterion) of the inner loop
    trained_on: Mapping[str, Any] = field(default_factory=dict)  # run, log_sha256, workloads, requests, blocks

    def probability(self, stats: Mapping[str, np.ndarray]) -> np.ndarray:
        """(N,) probability that another arm emits more; stats: log.stats or blocks.stats, arrays (N, K)."""
        x = feature_matrix(stats, self.arms.index(self.dominant), self.features)
        z = (_design(x, np.array(self.fill)) - np.array(self.center)) / np.array(self.scale)
        return expit(z @ np.array(self.weights) + self.intercept)

    def redraft(self, stats: Mapping[str, np.ndarray]) -> np.ndarray:
        """(N,) bool: probability >= threshold."""
        return self.probability(stats) >= self.threshold

    def save(self, path: str | Path) -> None:
        """Write the selector as readable JSON."""
        text = json.dumps({"schema": 1, "kind": "redraft selector", **asdict(self), "criterion": CRITERION}, indent=1, allow_nan=False)
        write_bytes_atomically(path, text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path, *, arms: Sequence[str] | None = None, draft_len: int | None = None,
             features: Sequence[str] | None = None) -> Selector:
        """Read a selector; refuses another pool, draft length or feature set than the one given, by name."""
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            kind = data.pop("kind", None), data.pop("schema", None)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SpecselError(f"{path}: is no readable selector ({error}); make one with `specsel selector fit`") from None
        data.pop("criterion", None)
        if kind != ("redraft selector", 1) or set(data) != set(cls.__dataclass_fields__):
            raise SpecselError(f"{path}: is no redraft selector of schema 1; make one with `specsel selector fit`")
        made = cls(**{key: _tuples(value) for key, value in data.items()})
        for name, wanted in (("arms", arms), ("draft_len", draft_len), ("features", features)):
            found = getattr(made, name)
            if wanted is not None and found != _tuples(wanted):
                raise SpecselError(f"{path}: was trained for {name} {found}, but this run has {_tuples(wanted)}; "
                                   "fit a selector on a log of this pool with `specsel selector fit`")
        return made


def feature_matrix(stats: Mapping[str, np.ndarray], arm: int, features: Sequence[str]) -> np.ndarray:
    """(N, F) features of one arm, nan where missing or not logged."""
    rows = len(next(iter(stats.values())))
    return np.stack([stats[name][:, arm] if name in stats else np.full(rows, np.nan) for name in features], axis=1)


def _design(x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    missing = np.isnan(x)
    return np.concatenate([np.where(missing, fill, x), missing], axis=1)


def fit_selector(blocks: BlockLog, train: np.ndarray | None = None, *, features: Sequence[str] = STATS,
                 thresholds: Sequence[float] = THRESHOLDS, trained_on: Mapping[str, Any] | None = None) -> Selector:
    """Fit model and threshold on the blocks of `train` (B,) bool, and on nothing else.

    Missing values become training means plus an indicator. The threshold follows `CRITERION` in an inner leave-one-workload-out
    loop (five folds of requests where one workload, or no scorable one, is left).
    Raises NotFitted when the training blocks hold one class or no value of any feature.
    """
    train = np.ones(blocks.n_blocks, dtype=bool) if train is None else train
    model = fit_model(blocks, train, features)
    search = _threshold_search(blocks, train, features, thresholds)
    best = max(range(len(search)), key=lambda i: (search[i][1], search[i][0]))
    used = np.unique(blocks.request_of[train])
    trained = {"workloads": [blocks.workloads[w] for w in np.unique(blocks.workload[used])], "requests": len(used),
               "blocks": int(train.sum()), **(trained_on or {})}
    return Selector(blocks.arms, blocks.path_arm, blocks.draft_len, tuple(features), **model, threshold=search[best][0],
                    search=tuple(search), trained_on=trained)


def fit_model(blocks: BlockLog, train: np.ndarray, features: Sequence[str], weights: np.ndarray | None = None) -> dict[str, Any]:
    """Fill values, scaler and coefficients from the training rows; weights (B,) count each block."""
    rows = np.flatnonzero(train)
    rows = rows[::max(1, -(-len(rows) // MAX_ROWS))]
    x, label = feature_matrix(blocks.stats, first_arm(blocks), features)[rows], gains(blocks)[rows] > 0
    if label.all() or not label.any():
        raise NotFitted("not fitted: one class (the training blocks are " + ("all" if label.any() else "never") + " worth a redraft)")
    if np.isnan(x).all():
        raise NotFitted(f"not fitted: '{blocks.path_arm}' has no value of {', '.join(features)} in the training blocks")
    weights = None if weights is None else weights[rows]
    counts = ~np.isnan(x)
    fill = np.where(counts, x, 0).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    scaler = StandardScaler().fit(_design(x, fill), sample_weight=weights)
    model = LogisticRegression(max_iter=1000).fit(scaler.transform(_design(x, fill)), label, sample_weight=weights)
    vectors = {"fill": fill, "center": scaler.mean_, "scale": scaler.scale_, "weights": model.coef_[0]}
    return {name: tuple(v.tolist()) for name, v in vectors.items()} | {"intercept": float(model.intercept_[0])}


def folds(blocks: BlockLog, train: np.ndarray) -> Iterator[np.ndarray]:
    """Groupings (B,) of the training blocks for inner loops: by workload if there are two, then by request into five folds."""
    if len(np.unique(blocks.workload_of[train])) > 1:
        yield blocks.workload_of
    yield blocks.request_of % 5


def _threshold_search(blocks: BlockLog, train: np.ndarray, features: Sequence[str], thresholds: Sequence[float]) -> list[tuple[float, float]]:
    """(threshold, mean over folds of capture - redraft rate), from the training blocks alone."""
    gain = gains(blocks)
    for groups in folds(blocks, train):
        scores = []
        for group in np.unique(groups[train]):
            held = train & (groups == group)
            if gain[held].sum() > 0 and (probability := out_of_fold(blocks, train & (groups != group), held, features)) is not None:
                scores.append(_heights(probability, gain[held], thresholds))
        if scores:
            return list(zip(map(float, thresholds), np.mean(scores, axis=0).tolist()))
    raise NotFitted("not fitted: no fold of the training blocks can judge a threshold (no gain, or one class without it)")


def _heights(probability: np.ndarray, gain: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """(T,) capture - redraft rate of redrafting where probability >= threshold."""
    order = np.argsort(thresholds, kind="stable")
    passed = np.searchsorted(np.asarray(thresholds)[order], probability, side="right")
    taken, chosen = (np.bincount(passed, weights=w, minlength=len(order) + 1)[::-1].cumsum()[::-1][1:] for w in (gain, None))
    found = np.empty(len(order))
    found[order] = taken / gain.sum() - chosen / len(gain)
    return found


def out_of_fold(blocks: BlockLog, train: np.ndarray, held: np.ndarray, features: Sequence[str] = STATS) -> np.ndarray | None:
    """Probabilities on the held rows of a model fitted on the training rows, None where that cannot be fitted."""
    try:
        model = fit_model(blocks, train, features)
    except NotFitted:
        return None
    applied = Selector(blocks.arms, blocks.path_arm, blocks.draft_len, tuple(features), **model, threshold=0.5)
    return applied.probability({name: values[held] for name, values in blocks.stats.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


# ---- leave one workload out

RATIOS = {"oracle_gap": oracle_gap, "capture": capture, "redraft_rate": redraft_rate, "skill": skill, "token_gain": token_gain}
UNDEFINED = {"oracle_gap": "undefined: no blocks", "capture": "undefined: no block has a gain", "redraft_rate": "undefined: no blocks",
             "skill": "undefined: no block has a gain, or none is redrafted", "token_gain": "undefined: no blocks"}
Verdict = str  # "beats random", "no measurable benefit", "worse than random", or "undefined: ..." / "not fitted: ..."


@dataclass(frozen=True, slots=True)
class LowoRow:
    """One workload, judged by a selector that was trained on the others."""

    workload: str
    selector: Selector | None  # None when it could not be fitted
    reason: str  # why not, or ""
    requests: int
    blocks: int
    estimates: Mapping[str, Estimate]  # oracle_gap, capture, redraft_rate, skill, token_gain over the workload's requests
    p_holm: float | None  # two-sided p-value of skill = 1, adjusted for all fitted workloads
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LowoTable:
    """All workloads of a log, each held out once."""

    rows: tuple[LowoRow, ...]  # in the order of blocks.workloads
    probability: np.ndarray  # (B,) from the selector that has not seen the block's workload; nan where not fitted
    redraft: np.ndarray  # (B,) bool, with that selector's threshold; False where not fitted
    sums: np.ndarray  # (R, 5) redraft_sums of these decisions
    fitted: np.ndarray  # (R,) bool: the request's workload has a selector
    pooled: Mapping[str, Estimate]  # the same five quantities over all fitted workloads

    def frame(self) -> pd.DataFrame:
        """One row per workload: threshold, estimates with limits, verdict."""
        return pd.DataFrame([{
            "workload": row.workload, "threshold": row.selector.threshold if row.selector else None, "requests": row.requests,
            "blocks": row.blocks, "verdict": row.verdict, "p_holm": row.p_holm, **{
                key + tail: getattr(estimate, part) for key, estimate in row.estimates.items()
                for tail, part in (("", "value"), ("_low", "low"), ("_high", "high"))}} for row in self.rows])

    def redraft_at(self, log: PositionLog) -> np.ndarray:
        """(N,) decisions at every position of the log, by the selector that has not seen the position's workload."""
        found, workload = np.zeros(log.n_positions, dtype=bool), log.workload[log.request_of]
        for w, row in enumerate(self.rows):
            if row.selector is not None:
                at = workload == w
                found[at] = row.selector.redraft({name: values[at] for name, values in log.stats.items()})
        return found


def leave_one_workload_out(blocks: BlockLog, *, rng: np.random.Generator, n_resamples: int = 10_000, level: float = 0.95,
                           features: Sequence[str] = STATS, thresholds: Sequence[float] = THRESHOLDS) -> LowoTable:
    """Fit on all workloads but one, threshold included, and judge the one; once for each workload.

    A workload whose training blocks hold one class is reported as not fitted and the others go on; a workload without any gain
    has an undefined capture and skill. Verdicts come from the interval of the skill and its Holm-adjusted p-value.
    """
    workload_of = blocks.workload_of
    probability, redraft = np.full(blocks.n_blocks, np.nan), np.zeros(blocks.n_blocks, dtype=bool)
    found: list[Selector | NotFitted] = [_held_out(blocks, w, features, thresholds) for w in range(len(blocks.workloads))]
    for w, selector in enumerate(found):
        if isinstance(selector, Selector):
            at = workload_of == w
            probability[at] = selector.probability({name: values[at] for name, values in blocks.stats.items()})
            redraft[at] = probability[at] >= selector.threshold
    sums = redraft_sums(blocks, redraft)
    fitted = np.array([isinstance(s, Selector) for s in found], dtype=bool)[blocks.workload]

    scopes = {w: [w] for w in range(len(blocks.workloads))} | {"all": np.unique(blocks.workload[fitted])}
    names = {(scope, key): part for scope, part in scopes.items() for key in RATIOS}
    drawn = bootstrap_many({name: RATIOS[name[1]] for name in names}, sums, strata=blocks.workload, rng=rng, n_resamples=n_resamples,
                           level=level, within=names, null={name: 1.0 for name in names if name[1] == "skill"})
    estimates = {scope: {key: _worded(drawn[scope, key], key) for key in RATIOS} for scope in scopes}
    tested = [w for w, s in enumerate(found) if isinstance(s, Selector) and estimates[w]["skill"].defined]
    adjusted = dict(zip(tested, holm(np.array([estimates[w]["skill"].p for w in tested])).tolist()))
    rows = tuple(_row(blocks, w, selector, estimates[w], adjusted.get(w)) for w, selector in enumerate(found))
    pooled = estimates["all"] if fitted.any() else _undefined(estimates["all"], "not fitted for any workload")
    return LowoTable(rows, probability, redraft, sums, fitted, pooled)


def _worded(estimate: Estimate, key: str) -> Estimate:
    """The same estimate, its reason in the words of the quantity."""
    return estimate if estimate.value is not None else replace(estimate, method=UNDEFINED[key])


def _undefined(like: Mapping[str, Estimate], reason: str) -> dict[str, Estimate]:
    """Estimates without a value, for that reason; the oracle gap needs no selector and stays."""
    return {key: e if key == "oracle_gap" else replace(e, value=None, low=None, high=None, p=None, method=f"undefined: {reason}")
            for key, e in like.items()}


def _held_out(blocks: BlockLog, w: int, features: Sequence[str], thresholds: Sequence[float]) -> Selector | NotFitted:
    train = blocks.workload_of != w
    if not train.any():
        return NotFitted("not fitted: no other workload to train on")
    try:
        return fit_selector(blocks, train, features=features, thresholds=thresholds)
    except NotFitted as reason:
        return reason


def _row(blocks: BlockLog, w: int, selector: Selector | NotFitted, estimates: dict[str, Estimate], p_holm: float | None) -> LowoRow:
    at = blocks.workload == w
    fitted = isinstance(selector, Selector)
    reason = "" if fitted else str(selector)
    estimates = estimates if fitted else _undefined(estimates, reason)
    return LowoRow(blocks.workloads[w], selector if fitted else None, reason, int(at.sum()), int(at[blocks.request_of].sum()),
                   estimates, p_holm, reason or verdict(estimates, p_holm))


def verdict(estimates: Mapping[str, Estimate], p_holm: float | None) -> Verdict:
    """The sentence about a skill: its interval must exclude 1 and its adjusted p-value must be at most 1 - level."""
    found = estimates["skill"]
    if estimates["capture"].value is None:
        return "undefined: no block has a gain"
    excluded = found.defined and not found.low <= 1.0 <= found.high and p_holm is not None and p_holm <= 1 - found.level
    if not excluded:
        return "no measurable benefit"
    return "beats random" if found.low > 1.0 else "worse than random"


# ---- the threshold frontier


def frontier_sums(blocks: BlockLog, probability: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """(R, T, 5) `redraft_sums` of every (ascending) threshold at once; blocks with nan probability count nowhere."""
    known, n_bins = np.isfinite(probability), len(thresholds) + 1
    passed = np.searchsorted(thresholds, probability, side="right")  # thresholds that the block reaches
    cell = blocks.request_of[known] * n_bins + passed[known]

    def reached(weights: np.ndarray) -> np.ndarray:
        table = np.bincount(cell, weights=weights, minlength=len(blocks.requests) * n_bins).reshape(-1, n_bins)
        return table[:, ::-1].cumsum(axis=1)[:, ::-1]  # column t: blocks that reach at least t thresholds

    base = blocks.emitted[known, first_arm(blocks)].astype(float)
    gain, one = reached(gains(blocks)[known].astype(float)), reached(np.ones(len(base)))
    whole = [np.broadcast_to(x[:, :1], gain[:, 1:].shape) for x in (reached(base), gain, one)]
    return np.stack([whole[0], whole[1], gain[:, 1:], one[:, 1:], whole[2]], axis=-1)


def frontier(blocks: BlockLog, probability: np.ndarray, *, rng: np.random.Generator, n_resamples: int = 2_000, level: float = 0.95,
             thresholds: Sequence[float] = tuple(np.round(np.linspace(0, 1, 101), 2))) -> pd.DataFrame:
    """Capture against redraft rate over all thresholds, for all workloads together ("all") and each alone.

    probability (B,), nan = block left out. Columns: scope, threshold, redraft_rate, capture, low, high (of the capture at this
    threshold), skill, token_gain, oracle_gap, requests, blocks. A scope without any gain has no capture and no rows.
    """
    thresholds = np.sort(thresholds)
    totals = frontier_sums(blocks, probability, thresholds)
    used = totals[:, 0, BLOCKS] > 0
    scopes = {"all": used} | {name: used & (blocks.workload == w) for w, name in enumerate(blocks.workloads)}
    tables = [_frontier_of(scope, totals[at], blocks.workload[at], thresholds, rng, (n_resamples, level))
              for scope, at in scopes.items() if totals[at, 0, GAIN].sum() > 0]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=FRONTIER)


FRONTIER = ("scope", "threshold", "redraft_rate", "capture", "low", "high", "skill", "token_gain", "oracle_gap", "requests", "blocks")


def _frontier_of(scope: str, totals: np.ndarray, strata: np.ndarray, thresholds: np.ndarray, rng: np.random.Generator,
                 options: tuple[int, float]) -> pd.DataFrame:
    sums = totals.sum(axis=0)
    band = bootstrap_many(dict.fromkeys(range(len(thresholds)), capture), totals, strata=strata, rng=rng, n_resamples=options[0],
                          level=options[1], columns={t: t for t in range(len(thresholds))})
    return pd.DataFrame({"scope": scope, "threshold": thresholds, **{name: f(sums) for name, f in RATIOS.items()},
                         "low": [e.low for e in band.values()], "high": [e.high for e in band.values()], "requests": len(totals),
                         "blocks": int(sums[0, BLOCKS])})[list(FRONTIER)]
