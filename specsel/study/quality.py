"""Selection against drafter quality: the same questions asked of logs collected with better and better drafters.

A run folder is a point of the sweep when its manifest says how far an arm was trained, in ``drafters[ARM]``:
``"checkpoint"`` ("random", "early", "middle", "final", ...) and ``"step"``. Where an arm is not "final" or "best",
those that are form the background. A run whose manifest names no checkpoint is a point for its dominant arm.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from specsel.logs import PositionLog, block_view
from specsel.paper.words import listed, sentence
from specsel.study.oldredraft import dominant_blocks
from specsel.study.oldrouting import decision_runs
from specsel.study.oldselector import leave_one_workload_out
from specsel.study.oldstats import Estimate, bootstrap_many, ratio

FINAL = ("final", "best")  # names of the last checkpoint of a training
AFTER = ("oracle_gap", "capture", "redraft_rate", "skill")  # asked after a draft of the swept drafter itself
COLUMNS = ("run", "drafter", "checkpoint", "step", "efficiency", "quantity", "value", "low", "high", "n", "method")
NO_SWEEP = "No quality sweep is among the runs of this book, so this stays open; the point shown is its own log."


def swept(log: PositionLog) -> dict[str, dict]:
    """Arm -> quality of the drafters that this run is about."""
    said = {arm: log.manifest.get("drafters", {}).get(arm, {}) for arm in log.arms}
    known = {
        arm: {"checkpoint": str(entry["checkpoint"]), "step": entry.get("step")}
        for arm, entry in said.items()
        if entry.get("checkpoint")
    }
    unfinished = {arm: quality for arm, quality in known.items() if quality["checkpoint"] not in FINAL}
    return unfinished or known or {dominant_blocks(log).path_arm: {"checkpoint": log.run, "step": None}}


def points(logs: Iterable[PositionLog], *, rng: np.random.Generator, n_resamples: int = 10_000) -> pd.DataFrame:
    """One row per run, swept drafter and quantity, with limits from resampled requests; columns `COLUMNS`.

    After a draft of the swept drafter: oracle gap, capture, redraft rate and skill of leave one workload out. Over the
    best fixed arm of the run, by exact replay: redraft gain, routing gain (logistic, free features), and routing over
    redrafting (paired). `efficiency` is the block efficiency of the swept drafter when it always runs.
    """
    rows = []
    for log in logs:
        pool = _pool(log, rng, n_resamples)
        for arm, quality in swept(log).items():
            own = _drafter(log, log.arms.index(arm), rng, n_resamples)
            point = (log.run, arm, quality["checkpoint"], quality["step"], own["block_efficiency"].value)
            rows += [
                (*point, name.replace("_", " "), e.value, e.low, e.high, e.n, e.method)
                for name, e in (own | pool).items()
            ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _drafter(log: PositionLog, arm: int, rng: np.random.Generator, n_resamples: int) -> dict[str, Estimate]:
    """What the blocks of one drafter say."""
    blocks = block_view(log, arm)
    table = leave_one_workload_out(blocks, rng=rng, n_resamples=n_resamples)
    counts = np.bincount(blocks.request_of, minlength=log.n_requests)
    sums = np.stack([np.diff(log.starts), counts], axis=1)
    efficiency = bootstrap_many(
        {0: lambda s: ratio(s[..., 0], s[..., 1])}, sums, strata=log.workload, rng=rng, n_resamples=n_resamples
    )[0]
    return {"block_efficiency": efficiency, **{name: table.pooled[name] for name in AFTER}}


def _pool(log: PositionLog, rng: np.random.Generator, n_resamples: int) -> dict[str, Estimate]:
    """What redrafting and routing gain over the best fixed arm of this pool, on held-out workloads."""
    runs = decision_runs(log, rng=rng, kinds=("logistic",))
    dominant = f"always {dominant_blocks(log).path_arm}"
    blocks = np.stack([runs[name].blocks for name in (dominant, "redraft", "route (logistic)")], axis=1)
    pairs = {"redraft_gain": (0, 1), "routing_gain": (0, 2), "routing_over_redrafting": (1, 2)}
    return bootstrap_many(
        {name: lambda s, a=a, b=b: ratio(s[..., a], s[..., b]) - 1 for name, (a, b) in pairs.items()},
        blocks,
        strata=log.workload,
        rng=rng,
        n_resamples=n_resamples,
    )


def of(table: pd.DataFrame, *quantities: str) -> pd.DataFrame:
    """The rows of some quantities in order of quality, for a chart; `series` says drafter and, if several, quantity."""
    rows = table[table["quantity"].isin(quantities)].sort_values(["drafter", "quantity", "efficiency"], kind="stable")
    return rows.assign(series=rows["drafter"] if len(quantities) == 1 else rows["quantity"] + ", " + rows["drafter"])


# ---- sentences


def signal(table: pd.DataFrame) -> str:
    """Does confidence carry signal only once drafters are good? From the skill at every checkpoint."""
    parts = []
    for drafter, rows in of(table, "skill").groupby("drafter", sort=False):
        good = (rows["low"].astype(float) > 1).tolist()
        if len(good) > 1:
            first = good.index(True) if any(good) else 0
            where = (
                "at no checkpoint"
                if not any(good)
                else "at every checkpoint"
                if all(good)
                else f"once it emits {rows['efficiency'].iloc[first]:.2f} tokens per block, and not before"
                if all(good[first:])
                else f"at {sum(good)} of {len(good)} checkpoints, in no order of quality"
            )
            parts.append(f"the confidence of {drafter} carries a signal {where}")
    return sentence(parts) or NO_SWEEP


def worth(table: pd.DataFrame) -> str:
    """Is routing on free features worth more than redrafting when drafters are weak? At both ends of every sweep."""
    parts = []
    for drafter, rows in of(table, "routing over redrafting").dropna(subset=["low"]).groupby("drafter", sort=False):
        if len(rows) > 1:
            ends = (
                f"{'more' if row.low > 0 else 'less' if row.high < 0 else 'no more and no less'} at its {which} "
                f"({row.checkpoint})"
                for which, row in (("weakest", rows.iloc[0]), ("best", rows.iloc[-1]))
            )
            parts.append(f"with {drafter}, routing is worth {listed(ends)} than redrafting")
    return sentence(parts) or NO_SWEEP
