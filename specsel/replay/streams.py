"""Streams of blocks: where each request stands, what its policy has been told, and its random numbers.

A stream is one request (state forgotten at its end) or all requests in the order of the log (state kept). Several runs
(policies, seeds, kinds of feedback) are several sets of streams, and one step runs one block of every stream of all of
them. Not handled here: totals, oracles, names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np

from specsel.logs import PositionLog, SpecselError
from specsel.replay.policy import Feedback, Policy, View, base_name, feature

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the constants of SplitMix64
MIX = tuple((np.uint64(s), np.uint64(f)) for s, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
LAST, TO_53_BITS = np.uint64(31), np.uint64(11)
NEVER = np.iinfo(np.int32).max  # a row that no log has


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


@dataclass(frozen=True, slots=True)
class Run:
    """One replay of a policy among those that go through a log in the same steps."""

    policy: Policy
    seed: int | None = None  # required by policies that draw at random
    feedback: str | None = None  # "bandit", "full" or "delayed"; None: what the policy needs


class Group:
    """The streams of one policy, neighbours among all streams, and what the policy has learned in each of them."""

    def __init__(self, log: PositionLog, runs: Sequence[Run], first: int, size: int):
        self.policy, self.first = runs[0].policy, first  # first: number of the first run
        self.part = slice(first * size, (first + len(runs)) * size)
        n = self.part.stop - self.part.start
        self.reads, self.state = self.policy.reads, self.policy.start(n, log.n_arms)
        self.draws = Draws(log, self.policy, [r.seed for r in runs]) if self.policy.draws(log.n_arms) else None
        modes = {r.feedback for r in runs}
        self.mode = self.policy.sees if self.policy.sees in ("nothing", "chosen arm") else min(modes)
        if self.policy.sees in ("every arm", "either") and modes not in ({"full"}, {"bandit"}):
            self.mode = "queued"

    def view(self, n_arms: int, draft_len: int, block: np.ndarray, features: dict, part: slice) -> View:
        """What the policy may see of these streams: the features that it reads, and no others."""
        return View(n_arms, draft_len, block[part], {f: features[f][part] for f in self.reads})

    def learn(self, view: View, arms: np.ndarray, counts: np.ndarray) -> None:
        """The counts of a block as they come at once: of every arm, or of those that drafted."""
        seen = np.ones(counts.shape, dtype=bool)
        if self.mode != "full":
            seen = np.arange(counts.shape[1]) == arms[:, None]
        self.policy.update(self.state, Feedback(view, arms, counts * seen, seen))

    def learn_some(self, rows: np.ndarray, feedback: Feedback) -> None:
        """Update the state of some streams."""
        if len(rows) == self.part.stop - self.part.start:
            return self.policy.update(self.state, feedback)
        part = {k: v[rows] for k, v in self.state.items()}
        self.policy.update(part, feedback)
        for key, value in part.items():
            self.state[key][rows] = value

    def keep(self, keep: np.ndarray, start: int) -> None:
        """Forget the streams that have ended; those left stand from ``start`` on."""
        self.state = {k: v[keep] for k, v in self.state.items()}
        self.part = slice(start, start + int(keep.sum()))


class Streams:
    """The streams of some runs, those of equal policies next to each other; ``step`` until ``row`` is empty, then ask
    for ``decisions``."""

    def __init__(self, log: PositionLog, runs: Sequence[Run], *, persistent: bool):
        size = 1 if persistent else log.n_requests
        self.log, self.persistent = log, persistent
        self.run, self.stream = np.repeat(np.arange(len(runs)), size), np.arange(len(runs) * size)
        self.request = np.tile(np.arange(size), len(runs))
        self.row, self.end = log.starts[self.request], log.starts[self.request + 1]
        self.block = np.zeros(len(self.run), dtype=int)
        self.groups: list[Group] = []
        for _, mine in groupby(enumerate(runs), key=lambda numbered: numbered[1].policy):
            numbers, together = zip(*mine, strict=True)
            self.groups.append(Group(log, together, numbers[0], size))
        reads = {name for group in self.groups for name in group.reads}
        self.counts, self.columns = log.emitted, {f: feature_column(log, f) for f in sorted(reads)}
        self.queue = None
        if any(group.mode == "queued" for group in self.groups):
            modes = np.array([r.feedback for r in runs], dtype=object)[self.run]
            per_arm = np.zeros(len(self.run), dtype=bool)
            for group in self.groups:
                per_arm[group.part] = group.policy.release == "arm"
                modes[group.part] = modes[group.part] if group.mode == "queued" else ""
            self.queue = DelayQueue(log, modes, per_arm, self.columns)
        self.steps: list[tuple] = []

    def step(self) -> None:
        """One block of every stream: look, choose, count, learn, move on."""
        shape, block = (self.log.n_arms, self.log.draft_len), self.block
        features = {f: c[self.row] for f, c in self.columns.items()}
        counts, arms, views = self.counts[self.row], np.empty(len(self.row), dtype=np.intp), []
        for group in self.groups:
            part, view = group.part, group.view(*shape, block, features, group.part)
            uniforms = None
            if group.draws:
                uniforms = group.draws.next(self.run[part] - group.first, self.request[part], block[part])
            arms[part] = group.policy.choose(group.state, view, uniforms)
            views.append(view)
        reached = self.row + counts[np.arange(len(arms)), arms]
        self.steps.append((self.stream, self.row, arms.astype(np.int8)))
        for group, view in zip(self.groups, views, strict=True):
            if group.mode not in ("nothing", "queued"):
                group.learn(view, arms[group.part], counts[group.part])
        if self.queue:
            self.queue.push(block, features, arms, counts, self.row)
            self._release(reached)
        self.row, self.block = reached, block + 1
        self._advance()

    def _release(self, reached: np.ndarray) -> None:
        """Hand every policy the counts that the text has reached, and nothing else."""
        bounds = [group.part.start for group in self.groups] + [len(reached)]
        for rows, block, features, arms, counts, seen in self.queue.released(reached):
            ends = np.searchsorted(rows, bounds)
            for group, a, b in zip(self.groups, ends[:-1], ends[1:], strict=True):
                if a < b:
                    part = slice(a, b)
                    view = group.view(counts.shape[1], self.log.draft_len, block, features, part)
                    group.learn_some(
                        rows[part] - group.part.start, Feedback(view, arms[part], counts[part], seen[part])
                    )

    def _advance(self) -> None:
        """Streams whose request has ended go to their next request, or leave."""
        done = self.row == self.end
        if self.persistent and done.any():
            self.request, self.block = self.request + done, np.where(done, 0, self.block)
            done = self.request == self.log.n_requests
            self.end = self.log.starts[np.minimum(self.request, self.log.n_requests - 1) + 1]
        if not done.any():
            return
        keep, start = ~done, 0
        for group in self.groups:
            group.keep(keep[group.part], start)
            start = group.part.stop
        self.groups = [group for group in self.groups if group.part.start < group.part.stop]
        for name in ("row", "end", "block", "run", "request", "stream"):
            setattr(self, name, getattr(self, name)[keep])
        if self.queue:
            self.queue.keep(keep)

    def decisions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per run: rows where blocks started (B,) and arms that drafted (B,), in the order of the log."""
        n_streams = self.steps[0][0].size
        rows = np.full((n_streams, len(self.steps)), -1, dtype=np.int64)  # streams of a run stand in the log's order
        arms = np.zeros(rows.shape, dtype=np.int8)
        for n, (stream, row, chosen) in enumerate(self.steps):
            rows[stream, n], arms[stream, n] = row, chosen
        size = 1 if self.persistent else self.log.n_requests
        runs = [slice(first, first + size) for first in range(0, n_streams, size)]
        return [(rows[mine][rows[mine] >= 0], arms[mine][rows[mine] >= 0]) for mine in runs]


class Draws:
    """Uniform numbers in [0, 1): a pure function of seed, policy, request, and number of the block in its request.

    So the order of requests, the number of streams and the moment of the call do not matter. Each request of a seed has
    a key, from which SplitMix64 counts (Steele, Lea & Flood 2014, figure 13).
    """

    def __init__(self, log: PositionLog, policy: Policy, seeds: Sequence[int | None]):
        kind = type(policy).__name__
        if None in seeds:
            raise SpecselError(f"{kind} draws at random: give a seed")
        names = [f"{kind}/{log.workloads[w]}/{r}" for w, r in zip(log.workload, log.requests, strict=True)]
        keys = {seed: [_key(f"{seed}/{name}") for name in names] for seed in dict.fromkeys(seeds)}
        self.keys = np.array([keys[seed] for seed in seeds], dtype=np.uint64)  # (runs, R)
        self.width = policy.draws(log.n_arms)

    def next(self, run: np.ndarray, request: np.ndarray, block: np.ndarray) -> np.ndarray:
        """(n, width) numbers for a block of each stream."""
        counter = block[:, None] * self.width + np.arange(1, self.width + 1)
        x = self.keys[run, request][:, None] + counter.astype(np.uint64) * GOLDEN
        for shift, factor in MIX:
            x ^= x >> shift
            x *= factor
        x ^= x >> LAST
        return (x >> TO_53_BITS) * 2.0**-53


def _key(text: str) -> int:
    """A whole number of 64 bits from a name."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class DelayQueue:
    """Counts that wait until the committed text reaches them; at most L blocks of a stream are waiting.

    Arm i's count of a block that starts at s is released at the first block end >= s + min(emitted_i, L): release per
    "arm" (policies.md, section 1). Learners on whole rounds get all counts of the block at the first block end
    >= s + min(max_i emitted_i, L): release per "round" (the rule of the table in section 7). Streams in other modes
    than "delayed" share the queue: "full" waits for nothing, "bandit" never gets more than the own count, "" nothing.
    """

    def __init__(self, log: PositionLog, modes: np.ndarray, per_arm: np.ndarray, features: dict[str, np.ndarray]):
        self.slots, self.now = max(log.draft_len, 1), 0
        self.per_arm, self.waits, self.hides, self.idle = per_arm, modes == "delayed", modes == "bandit", modes == ""
        shape = (len(modes), self.slots)
        self.due = np.full((log.n_arms, *shape), NEVER, dtype=np.int32)  # arms first: quick to ask all
        self.counts = np.zeros((*shape, log.n_arms), dtype=np.int16)
        self.arms, self.block = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        self.features = {f: np.zeros(shape) for f in features}

    def push(self, block: np.ndarray, features: dict, arms: np.ndarray, counts: np.ndarray, start: np.ndarray) -> None:
        """Queue the block that has just run in every stream."""
        slot = self.now % self.slots
        reach = np.where(self.per_arm, counts.T, np.maximum.reduce(counts.T))
        due = start + np.minimum(reach, self.slots) * self.waits
        other = np.arange(counts.shape[1])[:, None] != arms
        self.due[:, :, slot] = np.where(self.hides & other | self.idle, NEVER, due)
        self.counts[:, slot], self.arms[:, slot], self.block[:, slot] = counts, arms, block
        for name, value in features.items():
            self.features[name][:, slot] = value
        self.now += 1

    def released(self, reached: np.ndarray) -> Iterator[tuple]:
        """(streams, block, features, arms, counts, seen) of all that the text has now reached, oldest block first."""
        ready = self.due <= reached[:, None].astype(np.int32)
        self.due[ready] = NEVER
        oldest_first = (self.now + np.arange(self.slots)) % self.slots
        streams, place = np.nonzero(ready.any(axis=0)[:, oldest_first])
        slots, nth = oldest_first[place], np.arange(len(streams)) - np.searchsorted(streams, streams)
        for now in range(nth.max(initial=-1) + 1):  # the next oldest block of every stream that has one
            rows, slot = streams[nth == now], slots[nth == now]
            seen, features = ready[:, rows, slot].T, {f: c[rows, slot] for f, c in self.features.items()}
            yield rows, self.block[rows, slot], features, self.arms[rows, slot], self.counts[rows, slot] * seen, seen

    def keep(self, keep: np.ndarray) -> None:
        """Forget the streams that have ended."""
        self.due = self.due[:, keep]
        for name in ("counts", "arms", "block", "per_arm", "waits", "hides", "idle"):
            setattr(self, name, getattr(self, name)[keep])
        self.features = {f: c[keep] for f, c in self.features.items()}
