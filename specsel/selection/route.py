"""Routing before drafting, redrafting after it, and both, as plans for exact replay.

A router sees what is free before drafting: context of the target, position, and what each arm had accepted when it last
ran in this request. It predicts every arm's accepted count and sends the block to the highest. A redraft adds all arms
after the first draft. Not handled here: the replay and its seconds (`specsel.replay`), intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from specsel.costs import Costs
from specsel.logs import STATS, PositionLog, SpecselError
from specsel.replay.replay import Plan, follow, oracle_plan
from specsel.selection.blocks import blocks, dominant_arm
from specsel.selection.redraft import Decided, chance, coefficients, leave_one_workload_out, unfitted
from specsel.selection.selector import Selector

KINDS = ("logistic", "boosting")
MAX_ROWS = 20_000  # training rows of a router, thinned evenly; more change little (see the learning curve)
ROUNDS = 2  # fits of a router: on blocks of random arms, then also on its own


@dataclass(frozen=True, slots=True)
class Router:
    """Predicts the accepted count of every arm from what is known before drafting."""

    kind: str  # one of KINDS
    draft_len: int
    models: tuple[Any, ...]  # K fitted models (logistic: coefficients), or a float: the count is constant in training

    def expected(self, x: np.ndarray) -> np.ndarray:
        """(n, K) expected accepted tokens, 0..L, from features (n, F) as `Memory` gives them."""
        return np.stack([self._one(model, x) for model in self.models], axis=1)

    def _one(self, model: Any, x: np.ndarray) -> np.ndarray:
        if isinstance(model, float):
            return np.full(len(x), model)
        return chance(x, *model) * self.draft_len if self.kind == "logistic" else model.predict(x)


class Memory:
    """What is free before drafting: context, position (log scale), and what a request remembers of each arm: the share
    of L accepted when it last ran, and how many blocks ago (log scale).
    """

    def __init__(self, log: PositionLog):
        context = [values for values in log.context.values() if np.isfinite(values).any()]
        self.free = np.stack([*context, np.log1p(log.position)], axis=1)
        self.share = log.accepted / max(log.draft_len, 1)
        self.last = np.full((log.n_requests, log.n_arms), np.nan)
        self.age = np.full((log.n_requests, log.n_arms), np.nan)

    def features(self, row: np.ndarray, request: np.ndarray) -> np.ndarray:
        """(n, F) at some rows of the log, each of another request."""
        return np.concatenate([self.free[row], self.last[request], np.log1p(self.age[request])], axis=1)

    def update(self, row: np.ndarray, request: np.ndarray, ran: np.ndarray) -> None:
        """Remember the arms (n, K) that ran there, and nothing of the others."""
        self.last[request] = np.where(ran, self.share[row], self.last[request])
        self.age[request] = np.where(ran, 0, self.age[request] + 1)


def roam(
    log: PositionLog, choose: Callable[[np.ndarray], np.ndarray], *, again: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk through all requests at once: rows of the blocks (B,), arms that ran (B, K), features seen (B, F).

    ``choose`` maps features (n, F) to arms (n,); ``again`` (N, K) says where all arms run after this one has drafted.
    Here the next block depends on what was seen on the way, so no plan can be made beforehand.
    """
    memory, request_of, row, seen = Memory(log), log.request_of, log.starts[:-1], []
    while len(row):
        request = request_of[row]
        x = memory.features(row, request)
        arm = choose(x)
        ran = np.arange(log.n_arms) == arm[:, None]
        if again is not None:
            ran = ran | again[row, arm][:, None]
        memory.update(row, request, ran)
        seen.append((row, ran, x))
        accepted = np.where(ran, log.accepted[row], -1).max(axis=1).astype(np.int64)
        row = row + np.minimum(accepted + 1, log.remaining[row])
        row = row[row < log.starts[request + 1]]
    rows, ran, x = (np.concatenate(part) for part in zip(*seen, strict=True))
    order = np.argsort(rows, kind="stable")
    return rows[order], ran[order], x[order]


@threadpool_limits.wrap(limits=1)  # small fits: with a thread per core most of the time is waiting
def fit_router(log: PositionLog, *, kind: str, rng: np.random.Generator) -> Router:
    """Fit on a log of the training workloads: on blocks of uniformly random arms, then also on the router's own.

    "logistic": one binomial logistic regression of accepted / L per arm (missing values: mean and indicator).
    "boosting": histogram gradient boosting of the accepted count per arm.
    """
    if kind not in KINDS:
        raise SpecselError(f"router kind '{kind}' does not exist; choose {' or '.join(KINDS)}")
    parts, choose = [], lambda x: rng.integers(log.n_arms, size=len(x))
    for _ in range(ROUNDS):
        parts.append(roam(log, choose))
        rows, x = np.concatenate([p[0] for p in parts]), np.concatenate([p[2] for p in parts])
        kept = slice(None, None, max(1, -(-len(rows) // MAX_ROWS)))
        models = tuple(_fit_arm(kind, x[kept], log, rows[kept], k) for k in range(log.n_arms))
        router = Router(kind, log.draft_len, models)
        choose = _greedy(router)
    return router


def _greedy(router: Router, prices: np.ndarray | float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (router.expected(x) - prices).argmax(axis=1)


def _fit_arm(kind: str, x: np.ndarray, log: PositionLog, rows: np.ndarray, arm: int) -> Any:
    asked = log.proposed[rows, arm] >= 0
    x, accepted = x[asked], log.accepted[rows, arm][asked].astype(float)
    if not len(accepted) or accepted.min() == accepted.max():
        return float(accepted[0]) if len(accepted) else 0.0
    if kind == "boosting":
        model = HistGradientBoostingRegressor(max_iter=60, max_leaf_nodes=15, early_stopping=False, random_state=0)
        return model.fit(np.where(np.isnan(x).all(axis=0), 0.0, x), accepted)  # a column without a value has no bins
    share = accepted / log.draft_len  # a binomial share is a success and a failure with these weights
    weights, labels = np.concatenate([share, 1 - share]), np.repeat([1, 0], len(share))
    return coefficients(unfitted().fit(np.concatenate([x, x]), labels, logistic__sample_weight=weights))


# ---- plans on held-out workloads: who decides, before or after drafting?


def decision_plans(
    log: PositionLog,
    *,
    rng: np.random.Generator,
    kinds: Sequence[str] = KINDS,
    costs: Costs | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Every decision as a plan: fixed arms, redrafting, routing, both, all arms, and the best sequence of arms.

    Selectors (with ``options`` of `leave_one_workload_out`) and routers are trained on the other workloads; where a
    workload has no selector its dominant arm runs alone, and where none has one, or there is no other workload, the
    plan is left out. With ``costs`` also no draft at all, and routers "for time": they maximise expected tokens - rate
    x seconds, the rate of the best arm in training.
    """
    found = [Plan("plain decoding", np.zeros((log.n_positions, log.n_arms), dtype=bool))] if costs else []
    found += [_always(log, k) for k in range(log.n_arms)]
    decided = {arm: leave_one_workload_out(blocks(log, arm), **options) for arm in log.arms}
    dominant = dominant_arm(log)
    if decided[dominant].model:
        found.append(redrafting(log, decided[dominant]))
    again = np.stack([d.everywhere(log) for d in decided.values()], axis=1)
    for kind in kinds if len(np.unique(log.workload)) > 1 else ():
        routers = [fit_router(log.select(log.workload != w), kind=kind, rng=rng) for w in range(len(log.workloads))]
        found.append(routing(log, f"route ({kind})", routers))
        if again.any():
            found.append(routing(log, f"route ({kind}) + redraft", routers, again=again))
        if costs:
            found.append(routing(log, f"route ({kind}) for time", routers, costs=costs))
    found.append(Plan("all arms", np.ones((log.n_positions, log.n_arms), dtype=bool)))
    found.append(Plan("best sequence (hindsight)", oracle_plan(log, "oracle_dp").arms))
    return {plan.name: plan for plan in found}


def _always(log: PositionLog, arm: int) -> Plan:
    return Plan.one(f"always {log.arms[arm]}", log, np.full(log.n_positions, arm))


def redrafting(log: PositionLog, decided: Decided) -> Plan:
    """The dominant arm first, all arms where the selector says so: the redraft study as a policy."""
    first = Plan.one("redraft", log, np.full(log.n_positions, log.arms.index(decided.dominant)))
    return Plan("redraft", first.arms | decided.everywhere(log)[:, None])


def selector_plan(log: PositionLog, path: str | Path) -> Plan:
    """The redrafts of a saved selector; SpecselError where it was made for another pool, draft length or features."""
    selector = Selector.load(path, arms=log.arms, draft_len=log.draft_len, features=STATS)
    first = Plan.one("", log, log.arms.index(selector.dominant))
    return Plan(f"selector:{Path(path).name}", first.arms | selector.redraft(log.stats)[:, None])


@threadpool_limits.wrap(limits=1)
def routing(
    log: PositionLog,
    name: str,
    routers: Sequence[Router],
    *,
    again: np.ndarray | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Each workload routed by its own router (W); ``again`` (N, K): where all arms run after an arm has drafted; with
    ``costs`` each router weighs tokens against the seconds of the arms in its training workloads.

    Positions where no block starts have no arms.
    """
    arms = np.zeros((log.n_positions, log.n_arms), dtype=bool)
    for w in np.unique(log.workload):
        index = np.flatnonzero((log.workload == w)[log.request_of])
        prices = 0.0 if costs is None else _prices(log.select(log.workload != w), costs)
        mine = log.select(log.workload == w)
        rows, ran, _ = roam(mine, _greedy(routers[w], prices), again=None if again is None else again[index])
        arms[index[rows]] = ran
    return Plan(name, arms)


def _prices(log: PositionLog, costs: Costs) -> np.ndarray:
    """(K,) seconds of a block of each arm alone, in tokens: times the tokens per second of the fastest arm."""
    runs = [follow(log, _always(log, k), costs=costs) for k in range(log.n_arms)]
    rate = max(run.emitted.sum() / run.seconds.sum() for run in runs)
    return rate * np.array([run.seconds.sum() / run.blocks.sum() for run in runs])
