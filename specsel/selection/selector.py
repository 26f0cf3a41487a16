"""A redraft selector as a readable JSON file, which the live engine applies without scikit-learn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsel.logs import STATS, SpecselError, readable, write_bytes_atomically
from specsel.selection.redraft import CRITERION, THRESHOLDS, chance, coefficients, train


@dataclass(frozen=True, slots=True)
class Selector:
    """A fitted redraft selector: everything that is needed to apply it, and what it was trained on (F features)."""

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
        """(N,) probability that another arm emits more, from statistics (N, K) of drafts; nan = missing."""
        arm, n = self.arms.index(self.dominant), len(next(iter(stats.values())))
        x = np.stack([stats[f][:, arm] if f in stats else np.full(n, np.nan) for f in self.features], axis=1)
        return chance(x, self.fill, self.center, self.scale, self.weights, self.intercept)

    def redraft(self, stats: Mapping[str, np.ndarray]) -> np.ndarray:
        """(N,) bool: probability >= threshold."""
        return self.probability(stats) >= self.threshold

    def save(self, path: str | Path) -> None:
        """Write the selector as readable JSON."""
        content = {"schema": 1, "kind": "redraft selector", **asdict(self), "criterion": CRITERION}
        write_bytes_atomically(path, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path, **expected: Any) -> Selector:
        """Read a selector; refuses another pool, draft length or feature set than the ``arms``, ``draft_len`` and
        ``features`` that are given, by name. Raises SpecselError.
        """
        with readable(path, "make a selector with `specsel selector fit`", SpecselError):
            data = json.loads(Path(path).read_text("utf-8"))
            kind = data.pop("kind", None), data.pop("schema", None)
            data.pop("criterion", None)
            if kind != ("redraft selector", 1) or set(data) != set(cls.__dataclass_fields__):
                raise ValueError("it is no redraft selector of schema 1")
            made = cls(**{key: _tuples(value) for key, value in data.items()})
        for name, wanted in expected.items():
            if (found := getattr(made, name)) != _tuples(wanted):
                raise SpecselError(
                    f"{path}: was trained for {name} {found}, but this run has {_tuples(wanted)}; "
                    "fit a selector on a log of this pool with `specsel selector fit`"
                )
        with readable(path, "make a selector with `specsel selector fit`", SpecselError):
            made._check()
        return made

    def _check(self) -> None:
        """Raises ValueError where the numbers do not fit the features, or the arms the dominant one."""
        n = len(self.features)
        for name, size in (("fill", n), ("center", 2 * n), ("scale", 2 * n), ("weights", 2 * n)):
            values = np.array(getattr(self, name))
            if values.shape != (size,) or values.dtype.kind not in "fi" or not np.isfinite(values).all():
                raise ValueError(f"'{name}' must hold {size} numbers")
        if not math.isfinite(self.intercept + self.threshold) or 0 in self.scale or self.dominant not in self.arms:
            raise ValueError("'intercept', 'threshold', 'scale' or 'dominant' is not one of a fitted selector")


def fit_selector(
    blocks: pd.DataFrame,
    *,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = THRESHOLDS,
    trained_on: Mapping[str, Any] | None = None,
) -> Selector:
    """The selector of all these blocks, to be saved. Raises NotFitted where they cannot give one."""
    model, threshold, search = train(blocks, features=features, thresholds=thresholds)
    *vectors, intercept = coefficients(model)
    names = [name for name, _ in blocks.groupby("workload", sort=False)]
    counted = {"workloads": names, "requests": blocks.groupby(["workload", "request"]).ngroups, "blocks": len(blocks)}
    return Selector(
        tuple(blocks.attrs["arms"]),
        blocks.attrs["dominant"],
        blocks.attrs["draft_len"],
        tuple(features),
        *(tuple(v.tolist()) for v in vectors),
        intercept=float(intercept),
        threshold=threshold,
        search=tuple(search),
        trained_on=counted | dict(trained_on or {}),
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
