"""Exact replay: what any policy would have needed on the logged outputs, block by block.

Under greedy decoding the output does not depend on the drafter, so a policy replays exactly on a log of every position:
position += emitted of the chosen arm, one block per decision. Streams advance together, one numpy step per block.
Feedback is ``bandit`` (the chosen arm's count), ``full`` (all counts at once, an idealisation) or ``delayed`` (a count is
known once the committed text reaches it). Not handled here: which policies exist, intervals, figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from specsel.columns import walk
from specsel.log import PositionLog, SpecselError, require_complete
from specsel.policies import Feedback, Policy, State, View

CHUNK = 32  # blocks for which random numbers are drawn ahead


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
    time_s: np.ndarray | None = None  # (R,) modelled seconds, when costs were given
    path: Path | None = None  # when asked for

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per block, pooled over requests."""
        return float(self.emitted.sum() / self.blocks.sum())

    @property
    def totals(self) -> np.ndarray:
        """(R, 2) emitted and blocks of each request: what the bootstrap resamples."""
        return np.stack([self.emitted, self.blocks], axis=1)

    @property
    def shares(self) -> np.ndarray:
        """(K,) share of blocks per arm, 0..1."""
        return self.pulls.sum(axis=0) / self.blocks.sum()

    def by_workload(self) -> dict[str, dict]:
        """Per workload: requests, blocks, emitted, block_efficiency (None without blocks), pulls per arm."""
        found = {}
        for w, name in enumerate(self.workloads):
            mine = self.workload == w
            blocks, emitted = int(self.blocks[mine].sum()), int(self.emitted[mine].sum())
            found[name] = {"requests": int(mine.sum()), "blocks": blocks, "emitted": emitted,
                           "block_efficiency": emitted / blocks if blocks else None,
                           "pulls": {a: int(n) for a, n in zip(self.arms, self.pulls[mine].sum(axis=0))}}
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice of arm for every position, fixed before the replay: fixed arms and oracles."""

    name: str
    arms: np.ndarray  # (N,)


def headroom(better: Replay, base: Replay) -> float:
    """Relative gain in block efficiency of one replay over another.

    >>> import types; headroom(*[types.SimpleNamespace(block_efficiency=e) for e in (3.0, 2.0)])
    0.5
    """
    return better.block_efficiency / base.block_efficiency - 1


# ---- plans: fixed arms and oracles


def follow(log: PositionLog, plan: Plan, *, feedback: str = "full", costs: np.ndarray | None = None,
           keep_path: bool = False) -> Replay:
    """Replay a plan: blocks start wherever the planned arms lead; ``costs`` (K,) are seconds per block of each arm."""
    require_complete(log)
    accepted = np.take_along_axis(log.accepted, plan.arms[:, None].astype(np.intp), axis=1)[:, 0]
    return _follow(log, plan, np.minimum(accepted + 1, log.remaining), feedback, costs, keep_path)


def _follow(log: PositionLog, plan: Plan, step: np.ndarray, feedback: str, costs: np.ndarray | None, keep_path: bool) -> Replay:
    rows = walk(log.starts, step)
    arms = plan.arms[rows]
    request = np.searchsorted(log.starts, rows, side="right") - 1
    shape = (log.n_requests, log.n_arms)
    pulls = np.bincount(request * log.n_arms + arms, minlength=shape[0] * shape[1]).reshape(shape)
    emitted = np.bincount(request, weights=step[rows], minlength=log.n_requests).astype(np.int64)
    return _result(log, plan.name, feedback, pulls, emitted, costs, Path(rows, arms) if keep_path else None)


def _result(log: PositionLog, name: str, feedback: str, pulls: np.ndarray, emitted: np.ndarray,
            costs: np.ndarray | None, path: Path | None) -> Replay:
    return Replay(name, feedback, pulls.sum(axis=1), emitted, pulls, log.workload, log.workloads, log.arms,
                  None if costs is None else pulls @ np.asarray(costs, dtype=float), path)


def fixed(log: PositionLog, arm: int, **options) -> Replay:
    """Always the same arm."""
    require_complete(log)
    plan = Plan(f"fixed:{log.arms[arm]}", np.broadcast_to(np.int8(arm), log.n_positions))
    step = np.minimum(log.accepted[:, arm] + 1, log.remaining)
    return _follow(log, plan, step, **{"feedback": "full", "costs": None, "keep_path": False, **options})


def oracle_fixed(log: PositionLog, **options) -> Replay:
    """The arm with the highest block efficiency over the log."""
    best = np.argmin([fixed(log, k).blocks.sum() for k in range(log.n_arms)])
    return fixed(log, int(best), **options)


def best_arms(log: PositionLog, scope: str) -> np.ndarray:
    """(R,) hindsight best fixed arm of each request's ``scope``: "workload" or "request"; fewest blocks."""
    blocks = np.stack([fixed(log, k).blocks for k in range(log.n_arms)], axis=1)  # (R, K)
    if scope == "request":
        return blocks.argmin(axis=1)
    sums = np.zeros((len(log.workloads), log.n_arms), dtype=np.int64)
    np.add.at(sums, log.workload, blocks)
    return sums.argmin(axis=1)[log.workload]


def oracle_workload(log: PositionLog, **options) -> Replay:
    """The hindsight best fixed arm of each workload."""
    return follow(log, Plan("best_fixed_workload", np.repeat(best_arms(log, "workload"), np.diff(log.starts))), **options)


def oracle_request(log: PositionLog, **options) -> Replay:
    """The hindsight best fixed arm of each request."""
    return follow(log, Plan("best_fixed_request", np.repeat(best_arms(log, "request"), np.diff(log.starts))), **options)


def oracle_block(log: PositionLog, **options) -> Replay:
    """The arm that emits most at each block: hindsight, but no upper bound."""
    return follow(log, Plan("oracle_block", log.emitted.argmax(axis=1)), **options)


def dp_arms(log: PositionLog, costs: np.ndarray | None = None) -> np.ndarray:
    """(N,) first arm of a cheapest way to the end of the output from every position; equal costs when none are given."""
    require_complete(log)
    emitted, arms = log.emitted, np.zeros(log.n_positions, dtype=np.int8)
    prices = np.ones(log.n_arms) if costs is None else np.asarray(costs, dtype=float)
    lengths = np.diff(log.starts)
    longest = np.argsort(-lengths, kind="stable")
    counts = np.cumsum(np.bincount(lengths)[::-1])[::-1]  # requests with at least so many positions
    value = np.zeros(log.n_positions + log.n_requests)  # cost to the end; one free slot behind each request
    for left in range(1, len(counts)):
        request = longest[:counts[left]]
        row = log.starts[request + 1] - left
        total = prices + value[(row + request)[:, None] + emitted[row]]
        arms[row] = total.argmin(axis=1)
        value[row + request] = total.min(axis=1)
    return arms


def oracle_dp(log: PositionLog, *, costs: np.ndarray | None = None, **options) -> Replay:
    """Fewest blocks over all sequences of arms; with ``costs`` (K,) the least modelled time instead."""
    return follow(log, Plan("oracle_dp", dp_arms(log, costs)), costs=costs, **options)


def oracle_renewal(log: PositionLog, costs: np.ndarray, *, values: np.ndarray | None = None, **options) -> Replay:
    """The renewal-optimal rule: at each block the arm with the largest emitted - rate * cost, rate = emitted per second.

    The rate is found by Dinkelbach iteration on exact replay. ``values`` (N, K) replaces the hindsight counts by
    expectations given what is known before drafting. Source: policies.md, section 1 (e); not argmax emitted / cost.
    """
    values, rate, best = log.emitted if values is None else values, 0.0, None
    for _ in range(50):
        arms = (values - rate * np.asarray(costs)).argmax(axis=1)
        found = follow(log, Plan("oracle_renewal", arms), costs=costs, **options)
        achieved = float(found.emitted.sum() / found.time_s.sum())
        if best is not None and achieved <= rate * (1 + 1e-12):
            break
        best, rate = found, achieved
    return best


# ---- policies


def replay(log: PositionLog, policy: Policy | Plan, *, feedback: str | None = None, reset: str = "request",
           seed: int | None = None, costs: np.ndarray | None = None, keep_path: bool = False, name: str | None = None) -> Replay:
    """Replay one policy exactly.

    ``feedback``: "bandit", "full" or "delayed"; None takes what the policy needs. ``reset``: forget at each "request" or
    "never" (requests in the order of the log). ``seed`` is required by policies that draw at random; each (policy,
    request) has its own stream of numbers, so the order of requests does not matter when the state resets.
    Raises SpecselError on a block-anchored log, and when the policy needs feedback or context that is not there.
    """
    if isinstance(policy, Plan):
        return follow(log, policy, feedback=feedback or "full", costs=costs, keep_path=keep_path)
    return replay_seeds(log, policy, [seed], feedback=feedback, reset=reset, costs=costs, keep_path=keep_path, name=name)[0]


def replay_seeds(log: PositionLog, policy: Policy, seeds: Sequence[int | None], *, feedback: str | None = None,
                 reset: str = "request", costs: np.ndarray | None = None, keep_path: bool = False,
                 name: str | None = None) -> list[Replay]:
    """One replay per seed, all in the same steps; see ``replay``."""
    require_complete(log)
    feedback = _checked(policy, feedback, reset)
    run = _Run(log, policy, seeds, feedback, persistent=reset == "never", keep_path=keep_path)
    while len(run.row):
        run.step()
    name = name or repr(policy)
    return [_result(log, name, feedback, run.pulls[s], run.emitted_by[s], costs, path) for s, path in enumerate(run.paths())]


def _checked(policy: Policy, feedback: str | None, reset: str) -> str:
    """The feedback to use; SpecselError when the combination makes no sense."""
    if feedback not in (None, "bandit", "full", "delayed") or reset not in ("request", "never"):
        raise SpecselError(f"feedback is {feedback!r} and reset {reset!r}; expected bandit, full or delayed, and request or never")
    if policy.sees == "every arm" and feedback == "bandit":
        raise SpecselError(f"{type(policy).__name__} learns from the counts of every arm, but feedback is 'bandit'; "
                           "use 'full' or 'delayed', or a policy that reads the chosen arm only")
    return feedback or ("full" if policy.sees == "every arm" else "bandit")


def feature_column(log: PositionLog, name: str) -> np.ndarray:
    """(N,) one feature known before drafting: a column of the log's context, or the index of the workload."""
    if name == "workload":
        return np.repeat(log.workload, np.diff(log.starts)).astype(float)
    if name not in log.context:
        raise SpecselError(f"{log.run}: the log has no context '{name}' (it has {', '.join(log.context) or 'none'}); "
                           "choose a policy that does not read it, or collect a log that holds it")
    return log.context[name]


class _Run:
    """The streams of one replay: where each stands, what its policy knows, and what has been counted."""

    def __init__(self, log: PositionLog, policy: Policy, seeds: Sequence[int | None], feedback: str, *, persistent: bool, keep_path: bool):
        self.log, self.policy, self.persistent = log, policy, persistent
        self.mode = feedback if policy.sees in ("every arm", "either") else policy.sees
        n_seeds, n_requests = len(seeds), log.n_requests
        self.seed = np.arange(n_seeds) if persistent else np.repeat(np.arange(n_seeds), n_requests)
        self.request = np.zeros(n_seeds, dtype=int) if persistent else np.tile(np.arange(n_requests), n_seeds)
        self.row, self.block = log.starts[self.request], np.zeros(len(self.seed), dtype=int)
        self.emitted, self.columns = log.emitted, {f: feature_column(log, f) for f in policy.reads}
        self.state = policy.start(len(self.row), log.n_arms)
        self.draws = _Draws(log, policy, seeds, len(self.row)) if policy.draws(log.n_arms) else None
        self.queue = _Queue(len(self.row), log, policy) if self.mode == "delayed" else None
        self.pulls = np.zeros((n_seeds, n_requests, log.n_arms), dtype=np.int64)
        self.emitted_by = np.zeros((n_seeds, n_requests), dtype=np.int64)
        self.steps = [] if keep_path else None

    def step(self) -> None:
        """One block of every stream: look, choose, count, learn, move on."""
        view = View(self.log.n_arms, self.log.draft_len, self.block, {f: c[self.row] for f, c in self.columns.items()})
        uniforms = self.draws.next(self.seed, self.request, self.block) if self.draws else None
        arms = self.policy.choose(self.state, view, uniforms)
        counts, each = self.emitted[self.row], np.arange(len(arms))
        got = counts[each, arms]
        self.pulls[self.seed, self.request, arms] += 1
        self.emitted_by[self.seed, self.request] += got
        if self.steps is not None:
            self.steps.append((self.seed, self.row, arms))
        self.learn(view, arms, counts, self.row + got)
        self.row, self.block = self.row + got, self.block + 1
        self.advance()

    def learn(self, view: View, arms: np.ndarray, counts: np.ndarray, reached: np.ndarray) -> None:
        """Hand the policy what its feedback reveals, and nothing else."""
        if self.mode == "full":
            self.policy.update(self.state, Feedback(view, arms, counts, np.ones(counts.shape, dtype=bool)))
        elif self.mode == "delayed":
            self.queue.push(view, arms, counts, self.row)
            for rows, feedback in self.queue.released(reached):
                _update(self.policy, self.state, rows, feedback)
        elif self.mode != "nothing":
            seen = np.arange(counts.shape[1]) == arms[:, None]
            self.policy.update(self.state, Feedback(view, arms, counts * seen, seen))

    def advance(self) -> None:
        """Streams whose request has ended go to their next request, or leave."""
        done = self.row == self.log.starts[self.request + 1]
        if not done.any():
            return
        if self.persistent:
            self.request, self.block = self.request + done, np.where(done, 0, self.block)
            done = self.request == self.log.n_requests
            if not done.any():
                return
        keep = ~done
        self.row, self.block, self.seed, self.request = (a[keep] for a in (self.row, self.block, self.seed, self.request))
        self.state = {k: v[keep] for k, v in self.state.items()}
        for part in (self.draws, self.queue):
            if part:
                part.keep(keep)

    def paths(self) -> list[Path | None]:
        """The decisions of each seed, in the order of the log."""
        if self.steps is None:
            return [None] * len(self.pulls)
        seed, rows, arms = (np.concatenate(a) for a in zip(*self.steps))
        order = np.lexsort((rows, seed))
        return [Path(rows[o], arms[o]) for o in np.split(order, np.cumsum(np.bincount(seed))[:-1])]


def _update(policy: Policy, state: State, rows: np.ndarray, feedback: Feedback) -> None:
    """Update the state of some streams."""
    if len(rows) == len(next(iter(state.values()))):
        return policy.update(state, feedback)
    part = {k: v[rows] for k, v in state.items()}
    policy.update(part, feedback)
    for key, value in part.items():
        state[key][rows] = value


class _Draws:
    """Uniform numbers keyed by (seed, policy, request) and counted by block: one Philox stream each, drawn in chunks."""

    def __init__(self, log: PositionLog, policy: Policy, seeds: Sequence[int | None], n: int):
        if None in seeds:
            raise SpecselError(f"{type(policy).__name__} draws at random: give a seed")
        names = [f"{type(policy).__name__}/{log.workloads[w]}/{r}" for w, r in zip(log.workload, log.requests)]
        self.keys = [[np.frombuffer(blake2b(f"{s}/{n}".encode(), digest_size=16).digest(), dtype="<u8") for n in names] for s in seeds]
        self.bits = np.random.Philox(key=0)
        self.generator, self.origin = np.random.Generator(self.bits), self.bits.state
        self.width = policy.draws(log.n_arms)
        self.ahead, self.mine = np.empty((n, CHUNK, self.width)), np.arange(n)

    def next(self, seed: np.ndarray, request: np.ndarray, block: np.ndarray) -> np.ndarray:
        """(n, width) numbers for the next block of each stream."""
        for i in np.flatnonzero(block % CHUNK == 0):
            self.origin["state"] = {"counter": np.array([0, 0, 0, block[i] // CHUNK], dtype="u8"), "key": self.keys[seed[i]][request[i]]}
            self.bits.state = self.origin
            self.ahead[self.mine[i]] = self.generator.random((CHUNK, self.width))
        return self.ahead[self.mine, block % CHUNK]

    def keep(self, keep: np.ndarray) -> None:
        """Forget the streams that have ended."""
        self.mine = self.mine[keep]


class _Queue:
    """Counts that wait until the committed text reaches them.

    Arm i's count of a block that starts at s is released at the first block end >= s + min(emitted_i, L) (per arm); learners
    on whole rounds get all arms at the first block end >= s + min(max_i emitted_i, L). At most L blocks are waiting.
    """

    def __init__(self, n: int, log: PositionLog, policy: Policy):
        self.slots, self.now, self.per_arm, self.draft_len = max(log.draft_len, 1), 0, policy.release == "arm", log.draft_len
        shape = (n, self.slots)
        self.due = np.full((*shape, log.n_arms), NEVER)
        self.counts = np.zeros((*shape, log.n_arms), dtype=np.int16)
        self.arms, self.block = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        self.features = {f: np.zeros(shape) for f in policy.reads}

    def push(self, view: View, arms: np.ndarray, counts: np.ndarray, start: np.ndarray) -> None:
        """Queue the block that has just run in every stream."""
        slot = self.now % self.slots
        known = counts if self.per_arm else counts.max(axis=1, keepdims=True)
        self.due[:, slot] = start[:, None] + np.minimum(known, max(self.draft_len, 1))
        self.counts[:, slot], self.arms[:, slot], self.block[:, slot] = counts, arms, view.block
        for name, value in view.features.items():
            self.features[name][:, slot] = value
        self.now += 1

    def released(self, reached: np.ndarray) -> Iterator[tuple[np.ndarray, Feedback]]:
        """(streams, feedback) of everything that the text has now reached, oldest block first."""
        ready = self.due <= reached[:, None, None]
        self.due[ready] = NEVER
        waiting = np.flatnonzero(ready.any(axis=(0, 2)))
        for slot in sorted(waiting, key=lambda s: (s - self.now) % self.slots):
            rows = np.flatnonzero(ready[:, slot].any(axis=1))
            seen = ready[rows, slot]
            view = View(seen.shape[1], self.draft_len, self.block[rows, slot], {f: c[rows, slot] for f, c in self.features.items()})
            yield rows, Feedback(view, self.arms[rows, slot], self.counts[rows, slot] * seen, seen)

    def keep(self, keep: np.ndarray) -> None:
        """Forget the streams that have ended."""
        self.due, self.counts, self.arms, self.block = (a[keep] for a in (self.due, self.counts, self.arms, self.block))
        self.features = {f: c[keep] for f, c in self.features.items()}


NEVER = np.iinfo(np.int64).max
