"""Experiments on policies: tuning on training requests, the policy table, and what a policy does on the way.

Every policy with a main parameter gets the same number of trials on the training requests, is frozen, and is played on
the other requests. What comes out are replays, sums per request that an interval can be made of. Not handled here: how
policies decide, comparisons and intervals (`specsel.stats`), charts, prose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np
import pandas as pd
from scipy.special import ndtri

from specsel.costs import Costs
from specsel.logs import PositionLog
from specsel.policies.catalogue import CATALOGUE, PLANS, allowed, context_of
from specsel.replay import Plan, Policy, Replay, Run, best_arms, follow, replay_runs

FEW = 5  # seeds for tuning, and where state is kept
TUNE_ONE_BY_ONE = 40  # training requests for tuning with state kept, where requests cannot run side by side
LARGE = 20_000  # positions, from which a second process is worth its start
POINTS = 30  # of a curve
Setting = tuple[Policy, str]  # a policy and the kind of feedback that it gets


def split_requests(log: PositionLog, *, share: float, rng: np.random.Generator) -> tuple[PositionLog, PositionLog]:
    """Training requests (``share`` of each workload, at least one) and the rest, both in random order.

    The order matters to policies that keep their state: random order is mixed traffic. A log in which a workload has
    one request only is both, whole.
    """
    if np.bincount(log.workload, minlength=len(log.workloads)).min() < 2:
        return log, log
    order = rng.permutation(log.n_requests)
    train = np.zeros(log.n_requests, dtype=bool)
    for w in range(len(log.workloads)):
        mine = order[log.workload[order] == w]
        train[mine[: max(1, round(share * len(mine)))]] = True
    return log.select(order[train[order]]), log.select(order[~train[order]])


def feedback_kinds(policy: Policy) -> list[str]:
    """The kinds of feedback under which a policy differs."""
    kinds = {"every arm": ["full", "delayed"], "either": ["bandit", "full", "delayed"]}
    return kinds.get(policy.sees, ["bandit"])


def live_feedback(policy: Policy) -> str:
    """The kind of feedback that a live engine could give: the chosen arm's count, or all as the text shows them."""
    return "delayed" if policy.sees == "every arm" else "bandit"


def play(
    log: PositionLog, settings: Sequence[Setting], *, reset: str = "request", seeds: Sequence[int] = range(FEW)
) -> list[Replay]:
    """Each setting, all in the same steps; the totals of a policy that draws are means over the seeds."""
    runs = [Run(p, seed, kind) for p, kind in settings for seed in (seeds if p.draws(log.n_arms) else [None])]
    found, pooled = iter(replay_runs(log, runs, reset=reset)), []
    for policy, _ in settings:
        pooled.append(_mean([next(found) for _ in (seeds if policy.draws(log.n_arms) else [None])]))
    return pooled


def _mean(runs: Sequence[Replay]) -> Replay:
    """Mean totals of the same policy with several seeds, and the spread of their block efficiency."""
    if len(runs) == 1:
        return runs[0]
    totals = {f: np.mean([getattr(r, f) for r in runs], axis=0) for f in ("blocks", "pulls", "neural_passes")}
    return replace(runs[0], **totals, seed_sd=float(np.std([r.block_efficiency for r in runs], ddof=1)))


def trials(
    log: PositionLog, policies: Mapping[str, Policy], *, reset: str = "request", workers: int = 1, **options
) -> tuple[pd.DataFrame, list[Replay]]:
    """Every value of the main parameter of every policy (one trial where it has none), and its replay with the feedback
    of a live engine.

    Columns: policy, parameter, value, place (from 1), setting (the policy with it). Options as in `play`; ``workers``
    as in `policy_table`.
    """
    rows = []
    for name, policy in policies.items():
        parameter, grid = CATALOGUE[name].parameter, CATALOGUE[name].grid or (None,)
        for place, value in enumerate(grid, start=1):
            setting = replace(policy, **{parameter: value}) if parameter else policy
            rows.append((name, parameter, value, place, setting))
    table = pd.DataFrame(rows, columns=["policy", "parameter", "value", "place", "setting"])
    settings = [(setting, live_feedback(setting)) for setting in table.setting]
    if reset == "never":  # a step serves one block of each run, so together they cost least
        return table, play(log, settings, reset=reset, **options)
    parts = [[settings[i] for i in rows.index] for _, rows in table.groupby("policy", sort=False)]
    played = _spread(partial(play, log, **options), parts, workers if log.n_positions > LARGE else 1)
    return table, [run for part in played for run in part]


def best_settings(table: pd.DataFrame, found: Sequence[Replay]) -> dict[str, Policy]:
    """The setting of each policy with the highest block efficiency among its trials; the first of equals."""
    efficiency = pd.Series([run.block_efficiency for run in found], index=table.index)
    best = efficiency.groupby(table.policy, sort=False).idxmax()
    return {name: table.setting[i] for name, i in best.items()}


def _spread(work: Callable, parts: Sequence, workers: int) -> list:
    """Some work on each part, shared by processes."""
    if workers == 1:
        return [work(part) for part in parts]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # a fork of threads may hang
        return list(pool.map(work, parts))


# ---- the policy table


def policy_table(
    train: PositionLog,
    test: PositionLog,
    *,
    names: Iterable[str] | None = None,
    costs: Costs | None = None,
    seeds: Sequence[int] = range(20),
    tune: bool = True,
    settings: Mapping[str, Policy] | None = None,
    workers: int = 1,
) -> tuple[pd.DataFrame, dict[str, Replay]]:
    """Every policy that the log allows on the test requests, under every kind of feedback: a row each, and its replay.

    A policy is tuned once per reset, with the feedback of a live engine, and then frozen; ``settings`` are those of
    policies that forget at each request, where they have been tuned already. (With state kept, on at most
    ``TUNE_ONE_BY_ONE`` training requests, and with at most ``FEW`` seeds.) The rows are named; columns:
    policy, source, sees, context (see `catalogue.context_of`), feedback, reset, setting, seed_sd. ``workers`` processes
    share the policies where the log is large enough; the table does not depend on their number. (A script that asks
    for more than one needs its ``if __name__ == "__main__"``.)
    """
    workers = workers if test.n_positions > LARGE else 1
    names = [*(f"fixed:{a}" for a in test.arms), *PLANS[1:], *CATALOGUE] if names is None else list(names)
    shares = [names[i::workers] for i in range(workers)]
    work = partial(_rows, train, test, costs=costs, seeds=seeds, tune=tune, settings=settings or {})
    parts = _spread(work, shares, workers)
    found = sorted((row for part in parts for row in part), key=lambda row: names.index(row[0]["policy"]))
    table = pd.DataFrame([row for row, _ in found], index=[_row_name(row) for row, _ in found])
    return table, {name: run for name, (_, run) in zip(table.index, found, strict=True)}


def _rows(
    train: PositionLog,
    test: PositionLog,
    names: Iterable[str],
    *,
    costs: Costs | None,
    seeds: Sequence[int],
    tune: bool,
    settings: Mapping[str, Policy],
) -> list[tuple[dict, Replay]]:
    """Rows and replays of some policies; those that keep their state run in the same steps."""
    made = allowed(test, names, fit_on=train, costs=costs)
    found = [(_row(name, plan, "", ""), follow(test, plan)) for name, plan in made.items() if isinstance(plan, Plan)]
    learners = {name: policy for name, policy in made.items() if isinstance(policy, Policy)}
    kept = {n: p for n, p in learners.items() if CATALOGUE[n].kept or (p.reads and p.sees != "nothing")}
    for reset, group in [("request", {n: p}) for n, p in learners.items()] + [("never", kept)] * bool(kept):
        part, few = (train, seeds) if reset == "request" else (train.select(slice(TUNE_ONE_BY_ONE)), seeds[:FEW])
        known = {n: p for n, p in settings.items() if n in group and reset == "request"}
        grids = {n: p for n, p in group.items() if tune and CATALOGUE[n].parameter and n not in known}
        tuned = best_settings(*trials(part, grids, reset=reset, seeds=seeds[:FEW])) if grids else {}
        played = [(n, p, kind) for n, p in (group | known | tuned).items() for kind in feedback_kinds(p)]
        runs = play(test, [(policy, kind) for _, policy, kind in played], reset=reset, seeds=few)
        found += [(_row(n, p, kind, reset, run.seed_sd), run) for (n, p, kind), run in zip(played, runs, strict=True)]
    return found


def _row(name: str, policy: Policy | Plan, kind: str, reset: str, seed_sd: float | None = None) -> dict:
    plan = isinstance(policy, Plan)
    return {
        "policy": name,
        "source": "" if plan else policy.source,
        "sees": "hindsight" if plan else policy.sees,
        "context": context_of(policy),
        "feedback": "" if plan or policy.sees == "nothing" else kind,
        "reset": reset,
        "setting": "" if plan else repr(policy),
        "seed_sd": seed_sd,
    }


def _row_name(row: Mapping[str, str]) -> str:
    """A name that no other row has: the policy, feedback that is not bandit, and whether state is kept."""
    kind = row["feedback"] if row["feedback"] in ("full", "delayed") else ""
    kept = "state kept" if row["reset"] == "never" else ""
    return ", ".join(filter(None, [row["policy"].replace(":", " "), kind, kept]))


# ---- what a policy does on the way


def steps(log: PositionLog, run: Replay) -> pd.DataFrame:
    """One row per block of a replay that kept its path: workload, request, block (from 1 in its request), arm, emitted,
    and what two others would have emitted there: best_fixed (the best fixed arm of the request), best (of this block).
    """
    rows, each = run.path.rows, np.arange(len(run.path.rows))
    request, emitted = log.request_of[rows], log.emitted[rows].astype(int)
    table = log.table[["workload", "request"]].iloc[request].reset_index(drop=True)
    return table.assign(
        block=each - np.concatenate([[0], np.cumsum(run.blocks)[:-1]])[request] + 1,
        arm=np.array(log.arms, dtype=object)[run.path.arms],
        emitted=emitted[each, run.path.arms],
        best_fixed=emitted[each, best_arms(log, "request")[request]],
        best=emitted.max(axis=1),
    )


def running_ratio(above: np.ndarray, below: np.ndarray, level: float = 0.95) -> pd.DataFrame:
    """sum(above) / sum(below) over the first requests: request (from 1), value, low, high; at most 30 of them.

    Limits are normal, of the linearised ratio of sums over independent requests; the first request has none.

    >>> running_ratio(np.array([1, 1, 1]), np.array([2, 2, 4])).round(3).to_numpy().tolist()[1:]
    [[2.0, 0.5, 0.5, 0.5], [3.0, 0.375, 0.191, 0.559]]
    """
    above, below, n = above.astype(float), below.astype(float), np.arange(1, len(above) + 1)
    value = above.cumsum() / below.cumsum()
    squares = (above**2).cumsum() - 2 * value * (above * below).cumsum() + value**2 * (below**2).cumsum()
    half = ndtri((1 + level) / 2) * np.sqrt(np.maximum(squares, 0) * n / np.maximum(n - 1, 1)) / below.cumsum()
    half[0] = np.nan
    table = pd.DataFrame({"request": n, "value": value, "low": value - half, "high": value + half})
    return table.iloc[np.unique(np.linspace(0, len(n) - 1, POINTS).astype(int))]
