"""The redraft selector judged: leave one workload out with an inner threshold choice, verdicts, and the threshold
frontier.

After the dominant arm has drafted, the selector decides from its confidence whether the other arms draft too. Each
workload is judged by a model and a threshold that have not seen it; requests are resampled, the fitted selectors stay
as they are. Not handled here: the model (`specsel.study.oldlogistic`), routing before drafting, diagnostics, charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from specsel.logs import STATS, BlockLog, PositionLog
from specsel.study.oldlogistic import CRITERION, THRESHOLDS, NotFitted, Selector, fit_selector
from specsel.study.oldredraft import (
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
from specsel.study.oldstats import Estimate, Statistic, bootstrap_many, holm

__all__ = [
    "Selector",
    "NotFitted",
    "fit_selector",
    "LowoRow",
    "LowoTable",
    "HeldOut",
    "leave_one_workload_out",
    "hold_out",
    "judge",
    "verdict",
    "frontier",
    "frontier_sums",
    "redraft_sums",
    "oracle_gap",
    "capture",
    "redraft_rate",
    "skill",
    "token_gain",
    "RATIOS",
    "THRESHOLDS",
    "CRITERION",
]

RATIOS = {
    "oracle_gap": oracle_gap,
    "capture": capture,
    "redraft_rate": redraft_rate,
    "skill": skill,
    "token_gain": token_gain,
}
UNDEFINED = {
    "oracle_gap": "undefined: no blocks",
    "capture": "undefined: no block has a gain",
    "redraft_rate": "undefined: no blocks",
    "skill": "undefined: no block has a gain, or none is redrafted",
    "token_gain": "undefined: no blocks",
}
Verdict = str  # "beats random", "no measurable benefit", "worse than random", or "undefined: ..." / "not fitted: ..."


@dataclass(frozen=True, slots=True)
class LowoRow:
    """One workload, judged by a selector that was trained on the others."""

    workload: str
    selector: Selector | None  # None when it could not be fitted
    reason: str  # why not, or ""
    requests: int
    blocks: int
    estimates: Mapping[str, Estimate]  # oracle_gap, capture, redraft_rate, skill, token_gain over its requests
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
        return pd.DataFrame(
            [
                {
                    "workload": row.workload,
                    "threshold": row.selector.threshold if row.selector else None,
                    "requests": row.requests,
                    "blocks": row.blocks,
                    "verdict": row.verdict,
                    "p_holm": row.p_holm,
                    **{
                        key + tail: getattr(estimate, part)
                        for key, estimate in row.estimates.items()
                        for tail, part in (("", "value"), ("_low", "low"), ("_high", "high"))
                    },
                }
                for row in self.rows
            ]
        )

    def operating_points(self) -> pd.DataFrame:
        """Where the chosen thresholds lie on the frontier: scope (all and every workload), redraft_rate, capture."""
        scopes = {"all": self.pooled, **{row.workload: row.estimates for row in self.rows}}
        return pd.DataFrame(
            [
                {"scope": scope, "redraft_rate": e["redraft_rate"].value, "capture": e["capture"].value}
                for scope, e in scopes.items()
            ]
        )

    def redraft_at(self, log: PositionLog) -> np.ndarray:
        """(N,) decisions at every position of the log, by the selector that has not seen the position's workload."""
        return _redraft_at(log, [row.selector for row in self.rows])


Scope = tuple[int | str, str]  # workload index or "all", and the name of a ratio


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Decisions on every workload by a selector that has not seen it."""

    blocks: BlockLog
    found: tuple[Selector | NotFitted, ...]  # per workload
    probability: np.ndarray  # as in LowoTable, like the next three
    redraft: np.ndarray
    sums: np.ndarray
    fitted: np.ndarray

    def redraft_at(self, log: PositionLog) -> np.ndarray:
        """(N,) as in LowoTable."""
        return _redraft_at(log, self.found)

    @property
    def within(self) -> dict[Scope, np.ndarray | list[int]]:
        """Workloads that a statistic is about."""
        scopes = {w: [w] for w in range(len(self.found))} | {"all": np.unique(self.blocks.workload[self.fitted])}
        return {(scope, key): part for scope, part in scopes.items() for key in RATIOS}

    @property
    def statistics(self) -> dict[Scope, Statistic]:
        """Ratios of ``sums``."""
        return {name: RATIOS[name[1]] for name in self.within}

    @property
    def null(self) -> dict[Scope, float]:
        """Redrafting at random has skill 1."""
        return {name: 1.0 for name in self.within if name[1] == "skill"}


def leave_one_workload_out(
    blocks: BlockLog,
    *,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = THRESHOLDS,
) -> LowoTable:
    """Fit on all workloads but one, threshold included, and judge the one; once for each workload.

    Which arm drafts first is taken over all workloads, as in the original study: this choice sees the held-out one.
    A workload whose training blocks hold one class is reported as not fitted and the others go on; a workload without
    any gain has an undefined capture and skill. Verdicts come from the interval of the skill and its Holm-adjusted
    p-value.
    """
    decided = hold_out(blocks, features=features, thresholds=thresholds)
    return judge(
        decided,
        bootstrap_many(
            decided.statistics,
            decided.sums,
            strata=blocks.workload,
            rng=rng,
            n_resamples=n_resamples,
            level=level,
            within=decided.within,
            null=decided.null,
        ),
    )


def hold_out(blocks: BlockLog, *, features: Sequence[str] = STATS, thresholds: Sequence[float] = THRESHOLDS) -> HeldOut:
    """Decisions on every workload by the selector of the others, and what has to be resampled to judge them."""
    workload_of = blocks.workload_of
    probability, redraft = np.full(blocks.n_blocks, np.nan), np.zeros(blocks.n_blocks, dtype=bool)
    found = tuple(_held_out(blocks, w, features, thresholds) for w in range(len(blocks.workloads)))
    for w, selector in enumerate(found):
        if isinstance(selector, Selector):
            at = workload_of == w
            probability[at] = selector.probability(blocks.stats, at)
            redraft[at] = probability[at] >= selector.threshold
    fitted = np.array([isinstance(s, Selector) for s in found], dtype=bool)[blocks.workload]
    return HeldOut(blocks, found, probability, redraft, redraft_sums(blocks, redraft), fitted)


def judge(decided: HeldOut, drawn: Mapping[Scope, Estimate]) -> LowoTable:
    """The table of `leave_one_workload_out` from the estimates of ``decided.statistics``."""
    blocks, found = decided.blocks, decided.found
    scopes = dict.fromkeys(scope for scope, _ in drawn)
    estimates = {scope: {key: _worded(drawn[scope, key], key) for key in RATIOS} for scope in scopes}
    tested = [w for w, s in enumerate(found) if isinstance(s, Selector) and estimates[w]["skill"].defined]
    adjusted = dict(zip(tested, holm(np.array([estimates[w]["skill"].p for w in tested])).tolist(), strict=True))
    rows = tuple(_row(blocks, w, selector, estimates[w], adjusted.get(w)) for w, selector in enumerate(found))
    pooled = estimates["all"] if decided.fitted.any() else _undefined(estimates["all"], "not fitted for any workload")
    return LowoTable(rows, decided.probability, decided.redraft, decided.sums, decided.fitted, pooled)


def _redraft_at(log: PositionLog, selectors: Sequence[Selector | NotFitted | None]) -> np.ndarray:
    """(N,) decisions at every position, by the selector of its workload; False where there is none."""
    found, workload = np.zeros(log.n_positions, dtype=bool), log.workload[log.request_of]
    for w, selector in enumerate(selectors):
        if isinstance(selector, Selector):
            at = workload == w
            found[at] = selector.redraft(log.stats, at)
    return found


def _worded(estimate: Estimate, key: str) -> Estimate:
    """The same estimate, its reason in the words of the quantity."""
    return estimate if estimate.value is not None else replace(estimate, method=UNDEFINED[key])


def _undefined(like: Mapping[str, Estimate], reason: str) -> dict[str, Estimate]:
    """Estimates without a value, for that reason; the oracle gap needs no selector and stays."""
    return {
        key: e
        if key == "oracle_gap"
        else replace(e, value=None, low=None, high=None, p=None, method=f"undefined: {reason}")
        for key, e in like.items()
    }


def _held_out(blocks: BlockLog, w: int, features: Sequence[str], thresholds: Sequence[float]) -> Selector | NotFitted:
    train = blocks.workload_of != w
    if not train.any():
        return NotFitted("not fitted: no other workload to train on")
    try:
        return fit_selector(blocks, train, features=features, thresholds=thresholds)
    except NotFitted as reason:
        return reason


def _row(
    blocks: BlockLog, w: int, selector: Selector | NotFitted, estimates: dict[str, Estimate], p_holm: float | None
) -> LowoRow:
    at = blocks.workload == w
    fitted = isinstance(selector, Selector)
    reason = "" if fitted else str(selector)
    estimates = estimates if fitted else _undefined(estimates, reason)
    return LowoRow(
        blocks.workloads[w],
        selector if fitted else None,
        reason,
        int(at.sum()),
        int(at[blocks.request_of].sum()),
        estimates,
        p_holm,
        reason or verdict(estimates, p_holm),
    )


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


def frontier(
    blocks: BlockLog,
    probability: np.ndarray,
    *,
    rng: np.random.Generator,
    n_resamples: int = 2_000,
    level: float = 0.95,
    thresholds: Sequence[float] = tuple(np.round(np.linspace(0, 1, 101), 2)),
) -> pd.DataFrame:
    """Capture against redraft rate over all thresholds, for all workloads together ("all") and each alone.

    probability (B,), nan = block left out. Columns: scope, threshold, redraft_rate, capture, low, high (of the capture
    at this threshold), skill, token_gain, oracle_gap, requests, blocks. A scope without any gain has no capture and no
    rows.
    """
    thresholds = np.sort(thresholds)
    totals = frontier_sums(blocks, probability, thresholds)
    used = totals[:, 0, BLOCKS] > 0
    scopes = {"all": used} | {name: used & (blocks.workload == w) for w, name in enumerate(blocks.workloads)}
    tables = [
        _frontier_of(scope, totals[at], blocks.workload[at], thresholds, rng, (n_resamples, level))
        for scope, at in scopes.items()
        if totals[at, 0, GAIN].sum() > 0
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=FRONTIER)


FRONTIER = (
    "scope",
    "threshold",
    "redraft_rate",
    "capture",
    "low",
    "high",
    "skill",
    "token_gain",
    "oracle_gap",
    "requests",
    "blocks",
)


def _frontier_of(
    scope: str,
    totals: np.ndarray,
    strata: np.ndarray,
    thresholds: np.ndarray,
    rng: np.random.Generator,
    options: tuple[int, float],
) -> pd.DataFrame:
    sums = totals.sum(axis=0)
    band = bootstrap_many(
        dict.fromkeys(range(len(thresholds)), capture),
        totals,
        strata=strata,
        rng=rng,
        n_resamples=options[0],
        level=options[1],
        columns={t: t for t in range(len(thresholds))},
    )
    return pd.DataFrame(
        {
            "scope": scope,
            "threshold": thresholds,
            **{name: f(sums) for name, f in RATIOS.items()},
            "low": [e.low for e in band.values()],
            "high": [e.high for e in band.values()],
            "requests": len(totals),
            "blocks": int(sums[0, BLOCKS]),
        }
    )[list(FRONTIER)]
