"""Every headline figure of the study, measured on one log, as claims with intervals.

The figures are those of the original study's section 3 and the exact versions by replay. What a log cannot give (replay
figures of a block-anchored log, a selector where one cannot be fitted) is undefined with a reason. Nothing is printed
or drawn here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from specsel.costs import Costs, break_even_rho
from specsel.logs.log import BlockLog, PositionLog, block_view
from specsel.paper.claims import Claim, make_claim
from specsel.replay.replay import Replay, fixed, oracle_block, oracle_dp
from specsel.study.oldredraft import (
    BASE,
    BLOCKS,
    GAIN,
    REDRAFTED,
    TAKEN,
    capture,
    dominant_arm,
    first_arm,
    gains,
    oracle_gap,
    redraft_rate,
    redraft_sums,
    token_gain,
)
from specsel.study.oldrouting import context_length, one_arm, plain_decoding, redraft_plan, run_plan
from specsel.study.oldselector import THRESHOLDS, UNDEFINED, HeldOut, LowoTable, frontier_sums, hold_out, judge
from specsel.study.oldstats import Estimate, Statistic, bootstrap_many, bootstrap_rows, ratio, request_sums

RHOS = (0.02, 0.05, 0.10, 0.15, 0.20)  # of the published break-even table
UNITS = {
    "skill": "ratio",
    "rho": "ratio",
    "alpha_union": "ratio",
    "speed": "ratio",
    "redraft_speed": "ratio",
    "break_even_rho": "ratio",
    "max_alpha": "ratio",
    "threshold": "ratio",
    "best_of_n": "ratio",
    "best_selector": "ratio",
    "block_efficiency": "tokens/block",
    "mean_accepted": "tokens/block",
    "workload_oracle_efficiency": "tokens/block",
    "best_fixed_efficiency": "tokens/block",
    "mean_best": "tokens/block",
    "mean_dominant": "tokens/block",
}


@dataclass
class _Collector:
    """Claims of one log, all with the same label, origin and resampling; statistics are queued and resampled together
    at the end.
    """

    log: PositionLog
    rng: np.random.Generator
    n_resamples: int
    level: float
    claims: list[Claim] = field(default_factory=list)
    queued: list[_Queued] = field(default_factory=list)

    def add(
        self, name: str, value: Any, function: str, *, headline: bool = True, reason: str = "", n: int | None = None
    ) -> None:
        """One claim; an Estimate without interval is no headline and carries its reason."""
        unit = "" if isinstance(value, str) else UNITS.get(name.partition(":")[0], "fraction")
        shown = headline and getattr(value, "low", None) is not None
        if isinstance(value, Estimate) and value.low is None and not reason:
            reason = value.method
        self.claims.append(
            make_claim(
                name,
                value,
                label=self.log.label,
                unit=unit,
                function=function,
                headline=shown,
                reason=reason,
                n=n,
                origin={"run": self.log.run, "log_sha256": self.log.sha256},
            )
        )

    def queue(self, statistics: Mapping[Any, Statistic], totals: np.ndarray, function: str, **options: Any) -> None:
        """Statistics of per-request sums (R, *S), over the strata `within`, with sums per stratum if `split`."""
        self.queued.append(_Queued(statistics, totals, function, **options))

    def resample(self) -> dict[Hashable, Estimate]:
        """Estimates of all queued statistics, from the same resamples."""
        statistics, columns, within, null, split, tables, width = {}, {}, {}, {}, [], {}, 0
        for part in self.queued:
            shape = part.totals.shape[1:]
            if id(part.totals) not in tables:  # the same sums are resampled once
                tables[id(part.totals)] = part.totals.reshape(len(part.totals), -1), width
                width += tables[id(part.totals)][0].shape[1]
            flat, start = tables[id(part.totals)]
            for name, statistic in part.statistics.items():
                statistics[name] = lambda s, f=statistic, shape=shape: f(s.reshape(*s.shape[:-1], *shape))
                columns[name] = slice(start, start + flat.shape[1])
                if part.within is not None:
                    within[name] = part.within[name] if isinstance(part.within, Mapping) else part.within
            split += part.statistics if part.split else []
            null |= part.null
        every = np.concatenate([flat for flat, _ in tables.values()], axis=1)
        return bootstrap_many(
            statistics,
            every,
            strata=self.log.workload,
            rng=self.rng,
            n_resamples=self.n_resamples,
            level=self.level,
            columns=columns,
            within=within,
            split=split,
            null=null,
        )

    def finish(self, found: Mapping[Hashable, Estimate]) -> None:
        """Make a claim of every queued statistic that has a claim's name."""
        for part in self.queued:
            for name in filter(lambda name: isinstance(name, str), part.statistics):
                e, reason = (
                    found[name],
                    part.undefined or UNDEFINED.get(name.partition(":")[0].removesuffix("_accepted")),
                )
                self.add(name, replace(e, method=reason) if e.value is None and reason else e, part.function)


@dataclass(frozen=True, slots=True)
class _Queued:
    statistics: Mapping[Hashable, Statistic]
    totals: np.ndarray  # (R, *S)
    function: str  # for the origin of the claims
    within: Sequence[int] | Mapping[Hashable, Sequence[int]] | None = None  # of all, or of each
    split: bool = False
    undefined: str = ""  # reason when the value is undefined
    null: Mapping[Hashable, float] = field(default_factory=dict)


def headline(
    log: PositionLog,
    *,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    dominant: int | None = None,
    costs: Costs | None = None,
) -> list[Claim]:
    """All headline claims of a log; every number has an interval from resampled requests, or says why not.

    dominant: the arm that drafts first (default: the one that needs the fewest blocks, or the logged path of an
    anchored log). costs: measured seconds; with them also rho per arm, alpha, and modelled speeds.
    """
    with ThreadPoolExecutor() as pool:  # oracles meanwhile
        found = [pool.submit(oracle, log) for oracle in (oracle_dp, oracle_block) if log.complete]
        runs = [fixed(log, k, keep_path=True) for k in range(log.n_arms) if log.complete]
        if dominant is None and runs:
            dominant = dominant_arm(runs)
        blocks = block_view(log, dominant)
        made = _Collector(log, rng, n_resamples, level)
        made.add("dominant", str(blocks.path_arm), "dominant_blocks", n=log.n_requests)
        _block_claims(made, blocks)
        table = hold_out(blocks)
    made.queue(table.statistics, table.sums, "leave_one_workload_out", within=table.within, null=table.null)
    _accepted_claims(made, blocks, table)
    _break_even_claims(made, blocks, table)
    if log.complete:
        _replay_claims(made, blocks, table, runs, [oracle.result() for oracle in found])
        _arm_table(made, runs)
        if costs is not None:
            _cost_claims(made, blocks, table, costs)
    else:
        for name in (
            "workload_headroom",
            "oracle_dp_headroom",
            "oracle_block_headroom",
            "oracle_request_headroom",
            "redraft_replay_gain",
        ):
            made.add(
                name, None, "replay", reason="undefined: the log is block-anchored, so nothing can be replayed exactly"
            )
    drawn = made.resample()
    _selector_claims(made, judge(table, {name: drawn[name] for name in table.statistics}))
    made.finish(drawn)
    return sorted(made.claims, key=lambda claim: ":" in claim.name)


def compare(
    logs: Mapping[str, PositionLog], figures: Sequence[str], *, rng: np.random.Generator, n_resamples: int = 10_000
) -> pd.DataFrame:
    """Some headline figures of several logs: columns log, figure, value, low, high, requests."""
    rows = []
    for name, log in logs.items():
        found = {claim.name: claim for claim in headline(log, rng=rng, n_resamples=n_resamples)}
        rows += [
            {
                "log": name,
                "figure": figure.replace("_", " "),
                "value": c.value,
                "low": c.low,
                "high": c.high,
                "requests": c.n,
            }
            for figure in figures
            if (c := found.get(figure))
        ]
    return pd.DataFrame(rows)


def to_json(claims: Iterable[Claim]) -> dict[str, list[dict[str, Any]]]:
    """The object that `specsel headline --json` prints."""
    keys = ("name", "value", "unit", "label", "low", "high", "level", "n", "method")
    return {
        "claims": [
            {key: c.to_dict()[key] for key in keys} | {"method": c.method or f"none: {c.reason or 'a sentence'}"}
            for c in claims
        ]
    }


# ---- figures of the block view


def _block_claims(made: _Collector, blocks: BlockLog) -> None:
    """Oracle gap (with, without bonus, per workload, blocks resampled); workload headroom over the logged blocks."""
    none = np.zeros(blocks.n_blocks, dtype=bool)
    sums = redraft_sums(blocks, none)
    made.queue(
        {
            "oracle_gap": oracle_gap,
            "mean_dominant": lambda s: ratio(s[..., BASE], s[..., BLOCKS]),
            "mean_best": lambda s: ratio(s[..., BASE] + s[..., GAIN], s[..., BLOCKS]),
        },
        sums,
        "oracle_gap",
    )
    made.queue({"oracle_gap_accepted": oracle_gap}, redraft_sums(blocks, none, count="accepted"), "oracle_gap")
    for w, name in enumerate(blocks.workloads):
        made.queue({f"oracle_gap:{name}": oracle_gap}, sums, "oracle_gap", within=[w])
    counts, base = blocks.emitted, blocks.emitted[:, first_arm(blocks)]
    rows = np.stack([base + gains(blocks), base], axis=1)
    by_rows = bootstrap_rows(
        lambda s: ratio(s[..., 0], s[..., 1]) - 1,
        rows,
        strata=blocks.workload_of,
        rng=made.rng,
        n_resamples=made.n_resamples,
        level=made.level,
    )
    made.add(
        "oracle_gap_by_blocks",
        replace(by_rows, method=f"{by_rows.method}, blocks resampled (too narrow)"),
        "bootstrap_rows",
        headline=False,
    )
    made.queue(
        {"workload_headroom_on_path": _headroom_on_path},
        request_sums(counts, blocks.request_of, len(blocks.requests)),
        "oracle_gap",
        split=True,
    )


def _headroom_on_path(sums: np.ndarray) -> np.ndarray:
    """Tokens of the best arm of each workload over those of the best arm of all, - 1; sums (..., W, K)."""
    return ratio(sums.max(axis=-1).sum(axis=-1), sums.sum(axis=-2).max(axis=-1)) - 1


# ---- figures of the selector


def _accepted_claims(made: _Collector, blocks: BlockLog, table: HeldOut) -> None:
    """Capture and token gain without the bonus token."""
    if table.fitted.any():
        made.queue(
            {"capture_accepted": capture, "token_gain_accepted": token_gain},
            redraft_sums(blocks, table.redraft, count="accepted"),
            "leave_one_workload_out",
            within=_fitted(blocks, table),
        )


def _selector_claims(made: _Collector, table: LowoTable) -> None:
    """Pooled and per held-out workload: capture, redraft rate, skill, token gain, threshold, verdict."""
    for name, estimate in table.pooled.items():
        if name != "oracle_gap":
            made.add(name, estimate, "leave_one_workload_out")
    for row in table.rows:
        for name, estimate in row.estimates.items():
            if name != "oracle_gap":
                made.add(f"{name}:{row.workload}", estimate, "leave_one_workload_out")
        chosen = row.selector
        made.add(
            f"threshold:{row.workload}",
            chosen and chosen.threshold,
            "fit_selector",
            headline=False,
            n=chosen and chosen.trained_on["requests"],
            reason="chosen on the training workloads, not estimated" if chosen else f"undefined: {row.reason}",
        )
        made.add(f"verdict:{row.workload}", row.verdict, "leave_one_workload_out", n=row.requests)


def _fitted(blocks: BlockLog, table: HeldOut) -> list[int]:
    """Workloads that have a selector."""
    return np.unique(blocks.workload[table.fitted]).tolist()


def _scopes(blocks: BlockLog, table: HeldOut) -> dict[str, list[int]]:
    """Ends of claim names and what they are about: all workloads that have a selector, and each of them alone."""
    fitted = _fitted(blocks, table)
    return {"": fitted} | {f":{blocks.workloads[w]}": [w] for w in fitted}


def _break_even_claims(made: _Collector, blocks: BlockLog, table: HeldOut) -> None:
    """The published model with measured gap, capture and rate: break-even rho, largest alpha, the table over rho."""
    whole = redraft_sums(blocks, np.ones(blocks.n_blocks, dtype=bool))
    made.queue({f"best_of_n:{rho}": lambda s, rho=rho: _all_speed(s, rho) for rho in RHOS}, whole, "best_of_n")
    if not table.fitted.any():
        for name in (
            "break_even_rho",
            "max_alpha",
            *(f"{what}:{rho}" for what in ("best_selector", "margin") for rho in RHOS),
        ):
            made.add(name, None, "break_even_rho", reason="undefined: not fitted for any workload")
        return
    within = _fitted(blocks, table)
    nothing = "undefined: nothing is redrafted"
    always = nothing if not table.redraft.any() else "undefined: redrafting pays at every drafter cost"
    made.queue(
        {"break_even_rho": lambda s: break_even_rho(token_gain(s), 1.0, redraft_rate(s))},
        table.sums,
        "break_even_rho",
        within=within,
        undefined=always,
    )
    made.queue(
        {"max_alpha": lambda s: ratio(token_gain(s), redraft_rate(s))},
        table.sums,
        "max_alpha",
        within=within,
        undefined=nothing,
    )
    points = frontier_sums(blocks, table.probability, (0.0, *THRESHOLDS, 1.01))
    once = np.column_stack([points[:, 0], points[:, 1:, TAKEN], points[:, 1:, REDRAFTED]])  # others do not change
    made.queue(
        {f"best_selector:{rho}": lambda s, rho=rho: _best_speed(s, rho) for rho in RHOS}
        | {f"margin:{rho}": lambda s, rho=rho: _best_speed(s, rho) / _all_speed(s, rho) - 1 for rho in RHOS},
        once,
        "best_selector",
        within=within,
    )


def _best_speed(sums: np.ndarray, rho: float) -> np.ndarray:
    """Largest relative speed (alpha = 0) over the thresholds, chosen anew in every resample.

    sums (..., 5 + 2T): `redraft_sums` where every block is redrafted, then gain taken and redrafted blocks at each of T
    thresholds.
    """
    taken, redrafted = np.split(sums[..., 5:], 2, axis=-1)
    gain, rate = ratio(taken, sums[..., [BASE]]), ratio(redrafted, sums[..., [BLOCKS]])
    return np.maximum(((1 + gain) * (1 + rho) / (1 + rho + rate * rho)).max(axis=-1), _all_speed(sums, rho))


def _all_speed(sums: np.ndarray, rho: float) -> np.ndarray:
    """Relative speed of redrafting every block."""
    return (1 + oracle_gap(sums)) * (1 + rho) / (1 + 2 * rho)


# ---- figures by exact replay


def _replay_claims(
    made: _Collector, blocks: BlockLog, table: HeldOut, runs: Sequence[Replay], limits: Sequence[Replay]
) -> None:
    """Headrooms of the oracles, block efficiency of every arm, best arms, the selector as a policy when held out."""
    log, n = made.log, made.log.n_arms
    arms = np.stack([run.blocks for run in runs], axis=1)  # (R, K)
    oracles = {run.policy: run.blocks for run in limits} | {"oracle_request": arms.min(axis=1)}
    totals = np.column_stack([arms, np.diff(log.starts), *oracles.values()]).astype(float)
    made.queue(
        {
            "workload_headroom": lambda s: ratio(_best_fixed(s, n), _best_each(s, n)) - 1,
            "workload_oracle_efficiency": lambda s: ratio(s[..., n].sum(axis=-1), _best_each(s, n)),
        },
        totals,
        "oracle_workload",
        split=True,
    )
    made.queue(
        {
            "best_fixed_efficiency": lambda s: ratio(s[..., n], s[..., :n].min(axis=-1)),
            **{
                f"{name}_headroom": lambda s, i=n + 1 + i: ratio(s[..., :n].min(axis=-1), s[..., i]) - 1
                for i, name in enumerate(oracles)
            },
            **{f"block_efficiency:{arm}": lambda s, k=k: ratio(s[..., n], s[..., k]) for k, arm in enumerate(log.arms)},
        },
        totals,
        "headroom",
    )
    for w, name in enumerate(log.workloads):
        mine = log.workload == w
        made.add(
            f"best_arm:{name}", log.arms[int(arms[mine].sum(axis=0).argmin())], "oracle_workload", n=int(mine.sum())
        )
    if not table.fitted.any():
        return made.add("redraft_replay_gain", None, "run_plan", reason="undefined: not fitted for any workload")
    run = run_plan(log, redraft_plan(log, first_arm(blocks), table.redraft_at(log)), name="redraft")
    pair = np.stack([run.blocks, arms[:, first_arm(blocks)]], axis=1)
    for scope, within in _scopes(blocks, table).items():
        made.queue(
            {f"redraft_replay_gain{scope}": lambda s: ratio(s[..., 1], s[..., 0]) - 1}, pair, "run_plan", within=within
        )


def _best_fixed(sums: np.ndarray, n_arms: int) -> np.ndarray:
    """Blocks of the best arm over all workloads, chosen anew in every resample; sums (..., W, K + ...)."""
    return sums[..., :n_arms].sum(axis=-2).min(axis=-1)


def _best_each(sums: np.ndarray, n_arms: int) -> np.ndarray:
    """Blocks when each workload has its own best arm."""
    return sums[..., :n_arms].min(axis=-1).sum(axis=-1)


def _arm_table(made: _Collector, runs: Sequence[Replay]) -> None:
    """Per workload and arm: mean accepted tokens and block efficiency over the blocks of that arm's own run."""
    log = made.log
    for k, (arm, run) in enumerate(zip(log.arms, runs, strict=True)):
        accepted = request_sums(log.accepted[run.path.rows, k], log.request_of[run.path.rows], log.n_requests)
        sums = np.stack([accepted, run.emitted, run.blocks], axis=1)
        for w, workload in enumerate(log.workloads):
            made.queue(
                {
                    f"mean_accepted:{workload}:{arm}": lambda s: ratio(s[..., 0], s[..., 2]),
                    f"block_efficiency:{workload}:{arm}": lambda s: ratio(s[..., 1], s[..., 2]),
                },
                sums,
                "summary",
                within=[w],
            )


def _cost_claims(made: _Collector, blocks: BlockLog, table: HeldOut, costs: Costs) -> None:
    """Measured rho per arm and alpha; modelled speeds of plain decoding, arms and selector over the dominant arm."""
    log = made.log
    context = float(np.median(context_length(log)))
    why = f"median of repeated timings at {context:.0f} tokens of context, on the machine of the timings"
    for arm in costs.arms:
        made.add(f"rho:{arm}", costs.rho(arm, log.draft_len, context), "Costs.rho", headline=False, reason=why)
    made.add("alpha_union", costs.alpha(log.draft_len, context), "Costs.alpha", headline=False, reason=why)
    plans = {f"always {arm}": one_arm(log, k) for k, arm in enumerate(log.arms)}
    plans["redraft"] = redraft_plan(log, first_arm(blocks), table.redraft_at(log))
    runs = {
        "plain decoding": plain_decoding(log, costs),
        **{name: run_plan(log, plan, name=name, costs=costs) for name, plan in plans.items()},
    }
    base = runs[f"always {blocks.path_arm}"].time_s
    scopes = {f"speed:{name}": (run, None) for name, run in runs.items()}
    scopes |= {
        f"redraft_speed{scope}": (runs["redraft"], within) for scope, within in _scopes(blocks, table).items() if within
    }
    for name, (run, within) in scopes.items():
        made.queue(
            {name: lambda s: ratio(s[..., 1], s[..., 0])},
            np.stack([run.time_s, base], axis=1),
            "run_plan",
            within=within,
        )
