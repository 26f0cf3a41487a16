"""What a policy is: what it may see before a block, what it learns after it, and how it draws.

A policy is an immutable record of its settings. What it learns lives in a state, a mapping of arrays whose first axis
is the stream (one request, or one persistent run of requests), so that thousands of requests advance in one step and a
live engine uses the same code with one stream. Rewards r = (emitted - 1) / L lie in 0..1; ties go to the lowest index.
Not handled here: the rules themselves (``policies``, ``contextual``), logs, files, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

State = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at before ``n`` blocks are drafted, one per stream."""

    n_arms: int  # K
    draft_len: int  # L, cap on drafted tokens per block
    block: np.ndarray  # (n,) blocks already run in the request of each stream
    features: dict[str, np.ndarray]  # name -> (n,) known before drafting, only what the policy reads; nan = missing


@dataclass(frozen=True, slots=True)
class Feedback:
    """What becomes known after ``n`` blocks; unseen counts are 0 and carry no information."""

    view: View  # what was known when the arms were chosen
    arms: np.ndarray  # (n,) arms that drafted
    emitted: np.ndarray  # (n, K) emitted tokens, bonus included, 1..L+1; 0 where unseen
    seen: np.ndarray  # (n, K) bool

    @property
    def reward(self) -> np.ndarray:
        """(n, K) reward (emitted - 1) / L in 0..1; 0 where unseen."""
        return np.maximum(self.emitted - 1, 0) / max(self.view.draft_len, 1)

    @property
    def own_reward(self) -> np.ndarray:
        """(n,) reward of the arms that drafted, 0..1."""
        return (self.emitted[np.arange(len(self.arms)), self.arms] - 1) / max(self.view.draft_len, 1)


class Policy:
    """A choice rule: ``start`` a state, ``choose`` an arm per stream, ``update`` the state in place."""

    __slots__ = ()
    source: ClassVar[str] = ""  # where the rule comes from
    sees: ClassVar[str] = "nothing"  # "nothing", "chosen arm", "every arm" or "either", as feedback
    release: ClassVar[str] = "round"  # delayed feedback comes per "round" (all arms of a block) or per "arm"

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the features that it looks at before drafting."""
        return ()

    def draws(self, n_arms: int) -> int:
        """Uniform random numbers needed per block."""
        return 0

    def start(self, n: int, n_arms: int) -> State:
        """The state of ``n`` fresh streams."""
        return {}

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        """(n,) arms; ``uniforms`` has shape (n, draws)."""
        raise NotImplementedError

    def update(self, state: State, feedback: Feedback) -> None:
        """Learn from one finished block of every stream, in place."""


class IndexPolicy(Policy):
    """A rule that plays the arm with the highest index."""

    __slots__ = ()

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        return self.index(state, view).argmax(axis=1)


class SampledPolicy(Policy):
    """A rule that draws the arm from a distribution."""

    __slots__ = ()

    def draws(self, n_arms: int) -> int:
        return 1

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        return inverse_cdf(self.probabilities(state, view), uniforms[:, 0])


def inverse_cdf(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """(n,) arms drawn by inverse distribution function in index order; probabilities (n, K), uniforms (n,) in [0, 1).

    >>> inverse_cdf(np.array([[0.2, 0.0, 0.8], [0.2, 0.0, 0.8]]), np.array([0.1, 0.2]))
    array([0, 2])
    """
    cumulative = probabilities.T.cumsum(axis=0)  # arms first: numpy is slow along a short last axis
    return np.add.reduce(cumulative[:-1] / cumulative[-1] <= uniforms, dtype=np.intp)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities proportional to exp(logits) along the last axis, finite for any finite logits.

    >>> softmax(np.array([[0.0, -1e6]])).tolist()
    [[1.0, 0.0]]
    """
    weights = np.exp(logits - np.maximum.reduce(logits.T).T[..., None])  # arms first: quick where there are few
    return weights / np.add.reduce(weights.T).T[..., None]


def leader(score: np.ndarray, prefer: int = 0) -> np.ndarray:
    """(n,) arms with the highest score (n, K); ``prefer`` wins a tie it is part of, else the lowest index does.

    >>> leader(np.array([[1, 1, 0], [0, 2, 2]]), prefer=2).tolist()
    [0, 2]
    """
    best = score.argmax(axis=1)
    return np.where(score[:, prefer] == score.max(axis=1), prefer, best) if prefer else best


def base_name(name: str) -> str:
    """The quantity behind a feature: "match_length" for "scaled:match_length", "workload" for "workload=2"."""
    return name.removeprefix("scaled:").partition("=")[0]


def feature(name: str, value: np.ndarray) -> np.ndarray:
    """(n,) a feature from its quantity: itself, near 0..1 for regressions ("scaled:", missing is 0), or "=" as 0/1.

    scaled match_length m: ln(1+m)/2; scaled target_entropy H: H/(1+H); others unchanged.

    >>> feature("scaled:target_entropy", np.array([3.0, np.nan])), feature("workload=2", np.array([2.0, 0.0]))
    (array([0.75, 0.  ]), array([1., 0.]))
    """
    if "=" in name:
        return (value == float(name.partition("=")[2])).astype(float)
    if not name.startswith("scaled:"):
        return value
    scales = {"match_length": lambda m: np.log1p(m) / 2, "target_entropy": lambda h: h / (1 + h)}
    scaled = scales.get(base_name(name), np.asarray)(value)
    return np.where(np.isnan(scaled), 0.0, scaled)


def bump(array: np.ndarray, arms: np.ndarray, amount: float | np.ndarray) -> None:
    """Add ``amount`` at the arm of each stream, in place."""
    array[np.arange(len(arms)), arms] += amount
