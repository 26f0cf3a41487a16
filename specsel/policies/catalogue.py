"""Every policy by name, one row each: how it is made, its main parameter, and the values that tuning may try.

Names are the snake-case names of the literature; fixed arms and oracles are plans over a log. Rules that need to know
which arm looks text up, that are fitted, or that weigh costs, take them from the requests that they may be fitted on.
A new policy is a class and a row. Not handled here: how a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from specsel.costs import CostError, Costs
from specsel.logs import PositionLog, SpecselError
from specsel.policies import contextual as ctx
from specsel.policies import plain as free
from specsel.replay.policy import Policy, View, base_name
from specsel.replay.replay import Plan, fixed, follow, oracle_plan
from specsel.replay.streams import feature_column

PLANS = ("best_fixed", "best_fixed_workload", "best_fixed_request", "oracle_block", "oracle_dp")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy of the catalogue."""

    policy: Policy | Callable[..., Policy]  # itself, or made from (the log it may be fitted on, costs or None)
    parameter: str | None = None  # main parameter
    grid: tuple = ()  # its values that tuning and the sensitivity chart try: as many for every policy
    kept: bool = False  # without context, but also shown with its state kept (those with context always are)
    ties: bool = False  # deterministic, so that the order of the arms settles ties
    also: tuple[str, ...] = ()  # other names


def policy_by_name(
    name: str, log: PositionLog, *, fit_on: PositionLog | None = None, costs: Costs | None = None
) -> Policy | Plan:
    """The policy or plan of a name, ready for ``replay`` on ``log``.

    ``fit_on`` is the log from which rules take their fitted parts (the model arm of a gate, router weights, costs of a
    block). Without it they are fitted on ``log`` itself, in hindsight: fine to look at, not a result. Raises
    SpecselError for a name that does not exist or needs what the log does not have, listing what there is.
    """
    key = name.replace("-", "_")
    key = next((n for n, row in CATALOGUE.items() if key in row.also), key)
    bare = name.rpartition("@")[0] if name not in log.arms else ""
    if name == "none" or bare in log.arms or name.partition(":")[0] in ("fixed", "gate", "priority", "union"):
        return _plan(name, log)
    if key in PLANS:
        return oracle_plan(log, key)
    if key not in CATALOGUE:
        raise SpecselError(
            f"there is no policy {name!r}; expected fixed:ARM with an arm of {', '.join(log.arms)}, "
            f"or one of {', '.join((*PLANS, *CATALOGUE))}"
        )
    made = CATALOGUE[key].policy
    return made if isinstance(made, Policy) else made(fit_on or log, costs)


def allowed(log: PositionLog, names: Iterable[str] | None = None, **options) -> dict[str, Policy | Plan]:
    """The policies of these names (default: the catalogue) that the log allows; options as in `policy_by_name`."""
    found = {}
    for name in CATALOGUE if names is None else names:
        with suppress(SpecselError):
            found[name] = policy_by_name(name, log, **options)
    return found


def context_of(policy: Policy | Plan) -> str:
    """How often what a policy reads changes: "no context", or context by "workload", "request" (decides once) or
    "block"; "hindsight" for a plan."""
    if isinstance(policy, Plan):
        return "hindsight"
    bases = set(map(base_name, policy.reads))
    if not bases:
        return "no context"
    if isinstance(policy, ctx.Router) and not policy.every:
        return "context by request"
    return "context by workload" if bases == {"workload"} else "context by block"


def describe(log: PositionLog, *, costs: Costs | None = None) -> pd.DataFrame:
    """One row per policy that the log allows: policy, source, what it sees and reads, how delayed counts reach it, its
    main parameter and the values that are tried."""
    rows = []
    for name, policy in allowed(log, costs=costs).items():
        row = CATALOGUE[name]
        costs_of = getattr(policy, "costs", ())
        rows.append(
            {
                "policy": name,
                "source": policy.source + (" (here with equal costs)" if costs_of is None else ""),
                "sees": policy.sees,
                "reads": ", ".join(policy.reads),
                "release": policy.release if policy.sees in ("every arm", "either") else "",
                "parameter": row.parameter or "",
                "tried": ", ".join(map(str, row.grid)),
            }
        )
    return pd.DataFrame(rows)


def _plan(name: str, log: PositionLog) -> Plan:
    """The plan of a rule, named as the rule."""
    longest = _drafts(name.removeprefix("fixed:"), log)
    whole = ((longest == 0) | (longest == log.draft_len)).all()
    return Plan(name, longest > 0, None if whole else longest)


def _drafts(rule: str, log: PositionLog) -> np.ndarray:
    """(N, K) tokens that each arm may draft, 0 where it does not, by a rule: ARM, ARM@L (at most L tokens), none,
    gate:M:RULE (the lookup arm from match length M on, else the rule), union:RULE+RULE (verified together),
    priority:RULE>RULE@M (the first that has a draft; from match length M on).
    """
    kind, _, rest = rule.partition(":")
    name, at, length = (rule, "", "") if rule in log.arms else rule.rpartition("@")
    found = np.zeros((log.n_positions, log.n_arms), dtype=np.int16)
    if name in log.arms:
        if at and not (length.isdigit() and 1 <= int(length) <= log.draft_len):
            raise SpecselError(f"{rule}: a draft length is {length!r}; expected 1 to {log.draft_len}, as logged")
        found[:, log.arms.index(name)] = int(length or log.draft_len)
    elif kind == "gate":
        least, _, other = rest.partition(":")
        found = _drafts(other, log)
        found[_matched(log, least)] = log.draft_len * (np.arange(log.n_arms) == _lookup(log))
    elif kind == "union":
        found = np.maximum.reduce([_drafts(part, log) for part in rest.split("+")])
    elif kind == "priority":
        open_ = np.ones(log.n_positions, dtype=bool)
        for part in rest.split(">"):
            inner, _, least = (part, "", "") if part in log.arms else part.partition("@")
            drafts = _drafts(inner, log)
            taken = open_ & ((drafts > 0) & (log.proposed > 0)).any(axis=1) & (_matched(log, least) if least else True)
            found[taken] = drafts[taken]
            open_ &= ~taken
    elif rule != "none":
        raise SpecselError(f"there is no arm {rule!r} in {log.run}; expected one of {', '.join(log.arms)}")
    return found


def _matched(log: PositionLog, least: str) -> np.ndarray:
    """(N,) is the longest suffix that occurred earlier at least so long?"""
    if not least.isdigit():
        raise SpecselError(f"a match length is {least!r}; expected a whole number, as in gate:6:ARM")
    return feature_column(log, "match_length") >= int(least)


def lookup_arm(log: PositionLog) -> int | None:
    """The arm that looks text up: the one named ngram, else the first with match lengths of its own, else None."""
    if "ngram" in log.arms:
        return log.arms.index("ngram")
    found = ~np.isnan(log.stats.get("match_length", np.full((1, log.n_arms), np.nan))).all(axis=0)
    return int(found.argmax()) if found.any() else None


def model_arm_first(log: PositionLog) -> int:
    """The lowest arm that does not look text up: it wins ties of follow-the-leader, also before the first block."""
    return 1 if lookup_arm(log) == 0 and log.n_arms > 1 else 0


def _lookup(log: PositionLog) -> int:
    """The lookup arm of a log that has one and another arm beside it."""
    lookup = lookup_arm(log)
    if lookup is None or log.n_arms < 2:
        raise SpecselError(
            f"{log.run}: no arm looks text up (arms: {', '.join(log.arms)}), so a gate has nothing to "
            "choose; take another policy"
        )
    return lookup


def _block_features(log: PositionLog) -> tuple[str, ...]:
    """Context that the log has, known anew before each block."""
    found = tuple(n for n, v in log.context.items() if not np.isnan(v).all())
    if not found:
        raise SpecselError(f"{log.run}: the log has no context, so no policy can look at it; collect one that has")
    return tuple(f"scaled:{n}" for n in found)


def _all_features(log: PositionLog) -> tuple[str, ...]:
    return (*_block_features(log), *(f"workload={w}" for w in range(1, len(log.workloads))))


def _target_features(log: PositionLog) -> tuple[str, ...]:
    return tuple(f for f in _block_features(log) if "target" in f)


def _regressors(log: PositionLog, features: tuple[str, ...], rows: np.ndarray) -> np.ndarray:
    columns = {f: feature_column(log, f)[rows] for f in features}
    return ctx.design(View(log.n_arms, log.draft_len, np.zeros(len(rows)), columns), features)


def _classifier(log: PositionLog, features: tuple[str, ...], every: int) -> Policy:
    """Which arm emits most, learned from at most 20,000 evenly spaced positions; SpecselError without features."""
    if not features:
        raise SpecselError(f"{log.run}: the log says nothing of the target before a draft; choose another policy")
    rows = np.unique(np.linspace(0, log.n_positions - 1, 20_000).astype(int))
    return ctx.fit_classifier_router(_regressors(log, features, rows), log.emitted[rows], features, every=every)


def _request_router(log: PositionLog) -> Policy:
    """Each arm's block efficiency on a request, predicted from its workload and its first position."""
    features, lengths = _all_features(log), np.diff(log.starts)
    efficiency = np.stack([lengths / fixed(log, k).blocks for k in range(log.n_arms)], axis=1)
    return ctx.fit_linear_router(_regressors(log, features, log.starts[:-1]), efficiency, features, every=0)


def _match_gate(log: PositionLog, threshold: int) -> Policy:
    """The lookup arm from a match of this length on, else the arm with which that needs the fewest blocks."""
    reached, lookup = feature_column(log, "match_length") >= threshold, _lookup(log)
    others = [k for k in range(log.n_arms) if k != lookup]
    plans = [Plan.one("", log, np.where(reached, lookup, k)) for k in others]
    best = int(np.argmin([follow(log, plan).blocks.sum() for plan in plans]))
    return ctx.Gate("match_length", threshold, lookup, others[best])


def _entropy_gate(log: PositionLog) -> Policy:
    """The pair of arms and the threshold (six quantiles) with the fewest blocks."""
    values = feature_column(log, "target_entropy")
    if np.isnan(values).all():
        raise SpecselError(f"{log.run}: the log has no target entropy; choose another policy")
    if log.n_arms < 2:
        raise SpecselError(f"{log.run}: a gate needs two arms; the log has {log.n_arms}")
    gates = [
        ctx.Gate("target_entropy", float(t), above, below)
        for t in np.nanquantile(values, (0.1, 0.25, 0.4, 0.6, 0.75, 0.9))
        for above in range(log.n_arms)
        for below in range(log.n_arms)
        if above != below
    ]
    plans = [Plan.one("", log, np.where(values >= g.threshold, g.above, g.below)) for g in gates]
    return gates[int(np.argmin([follow(log, plan).blocks.sum() for plan in plans]))]


def _experts(log: PositionLog) -> tuple[Policy, ...]:
    """Every fixed arm, and the match gates."""
    return (*(free.Fixed(k) for k in range(log.n_arms)), *(_match_gate(log, m) for m in (1, 3, 5, 6)))


def _by_match(log: PositionLog, inner: Policy) -> Policy:
    """One learner per length of the longest suffix that occurred earlier (0..6)."""
    feature_column(log, "match_length")
    return ctx.PerContext(inner)


def _workload_edges(log: PositionLog) -> tuple[float, ...]:
    return tuple(w - 0.5 for w in range(1, len(log.workloads)))


def _leader(discount: float, log: PositionLog, costs: Costs | None) -> Policy:
    return free.FollowTheLeader(discount, prefer=model_arm_first(log))


def _per_cost(log: PositionLog, costs: Costs | None) -> Policy:
    """Costs are mean seconds of a block of each arm alone, as modelled from the timings; equal without timings."""
    found = None
    with suppress(CostError):
        runs = [fixed(log, k, costs=costs) for k in range(log.n_arms)] if costs else []
        found = tuple(float(r.seconds.sum() / r.blocks.sum()) for r in runs) or None
    return free.EMAPerCost(costs=found)


SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
WIDTHS = (0.01, 0.03, 0.1, 0.2, 0.3, 1.0)
RADII = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ROUNDS = (0, 2, 5, 10, 20, 50)
CATALOGUE: dict[str, Row] = {
    "random": Row(free.Random(), also=("uniform_random",)),
    "ftl": Row(partial(_leader, 1.0), kept=True, ties=True, also=("follow_the_leader",)),
    "discounted_ftl": Row(partial(_leader, 0.9), "discount", (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)),
    "last_winner": Row(partial(_leader, 0.0), ties=True),
    "ucb1": Row(free.UCB1(), "c", (0.02, 0.1, 0.3, 0.5, 1.0, 2.0), kept=True, ties=True),
    "metasd_ucb": Row(free.MetaSDUCB(), "beta", (0.03, 0.1, 0.2, 0.3, 0.5, 1.0)),
    "d_ucb": Row(free.DiscountedUCB(), "discount", (0.8, 0.9, 0.95, 0.98, 0.99, 0.999), also=("discounted_ucb",)),
    "sw_ucb": Row(free.SlidingWindowUCB(), "window", (5, 10, 15, 25, 50, 100), also=("sliding_window_ucb",)),
    "ucbspec_paper": Row(
        free.UCBSpecPaper(), "scale", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), ties=True, also=("ucbspec",)
    ),
    "ucbspec_released": Row(free.UCBSpecReleased(), "passes", (1, 2, 3, 4, 6, 8)),
    "ema_per_cost": Row(_per_cost, "rate", SHARES, also=("cas_spec",)),
    "exp3": Row(free.EXP3(), "explore", SHARES),
    "exp3spec": Row(free.EXP3Spec(), "scale", SCALES),
    "hedge": Row(free.Hedge(horizon=60), "horizon", (1, 4, 15, 60, 250, 1000)),
    "hedge_anytime": Row(free.Hedge(), "scale", SCALES, kept=True),
    "hedgespec": Row(free.NormalHedge(), also=("normal_hedge", "normalhedge")),
    "hedgespec_argmax": Row(free.NormalHedge(greedy=True)),
    "hedgespec_hedge": Row(free.Hedge(with_bonus=True), "scale", SCALES),
    "hedgespec_hedge_argmax": Row(free.Hedge(with_bonus=True, greedy=True)),
    "fixed_share": Row(free.FixedShare(), "share", (0.005, 0.01, 0.05, 0.1, 0.2, 0.4)),
    "gaussian_thompson": Row(free.GaussianThompson(), "noise", (0.003, 0.01, 0.03, 0.1, 0.25, 0.5), kept=True),
    "beta_thompson": Row(free.BetaThompson()),
    "contextual_hedge": Row(lambda log, _: _by_match(log, free.Hedge()), "backoff", ROUNDS),
    "contextual_ftl": Row(
        lambda log, costs: _by_match(log, _leader(1.0, log, costs)),
        "backoff",
        ROUNDS,
        ties=True,
        also=("contextual_follow_the_leader",),
    ),
    "contextual_thompson": Row(
        lambda log, _: ctx.PerContext(free.GaussianThompson(), "workload", _workload_edges(log)), "backoff", ROUNDS
    ),
    "linucb": Row(lambda log, _: ctx.LinUCB(_block_features(log)), "explore", WIDTHS),
    "lints": Row(lambda log, _: ctx.LinTS(_block_features(log)), "v", WIDTHS),
    "lints_greedy": Row(lambda log, _: ctx.LinTS(_block_features(log), v=0.0)),
    "exp4": Row(lambda log, _: ctx.EXP4(_experts(log)), "explore", SHARES),
    "exp4_full": Row(lambda log, _: ctx.HedgeOverExperts(_experts(log)), "rate", (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)),
    "match_gate": Row(lambda log, _: _match_gate(log, 6), "threshold", (1, 2, 3, 4, 5, 6), also=("match_gate_6",)),
    "match_gate_1": Row(lambda log, _: _match_gate(log, 1)),
    "match_gate_3": Row(lambda log, _: _match_gate(log, 3)),
    "match_gate_5": Row(lambda log, _: _match_gate(log, 5)),
    "entropy_gate": Row(lambda log, _: _entropy_gate(log), also=("whiflash",)),
    "request_router": Row(lambda log, _: _request_router(log)),
    "memspec": Row(lambda log, _: _classifier(log, _all_features(log), 4)),
    "whiflash_logistic": Row(lambda log, _: _classifier(log, _target_features(log), 1)),
    "block_router": Row(lambda log, _: _classifier(log, _block_features(log), 1)),
}
