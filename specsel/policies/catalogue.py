"""Every policy by name, with the values that tuning may try.

Names are the snake-case names of the literature; fixed arms and oracles are plans over a log. Rules that need to know
which arm looks text up, or that are fitted, learn it from ``fit_on``. Not handled here: how a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd

from specsel.logs import PositionLog, SpecselError
from specsel.policies import contextual as ctx
from specsel.policies import plain as free
from specsel.replay.policy import Policy, View, base_name
from specsel.replay.replay import Plan, fixed, follow, oracle_plan
from specsel.replay.streams import feature_column

BASES: dict[str, Policy] = {
    "random": free.Random(),
    "ftl": free.FollowTheLeader(),
    "discounted_ftl": free.FollowTheLeader(discount=0.9),
    "last_winner": free.FollowTheLeader(discount=0.0),
    "ucb1": free.UCB1(),
    "metasd_ucb": free.MetaSDUCB(),
    "d_ucb": free.DiscountedUCB(),
    "sw_ucb": free.SlidingWindowUCB(),
    "ucbspec_paper": free.UCBSpecPaper(),
    "ucbspec_released": free.UCBSpecReleased(),
    "ema_per_cost": free.EMAPerCost(),
    "exp3": free.EXP3(),
    "exp3spec": free.EXP3Spec(),
    "hedge": free.Hedge(horizon=60),
    "hedge_anytime": free.Hedge(),
    "hedgespec": free.NormalHedge(),
    "hedgespec_argmax": free.NormalHedge(greedy=True),
    "hedgespec_hedge": free.Hedge(with_bonus=True),
    "hedgespec_hedge_argmax": free.Hedge(with_bonus=True, greedy=True),
    "fixed_share": free.FixedShare(),
    "gaussian_thompson": free.GaussianThompson(),
    "beta_thompson": free.BetaThompson(),
}
ALIASES = {
    "follow_the_leader": "ftl",
    "contextual_follow_the_leader": "contextual_ftl",
    "uniform_random": "random",
    "discounted_ucb": "d_ucb",
    "sliding_window_ucb": "sw_ucb",
    "ucbspec": "ucbspec_paper",
    "normal_hedge": "hedgespec",
    "normalhedge": "hedgespec",
    "match_gate_6": "match_gate",
    "cas_spec": "ema_per_cost",
    "whiflash": "entropy_gate",
}
PERSISTENT = ("ftl", "ucb1", "hedge_anytime", "gaussian_thompson")  # without context, also shown with state kept
DETERMINISTIC = ("ucb1", "ucbspec_paper", "ftl", "last_winner", "contextual_ftl")  # ties decide, not random numbers
PLANS = ("best_fixed", "best_fixed_workload", "best_fixed_request", "oracle_block", "oracle_dp")

# main parameter of each policy and the values that tuning and the sensitivity chart try: the same number for all
GRIDS: dict[str, tuple[str, tuple]] = {
    "discounted_ftl": ("discount", (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)),
    "ucb1": ("c", (0.02, 0.1, 0.3, 0.5, 1.0, 2.0)),
    "metasd_ucb": ("beta", (0.03, 0.1, 0.2, 0.3, 0.5, 1.0)),
    "d_ucb": ("discount", (0.8, 0.9, 0.95, 0.98, 0.99, 0.999)),
    "sw_ucb": ("window", (5, 10, 15, 25, 50, 100)),
    "ucbspec_paper": ("scale", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
    "ucbspec_released": ("passes", (1, 2, 3, 4, 6, 8)),
    "ema_per_cost": ("rate", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "exp3": ("explore", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "exp3spec": ("scale", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "hedge": ("horizon", (1, 4, 15, 60, 250, 1000)),
    "hedge_anytime": ("scale", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "hedgespec_hedge": ("scale", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "fixed_share": ("share", (0.005, 0.01, 0.05, 0.1, 0.2, 0.4)),
    "gaussian_thompson": ("noise", (0.003, 0.01, 0.03, 0.1, 0.25, 0.5)),
    "linucb": ("explore", (0.01, 0.03, 0.1, 0.2, 0.3, 1.0)),
    "lints": ("v", (0.01, 0.03, 0.1, 0.2, 0.3, 1.0)),
    "contextual_hedge": ("backoff", (0, 2, 5, 10, 20, 50)),
    "contextual_ftl": ("backoff", (0, 2, 5, 10, 20, 50)),
    "contextual_thompson": ("backoff", (0, 2, 5, 10, 20, 50)),
    "exp4": ("explore", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "exp4_full": ("rate", (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)),
    "match_gate": ("threshold", (1, 2, 3, 4, 5, 6)),
}


def policy_by_name(name: str, log: PositionLog, *, fit_on: PositionLog | None = None) -> Policy | Plan:
    """The policy or plan of a name, ready for ``replay`` on ``log``.

    ``fit_on`` is the log from which rules take their fitted parts (the model arm of a gate, router weights). Without it
    they are fitted on ``log`` itself, in hindsight: fine to look at, not a result. Raises SpecselError for a name that
    does not exist or needs what the log does not have, listing what there is.
    """
    key = name.replace("-", "_")
    key = ALIASES.get(key, key)
    if name.startswith("fixed:"):
        return _fixed_plan(name, log)
    if key in PLANS:
        return oracle_plan(log, key)
    if key in BASES:
        policy = BASES[key]
        return replace(policy, prefer=model_arm_first(log)) if isinstance(policy, free.FollowTheLeader) else policy
    if key not in CONTEXTUAL:
        raise SpecselError(
            f"there is no policy {name!r}; expected fixed:ARM with an arm of {', '.join(log.arms)}, "
            f"or one of {', '.join((*PLANS, *learner_names()))}"
        )
    return CONTEXTUAL[key](fit_on or log)


def learner_names() -> tuple[str, ...]:
    """Names of all policies that are not plans over a log."""
    return (*BASES, *CONTEXTUAL)


def allowed(log: PositionLog, names: Iterable[str]) -> dict[str, Policy]:
    """The learners of these names that the log allows."""
    found = {}
    for name in names:
        with suppress(SpecselError):
            found[name] = policy_by_name(name, log)
    return found


def context_of(policy: Policy) -> str:
    """How often what a policy reads changes: "no context", or by "workload", "request" (decides once) or "block"."""
    bases = set(map(base_name, policy.reads))
    if not bases:
        return "no context"
    if isinstance(policy, ctx.Router) and not policy.every:
        return "request"
    return "workload" if bases == {"workload"} else "block"


def describe(log: PositionLog) -> pd.DataFrame:
    """One row per policy that the log allows: name, source, what it sees and reads, how delayed counts reach it."""
    return pd.DataFrame(
        [
            {
                "policy": name,
                "source": policy.source,
                "sees": policy.sees,
                "reads": ", ".join(policy.reads),
                "release": policy.release if policy.sees in ("every arm", "either") else "",
            }
            for name, policy in allowed(log, learner_names()).items()
        ]
    )


def _fixed_plan(name: str, log: PositionLog) -> Plan:
    arm = name.removeprefix("fixed:")
    if arm not in log.arms:
        raise SpecselError(f"there is no arm {arm!r} in {log.run}; expected one of {', '.join(log.arms)}")
    return Plan.one(name, log, log.arms.index(arm))


def lookup_arm(log: PositionLog) -> int | None:
    """The arm that looks text up: the one named ngram, else the first with match lengths of its own, else None."""
    if "ngram" in log.arms:
        return log.arms.index("ngram")
    found = ~np.isnan(log.stats.get("match_length", np.full((1, log.n_arms), np.nan))).all(axis=0)
    return int(found.argmax()) if found.any() else None


def model_arm_first(log: PositionLog) -> int:
    """The lowest arm that does not look text up: it wins ties of follow-the-leader, also before the first block."""
    return 1 if lookup_arm(log) == 0 and log.n_arms > 1 else 0


def _pair(log: PositionLog) -> tuple[int, int]:
    """The lookup arm, and the best fixed arm among the others."""
    lookup = lookup_arm(log)
    if lookup is None or log.n_arms < 2:
        raise SpecselError(
            f"{log.run}: no arm looks text up (arms: {', '.join(log.arms)}), so a gate has nothing to "
            "choose; take another policy"
        )
    others = [k for k in range(log.n_arms) if k != lookup]
    return lookup, min(others, key=lambda k: fixed(log, k).blocks.sum())


def _block_features(log: PositionLog) -> tuple[str, ...]:
    """Context that the log has, known anew before each block."""
    found = tuple(n for n, v in log.context.items() if not np.isnan(v).all())
    if not found:
        raise SpecselError(f"{log.run}: the log has no context, so no policy can look at it; collect one that has")
    return tuple(f"scaled:{n}" for n in found)


def _all_features(log: PositionLog) -> tuple[str, ...]:
    return (*_block_features(log), *(f"workload={w}" for w in range(1, len(log.workloads))))


def _regressors(log: PositionLog, features: tuple[str, ...], rows: np.ndarray) -> np.ndarray:
    columns = {f: feature_column(log, f)[rows] for f in features}
    return ctx.design(View(log.n_arms, log.draft_len, np.zeros(len(rows)), columns), features)


def _classifier(log: PositionLog, features: tuple[str, ...], every: int) -> Policy:
    """Which arm emits most, learned from at most 20,000 evenly spaced positions."""
    rows = np.unique(np.linspace(0, log.n_positions - 1, 20_000).astype(int))
    return ctx.fit_classifier_router(_regressors(log, features, rows), log.emitted[rows], features, every=every)


def _request_router(log: PositionLog) -> Policy:
    """Each arm's block efficiency on a request, predicted from its workload and its first position."""
    features, lengths = _all_features(log), np.diff(log.starts)
    efficiency = np.stack([lengths / fixed(log, k).blocks for k in range(log.n_arms)], axis=1)
    return ctx.fit_linear_router(_regressors(log, features, log.starts[:-1]), efficiency, features, every=0)


def _match_gate(log: PositionLog, threshold: int) -> Policy:
    feature_column(log, "match_length")
    return ctx.Gate("match_length", threshold, *_pair(log))


def _entropy_gate(log: PositionLog) -> Policy:
    """The pair of arms and the threshold (six quantiles) with the fewest blocks."""
    values = feature_column(log, "target_entropy")
    if np.isnan(values).all():
        raise SpecselError(f"{log.run}: the log has no target entropy; choose another policy")
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


CONTEXTUAL: dict[str, Callable[[PositionLog], Policy]] = {
    "contextual_hedge": lambda log: _by_match(log, free.Hedge()),
    "contextual_ftl": lambda log: _by_match(log, free.FollowTheLeader(prefer=model_arm_first(log))),
    "contextual_thompson": lambda log: ctx.PerContext(free.GaussianThompson(), "workload", _workload_edges(log)),
    "linucb": lambda log: ctx.LinUCB(_block_features(log)),
    "lints": lambda log: ctx.LinTS(_block_features(log)),
    "lints_greedy": lambda log: ctx.LinTS(_block_features(log), v=0.0),
    "exp4": lambda log: ctx.EXP4(_experts(log)),
    "exp4_full": lambda log: ctx.HedgeOverExperts(_experts(log)),
    "match_gate": lambda log: _match_gate(log, 6),
    "match_gate_1": lambda log: _match_gate(log, 1),
    "match_gate_3": lambda log: _match_gate(log, 3),
    "match_gate_5": lambda log: _match_gate(log, 5),
    "entropy_gate": _entropy_gate,
    "request_router": _request_router,
    "memspec": lambda log: _classifier(log, _all_features(log), 4),
    "whiflash_logistic": lambda log: _classifier(log, tuple(f for f in _block_features(log) if "target" in f), 1),
    "block_router": lambda log: _classifier(log, _block_features(log), 1),
}
