"""Exact replay: what any policy would have needed on the logged outputs, block by block.

Under greedy decoding the output does not depend on the drafter, so a policy replays exactly on a log of every position:
position += emitted of the chosen arm, one block per decision. Feedback is ``bandit`` (the chosen arm's count), ``full``
(all counts at once, an idealisation) or ``delayed`` (a count is known once the committed text reaches it, see
``streams.DelayQueue``). Not handled here: which policies exist, intervals, figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from specsel.logs import PositionLog, SpecselError, require_complete, walk
from specsel.replay.policy import Policy
from specsel.replay.streams import Run, Streams

if TYPE_CHECKING:
    from specsel.costs import Costs


@dataclass(frozen=True, slots=True)
class Path:
    """The blocks of one replay, in the order of the log (B blocks)."""

    rows: np.ndarray  # (B,) row of the log where each block starts
    arms: np.ndarray  # (B,) arm whose draft was committed; -1 where none drafted
    ran: np.ndarray  # (B, K) bool, arms that drafted


@dataclass(frozen=True, slots=True)
class Replay:
    """Totals per request of one policy on one log (R requests, K arms)."""

    policy: str
    feedback: str
    blocks: np.ndarray  # (R,) int64
    emitted: np.ndarray  # (R,) int64, bonus included, the first token of the output (from prefill) excluded
    pulls: np.ndarray  # (R, K) int64 blocks in which each arm drafted
    neural_passes: np.ndarray  # (R,) int64 passes of neural drafters, see `neural_passes`
    workload: np.ndarray  # (R,) index into workloads
    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    seconds: np.ndarray | None = None  # (R,) modelled, where costs were given
    path: Path | None = None  # when asked for
    seed_sd: float | None = None  # of block efficiency between seeds, where the totals are means over several

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per block, pooled over requests; nan without requests."""
        blocks = self.blocks.sum()
        return float(self.emitted.sum() / blocks) if blocks else float("nan")

    @property
    def totals(self) -> np.ndarray:
        """(R, 2) emitted and blocks of each request: what the bootstrap resamples."""
        return np.stack([self.emitted, self.blocks], axis=1)

    @property
    def shares(self) -> np.ndarray:
        """(K,) share of blocks per arm, 0..1."""
        return self.pulls.sum(axis=0) / self.blocks.sum()

    def by_workload(self) -> dict[str, dict]:
        """Per workload: requests, blocks, emitted, block_efficiency (None without blocks), pulls per arm, neural
        passes."""
        found = {}
        for w, name in enumerate(self.workloads):
            mine = self.workload == w
            blocks, emitted = int(self.blocks[mine].sum()), int(self.emitted[mine].sum())
            pulls = self.pulls[mine].sum(axis=0).tolist()
            found[name] = {
                "requests": int(mine.sum()),
                "blocks": blocks,
                "emitted": emitted,
                "block_efficiency": emitted / blocks if blocks else None,
                "pulls": dict(zip(self.arms, pulls, strict=True)),
                "neural_passes": int(self.neural_passes[mine].sum()),
            }
        return found


def per_request(log: PositionLog, runs: Mapping[str, Replay]) -> pd.DataFrame:
    """A table for `stats.by`, one row per request of the log: workload, request, tokens (emitted after the first one),
    and per run ("blocks", name), ("passes", name) of neural drafters, and ("seconds", name) where it was timed.
    """
    columns = {
        "workload": np.array(log.workloads, dtype=object)[log.workload],
        "request": np.array(log.requests, dtype=object),
        "tokens": np.diff(log.starts),
    }
    for name, run in runs.items():
        columns |= {("blocks", name): run.blocks, ("passes", name): run.neural_passes}
        columns |= {} if run.seconds is None else {("seconds", name): run.seconds}
    return pd.DataFrame(columns)


# ---- plans: the arms of every position are settled before the replay


@dataclass(frozen=True, slots=True)
class Plan:
    """The arms that draft at every position: all are verified together and the longest draft is kept."""

    name: str
    arms: np.ndarray  # (N, K) bool; no arm: the target decodes one token alone
    longest: np.ndarray | None = None  # (N, K) int16 tokens that a draft may have; None: as logged

    @classmethod
    def one(cls, name: str, log: PositionLog, index: np.ndarray | int) -> Plan:
        """One arm at every position, by its index (N,)."""
        chosen = np.arange(log.n_arms) == np.asarray(index)[..., None]
        return cls(name, np.broadcast_to(chosen, (log.n_positions, log.n_arms)))


def follow(
    log: PositionLog, plan: Plan, *, costs: Costs | None = None, feedback: str = "full", keep_path: bool = False
) -> Replay:
    """Replay a plan exactly: blocks start wherever the planned arms lead. ``costs`` adds modelled seconds."""
    require_complete(log)
    if plan.longest is not None:  # the parts of a composite arm are cut with it
        log = log.shortened(np.where(plan.arms, plan.longest, plan.longest.max(axis=1, keepdims=True)))
    accepted = np.zeros(log.n_positions, dtype=log.accepted.dtype)
    for k in range(log.n_arms):  # arm by arm: a maximum over a short last axis is slow
        np.maximum(accepted, log.accepted[:, k], out=accepted, where=plan.arms[:, k])
    rows = walk(log.starts, np.minimum(accepted.astype(np.int64) + 1, log.remaining))
    return _totals(log, plan.name, feedback, rows, plan.arms[rows], costs, keep_path)


def _totals(
    log: PositionLog,
    name: str,
    feedback: str,
    rows: np.ndarray,
    ran: np.ndarray,
    costs: Costs | None = None,
    keep_path: bool = False,
) -> Replay:
    """Totals per request of blocks (B,) that start at these rows with these arms (B, K), in the order of the log."""
    kept = np.stack([np.where(ran[:, k], log.accepted[rows, k], -1) for k in range(log.n_arms)])  # (K, B)
    emitted = np.minimum(np.maximum(np.maximum.reduce(kept), 0) + 1, log.remaining[rows])
    ends = np.searchsorted(rows, log.starts)  # rows ascend, so every request's blocks stand together

    def sums(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, ends[:-1], dtype=np.result_type(values, np.int64))  # no request without a block

    return Replay(
        name,
        feedback,
        np.diff(ends),
        sums(emitted),
        np.stack([sums(ran[:, k]) for k in range(log.n_arms)], axis=1),
        sums(neural_passes(log, rows, ran)),
        log.workload,
        log.workloads,
        log.arms,
        None if costs is None else sums(_seconds(log, rows, ran, costs)),
        Path(rows, np.where(ran.any(axis=1), kept.argmax(axis=0), -1), ran) if keep_path else None,
    )


def neural_passes(log: PositionLog, rows: np.ndarray, ran: np.ndarray) -> np.ndarray:
    """(B,) passes of neural drafters in blocks that start at these rows with these arms (B, K).

    A draft is neural where the log has a confidence of it. A composite arm passes on the draft of its ``source``,
    which is not made twice when that arm drafts, too.
    """
    drafted = np.array(ran)
    for k in range(0 if log.source is None else log.n_arms):
        used = log.source[rows, k]
        if (used == -1).all():
            continue
        drafted[:, k] &= used < 0  # its part is outside of the pool: the confidence says whether that is neural
        at = np.flatnonzero(ran[:, k] & (used >= 0))
        drafted[at, used[at]] = True
    if "conf_first" not in log.stats:
        return np.zeros(len(rows), dtype=np.int64)
    confident = log.stats["conf_first"]
    return np.sum([drafted[:, k] & np.isfinite(confident[rows, k]) for k in range(log.n_arms)], axis=0)


def _seconds(log: PositionLog, rows: np.ndarray, ran: np.ndarray, costs: Costs) -> np.ndarray:
    """(B,) modelled seconds; the union of drafts is verified at once, and accepted tokens that drafts share are one
    row.

    Drafts may share rejected tokens too, so the number of rows is an upper bound; one draft is exact. An arm that sat
    out the block before has to catch up. A composite arm without timings of its own costs what its parts cost, and
    nothing twice: the cheapest of them is tried first, always.
    """
    drafted, verified = np.array(ran), np.array(ran)
    for k in (log.arms.index(name) for name in log.composites):
        if log.arms[k] in costs.arms or not (log.source[:, k] >= 0).any():
            continue
        on, used = ran[:, k], log.source[rows, k]
        parts = np.unique(log.source[log.source[:, k] >= 0, k])
        drafted[:, k] = verified[:, k] = False
        hit = np.flatnonzero(on & (used >= 0))
        drafted[hit, used[hit]] = verified[hit, used[hit]] = True
        drafted[on, min(parts, key=lambda part: float(costs.draft_s(log.arms[part], 0)))] = True
    accepted = np.where(verified, log.accepted[rows], 0)
    proposed = np.where(verified, np.maximum(log.proposed[rows], 0), 0)
    width = 1 + accepted.max(axis=1) + (proposed - accepted).sum(axis=1)
    request = np.searchsorted(log.starts, rows, side="right") - 1
    stale = np.zeros(ran.shape, dtype=bool)
    stale[1:] = ~drafted[:-1] & (request[1:] == request[:-1])[:, None]
    return costs.block_s(log.arms, context_length(log)[rows], ran=drafted, rows=width, stale=stale)


def context_length(log: PositionLog) -> np.ndarray:
    """(N,) tokens before each draft: prompt (where the log's request table has it) + output up to the anchor."""
    prompt = log.request_column("prompt_tokens")
    return log.position + 1 + (0 if prompt is None else np.repeat(prompt.astype(int), np.diff(log.starts)))


def fixed(log: PositionLog, arm: int, *, costs: Costs | None = None, keep_path: bool = False) -> Replay:
    """Always the same arm, by its index."""
    plan = Plan.one(f"fixed:{log.arms[arm]}", log, arm)
    return follow(log, plan, costs=costs, feedback="bandit", keep_path=keep_path)


def best_arms(log: PositionLog, scope: str) -> np.ndarray:
    """(R,) hindsight best fixed arm of each request's ``scope``: "log", "workload" or "request"; fewest blocks."""
    blocks = np.stack([fixed(log, k).blocks for k in range(log.n_arms)], axis=1)  # (R, K)
    every = np.arange(log.n_requests)
    group = {"log": 0 * every, "workload": log.workload, "request": every}[scope]
    sums = np.zeros((group.max() + 1, log.n_arms), dtype=np.int64)
    np.add.at(sums, group, blocks)
    return sums.argmin(axis=1)[group]


def oracle_plan(log: PositionLog, name: str) -> Plan:
    """A plan by hindsight: "best_fixed", "best_fixed_workload", "best_fixed_request", "oracle_block", "oracle_dp"."""
    require_complete(log)
    if name.startswith("best_fixed"):
        scope = name.removeprefix("best_fixed").removeprefix("_") or "log"
        return Plan.one(name, log, np.repeat(best_arms(log, scope), np.diff(log.starts)))
    return Plan.one(name, log, log.emitted.argmax(axis=1) if name == "oracle_block" else fewest_blocks(log))


def oracle_block(log: PositionLog) -> Replay:
    """The arm that emits most at each block: hindsight, but no upper bound."""
    return follow(log, oracle_plan(log, "oracle_block"))


def oracle_dp(log: PositionLog) -> Replay:
    """Fewest blocks over all sequences of arms: the bound of choosing one arm per block."""
    return follow(log, oracle_plan(log, "oracle_dp"))


def fewest_blocks(log: PositionLog) -> np.ndarray:
    """(N,) first arm of a way to the end of the output in as few blocks as possible, from every position: by dynamic
    programming from the end, all requests side by side.
    """
    emitted, arms = log.emitted, np.zeros(log.n_positions, dtype=np.int8)
    lengths = np.diff(log.starts)
    longest = np.argsort(-lengths, kind="stable")
    counts = np.cumsum(np.bincount(lengths)[::-1])[::-1]  # requests with at least so many positions
    left_over = np.zeros(log.n_positions + log.n_requests, dtype=np.int32)  # blocks to the end; a slot behind each end
    for left in range(1, len(counts)):
        request = longest[: counts[left]]
        row = log.starts[request + 1] - left
        after = left_over[(row + request)[:, None] + emitted[row]]  # (n, K)
        arms[row] = after.argmin(axis=1)
        left_over[row + request] = 1 + after.min(axis=1)
    return arms


# ---- policies: the arm depends on what was seen on the way


def replay(
    log: PositionLog,
    policy: Policy | Plan,
    *,
    feedback: str | None = None,
    reset: str = "request",
    seed: int | None = None,
    keep_path: bool = False,
    name: str | None = None,
) -> Replay:
    """Replay one policy exactly.

    ``feedback``: "bandit", "full" or "delayed"; None takes what the policy needs. ``reset``: forget at each "request"
    or "never" (requests in the order of the log). ``seed`` is required by policies that draw at random; each (policy,
    request) has its own stream of numbers, so the order of requests does not matter when the state resets.
    Raises SpecselError on a block-anchored log, and when the policy needs feedback or context that is not there.
    """
    if isinstance(policy, Plan):
        return follow(log, policy, feedback=feedback or "bandit", keep_path=keep_path)
    return replay_runs(log, [Run(policy, seed, feedback)], reset=reset, keep_path=keep_path, name=name)[0]


def replay_runs(
    log: PositionLog, runs: Sequence[Run], *, reset: str = "request", keep_path: bool = False, name: str | None = None
) -> list[Replay]:
    """One replay per run, all in the same steps, which costs less than one after the other; see ``replay``."""
    require_complete(log)
    runs = [Run(r.policy, r.seed, _checked(r.policy, r.feedback, reset)) for r in runs]
    streams = Streams(log, runs, persistent=reset == "never")
    while len(streams.row):
        streams.step()
    every = np.arange(log.n_arms)
    return [
        _totals(log, name or repr(r.policy), r.feedback, rows, arms[:, None] == every, None, keep_path)
        for r, (rows, arms) in zip(runs, streams.decisions(), strict=True)
    ]


def _checked(policy: Policy, feedback: str | None, reset: str) -> str:
    """The feedback to use; SpecselError when the combination makes no sense."""
    if feedback not in (None, "bandit", "full", "delayed") or reset not in ("request", "never"):
        raise SpecselError(
            f"feedback is {feedback!r} and reset {reset!r}; expected bandit, full or delayed, and request or never"
        )
    if policy.sees == "every arm" and feedback == "bandit":
        raise SpecselError(
            f"{type(policy).__name__} learns from the counts of every arm, but feedback is 'bandit'; "
            "use 'full' or 'delayed', or a policy that reads the chosen arm only"
        )
    return feedback or ("full" if policy.sees == "every arm" else "bandit")
