"""The logistic redraft selector itself: features, fit, threshold choice, and the JSON file that holds one.

Features are statistics of the dominant arm's draft, the label is "another arm emits more". Whoever fits says which
blocks may be seen; nothing else is looked at. Not handled here: how well a selector does on other workloads
(`specsel.study.oldselector`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from specsel.logs import STATS, BlockLog, SpecselError, readable, write_bytes_atomically
from specsel.study.oldredraft import first_arm, gains

EVERY = slice(None)
MAX_ROWS = 100_000  # blocks for one fit or one threshold, thinned evenly; the learning curve is flat long before
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
CRITERION = (
    "highest mean of capture - redraft rate (height above random redrafting) over the training workloads, "
    "each judged by a model that has not seen it; ties go to the highest threshold"
)


class NotFitted(SpecselError):
    """A selector that these blocks cannot give; the message starts with 'not fitted:' and says why."""


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

    def standardised(self, stats: Mapping[str, np.ndarray], rows: np.ndarray | slice = EVERY) -> np.ndarray:
        """(N, 2F) what the weights are applied to; stats: log.stats or blocks.stats, arrays (., K), those ``rows``."""
        x = feature_matrix(stats, self.arms.index(self.dominant), self.features, rows)
        return (_design(x, np.array(self.fill)) - np.array(self.center)) / np.array(self.scale)

    def probability(self, stats: Mapping[str, np.ndarray], rows: np.ndarray | slice = EVERY) -> np.ndarray:
        """(N,) probability that another arm emits more, at some ``rows`` of the statistics."""
        x = feature_matrix(stats, self.arms.index(self.dominant), self.features, rows)
        missing, slope = np.isnan(x), np.array(self.weights) / np.array(self.scale)
        known, absent = np.split(slope, 2)
        return expit(
            np.where(missing, self.fill, x) @ known
            + missing @ absent
            + (self.intercept - np.array(self.center) @ slope)
        )

    def redraft(self, stats: Mapping[str, np.ndarray], rows: np.ndarray | slice = EVERY) -> np.ndarray:
        """(N,) bool: probability >= threshold."""
        return self.probability(stats, rows) >= self.threshold

    def save(self, path: str | Path) -> None:
        """Write the selector as readable JSON."""
        text = json.dumps(
            {"schema": 1, "kind": "redraft selector", **asdict(self), "criterion": CRITERION}, indent=1, allow_nan=False
        )
        write_bytes_atomically(path, text.encode() + b"\n")

    def _check(self) -> None:
        """Raises ValueError where the numbers do not fit the features, or the arms the dominant one."""
        n = len(self.features)
        for name, size in (("fill", n), ("center", 2 * n), ("scale", 2 * n), ("weights", 2 * n)):
            values = np.array(getattr(self, name))
            if values.shape != (size,) or values.dtype.kind not in "fi" or not np.isfinite(values).all():
                raise ValueError(f"'{name}' must hold {size} numbers")
        if not math.isfinite(self.intercept + self.threshold) or 0 in self.scale or self.dominant not in self.arms:
            raise ValueError("'intercept', 'threshold', 'scale' or 'dominant' is not one of a fitted selector")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        arms: Sequence[str] | None = None,
        draft_len: int | None = None,
        features: Sequence[str] | None = None,
    ) -> Selector:
        """Read a selector; refuses another pool, draft length or feature set than the one given, by name."""
        with readable(path, "make a selector with `specsel selector fit`", SpecselError):
            data = json.loads(Path(path).read_text("utf-8"))
            kind = data.pop("kind", None), data.pop("schema", None)
            data.pop("criterion", None)
            if kind != ("redraft selector", 1) or set(data) != set(cls.__dataclass_fields__):
                raise ValueError("it is no redraft selector of schema 1")
            made = cls(**{key: _tuples(value) for key, value in data.items()})
        for name, wanted in (("arms", arms), ("draft_len", draft_len), ("features", features)):
            found = getattr(made, name)
            if wanted is not None and found != _tuples(wanted):
                raise SpecselError(
                    f"{path}: was trained for {name} {found}, but this run has {_tuples(wanted)}; "
                    "fit a selector on a log of this pool with `specsel selector fit`"
                )
        with readable(path, "make a selector with `specsel selector fit`", SpecselError):
            made._check()
        return made


def feature_matrix(
    stats: Mapping[str, np.ndarray], arm: int, features: Sequence[str], rows: np.ndarray | slice = EVERY
) -> np.ndarray:
    """(N, F) features of one arm at some rows, nan where missing or not logged."""
    known = {name: stats[name][:, arm][rows] for name in features if name in stats}
    size = len(next(iter(known.values()), next(iter(stats.values()))[:, arm][rows]))
    return np.stack([known.get(name, np.full(size, np.nan)) for name in features], axis=1)


def _design(x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    missing = np.isnan(x)
    return np.concatenate([np.where(missing, fill, x), missing], axis=1)


def fit_selector(
    blocks: BlockLog,
    train: np.ndarray | None = None,
    *,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = THRESHOLDS,
    trained_on: Mapping[str, Any] | None = None,
) -> Selector:
    """Fit model and threshold on the blocks of `train` (B,) bool, and on nothing else.

    Missing values become training means plus an indicator. The threshold follows `CRITERION` in an inner
    leave-one-workload-out loop (five folds of requests where one workload, or no scorable one, is left). Raises
    NotFitted when the training blocks hold one class or no value of any feature.
    """
    train = np.ones(blocks.n_blocks, dtype=bool) if train is None else train
    model = fit_model(blocks, train, features)
    search = _threshold_search(blocks, _thinned(train), features, thresholds)
    best = max(range(len(search)), key=lambda i: (search[i][1], search[i][0]))
    used = np.unique(blocks.request_of[train])
    trained = {
        "workloads": [blocks.workloads[w] for w in np.unique(blocks.workload[used])],
        "requests": len(used),
        "blocks": int(train.sum()),
        **(trained_on or {}),
    }
    return Selector(
        blocks.arms,
        blocks.path_arm,
        blocks.draft_len,
        tuple(features),
        **model,
        threshold=search[best][0],
        search=tuple(search),
        trained_on=trained,
    )


def _thinned(train: np.ndarray) -> np.ndarray:
    """(B,) at most `MAX_ROWS` of the training blocks, evenly."""
    rows = np.flatnonzero(train)
    kept = np.zeros(len(train), dtype=bool)
    kept[rows[:: max(1, -(-len(rows) // MAX_ROWS))]] = True
    return kept


def fit_model(blocks: BlockLog, train: np.ndarray, features: Sequence[str]) -> dict[str, Any]:
    """Fill values, scaler and coefficients from the training rows."""
    rows = np.flatnonzero(_thinned(train))
    counts, first = blocks.emitted[rows], first_arm(blocks)
    label = counts.max(axis=1) > counts[:, first]
    x = feature_matrix(blocks.stats, first, features, rows)
    if label.all() or not label.any():
        share = "all" if label.any() else "never"
        raise NotFitted(f"not fitted: one class (the training blocks are {share} worth a redraft)")
    if np.isnan(x).all():
        raise NotFitted(f"not fitted: '{blocks.path_arm}' has no value of {', '.join(features)} in the training blocks")
    counts = ~np.isnan(x)
    fill = np.where(counts, x, 0).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    scaler = StandardScaler().fit(_design(x, fill))
    model = LogisticRegression(max_iter=1000).fit(scaler.transform(_design(x, fill)), label)
    vectors = {"fill": fill, "center": scaler.mean_, "scale": scaler.scale_, "weights": model.coef_[0]}
    return {name: tuple(v.tolist()) for name, v in vectors.items()} | {"intercept": float(model.intercept_[0])}


def folds(blocks: BlockLog, train: np.ndarray) -> Iterator[np.ndarray]:
    """Groupings (B,) of the training blocks for inner loops: by workload if there are two, then by request into five
    folds.
    """
    if len(np.unique(blocks.workload_of[train])) > 1:
        yield blocks.workload_of
    yield blocks.request_of % 5


def _threshold_search(
    blocks: BlockLog, train: np.ndarray, features: Sequence[str], thresholds: Sequence[float]
) -> list[tuple[float, float]]:
    """(threshold, mean over folds of capture - redraft rate), from the training blocks alone."""
    gain = gains(blocks)
    for groups in folds(blocks, train):
        scores = []
        for group in np.unique(groups[train]):
            held = train & (groups == group)
            if not gain[held].sum():
                continue
            probability = out_of_fold(blocks, train & (groups != group), held, features)
            if probability is not None:
                scores.append(_heights(probability, gain[held], thresholds))
        if scores:
            return list(zip(map(float, thresholds), np.mean(scores, axis=0).tolist(), strict=True))
    raise NotFitted("not fitted: no fold of the training blocks can judge a threshold (no gain, or one class)")


def _heights(probability: np.ndarray, gain: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """(T,) capture - redraft rate of redrafting where probability >= threshold."""
    order = np.argsort(thresholds, kind="stable")
    passed = np.searchsorted(np.asarray(thresholds)[order], probability, side="right")
    taken, chosen = (
        np.bincount(passed, weights=w, minlength=len(order) + 1)[::-1].cumsum()[::-1][1:] for w in (gain, None)
    )
    found = np.empty(len(order))
    found[order] = taken / gain.sum() - chosen / len(gain)
    return found


def out_of_fold(
    blocks: BlockLog, train: np.ndarray, held: np.ndarray, features: Sequence[str] = STATS
) -> np.ndarray | None:
    """Probabilities on the held rows of a model fitted on the training rows, None where that cannot be fitted."""
    try:
        fitted = untuned(blocks, train, features)
    except NotFitted:
        return None
    return fitted.probability(blocks.stats, held)


def untuned(blocks: BlockLog, train: np.ndarray, features: Sequence[str] = STATS) -> Selector:
    """A selector with its model and no threshold search: it redrafts where another arm probably emits more."""
    return Selector(
        blocks.arms,
        blocks.path_arm,
        blocks.draft_len,
        tuple(features),
        **fit_model(blocks, train, features),
        threshold=0.5,
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
