"""Streams of blocks: where each request stands, what its policy has been told, and its random numbers.

A stream is one request (state forgotten at its end) or all requests in the order of the log (state kept); several
seeds are several sets of streams. One step runs one block of every stream. Not handled here: totals, oracles, names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from specsel.logs import PositionLog, SpecselError
from specsel.replay.policy import Feedback, Policy, State, View, base_name, feature

CHUNK = 32  # blocks for which random numbers are drawn ahead
NEVER = np.iinfo(np.int64).max


def feature_column(log: PositionLog, name: str) -> np.ndarray:
    """(N,) one feature known before drafting (``decisions.feature``): from the context, or the workload index."""
    base = base_name(name)
    if base == "workload":
        return feature(name, np.repeat(log.workload, np.diff(log.starts)).astype(float))
    if base not in log.context:
        raise SpecselError(
            f"{log.run}: the log has no context '{base}' (it has {', '.join(log.context) or 'none'}); "
            "choose a policy that does not read it, or collect a log that holds it"
        )
    return feature(name, log.context[base])


class Streams:
    """The streams of some runs, (seed, feedback) each; ``step`` until ``row`` is empty, then ask for ``decisions``."""

    def __init__(self, log: PositionLog, policy: Policy, runs: Sequence[tuple[int | None, str]], *, persistent: bool):
        n_runs, n_requests = len(runs), log.n_requests
        self.log, self.policy, self.persistent = log, policy, persistent
        self.run = np.arange(n_runs) if persistent else np.repeat(np.arange(n_runs), n_requests)
        self.request = np.zeros(n_runs, dtype=int) if persistent else np.tile(np.arange(n_requests), n_runs)
        self.row, self.end = log.starts[self.request], log.starts[self.request + 1]
        self.block = np.zeros(len(self.run), dtype=int)
        self.counts, self.columns = log.emitted, {f: feature_column(log, f) for f in policy.reads}
        self.state = policy.start(len(self.row), log.n_arms)
        self.draws = Draws(log, policy, [s for s, _ in runs], len(self.row)) if policy.draws(log.n_arms) else None
        self.queue, modes = None, np.array([f for _, f in runs])
        self.mode = policy.sees if policy.sees in ("nothing", "chosen arm") else modes[0]
        if policy.sees in ("every arm", "either") and (modes != "full").any() and (modes != "bandit").any():
            self.mode, self.queue = "queued", DelayQueue(log, policy, modes[self.run])
        self.steps: list[tuple] = []

    def step(self) -> None:
        """One block of every stream: look, choose, count, learn, move on."""
        view = View(self.log.n_arms, self.log.draft_len, self.block, {f: c[self.row] for f, c in self.columns.items()})
        uniforms = self.draws.next(self.run, self.request, self.block) if self.draws else None
        arms = self.policy.choose(self.state, view, uniforms)
        counts = self.counts[self.row]
        got = counts[np.arange(len(arms)), arms]
        self.steps.append((self.run, self.row, arms.astype(np.int8)))
        self._learn(view, arms, counts, self.row + got)
        self.row, self.block = self.row + got, self.block + 1
        self._advance()

    def _learn(self, view: View, arms: np.ndarray, counts: np.ndarray, reached: np.ndarray) -> None:
        """Hand the policy what its feedback reveals, and nothing else."""
        if self.mode == "full":
            self.policy.update(self.state, Feedback(view, arms, counts, np.ones(counts.shape, dtype=bool)))
        elif self.mode == "queued":
            self.queue.push(view, arms, counts, self.row)
            for rows, feedback in self.queue.released(reached):
                _update_some(self.policy, self.state, rows, feedback)
        elif self.mode != "nothing":
            seen = np.arange(counts.shape[1]) == arms[:, None]
            self.policy.update(self.state, Feedback(view, arms, counts * seen, seen))

    def _advance(self) -> None:
        """Streams whose request has ended go to their next request, or leave."""
        done = self.row == self.end
        if not done.any():
            return
        if self.persistent:
            self.request, self.block = self.request + done, np.where(done, 0, self.block)
            done = self.request == self.log.n_requests
            self.end = self.log.starts[np.minimum(self.request, self.log.n_requests - 1) + 1]
        keep = ~done
        for name in ("row", "end", "block", "run", "request"):
            setattr(self, name, getattr(self, name)[keep])
        self.state = {k: v[keep] for k, v in self.state.items()}
        for part in (self.draws, self.queue):
            if part:
                part.keep(keep)

    def decisions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per run: rows where blocks started (B,) and arms that drafted (B,), in the order of the log."""
        run, rows, arms = (np.concatenate(a) for a in zip(*self.steps, strict=True))
        order = np.split(np.lexsort((rows, run)), np.cumsum(np.bincount(run))[:-1])
        return [(rows[o], arms[o]) for o in order]


def _update_some(policy: Policy, state: State, rows: np.ndarray, feedback: Feedback) -> None:
    """Update the state of some streams."""
    if len(rows) == len(next(iter(state.values()))):
        return policy.update(state, feedback)
    part = {k: v[rows] for k, v in state.items()}
    policy.update(part, feedback)
    for key, value in part.items():
        state[key][rows] = value


class Draws:
    """Uniform numbers in [0, 1), one Philox stream per (seed, policy, request), counted by the block of the request.

    The order of requests, the number of streams and the moment of the call do not matter.
    """

    def __init__(self, log: PositionLog, policy: Policy, seeds: Sequence[int | None], n: int):
        kind = type(policy).__name__
        if None in seeds:
            raise SpecselError(f"{kind} draws at random: give a seed")
        names = [f"{kind}/{log.workloads[w]}/{r}" for w, r in zip(log.workload, log.requests, strict=True)]
        self.keys = np.array([[_key(f"{s}/{name}") for name in names] for s in seeds])
        self.bits = np.random.Philox(key=0)
        self.generator, self.origin = np.random.Generator(self.bits), self.bits.state
        self.width = policy.draws(log.n_arms)
        self.ahead, self.mine = np.empty((n, CHUNK, self.width)), np.arange(n)

    def next(self, seed: np.ndarray, request: np.ndarray, block: np.ndarray) -> np.ndarray:
        """(n, width) numbers for the next block of each stream; ``seed`` (n,) is an index into the seeds."""
        place = block % CHUNK
        for i in np.flatnonzero(place == 0):
            counter = np.array([0, 0, 0, block[i] // CHUNK], dtype=np.uint64)
            self.bits.state = {**self.origin, "state": {"counter": counter, "key": self.keys[seed[i], request[i]]}}
            self.ahead[self.mine[i]] = self.generator.random((CHUNK, self.width))
        return self.ahead[self.mine, place]

    def keep(self, keep: np.ndarray) -> None:
        """Forget the streams that have ended."""
        self.mine = self.mine[keep]


def _key(text: str) -> np.ndarray:
    """(2,) uint64 key of a random stream."""
    return np.frombuffer(blake2b(text.encode(), digest_size=16).digest(), dtype="<u8")


class DelayQueue:
    """Counts that wait until the committed text reaches them; at most L blocks of a stream are waiting.

    Arm i's count of a block that starts at s is released at the first block end >= s + min(emitted_i, L): release per
    "arm" (policies.md, section 1). Learners on whole rounds get all counts of the block at the first block end
    >= s + min(max_i emitted_i, L): release per "round" (the rule of the table in section 7). Streams in other modes
    than "delayed" may share the queue: "full" waits for nothing, "bandit" never gets more than the own count.
    """

    def __init__(self, log: PositionLog, policy: Policy, modes: np.ndarray):
        self.draft_len, self.slots, self.now = log.draft_len, max(log.draft_len, 1), 0
        self.per_arm, self.full, self.bandit = policy.release == "arm", modes == "full", modes == "bandit"
        shape = (len(modes), self.slots)
        self.due = np.full((*shape, log.n_arms), NEVER)
        self.counts = np.zeros((*shape, log.n_arms), dtype=np.int16)
        self.arms, self.block = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        self.features = {f: np.zeros(shape) for f in policy.reads}

    def push(self, view: View, arms: np.ndarray, counts: np.ndarray, start: np.ndarray) -> None:
        """Queue the block that has just run in every stream."""
        slot = self.now % self.slots
        reach = counts if self.per_arm else counts.max(axis=1, keepdims=True)
        due = start[:, None] + np.where(self.full[:, None], 0, np.minimum(reach, self.slots))
        other = np.arange(counts.shape[1]) != arms[:, None]
        self.due[:, slot] = np.where(self.bandit[:, None], np.where(other, NEVER, 0), due)
        self.counts[:, slot], self.arms[:, slot], self.block[:, slot] = counts, arms, view.block
        for name, value in view.features.items():
            self.features[name][:, slot] = value
        self.now += 1

    def released(self, reached: np.ndarray) -> Iterator[tuple[np.ndarray, Feedback]]:
        """(streams, feedback) of everything that the text has now reached, oldest block first."""
        ready = self.due <= reached[:, None, None]
        self.due[ready] = NEVER
        oldest_first = (self.now + np.arange(self.slots)) % self.slots
        streams, place = np.nonzero(ready.any(axis=2)[:, oldest_first])
        slots, turn = oldest_first[place], np.arange(len(streams)) - np.searchsorted(streams, streams)
        for now in range(turn.max(initial=-1) + 1):  # the next oldest block of every stream that has one
            rows, slot = streams[turn == now], slots[turn == now]
            seen, features = ready[rows, slot], {f: c[rows, slot] for f, c in self.features.items()}
            view = View(seen.shape[1], self.draft_len, self.block[rows, slot], features)
            yield rows, Feedback(view, self.arms[rows, slot], self.counts[rows, slot] * seen, seen)

    def keep(self, keep: np.ndarray) -> None:
        """Forget the streams that have ended."""
        for name in ("due", "counts", "arms", "block", "full", "bandit"):
            setattr(self, name, getattr(self, name)[keep])
        self.features = {f: c[keep] for f, c in self.features.items()}
