"""What a policy does on the way: regret and shares of pulls, cumulative over the blocks of a request and over the log.

Feedback is as late as in a live engine and the state is reset with each request. Not handled here: tuned settings,
charts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specsel.logs import PositionLog
from specsel.policies.catalogue import allowed
from specsel.replay.replay import Replay, best_arms, fixed, replay
from specsel.study.oldstats import bootstrap_many, pooled_ratio, ratio
from specsel.study.policies import late

SHOWN = ("ucb1", "contextual_ftl", "hedgespec")  # a learner that reads nothing; one that reads the text, if it can
POINTS = 30  # of a curve
REGRET = ("the best fixed arm of the request", "the best arm of each block")
PARTS = ("regret", "shares", "extra", "log_shares")


@dataclass(frozen=True, slots=True)
class Curves:
    """Tables for line charts, each with the columns policy, series, low, high (95 % limits) and those named here."""

    regret: pd.DataFrame  # block (from 1), regret: tokens behind what two others would have emitted (series)
    shares: pd.DataFrame  # block, share of the blocks so far; series is the arm
    extra: pd.DataFrame  # request (from 1), extra: blocks beyond those of the best fixed arm, relative to them
    log_shares: pd.DataFrame  # request, share of the blocks so far; series is the arm

    def of(self, place: int) -> Curves:
        """The curves of one policy by place (from 0) among those shown."""
        name = self.regret["policy"].unique()[place]
        return Curves(*(t[t["policy"] == name] for t in (getattr(self, part) for part in PARTS)))


def curves(
    log: PositionLog, *, rng: np.random.Generator, names: Iterable[str] = SHOWN, seed: int = 0, n_resamples: int = 1000
) -> Curves:
    """Curves of the first two policies that the log allows; requests in the order of the log."""
    base, tables = fixed(log, int(best_arms(log, "log")[0])), []
    for name, policy in list(allowed(log, names).items())[:2]:
        found = replay(log, policy, feedback=late(policy), seed=seed, keep_path=True, name=name)
        tables.append((*within_request(log, found, rng=rng, n_resamples=n_resamples), *over_log(found, base)))
    return Curves(*(pd.concat(parts, ignore_index=True) for parts in zip(*tables, strict=True)))


def within_request(
    log: PositionLog, found: Replay, *, rng: np.random.Generator, n_resamples: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`Curves.regret` and `Curves.shares` of one replay that kept its path; requests are resampled.

    Block b adds the mean over the requests that have one; curves end where fewer than one request in ten has a block.
    """
    sums = _by_block(log, found)
    last = int((sums[:, :, 2].sum(axis=0) >= max(1, log.n_requests / 10)).sum())
    places = [int(b) for b in np.unique(np.linspace(0, last - 1, POINTS).astype(int))]
    statistics = {
        ("regret", what, b): lambda s, c=c, b=b: ratio(s[..., : b + 1, c], s[..., : b + 1, 2]).sum(axis=-1)
        for c, what in enumerate(REGRET)
        for b in places
    }
    statistics |= {
        ("share", arm, b): lambda s, c=c, b=b: pooled_ratio(s[..., : b + 1, (c, 2)].sum(axis=-2))
        for c, arm in enumerate(log.arms, 3)
        for b in places
    }
    every = bootstrap_many(
        statistics, sums[:, :last], strata=log.workload, rng=rng, n_resamples=n_resamples, method="percentile"
    )
    tables: dict[str, list[dict]] = {"regret": [], "share": []}
    for (kind, key, b), e in every.items():
        series = key if kind == "share" else f"{found.policy} against {key}"
        tables[kind].append(
            {"policy": found.policy, "block": b + 1, kind: e.value, "low": e.low, "high": e.high, "series": series}
        )
    return pd.DataFrame(tables["regret"]), pd.DataFrame(tables["share"])


def _by_block(log: PositionLog, found: Replay) -> np.ndarray:
    """(R, B, 3 + K) per block: tokens behind the request's best fixed arm, behind the best arm, 1, the arm as 0/1."""
    rows, arms = found.path.rows, found.path.arms.astype(int)
    request = np.searchsorted(log.starts, rows, side="right") - 1
    block = np.arange(len(rows)) - (found.blocks.cumsum() - found.blocks)[request]
    emitted, each = log.emitted[rows].astype(int), np.arange(len(rows))
    own, best = emitted[each, arms], best_arms(log, "request")[request]
    table = np.zeros((log.n_requests, int(found.blocks.max()), 3 + log.n_arms))
    table[request, block, :3] = np.stack([emitted[each, best] - own, emitted.max(axis=1) - own, 0 * own + 1], axis=1)
    table[request, block, 3 + arms] = 1
    return table


def over_log(found: Replay, base: Replay) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`Curves.extra` and `Curves.log_shares` of one replay against the best fixed arm."""
    extra = running_ratio(found.blocks - base.blocks, base.blocks)
    shares = [running_ratio(found.pulls[:, k], found.blocks).assign(series=arm) for k, arm in enumerate(found.arms)]
    tables = (
        extra.rename(columns={"value": "extra"}).assign(series=found.policy),
        pd.concat(shares).rename(columns={"value": "share"}),
    )
    return tuple(table.assign(policy=found.policy) for table in tables)


def running_ratio(above: np.ndarray, below: np.ndarray) -> pd.DataFrame:
    """sum(above) / sum(below) over the first requests: request (from 1), value, low, high; at most 30 of them.

    Limits are normal, of the linearised ratio of sums over independent requests; the first request has none.

    >>> running_ratio(np.array([1, 1, 1]), np.array([2, 2, 4])).round(3).to_numpy().tolist()[1:]
    [[2.0, 0.5, 0.5, 0.5], [3.0, 0.375, 0.191, 0.559]]
    """
    above, below, n = above.astype(float), below.astype(float), np.arange(1, len(above) + 1)
    value = above.cumsum() / below.cumsum()
    squares = (above**2).cumsum() - 2 * value * (above * below).cumsum() + value**2 * (below**2).cumsum()
    half = 1.96 * np.sqrt(np.maximum(squares, 0) * n / np.maximum(n - 1, 1)) / below.cumsum()
    half[0] = np.nan
    table = pd.DataFrame({"request": n, "value": value, "low": value - half, "high": value + half})
    return table.iloc[np.unique(np.linspace(0, len(n) - 1, POINTS).astype(int))]
