"""How good the drafters are and how they became so: acceptance at every position, learning curves, variants of the
training recipe.

Reads a position log and the `training.json` files beside the weights. Not handled here: training itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsel.log import LogError, PositionLog
from specsel.statistics import bootstrap_many, bootstrap_requests, pooled_ratio, ratio, request_sums


def acceptance(log: PositionLog, *, rng: np.random.Generator, n_resamples: int = 2_000) -> pd.DataFrame:
    """Share of all positions at which at least k drafted tokens are accepted, k = 1..L, per workload and over all of
    them ("all"): workload, arm, k, share, low, high, requests.

    Positions where an arm was not asked count as accepting nothing.
    """
    steps = np.arange(1, log.draft_len + 1)
    reached = (log.accepted[:, :, None] >= steps).reshape(log.n_positions, -1)
    sums = request_sums(np.column_stack([reached, np.ones(log.n_positions)]), log.request_of, log.n_requests)
    keys = [(arm, int(k)) for arm in log.arms for k in steps]
    rows = []
    for name in ("all", *log.workloads):
        mine = np.full(log.n_requests, True) if name == "all" else log.workload == log.workloads.index(name)
        statistics = {key: lambda s, i=i: ratio(s[..., i], s[..., -1]) for i, key in enumerate(keys)}
        found = bootstrap_many(statistics, sums[mine], strata=log.workload[mine], rng=rng, n_resamples=n_resamples)
        rows += [
            {"workload": name, "arm": arm, "k": k, "share": e.value, "low": e.low, "high": e.high, "requests": e.n}
            for (arm, k), e in found.items()
        ]
    return pd.DataFrame(rows)


def learning(folder: str | Path, *, rng: np.random.Generator, n_resamples: int = 2_000) -> pd.DataFrame:
    """Learning curve of a drafter folder on held-out answers: arm, step, tokens, loss, first_token, block_efficiency,
    low, high (answers resampled)."""
    log = training_log(folder)
    rows = []
    for point in log["curve"]:
        sums = np.column_stack([point["answers"]["emitted"], point["answers"]["blocks"]]).astype(float)
        found = bootstrap_requests(pooled_ratio, sums, strata=None, rng=rng, n_resamples=n_resamples)
        shown = {name: point[name] for name in ("step", "tokens", "loss", "first_token")}
        interval = {"block_efficiency": found.value, "low": found.low, "high": found.high}
        rows.append({"arm": log["kind"]} | shown | interval)
    return pd.DataFrame(rows)


def variants(path: str | Path) -> pd.DataFrame:
    """Short trainings that differ in one setting, from a file of their logs: arm, variant, tokens, first_token,
    block_efficiency, difference, low, high.

    ``difference`` is the block efficiency less that of the recipe in use ("recipe"), over the same held-out answers and
    the same number of steps, with the interval of the paired bootstrap over answers.
    """
    rows = []
    for kind, trainings in _json(Path(path)).items():
        reference = trainings["recipe"]
        for name, point in trainings.items():
            sums = np.column_stack(
                [reference["answers"]["emitted"], reference["answers"]["blocks"], point["answers"]["blocks"]]
            ).astype(float)
            found = bootstrap_requests(_difference, sums, strata=None, rng=np.random.default_rng(0), n_resamples=2_000)
            rows.append(
                {"arm": kind, "variant": name, "tokens": point["tokens"], "first_token": point["first_token"]}
                | {"block_efficiency": point["block_efficiency"]}
                | {"difference": found.value, "low": found.low, "high": found.high}
            )
    return pd.DataFrame(rows)


def _difference(sums: np.ndarray) -> np.ndarray:
    return ratio(sums[..., 0], sums[..., 2]) - ratio(sums[..., 0], sums[..., 1])


def training_log(folder: str | Path) -> dict[str, Any]:
    """The log that a training wrote beside its weights; raises LogError naming the file when there is none."""
    return _json(Path(folder) / "training.json")


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LogError(f"{path}: no such file; give the folder of a trained drafter.") from error
    except ValueError as error:
        raise LogError(f"{path}: not JSON ({error}); train the drafter again.") from error
