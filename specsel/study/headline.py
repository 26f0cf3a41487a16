"""Every headline figure of the study, measured on one log, as claims with intervals.

One table of sums per request and one resampling of the requests serve all of them, the same as in the chapters. The
figures are those of the original study's section 3 and the exact versions by replay. What a log cannot give (replay
figures of a block-anchored log, a selector where one cannot be fitted) is undefined with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from specsel.costs import Costs, best_of_n, break_even_rho, max_alpha, relative_speed
from specsel.logs import STATS, PositionLog
from specsel.paper.claims import UNITS, Claim, make_claim
from specsel.replay import Plan, Replay, context_length, fixed, follow, oracle_block, oracle_dp, per_request
from specsel.selection import redraft
from specsel.selection.blocks import blocks as blocks_of
from specsel.selection.route import redrafting
from specsel.stats import Estimate, Resampling, Sums, by, by_rows, ratio

RHOS = (0.02, 0.05, 0.10, 0.15, 0.20)  # of the published break-even table
ANCHORED = "undefined: the log is block-anchored, so nothing can be replayed exactly"
UNDEFINED = {
    "capture": "undefined: no block has a gain",
    "skill": "undefined: no block has a gain, or none is redrafted",
    "max_alpha": "undefined: nothing is redrafted",
    "break_even_rho": "undefined: nothing is redrafted, or redrafting pays at every drafter cost",
}
Quantities = Mapping[Hashable, Callable[[Sums], np.ndarray]]


def speed_of_all(s: Sums, rho: float) -> np.ndarray:
    """Relative speed of redrafting every block; alpha = 0."""
    return best_of_n(redraft.oracle_gap(s), rho)


def best_speed(s: Sums, rho: float) -> np.ndarray:
    """Largest relative speed over the thresholds, chosen anew in every resample; alpha = 0."""
    gap, capture = redraft.oracle_gap(s)[:, None], ratio(s.taken_at, s.gain[:, None])
    rate = ratio(s.redrafted_at, s.blocks[:, None])
    return np.fmax(relative_speed(gap, capture, rate, rho).max(axis=1), speed_of_all(s, rho))


BLOCK_VIEW: Quantities = {
    "oracle_gap": redraft.oracle_gap,
    "mean_dominant": lambda s: ratio(s.own, s.blocks),
    "mean_best": lambda s: ratio(s.own + s.gain, s.blocks),
    "oracle_gap_accepted": lambda s: ratio(s.gain_accepted, s.own_accepted),
    "workload_headroom_on_path": lambda s: (
        ratio(s.count.max(axis=1).sum(axis=-1), s.count.sum(axis=-1).max(axis=1)) - 1
    ),
}
SELECTOR: Quantities = {name: f for name, f in redraft.QUANTITIES.items() if name != "oracle_gap"}
POOLED: Quantities = {
    "capture_accepted": lambda s: ratio(s.taken_accepted, s.gain_accepted),
    "token_gain_accepted": lambda s: ratio(s.taken_accepted, s.own_accepted),
    "break_even_rho": lambda s: break_even_rho(redraft.token_gain(s), 1.0, redraft.redraft_rate(s)),
    "max_alpha": lambda s: max_alpha(redraft.token_gain(s), 1.0, redraft.redraft_rate(s)),
    **{("best_of_n", rho): lambda s, rho=rho: speed_of_all(s, rho) for rho in RHOS},
    **{("best_selector", rho): lambda s, rho=rho: best_speed(s, rho) for rho in RHOS},
    **{("margin", rho): lambda s, rho=rho: best_speed(s, rho) / speed_of_all(s, rho) - 1 for rho in RHOS},
}
EXACT: Quantities = {
    "workload_headroom": lambda s: ratio(s.always.sum(axis=-1).min(axis=1), s.always.min(axis=1).sum(axis=-1)) - 1,
    "workload_oracle_efficiency": lambda s: ratio(s.tokens.sum(axis=-1), s.always.min(axis=1).sum(axis=-1)),
    "best_fixed_efficiency": lambda s: ratio(s.tokens, s.always.min(axis=1)),
    "oracle_dp_headroom": lambda s: ratio(s.always.min(axis=1), s.oracle_dp) - 1,
    "oracle_block_headroom": lambda s: ratio(s.always.min(axis=1), s.oracle_block) - 1,
    "oracle_request_headroom": lambda s: ratio(s.always.min(axis=1), s.oracle_request) - 1,
}
PER_WORKLOAD = ("workload_headroom_on_path", "workload_headroom", "workload_oracle_efficiency")  # split sums


@dataclass
class _Claims:
    """Claims of one log, all from the same resampling."""

    log: PositionLog
    resampling: Resampling
    made: list[Claim] = field(default_factory=list)

    def add(self, name: Hashable, value: Any, function: str, *, reason: str = "", n: int | None = None) -> None:
        """One claim; a number without interval is no headline and carries its reason."""
        keys = tuple(map(str, name)) if isinstance(name, tuple) else (str(name),)
        if isinstance(value, Estimate) and value.low is None:
            reason = reason or (UNDEFINED.get(keys[0], value.method) if value.value is None else value.method)
            value = replace(value, method=reason) if value.value is None else value
        unit = "" if isinstance(value, str) else UNITS[keys[0]]
        defined = isinstance(value, Estimate) and value.low is not None and keys[0] != "oracle_gap_by_blocks"
        log = {"label": self.log.label, "origin": {"run": self.log.run, "log_sha256": self.log.sha256}}
        claim = make_claim(keys, value, unit=unit, function=function, headline=defined, reason=reason, n=n, **log)
        self.made.append(claim)

    def figures(
        self,
        table: pd.DataFrame,
        quantities: Quantities,
        function: str,
        groups: Sequence[str] = ("all",),
        reasons: Mapping[str, str] | None = None,
        null: Mapping[Hashable, float] | None = None,
    ) -> dict[tuple, Estimate]:
        """Claims of quantities of a table of requests; ``reasons``: workloads whose figures are undefined, and why."""
        split: Collection[Hashable] = [name for name in quantities if name in PER_WORKLOAD]
        found = by(table, quantities, resampling=self.resampling, groups=groups, split=split, null=null)
        estimates = {}
        for quantity, key, estimate in zip(found.quantity, found.key, found.estimate, strict=True):
            key = key[1:] if key[:1] == ("judged",) else key
            why = (reasons or {}).get(key[0], "") if key else ""
            if why:
                estimate = replace(estimate, value=None, low=None, high=None, p=None, method=why)
            self.add((quantity, *key), estimate, function, reason=why)
            estimates[quantity, *key] = estimate
        return estimates


def headline(
    log: PositionLog,
    *,
    resampling: Resampling | None = None,
    dominant: str | None = None,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = redraft.THRESHOLDS,
    threshold: float | None = None,
    costs: Costs | None = None,
) -> list[Claim]:
    """All headline claims of a log; every number has an interval from resampled requests, or says why not.

    dominant: the arm that drafts first (default: the one that needs the fewest blocks, or the logged path of an
    anchored log). threshold: of every selector (default: chosen by the inner loop). costs: measured seconds; with them
    also rho per arm, alpha, and modelled speeds.
    """
    made = _Claims(log, resampling or Resampling())
    blocks = blocks_of(log, dominant)
    decided = redraft.leave_one_workload_out(blocks, features=features, thresholds=thresholds, threshold=threshold)
    made.add("dominant", blocks.attrs["dominant"], "blocks", n=log.n_requests)
    _block_claims(made, blocks, decided, (0.0, *thresholds, 1.01))
    if log.complete:
        _exact_claims(made, decided, costs)
    else:
        for name in (*EXACT, "redraft_replay_gain"):
            made.add(name, None, "follow", reason=ANCHORED)
    return sorted(made.made, key=lambda claim: len(claim.keys))


def to_json(claims: Iterable[Claim]) -> dict[str, list[dict[str, Any]]]:
    """The object that `specsel headline --json` prints."""
    keys = ("name", "value", "unit", "label", "low", "high", "level", "n", "method")
    return {
        "claims": [
            {key: c.to_dict()[key] for key in keys} | {"method": c.method or f"none: {c.reason or 'a sentence'}"}
            for c in claims
        ]
    }


def _block_claims(made: _Claims, blocks: pd.DataFrame, decided: redraft.Decided, thresholds: Sequence[float]) -> None:
    """Figures over the blocks of the dominant arm: what there is to gain, and what the selector takes of it."""
    log = made.log
    table = redraft.requests(blocks, decided.redraft)
    table["judged"] = np.where(decided.fitted(table.workload), "judged", None)
    request_of = blocks.groupby(["workload", "request"], sort=False).ngroup().to_numpy()
    gain = (blocks.best - blocks.own).to_numpy()
    for t in thresholds:
        asked = decided.probability >= t
        table["taken_at", t] = np.bincount(request_of, gain * asked, len(table))
        table["redrafted_at", t] = np.bincount(request_of, asked, len(table))
    for k, arm in enumerate(log.arms):
        table["count", arm] = np.bincount(request_of, log.emitted[blocks.row, k], len(table))
    made.figures(table, BLOCK_VIEW, "blocks")
    made.figures(table, {"oracle_gap": redraft.oracle_gap}, "blocks", ["workload"])
    rows = blocks[["best", "own"]].to_numpy(dtype=float)
    narrow = by_rows(
        lambda s: ratio(s[:, 0], s[:, 1]) - 1, rows, workload=blocks.workload.to_numpy(), resampling=made.resampling
    )
    made.add("oracle_gap_by_blocks", narrow, "by_rows")
    function = "leave_one_workload_out"
    if decided.model:
        made.figures(table, SELECTOR | POOLED, function, ["judged"])
    else:
        for name in SELECTOR | POOLED:
            made.add(name, None, function, reason="undefined: not fitted for any workload")
    found = made.figures(table, SELECTOR, function, ["workload"], decided.reason, null={"skill": 1.0})
    verdicts = redraft.skill_verdicts({w: found["skill", w] for w in decided.reason})
    for w, verdict in verdicts.items():
        chosen, why = decided.threshold[w], decided.reason[w]
        reason = f"undefined: {why}" if why else "chosen on the training workloads, not estimated"
        made.add(("threshold", w), chosen, "train", reason=reason, n=int((table.workload != w).sum()))
        made.add(("verdict", w), verdict, "skill_verdicts", n=int((table.workload == w).sum()))


def _exact_claims(made: _Claims, decided: redraft.Decided, costs: Costs | None) -> None:
    """Figures by exact replay: headrooms of the oracles, every arm alone, the selector as a policy, modelled speeds."""
    log, dominant = made.log, decided.dominant
    always = {arm: fixed(log, k, costs=costs, keep_path=True) for k, arm in enumerate(log.arms)}
    redrafted = follow(log, redrafting(log, decided), costs=costs)
    table = per_request(log, {"redraft": redrafted, "oracle_dp": oracle_dp(log), "oracle_block": oracle_block(log)})
    for k, (arm, run) in enumerate(always.items()):
        table["always", arm] = run.blocks
        rows = run.path.rows
        table["accepted", arm] = np.bincount(log.request_of[rows], log.accepted[rows, k], log.n_requests)
    table = table.rename(columns={("blocks", name): name for name in ("redraft", "oracle_dp", "oracle_block")})
    table["oracle_request"] = table[[("always", arm) for arm in log.arms]].min(axis=1)
    table["judged"] = np.where(decided.fitted(table.workload), "judged", None)
    made.figures(table, EXACT, "follow")
    for w in log.workloads:
        mine = table[table.workload == w]
        best = min(log.arms, key=lambda arm: mine["always", arm].sum())
        made.add(("best_arm", w), best, "fixed", n=len(mine))
    arms: Quantities = {
        ("block_efficiency", arm): lambda s, arm=arm: ratio(s.tokens, s["always", arm]) for arm in log.arms
    }
    made.figures(table, arms, "fixed")
    gain: Quantities = {"redraft_replay_gain": lambda s: ratio(s["always", dominant], s.redraft) - 1}
    if decided.model:
        made.figures(table, gain, "follow", ["judged"])
        made.figures(table, gain, "follow", ["workload"], decided.reason)
    else:
        made.add("redraft_replay_gain", None, "follow", reason="undefined: not fitted for any workload")
    accepted: Quantities = {
        ("mean_accepted", arm): lambda s, arm=arm: ratio(s["accepted", arm], s["always", arm]) for arm in log.arms
    }
    made.figures(table, accepted | arms, "fixed", ["workload"])
    if costs is not None:
        runs = {f"always {arm}": run for arm, run in always.items()} | {"redraft": redrafted}
        _speed_claims(made, table, runs, decided, costs)


def _speed_claims(
    made: _Claims, table: pd.DataFrame, runs: Mapping[str, Replay], decided: redraft.Decided, costs: Costs
) -> None:
    """Measured rho per arm and alpha; modelled speeds of plain decoding, arms and selector over the dominant arm."""
    log, context = made.log, float(np.median(context_length(made.log)))
    why = f"median of repeated timings at {context:.0f} tokens of context, on the machine of the timings"
    for arm in costs.arms:
        made.add(("rho", arm), costs.rho(arm, log.draft_len, context), "Costs.rho", reason=why)
    made.add("alpha_union", costs.alpha(log.draft_len, context), "Costs.alpha", reason=why)
    nothing = np.zeros((log.n_positions, log.n_arms), dtype=bool)
    for name, run in {"plain decoding": follow(log, Plan("plain decoding", nothing), costs=costs), **runs}.items():
        table["seconds", name] = run.seconds
    base = ("seconds", f"always {decided.dominant}")
    speeds: Quantities = {
        ("speed", name): lambda s, name=name: ratio(s[base], s["seconds", name]) for name in ("plain decoding", *runs)
    }
    made.figures(table, speeds, "follow")
    if decided.model:
        selector: Quantities = {"redraft_speed": lambda s: ratio(s[base], s["seconds", "redraft"])}
        made.figures(table, selector, "follow", ["judged"])
        made.figures(table, selector, "follow", ["workload"], decided.reason)
