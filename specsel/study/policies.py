"""Experiments on policies: tuning on training requests, the policy table, sensitivity, a prediction.

Every policy with a main parameter gets the same number of trials on the training requests, is frozen, and is compared
on the other requests: requests are resampled, differences are paired, and the best fixed arm is chosen anew in every
resample. Not handled here: how policies decide, what happens on the way (`curves`), charts, prose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import pandas as pd

from specsel.logs import PositionLog, SpecselError
from specsel.policies.catalogue import GRIDS, PERSISTENT, PLANS, allowed, context_of, learner_names, policy_by_name
from specsel.policies.plain import Fixed
from specsel.replay.policy import Policy
from specsel.replay.replay import (
    Plan,
    Replay,
    fixed,
    follow,
    oracle_dp,
    oracle_plan,
    replay,
    replay_runs,
    replay_seeds,
)
from specsel.study.oldstats import Estimate, bootstrap_many, bootstrap_requests, holm, pooled_ratio

SEEDS = tuple(range(20))  # of every policy that draws at random
FEW = 5  # seeds for tuning, and where state is kept
TUNE_ONE_BY_ONE = 40  # training requests for tuning with state kept, where requests cannot run side by side


def split_requests(log: PositionLog, *, share: float, rng: np.random.Generator) -> tuple[PositionLog, PositionLog]:
    """Training requests (``share`` of each workload, at least one) and the rest, both in random order.

    The order matters to policies that keep their state: random order is mixed traffic.
    """
    order = rng.permutation(log.n_requests)
    train = np.zeros(log.n_requests, dtype=bool)
    for w in range(len(log.workloads)):
        mine = order[log.workload[order] == w]
        train[mine[: max(1, round(share * len(mine)))]] = True
    return log.select(order[train[order]]), log.select(order[~train[order]])


def setups(policy: Policy) -> list[str]:
    """The kinds of feedback under which a policy differs."""
    kinds = {"every arm": ["full", "delayed"], "either": ["bandit", "full", "delayed"]}
    return kinds.get(policy.sees, ["bandit"])


def evaluate(
    log: PositionLog,
    policy: Policy | Plan,
    *,
    feedback: str | None = None,
    reset: str = "request",
    seeds: Sequence[int] = SEEDS,
    name: str | None = None,
) -> tuple[Replay, float | None]:
    """Totals summed over the seeds, and the standard deviation of block efficiency between seeds (None: not random)."""
    if isinstance(policy, Plan):
        return replay(log, policy, feedback=feedback, name=name), None
    seeds = seeds if policy.draws(log.n_arms) else [None]
    return _pooled(replay_seeds(log, policy, seeds, feedback=feedback, reset=reset, name=name))


def _pooled(runs: list[Replay]) -> tuple[Replay, float | None]:
    """Sums of the totals of several seeds, and the spread of their block efficiency."""
    total = replace(runs[0], **{f: sum(getattr(r, f) for r in runs) for f in ("blocks", "emitted", "pulls")})
    return total, float(np.std([r.block_efficiency for r in runs], ddof=1)) if len(runs) > 1 else None


def trials(
    log: PositionLog, name: str, *, feedback: str | None = None, reset: str = "request", seeds: Sequence[int] = SEEDS
) -> pd.DataFrame:
    """Every value of a policy's main parameter: policy, parameter, value, block_efficiency, setting, found (Replay)."""
    policy = policy_by_name(name, log)
    parameter, values = GRIDS.get(name, (None, (None,)))
    rows = []
    for value in values:
        setting = policy if parameter is None else replace(policy, **{parameter: value})
        found, _ = evaluate(log, setting, feedback=feedback, reset=reset, seeds=seeds)
        rows.append(
            {
                "policy": name,
                "parameter": parameter,
                "value": value,
                "block_efficiency": found.block_efficiency,
                "setting": setting,
                "found": found,
            }
        )
    return pd.DataFrame(rows)


def tune(log: PositionLog, name: str, **options) -> Policy:
    """The setting with the highest block efficiency on training requests; the first of equals."""
    table = trials(log, name, **options)
    return table["setting"][int(table["block_efficiency"].argmax())]


def late(policy: Policy) -> str:
    """The kind of feedback that a live engine could give: the chosen arm's count, or all as the text shows them."""
    return "delayed" if policy.sees == "every arm" else "bandit"


def sensitivity(
    log: PositionLog,
    *,
    rng: np.random.Generator,
    names: Iterable[str] = tuple(GRIDS),
    seeds: Sequence[int] = SEEDS[:FEW],
    n_resamples: int = 1000,
) -> pd.DataFrame:
    """All trials of all policies that the log allows: policy, parameter, setting, place (from 1), value, low, high.

    value is the paired difference to the best fixed arm in tokens per block, with feedback as late as in an engine.
    """
    parts = [trials(log, name, feedback=late(policy), seeds=seeds) for name, policy in allowed(log, names).items()]
    if not parts:
        return pd.DataFrame(columns=["policy", "parameter", "setting", "place", "value", "low", "high"])
    every = pd.concat(parts)
    gaps = _differences(log, list(every["found"]), rng, n_resamples)
    rows = [
        {
            "policy": t.policy,
            "parameter": t.parameter,
            "setting": t.value,
            "place": t.Index + 1,
            "value": gap.value,
            "low": gap.low,
            "high": gap.high,
        }
        for t, gap in zip(every.itertuples(), (gaps[i, "fixed"] for i in range(len(every))), strict=True)
    ]
    return pd.DataFrame(rows)


def arm_order(
    log: PositionLog,
    names: Iterable[str],
    *,
    rng: np.random.Generator,
    seeds: Sequence[int] = SEEDS,
    n_resamples: int = 1000,
) -> pd.DataFrame:
    """What "ties go to the lowest index" is worth: columns policy, as_listed, reversed (block efficiency with the arms
    in that order), and their paired difference value, low, high.
    """
    turned = replace(
        log,
        arms=log.arms[::-1],
        proposed=log.proposed[:, ::-1],
        accepted=log.accepted[:, ::-1],
        source=None,
        stats={n: v[:, ::-1] for n, v in log.stats.items()},
    )
    rows = []
    for name in allowed(log, names):
        pair = []
        for part in (log, turned):
            policy = policy_by_name(name, part)
            pair.append(evaluate(part, policy, feedback=late(policy), seeds=seeds)[0])
        gap = bootstrap_requests(
            lambda s: pooled_ratio(s[:, 1]) - pooled_ratio(s[:, 0]),
            np.stack([p.totals for p in pair], axis=1),
            strata=log.workload,
            rng=rng,
            n_resamples=n_resamples,
        )
        rows.append(
            {
                "policy": name,
                "as_listed": pair[0].block_efficiency,
                "reversed": pair[1].block_efficiency,
                "value": gap.value,
                "low": gap.low,
                "high": gap.high,
            }
        )
    return pd.DataFrame(rows, columns=["policy", "as_listed", "reversed", "value", "low", "high"])


# ---- the policy table


@dataclass(frozen=True, slots=True)
class _Job:
    """One policy of the table, in all its setups."""

    name: str
    train: PositionLog
    test: PositionLog
    seeds: tuple[int, ...]
    tuned: bool


def _run_job(job: _Job) -> list[tuple[dict, Replay]]:
    """Rows (without intervals) and totals of one policy; none when the log lacks what the policy needs."""
    try:
        base = policy_by_name(job.name, job.test, fit_on=job.train)
    except SpecselError:
        return []
    if isinstance(base, Plan):
        found, _ = evaluate(job.test, base, name=job.name)
        return [
            (
                {
                    "policy": job.name,
                    "source": "",
                    "sees": "hindsight",
                    "context": "hindsight",
                    "feedback": "",
                    "reset": "",
                    "setting": "",
                },
                found,
            )
        ]
    rows, keeps = [], job.name in PERSISTENT or (base.reads and base.sees != "nothing")
    for reset in ("request", "never") if keeps else ("request",):
        policy = base
        if job.tuned and job.name in GRIDS:
            some = slice(TUNE_ONE_BY_ONE) if reset == "never" else slice(None)
            options = {"feedback": setups(base)[0], "reset": reset, "seeds": job.seeds[:FEW]}
            policy = tune(job.train.select(some), job.name, **options)
        for feedback, (found, spread) in _evaluate_each(job.test, policy, reset, job).items():
            shown = "" if policy.sees == "nothing" else feedback
            rows.append(
                (
                    {
                        "policy": job.name,
                        "source": policy.source,
                        "sees": policy.sees,
                        "context": context_of(policy),
                        "feedback": shown,
                        "reset": reset,
                        "setting": repr(policy),
                        "seed_sd": spread,
                    },
                    found,
                )
            )
    return rows


def _evaluate_each(log: PositionLog, policy: Policy, reset: str, job: _Job) -> dict[str, tuple[Replay, float | None]]:
    """``evaluate`` under every kind of feedback; with state kept, where steps are many and small, all run together."""
    kinds = setups(policy)
    if reset == "request":
        return {f: evaluate(log, policy, feedback=f, seeds=job.seeds, name=job.name) for f in kinds}
    seeds = job.seeds[:FEW] if policy.draws(log.n_arms) else (None,)
    runs = replay_runs(log, policy, [(s, f) for f in kinds for s in seeds], reset=reset, name=job.name)
    return {f: _pooled(runs[i * len(seeds) : (i + 1) * len(seeds)]) for i, f in enumerate(kinds)}


def compare(
    train: PositionLog,
    test: PositionLog,
    *,
    rng: np.random.Generator,
    names: Iterable[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    tuned: bool = True,
    n_resamples: int = 2000,
    workers: int = 1,
) -> pd.DataFrame:
    """The policy table on the test requests, one row per policy, feedback and reset.

    A policy is tuned once per reset, under the first kind of feedback it takes, and then frozen. (With state kept, on
    at most ``TUNE_ONE_BY_ONE`` training requests, and the table has at most ``FEW`` seeds.)

    Columns: policy, source, sees, context (see `catalogue.context_of`), feedback, reset, setting, seed_sd,
    block_efficiency, then ``fixed`` and ``dp``: the paired
    difference to the best fixed arm and to the exact oracle (tokens per block) with ``_low``, ``_high``, ``fixed_p``
    after Holm's correction (``attrs["least_p"]`` is the smallest that so many resamples can give); ``share:ARM`` are
    shares of blocks. Policies that the log does not allow are left out.
    ``workers`` processes share the work; the table does not depend on their number.
    """
    check = fixed(test, test.n_arms - 1)
    if not np.array_equal(check.totals, replay(test, Fixed(test.n_arms - 1)).totals):
        raise SpecselError(f"{test.run}: two ways of replaying {check.policy} disagree; run `specsel log validate`")
    if names is None:
        names = (*(f"fixed:{a}" for a in test.arms), *PLANS[1:], *learner_names())
    jobs = [_Job(n, train, test, tuple(seeds), tuned) for n in names]
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:  # a fork of threads may hang
            parts = list(pool.map(_run_job, jobs[::-1]))[::-1]  # those with context take longest and stand last
    else:
        parts = [_run_job(job) for job in jobs]
    rows = [row for part in parts for row in part]
    gaps = _differences(test, [found for _, found in rows], rng, n_resamples)
    for i, (row, found) in enumerate(rows):
        row["block_efficiency"] = found.block_efficiency
        for label in ("fixed", "dp"):
            gap = gaps[i, label]
            row.update({label: gap.value, f"{label}_low": gap.low, f"{label}_high": gap.high})
        row["fixed_p"] = gaps[i, "fixed"].p
        row.update({f"share:{a}": s for a, s in zip(test.arms, found.shares, strict=True)})
    table = pd.DataFrame([row for row, _ in rows])
    table = table.assign(fixed_p=holm(table["fixed_p"].fillna(1.0).to_numpy(dtype=float)))
    table.attrs["least_p"] = min(1.0, 2 * len(table) / (n_resamples + 1))
    return table


def _differences(
    log: PositionLog, found: list[Replay], rng: np.random.Generator, n_resamples: int
) -> dict[tuple[int, str], Estimate]:
    """Block efficiency minus that of the best fixed arm (chosen in every resample), and minus the exact oracle's."""
    n = len(found)
    totals = [*(f.totals for f in found), *(fixed(log, k).totals for k in range(log.n_arms)), oracle_dp(log).totals]
    statistics = {}
    for i in range(n):
        statistics[i, "fixed"] = lambda s, i=i: pooled_ratio(s[..., i, :]) - _best_ratio(s[..., n:-1, :])
        statistics[i, "dp"] = lambda s, i=i: pooled_ratio(s[..., i, :]) - pooled_ratio(s[..., -1, :])
    null = {name: 0.0 for name in statistics if name[1] == "fixed"}
    return bootstrap_many(
        statistics, np.stack(totals, axis=1), strata=log.workload, rng=rng, n_resamples=n_resamples, null=null
    )


def _best_ratio(sums: np.ndarray) -> np.ndarray:
    """Highest block efficiency over arms, (..., K, 2) -> (...)."""
    return pooled_ratio(sums).max(axis=-1)


# ---- the workload-level hypothesis


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says contextual Thompson sampling gains by workload, and what exact replay says."""

    predicted: Estimate  # relative gain over the best fixed arm, on the simulated log
    measured: Estimate  # the same on the measured log
    predicted_headroom: Estimate  # of the best arm per workload, on the simulated log
    measured_headroom: Estimate
    verdict: str


def gain_over_best_fixed(
    log: PositionLog, found: Replay, *, rng: np.random.Generator, n_resamples: int = 2000
) -> Estimate:
    """Relative gain in block efficiency over the best fixed arm, which is chosen anew in every resample."""
    arms = np.stack([found.totals] + [fixed(log, k).totals for k in range(log.n_arms)], axis=1)
    return bootstrap_requests(
        lambda s: pooled_ratio(s[:, 0]) / _best_ratio(s[:, 1:]) - 1,
        arms,
        strata=log.workload,
        rng=rng,
        n_resamples=n_resamples,
    )


def workload_hypothesis(
    simulated: PositionLog,
    measured: PositionLog,
    *,
    rng: np.random.Generator,
    seeds: Sequence[int] = SEEDS,
    n_resamples: int = 2000,
) -> Prediction:
    """Run contextual Thompson sampling (context: the workload, state kept, mixed traffic) on both logs and compare."""
    gains, limits = [], []
    for log in (simulated, measured):
        mixed = log.select(rng.permutation(log.n_requests))
        found, _ = evaluate(mixed, policy_by_name("contextual_thompson", mixed), reset="never", seeds=seeds)
        gains.append(gain_over_best_fixed(mixed, found, rng=rng, n_resamples=n_resamples))
        limits.append(
            gain_over_best_fixed(
                mixed, follow(mixed, oracle_plan(mixed, "best_fixed_workload")), rng=rng, n_resamples=n_resamples
            )
        )
    return Prediction(*gains, *limits, verdict=verdict(*gains))


def verdict(predicted: Estimate, measured: Estimate) -> str:
    """One sentence: is the prediction inside the measured interval, and does the measured gain differ from none?"""
    if predicted.value is None or not measured.defined:
        return "The log is too small to judge the prediction."
    effect = "a gain" if measured.low > 0 else "a loss" if measured.high < 0 else "no measurable benefit"
    inside = measured.low <= predicted.value <= measured.high
    return f"The prediction is {'confirmed' if inside else 'falsified'}: the log shows {effect}."
