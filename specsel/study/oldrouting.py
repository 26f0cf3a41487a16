"""Routing before drafting, redrafting after it, and both, under exact replay with modelled time.

A router sees what is free before drafting: context of the target, position, and what each arm had accepted when it last
ran in this request. It predicts every arm's accepted count and sends the block to the highest. Every decision is a set
of arms that run on a block; the best of their drafts is committed. Not handled here: block-anchored logs, intervals,
charts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from specsel.costs import Costs
from specsel.logs import PositionLog, SpecselError, block_view, require_complete
from specsel.replay.replay import Replay, oracle_dp
from specsel.study.oldlogistic import NotFitted, Selector, fit_selector
from specsel.study.oldredraft import dominant_blocks
from specsel.study.oldstats import bootstrap_many, ratio, request_sums

KINDS = ("logistic", "boosting")
MAX_ROWS = 20_000  # training rows of a router, thinned evenly; more change little (see the learning curve)


# ---- plans: which arms run at each position


def one_arm(log: PositionLog, arm: int) -> np.ndarray:
    """(N, K) bool plan: this arm alone, everywhere."""
    return np.broadcast_to(np.arange(log.n_arms) == arm, (log.n_positions, log.n_arms))


def redraft_plan(log: PositionLog, arm: int, redraft: np.ndarray) -> np.ndarray:
    """(N, K) bool plan: this arm first, all arms where redraft (N,) says so."""
    return one_arm(log, arm) | np.asarray(redraft, dtype=bool)[:, None]


def run_plan(log: PositionLog, ran: np.ndarray, *, name: str, costs: Costs | None = None) -> Replay:
    """Exact replay of a plan: at each block the planned arms draft, and the draft with the most accepted tokens is
    committed.

    Here `pulls` counts drafts, so it exceeds blocks where several arms ran. Ends are cut exactly; nothing is
    approximated.
    """
    require_complete(log)
    rows = _walk(log, lambda row: np.where(ran[row], log.accepted[row], -1).max(axis=1))
    return _replay(log, rows, ran[rows], name, costs)


def plain_decoding(log: PositionLog, costs: Costs | None = None) -> Replay:
    """The target alone, one token per pass: the row that every speed table needs."""
    require_complete(log)
    return _replay(
        log, np.arange(log.n_positions), np.zeros((log.n_positions, log.n_arms), dtype=bool), "plain decoding", costs
    )


def _walk(log: PositionLog, accepted: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Rows of all block starts, ascending; accepted maps the current rows to the accepted counts that are committed."""
    row, end, found = log.starts[:-1], log.starts[1:], []
    while len(row):
        found.append(row)
        row = row + np.minimum(accepted(row).astype(np.int64) + 1, log.remaining[row])
        row, end = row[row < end], end[row < end]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _replay(log: PositionLog, rows: np.ndarray, ran: np.ndarray, name: str, costs: Costs | None) -> Replay:
    """Totals of blocks that start at these rows with these arms."""
    request = np.searchsorted(log.starts, rows, side="right") - 1
    accepted = np.where(ran, log.accepted[rows], 0)
    emitted = np.minimum(accepted.max(axis=1) + 1, log.remaining[rows])
    totals = request_sums(np.column_stack([np.ones(len(rows)), emitted, ran]), request, log.n_requests).astype(np.int64)
    seconds = None if costs is None else request_sums(_seconds(log, rows, request, ran, costs), request, log.n_requests)
    return Replay(
        name,
        "full",
        totals[:, 0],
        totals[:, 1],
        totals[:, 2:],
        0 * totals[:, 0],
        log.workload,
        log.workloads,
        log.arms,
        seconds,
    )


def _seconds(log: PositionLog, rows: np.ndarray, request: np.ndarray, ran: np.ndarray, costs: Costs) -> np.ndarray:
    """(B,) modelled seconds; the union of drafts is verified at once, and accepted tokens that drafts share are one
    row.

    Drafts may share rejected tokens too, so the number of rows is an upper bound; one draft is exact. An arm that sat
    out the block before has to catch up. A composite arm without timings of its own costs what its parts cost, and
    nothing twice.
    """
    drafted, verified = _parts(log, rows, ran, costs)
    accepted = np.where(verified, log.accepted[rows], 0)
    proposed = np.where(verified, np.maximum(log.proposed[rows], 0), 0)
    width = 1 + accepted.max(axis=1) + (proposed - accepted).sum(axis=1)
    stale = np.zeros(ran.shape, dtype=bool)
    stale[1:] = ~drafted[:-1] & (request[1:] == request[:-1])[:, None]
    return costs.block_s(log.arms, context_length(log)[rows], ran=drafted, rows=width, stale=stale)


def _parts(log: PositionLog, rows: np.ndarray, ran: np.ndarray, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """(B, K) arms whose drafts are paid for, and arms whose drafts are verified, after taking composite arms apart.

    The log's `source` says whose draft a composite arm used; the cheapest of its parts is tried first, always.
    """
    drafted, verified = np.array(ran), np.array(ran)
    for k, arm in enumerate(log.arms):
        if log.source is None or arm in costs.arms or not (log.source[:, k] >= 0).any():
            continue
        on, used = ran[:, k], log.source[rows, k]
        parts = np.unique(log.source[log.source[:, k] >= 0, k])
        drafted[:, k] = verified[:, k] = False
        hit = np.flatnonzero(on & (used >= 0))
        drafted[hit, used[hit]] = verified[hit, used[hit]] = True
        drafted[on, min(parts, key=lambda part: float(costs.draft_s(log.arms[part], 0)))] = True
    return drafted, verified


def context_length(log: PositionLog) -> np.ndarray:
    """(N,) tokens before each draft: prompt (where the log's request table has it) + output up to the anchor."""
    prompt = log.request_column("prompt_tokens")
    return log.position + 1 + (0 if prompt is None else np.repeat(prompt.astype(int), np.diff(log.starts)))


# ---- the router


@dataclass(frozen=True, slots=True)
class Router:
    """Predicts the accepted count of every arm from what is known before drafting."""

    kind: str  # "logistic" or "boosting"
    names: tuple[str, ...]  # features, in the order of the columns
    draft_len: int
    models: tuple[Any, ...]  # K fitted models, or a float: the arm's count is constant in training

    def expected(self, x: np.ndarray) -> np.ndarray:
        """(n, K) expected accepted tokens, 0..L."""
        return np.stack([self._one(model, x) for model in self.models], axis=1)

    def _one(self, model: Any, x: np.ndarray) -> np.ndarray:
        if isinstance(model, float):
            return np.full(len(x), model)
        return model.predict_proba(x)[:, 1] * self.draft_len if self.kind == "logistic" else model.predict(x)


def free_features(log: PositionLog) -> tuple[tuple[str, ...], np.ndarray]:
    """Names and (N, F) values that do not depend on the policy: the log's context and the position (log scale)."""
    context = {name: values for name, values in log.context.items() if np.isfinite(values).any()}
    return (*context, "log position"), np.stack([*context.values(), np.log1p(log.position)], axis=1)


class _Memory:
    """What a request remembers of each arm: the share of L accepted when it last ran, and how many blocks ago."""

    def __init__(self, log: PositionLog):
        self.log, (self.names, self.free) = log, free_features(log)
        self.names += tuple(f"{what}:{arm}" for what in ("last", "age") for arm in log.arms)
        self.last = np.full((log.n_requests, log.n_arms), np.nan)
        self.age = np.full((log.n_requests, log.n_arms), np.nan)

    def features(self, row: np.ndarray, request: np.ndarray) -> np.ndarray:
        return np.concatenate([self.free[row], self.last[request], np.log1p(self.age[request])], axis=1)

    def update(self, row: np.ndarray, request: np.ndarray, ran: np.ndarray) -> None:
        share = self.log.accepted[row] / max(self.log.draft_len, 1)
        self.last[request] = np.where(ran, share, self.last[request])
        self.age[request] = np.where(ran, 0, self.age[request] + 1)


def roam(
    log: PositionLog, choose: Callable[[np.ndarray], np.ndarray], *, again: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk through all requests at once: rows of the blocks (B,), arms that ran (B, K), features seen (B, F).

    choose maps features (n, F) to arms (n,); again (N, K) says where all arms run after this one has drafted.
    """
    memory, request_of, seen = _Memory(log), log.request_of, []

    def accepted(row: np.ndarray) -> np.ndarray:
        request = request_of[row]
        x = memory.features(row, request)
        arm = choose(x)
        ran = np.arange(log.n_arms) == arm[:, None]
        if again is not None:
            ran = ran | again[row, arm][:, None]
        memory.update(row, request, ran)
        seen.append((row, ran, x))
        return np.where(ran, log.accepted[row], -1).max(axis=1)

    rows = _walk(log, accepted)
    order = np.argsort(np.concatenate([s[0] for s in seen]), kind="stable")
    return rows, np.concatenate([s[1] for s in seen])[order], np.concatenate([s[2] for s in seen])[order]


def fit_router(log: PositionLog, *, kind: str, rng: np.random.Generator, rounds: int = 2) -> Router:
    """Fit on a log of the training workloads: on blocks of uniformly random arms, then also on the router's own.

    "logistic": one binomial logistic regression of accepted / L per arm (missing values: mean and indicator).
    "boosting": histogram gradient boosting of the accepted count per arm.
    """
    if kind not in KINDS:
        raise SpecselError(f"router kind '{kind}' does not exist; choose {' or '.join(KINDS)}")
    parts, router = [], None
    for _ in range(rounds):
        choose = (lambda x: rng.integers(log.n_arms, size=len(x))) if router is None else _greedy(router)
        parts.append(roam(log, choose))
        rows, x = np.concatenate([p[0] for p in parts]), np.concatenate([p[2] for p in parts])
        kept = np.arange(0, len(rows), max(1, -(-len(rows) // MAX_ROWS)))
        names = _Memory(log).names
        models = tuple(_fit_arm(kind, x[kept], log, rows[kept], k) for k in range(log.n_arms))
        router = Router(kind, names, log.draft_len, models)
    return router


def _greedy(router: Router, prices: np.ndarray | float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (router.expected(x) - prices).argmax(axis=1)


def _fit_arm(kind: str, x: np.ndarray, log: PositionLog, rows: np.ndarray, arm: int) -> Any:
    asked = log.proposed[rows, arm] >= 0
    accepted = log.accepted[rows, arm][asked].astype(float)
    if not len(accepted) or accepted.min() == accepted.max():
        return float(accepted[0]) if len(accepted) else 0.0
    if kind == "boosting":
        model = HistGradientBoostingRegressor(
            max_iter=60, max_leaf_nodes=15, learning_rate=0.1, early_stopping=False, random_state=0
        )
        x = np.where(np.isnan(x[asked]).all(axis=0), 0.0, x[asked])  # a feature without one value cannot be binned
        return model.fit(x, accepted)
    share = accepted / log.draft_len
    model = make_pipeline(
        SimpleImputer(add_indicator=True, keep_empty_features=True), StandardScaler(), LogisticRegression(max_iter=1000)
    )
    return model.fit(
        np.concatenate([x[asked], x[asked]]),
        np.repeat([1, 0], len(share)),
        logisticregression__sample_weight=np.concatenate([share, 1 - share]),
    )


# ---- the comparison: who decides, before or after drafting?


def decision_runs(
    log: PositionLog, *, rng: np.random.Generator, costs: Costs | None = None, kinds: Sequence[str] = KINDS
) -> dict[str, Replay]:
    """Every decision on held-out workloads: fixed arms, redrafting, routing, both, all arms, and the best sequence.

    Selectors and routers are trained on the other workloads; where one cannot be fitted the dominant arm runs alone.
    With costs a router also runs "for time": it maximises expected tokens - rate x seconds, the rate of the best arm in
    training.
    """
    dominant = log.arms.index(dominant_blocks(log).path_arm)
    again, routers = _held_out_decisions(log, rng, kinds)
    found = {
        f"always {arm}": run_plan(log, one_arm(log, k), name=f"always {arm}", costs=costs)
        for k, arm in enumerate(log.arms)
    }
    found["redraft"] = run_plan(log, redraft_plan(log, dominant, again[:, dominant]), name="redraft", costs=costs)
    for kind in kinds:
        ways = {f"route ({kind})": {}, f"route ({kind}) + redraft": {"again": again}}
        if costs is not None:
            ways[f"route ({kind}) for time"] = {"priced": True}
        found |= {name: _routed(log, routers[kind], dominant, name, costs, **way) for name, way in ways.items()}
    every = np.broadcast_to(True, (log.n_positions, log.n_arms))
    found["all arms"] = run_plan(log, every, name="all arms", costs=costs)
    found["best sequence (hindsight)"] = oracle_dp(log)
    return found if costs is None else {"plain decoding": plain_decoding(log, costs)} | found


def _held_out_decisions(
    log: PositionLog, rng: np.random.Generator, kinds: Sequence[str]
) -> tuple[np.ndarray, dict[str, list[Router | None]]]:
    """(N, K) redraft decisions after each arm's draft, and one router per kind and held-out workload."""
    again = np.zeros((log.n_positions, log.n_arms), dtype=bool)
    workload = log.workload[log.request_of]
    for k in range(log.n_arms):
        blocks = block_view(log, k)
        for w in range(len(log.workloads)):
            selector = _selector(blocks, blocks.workload_of != w)
            if selector is not None:
                at = workload == w
                again[at, k] = selector.redraft(log.stats, at)
    others = [log.select(log.workload != w) for w in range(len(log.workloads))]
    return again, {
        kind: [fit_router(other, kind=kind, rng=rng) if other.n_requests else None for other in others]
        for kind in kinds
    }


def _selector(blocks: Any, train: np.ndarray) -> Selector | None:
    try:
        return fit_selector(blocks, train) if train.any() else None
    except NotFitted:
        return None


def _prices(log: PositionLog, costs: Costs) -> np.ndarray:
    """(K,) seconds of a block of each arm alone, in tokens: times the tokens per second of the fastest arm."""
    runs = [run_plan(log, one_arm(log, k), name=arm, costs=costs) for k, arm in enumerate(log.arms)]
    rate = max(run.emitted.sum() / run.seconds.sum() for run in runs)
    return rate * np.array([run.seconds.sum() / run.blocks.sum() for run in runs])


def _routed(
    log: PositionLog,
    routers: list[Router | None],
    dominant: int,
    name: str,
    costs: Costs | None,
    *,
    again: np.ndarray | None = None,
    priced: bool = False,
) -> Replay:
    """One replay put together from the held-out workloads, each with its own router."""
    parts = []
    for w, router in enumerate(routers):
        mine = np.flatnonzero(log.workload == w)
        if len(mine):
            index = np.concatenate([np.arange(log.starts[r], log.starts[r + 1]) for r in mine])
            prices = _prices(log.select(log.workload != w), costs) if priced and router else 0.0
            choose = _greedy(router, prices) if router else (lambda x: np.full(len(x), dominant))
            rows, ran, _ = roam(log.select(mine), choose, again=None if again is None else again[index])
            parts.append((index[rows], ran))
    rows, ran = (np.concatenate(x) for x in zip(*parts, strict=True))
    order = np.argsort(rows, kind="stable")
    return _replay(log, rows[order], ran[order], name, costs)


def decision_table(
    runs: Mapping[str, Replay], base: str, *, rng: np.random.Generator, n_resamples: int = 10_000, level: float = 0.95
) -> pd.DataFrame:
    """One row per run: block_efficiency and its gain over `base`; where timed also tokens_per_s and speed over `base`.

    Every quantity has columns _low and _high from resampled requests, the same for all rows; drafts_per_block is a cost
    that needs no timings. Where nothing is timed the speed columns are missing.
    """
    wide = np.stack(
        [
            np.stack([r.emitted, r.blocks, np.zeros(len(r.blocks)) if r.seconds is None else r.seconds], axis=1)
            for r in runs.values()
        ],
        axis=1,
    )  # (R, runs, 3)
    at, statistics, columns = list(runs).index(base), {}, {}
    for i, (name, run) in enumerate(runs.items()):
        for rate, gain, below in (("block_efficiency", "gain", 1), ("tokens_per_s", "speed", 2)):
            if below == 1 or run.seconds is not None:
                statistics[name, rate] = lambda s, b=below: ratio(s[..., 0, 0], s[..., 0, b])
                statistics[name, gain] = lambda s, b=below, off=2 - below: _rate_ratio(s, b) - off
                columns[name, rate] = columns[name, gain] = [i, at]
    found = bootstrap_many(
        statistics,
        wide,
        strata=next(iter(runs.values())).workload,
        rng=rng,
        n_resamples=n_resamples,
        level=level,
        columns=columns,
    )
    rows = {
        name: {"policy": name, "drafts_per_block": float(ratio(run.pulls.sum(), run.blocks.sum()))}
        for name, run in runs.items()
    }
    for (name, quantity), e in found.items():
        rows[name] |= {quantity: e.value, f"{quantity}_low": e.low, f"{quantity}_high": e.high}
    return pd.DataFrame(list(rows.values()))


def _rate_ratio(sums: np.ndarray, below: int) -> np.ndarray:
    """Tokens per (block or second) of the first run over those of the second; sums (..., 2, 3)."""
    return ratio(sums[..., 0, 0] * sums[..., 1, below], sums[..., 0, below] * sums[..., 1, 0])
