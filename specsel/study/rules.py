"""Rules that need no training, and the best of a family of them on workloads that it was not chosen on.

A gate asks the arm that looks text up where the longest suffix that occurred earlier is long enough, a priority list
takes the first arm that has a draft, a union verifies several drafts together, and the most confident of several drafts
is verified alone (TAPS, arXiv 2603.27027). Not handled here: what a rule's name means (`specsel.policies.catalogue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np

from specsel.costs import Costs
from specsel.logs import PositionLog
from specsel.policies.catalogue import lookup_arm, policy_by_name
from specsel.replay import Plan, follow

MATCHES = (1, 2, 3, 4, 5, 6, 8)  # tokens from which a gate or list asks the lookup arm
MOST_ORDERED = 5  # arms of which every order is tried as a list; of more, every pair


def families(log: PositionLog, *, lengths: Sequence[int] = ()) -> dict[str, list[Plan]]:
    """Family -> its rules as plans; families without a rule on this log are left out.

    ``lengths``: draft lengths to which fixed arms, gates and unions of two are cut besides.
    """
    look = lookup_arm(log) if "match_length" in log.context else None
    models = [arm for k, arm in enumerate(log.arms) if k != look]
    matches = [m for m in MATCHES if look is not None and (log.context["match_length"] >= m).any()]
    pairs, cuts = list(combinations(log.arms, 2)), ["", *(f"@{n}" for n in lengths)]
    names = {
        "fixed arm": [f"{arm}{cut}" if cut else f"fixed:{arm}" for arm in log.arms for cut in cuts],
        "gate": [f"gate:{m}:{arm}{cut}" for m in matches for arm in models for cut in cuts],
        "priority list": _lists(log, look, matches),
        "union of two": [f"union:{a}{cut}+{b}{cut}" for a, b in pairs for cut in cuts],
        "gate to a union": [f"gate:{m}:union:{a}+{b}" for m in matches for a, b in pairs],
        "union of all": ["union:" + "+".join(log.arms)] if log.n_arms > 2 else [],
    }
    found = {family: [policy_by_name(name, log) for name in rules] for family, rules in names.items()}
    found["most confident"] = _most_confident(log, models)
    return {family: plans for family, plans in found.items() if plans}


def _lists(log: PositionLog, look: int | None, matches: Sequence[int]) -> list[str]:
    """Orders of the arms, each cut behind the first arm that always has a draft."""
    sure = {arm for k, arm in enumerate(log.arms) if k != look and (log.proposed[:, k] > 0).all()}
    orders = permutations(log.arms, None if log.n_arms <= MOST_ORDERED else 2)
    ends = ((order, next((i for i, arm in enumerate(order) if arm in sure), len(order))) for order in orders)
    kept = dict.fromkeys(order[: end + 1] for order, end in ends)
    looked = None if look is None else log.arms[look]
    return [
        "priority:" + ">".join(f"{arm}@{m}" if arm == looked else arm for arm in order)
        for order in kept
        for m in (matches or [1])
        if matches or look is None
    ]


def _most_confident(log: PositionLog, arms: Sequence[str]) -> list[Plan]:
    """Of every two arms that state a confidence, the one with the higher mean confidence; missing never wins."""
    stated = log.stats.get("conf_mean", np.full((1, log.n_arms), np.nan))
    sure = [arm for arm in arms if np.isfinite(stated[:, log.arms.index(arm)]).any()]
    plans = []
    for pair in combinations(sure, 2):
        at = np.array([log.arms.index(arm) for arm in pair])
        best = np.nan_to_num(stated[:, at], nan=-1.0).argmax(axis=1)
        plans.append(Plan.one("most confident: " + " + ".join(pair), log, at[best]))
    return plans


def chosen_elsewhere(
    log: PositionLog, members: Sequence[Plan], *, costs: Costs | None = None
) -> tuple[Plan, dict[str, str]]:
    """The plan that follows on each workload the rule that is best on the others, and its name by workload.

    Best: fewest blocks, or with ``costs`` least modelled time. A log of one workload is chosen on itself, in hindsight.
    """
    runs = [follow(log, plan, costs=costs) for plan in members]
    spent = np.array([run.blocks if costs is None else run.seconds for run in runs])
    sums = np.stack([spent[:, log.workload == w].sum(axis=1) for w in range(len(log.workloads))], axis=1)  # (rules, W)
    best = (sums.sum(axis=1, keepdims=True) - sums if len(log.workloads) > 1 else sums).argmin(axis=0)
    arms = np.zeros((log.n_positions, log.n_arms), dtype=bool)
    longest = np.full(arms.shape, log.draft_len, dtype=np.int16)
    for w, i in enumerate(best):
        at = log.workload_of == w
        arms[at] = members[i].arms[at]
        longest[at] = log.draft_len if members[i].longest is None else members[i].longest[at]
    names = {w: members[i].name for w, i in zip(log.workloads, best, strict=True)}
    return Plan("chosen elsewhere", arms, longest if any(plan.longest is not None for plan in members) else None), names
