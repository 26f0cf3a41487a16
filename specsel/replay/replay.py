"""Exact replay: what any policy would have needed on the logged outputs, block by block.

Under greedy decoding the output does not depend on the drafter, so a policy replays exactly on a log of every position:
position += emitted of the chosen arm, one block per decision. Feedback is ``bandit`` (the chosen arm's count), ``full``
(all counts at once, an idealisation) or ``delayed`` (a count is known once the committed text reaches it, see
``streams.DelayQueue``). Not handled here: which policies exist, intervals, figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specsel.logs.columns import walk
from specsel.logs.log import PositionLog, SpecselError, require_complete
from specsel.policies.plain import Fixed
from specsel.replay.policy import Policy
from specsel.replay.streams import Streams


@dataclass(frozen=True, slots=True)
class Path:
    """The decisions of one replay, in the order of the log (B blocks)."""

    rows: np.ndarray  # (B,) row of the log where each block starts
    arms: np.ndarray  # (B,) arm that drafted


@dataclass(frozen=True, slots=True)
class Replay:
    """Totals per request of one policy on one log (R requests, K arms)."""

    policy: str
    feedback: str
    blocks: np.ndarray  # (R,) int64
    emitted: np.ndarray  # (R,) int64, bonus included, the first token of the output (from prefill) excluded
    pulls: np.ndarray  # (R, K) int64 blocks per arm
    workload: np.ndarray  # (R,) index into workloads
    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    time_s: np.ndarray | None = None  # (R,) modelled seconds, see ``timed``
    path: Path | None = None  # when asked for

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

    def timed(self, costs: np.ndarray) -> Replay:
        """The same with modelled time: ``costs`` (K,) are seconds per block of each arm (draft, verify, catch-up).

        A learner on full information also pays for the drafts that it only evaluates: add them to every cost.
        """
        return replace(self, time_s=self.pulls @ np.asarray(costs, dtype=float))

    def by_workload(self) -> dict[str, dict]:
        """Per workload: requests, blocks, emitted, block_efficiency (None without blocks), pulls per arm."""
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
            }
        return found


def headroom(better: Replay, base: Replay) -> float:
    """Relative gain in block efficiency of one replay over another.

    >>> import types; headroom(*[types.SimpleNamespace(block_efficiency=e) for e in (3.0, 2.0)])
    0.5
    """
    return better.block_efficiency / base.block_efficiency - 1


# ---- plans: the arm of every position is settled before the replay


@dataclass(frozen=True, slots=True)
class Plan:
    """An arm for every position: fixed arms, oracles, gates."""

    name: str
    arms: np.ndarray  # (N,)


def follow(log: PositionLog, plan: Plan, *, feedback: str = "full", keep_path: bool = False) -> Replay:
    """Replay a plan: blocks start wherever the planned arms lead."""
    require_complete(log)
    accepted = np.take_along_axis(log.accepted, plan.arms[:, None].astype(np.intp), axis=1)[:, 0]
    rows = walk(log.starts, np.minimum(accepted + 1, log.remaining))
    return _result(log, plan.name, feedback, Path(rows, plan.arms[rows]), keep_path)


def _result(log: PositionLog, name: str, feedback: str, path: Path, keep_path: bool) -> Replay:
    """Totals per request of a sequence of decisions."""
    emitted = np.minimum(log.accepted[path.rows, path.arms] + 1, log.remaining[path.rows])
    ends = np.searchsorted(path.rows, log.starts)  # rows ascend, so every request's blocks stand together

    def sums(values: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[ends])

    pulls = np.stack([sums(path.arms == k) for k in range(log.n_arms)], axis=1)
    return Replay(
        name,
        feedback,
        np.diff(ends),
        sums(emitted),
        pulls,
        log.workload,
        log.workloads,
        log.arms,
        None,
        path if keep_path else None,
    )


def fixed(log: PositionLog, arm: int, *, keep_path: bool = False) -> Replay:
    """Always the same arm."""
    require_complete(log)
    rows = walk(log.starts, np.minimum(log.accepted[:, arm] + 1, log.remaining))
    path = Path(rows, np.full(len(rows), arm, dtype=np.int8))
    return _result(log, f"fixed:{log.arms[arm]}", "bandit", path, keep_path)


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
        return Plan(name, np.repeat(best_arms(log, scope), np.diff(log.starts)))
    return Plan(name, log.emitted.argmax(axis=1) if name == "oracle_block" else dp_arms(log))


def oracle_fixed(log: PositionLog, *, keep_path: bool = False) -> Replay:
    """The arm with the highest block efficiency over the log."""
    return fixed(log, int(best_arms(log, "log")[0]), keep_path=keep_path)


def oracle_workload(log: PositionLog, *, keep_path: bool = False) -> Replay:
    """The hindsight best fixed arm of each workload."""
    return follow(log, oracle_plan(log, "best_fixed_workload"), keep_path=keep_path)


def oracle_request(log: PositionLog, *, keep_path: bool = False) -> Replay:
    """The hindsight best fixed arm of each request."""
    return follow(log, oracle_plan(log, "best_fixed_request"), keep_path=keep_path)


def oracle_block(log: PositionLog, *, keep_path: bool = False) -> Replay:
    """The arm that emits most at each block: hindsight, but no upper bound."""
    return follow(log, oracle_plan(log, "oracle_block"), keep_path=keep_path)


def oracle_dp(log: PositionLog, *, costs: np.ndarray | None = None, keep_path: bool = False) -> Replay:
    """Fewest blocks over all sequences of arms; with ``costs`` (K,) the least modelled time instead."""
    found = follow(log, Plan("oracle_dp", dp_arms(log, costs)), keep_path=keep_path)
    return found if costs is None else found.timed(costs)


def dp_arms(log: PositionLog, costs: np.ndarray | None = None) -> np.ndarray:
    """(N,) first arm of a cheapest way to the end of the output, from every position; equal costs by default."""
    require_complete(log)
    emitted, arms = log.emitted, np.zeros(log.n_positions, dtype=np.int8)
    prices = np.ones(log.n_arms) if costs is None else np.asarray(costs, dtype=float)
    lengths = np.diff(log.starts)
    longest = np.argsort(-lengths, kind="stable")
    counts = np.cumsum(np.bincount(lengths)[::-1])[::-1]  # requests with at least so many positions
    value = np.zeros(log.n_positions + log.n_requests)  # cost to the end; one free slot behind each request
    for left in range(1, len(counts)):
        request = longest[: counts[left]]
        row = log.starts[request + 1] - left
        slot, step = row + request, emitted[row].T
        best, first = prices[0] + value[slot + step[0]], np.zeros(len(row), dtype=np.int8)
        for k in range(1, log.n_arms):
            total = prices[k] + value[slot + step[k]]
            first[total < best] = k
            best = np.minimum(best, total)
        arms[row], value[slot] = first, best
    return arms


def oracle_renewal(
    log: PositionLog, costs: np.ndarray, *, values: np.ndarray | None = None, keep_path: bool = False
) -> Replay:
    """The renewal rule: at each block the arm with the largest emitted - rate * cost, rate = emitted per second.

    The rate is found by Dinkelbach iteration on exact replay, from 0 upwards, until it stops growing. ``values`` (N, K)
    replaces the hindsight counts by expectations given what is known before drafting. Source: policies.md, 1 (e).
    """
    values, rate, best = log.emitted if values is None else values, -1.0, None
    while True:
        arms = (values - max(rate, 0.0) * np.asarray(costs)).argmax(axis=1)
        found = follow(log, Plan("oracle_renewal", arms), keep_path=keep_path).timed(costs)
        achieved = float(found.emitted.sum() / found.time_s.sum())
        if achieved <= rate * (1 + 1e-12):
            return best
        best, rate = found, achieved


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
    return replay_seeds(log, policy, [seed], feedback=feedback, reset=reset, keep_path=keep_path, name=name)[0]


def replay_seeds(
    log: PositionLog,
    policy: Policy,
    seeds: Sequence[int | None],
    *,
    feedback: str | None = None,
    reset: str = "request",
    keep_path: bool = False,
    name: str | None = None,
) -> list[Replay]:
    """One replay per seed, all in the same steps; see ``replay``."""
    return replay_runs(log, policy, [(s, feedback) for s in seeds], reset=reset, keep_path=keep_path, name=name)


def replay_runs(
    log: PositionLog,
    policy: Policy,
    runs: Sequence[tuple[int | None, str | None]],
    *,
    reset: str = "request",
    keep_path: bool = False,
    name: str | None = None,
) -> list[Replay]:
    """One replay per (seed, feedback), all in the same steps; see ``replay``."""
    require_complete(log)
    runs = [(seed, _checked(policy, feedback, reset)) for seed, feedback in runs]
    streams = Streams(log, policy, runs, persistent=reset == "never")
    while len(streams.row):
        streams.step()
    return [
        _result(log, name or repr(policy), feedback, Path(*taken), keep_path)
        for (_, feedback), taken in zip(runs, streams.decisions(), strict=True)
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


def sanity_check(log: PositionLog) -> None:
    """Recompute the best fixed arm and another one block by block; SpecselError when the two routes disagree."""
    for arm in {int(best_arms(log, "log")[0]), log.n_arms - 1}:
        if not np.array_equal(fixed(log, arm).totals, replay(log, Fixed(arm)).totals):
            raise SpecselError(f"{log.run}: two ways of replaying {log.arms[arm]} disagree; run `specsel log validate`")
