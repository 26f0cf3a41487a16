"""Choice rules with context: they also look at what is known before drafting (text match, target entropy, workload).

A policy names the features that it reads, and is given nothing else. Gates and routers are fitted on training requests
and never change; the online learners start empty. Not handled here: where features come from (``replay``), files.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import ndtri
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from specsel.policies.plain import TINY
from specsel.replay.policy import Feedback, Policy, SampledPolicy, State, View, softmax

MATCH_EDGES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


@dataclass(frozen=True, slots=True)
class Gate(Policy):
    """Arm ``above`` when a feature reaches a threshold, arm ``below`` otherwise and where it is missing."""

    source: ClassVar[str] = (
        "match gates: SAM-Decoding 2411.10666, SuffixDecoding 2411.04975, vLLM PR 24344; "
        "entropy gates: ReSpec 2511.01282, WhiFlash 2606.07710 (thresholds are not known)"
    )
    feature: str
    threshold: float
    above: int
    below: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.feature,)

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        return np.where(view.features[self.feature] >= self.threshold, self.above, self.below)


@dataclass(frozen=True, slots=True)
class PerContext(Policy):
    """One independent learner per context: contextual Hedge, follow-the-leader, Thompson sampling.

    The context is the bin of one feature (a missing value is a bin of its own). While a context has seen fewer than
    ``backoff`` rounds, the learner of all contexts together decides.
    """

    source: ClassVar[str] = "standard; regret against the best map from contexts to arms"
    inner: Policy
    feature: str = "match_length"
    edges: tuple[float, ...] = MATCH_EDGES  # ascending; bin i holds edges[i-1] <= value < edges[i]
    backoff: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.feature, *self.inner.reads)

    @property
    def sees(self) -> str:
        return self.inner.sees

    @property
    def release(self) -> str:
        return self.inner.release

    def draws(self, n_arms: int) -> int:
        return self.inner.draws(n_arms)

    def start(self, n: int, n_arms: int) -> State:
        size = len(self.edges) + 3  # the bins, missing, and all contexts together
        state = self.inner.start(n * size, n_arms)
        return {
            "rounds": np.zeros((n, size), dtype=int),
            **{k: v.reshape(n, size, *v.shape[1:]) for k, v in state.items()},
        }

    def context(self, view: View) -> np.ndarray:
        """(n,) bin of each stream."""
        value = view.features[self.feature]
        return np.array(self.edges).searchsorted(value, side="right") + np.isnan(value)

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        rows, slot = np.arange(len(view.block)), self.context(view)
        if self.backoff:
            slot = np.where(state["rounds"][rows, slot] < self.backoff, -1, slot)
        return self.inner.choose({k: v[rows, slot] for k, v in state.items()}, view, uniforms)

    def update(self, state: State, feedback: Feedback) -> None:
        rows, slot = np.arange(len(feedback.arms)), self.context(feedback.view)
        for where in (slot, -1) if self.backoff else (slot,):
            inner = {k: v[rows, where] for k, v in state.items()}
            self.inner.update(inner, feedback)
            inner["rounds"] += 1
            for key, value in inner.items():
                state[key][rows, where] = value


def design(view: View, features: tuple[str, ...]) -> np.ndarray:
    """(n, d) regressors: 1, then one column per feature.

    >>> design(View(2, 9, np.zeros(1), {"scaled:match_length": np.array([0.75])}), ("scaled:match_length",)).tolist()
    [[1.0, 0.75]]
    """
    columns = np.ones((len(view.block), len(features) + 1))
    for i, name in enumerate(features, start=1):
        columns[:, i] = view.features[name]
    return columns


class LinearPolicy(Policy):
    """One ridge regression of the reward on the features per arm, kept as inverse matrix and vector."""

    __slots__ = ()
    sees: ClassVar[str] = "either"
    release: ClassVar[str] = "arm"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.features

    def start(self, n: int, n_arms: int) -> State:
        if self.ridge <= 0 or self.noise <= 0:
            raise ValueError(
                f"ridge is {self.ridge} and noise {self.noise}; both must be above 0, "
                "or the first arm is chosen for ever"
            )
        d = len(self.features) + 1
        return {"inverse": np.tile(np.eye(d) / self.ridge, (n, n_arms, 1, 1)), "vector": np.zeros((n, n_arms, d))}

    def estimates(self, state: State, view: View) -> tuple[np.ndarray, np.ndarray]:
        """(n, K) mean and variance of x'theta per arm."""
        x = design(view, self.features)[:, None, :, None]
        projected = (state["inverse"] @ x)[..., 0]  # (n, K, d)
        return (projected * state["vector"]).sum(axis=2), (projected * x[..., 0]).sum(axis=2)

    def update(self, state: State, feedback: Feedback) -> None:
        rows, arms = np.nonzero(feedback.seen)
        x = design(feedback.view, self.features)[rows]
        inverse = state["inverse"][rows, arms]
        projected = (inverse @ x[:, :, None])[..., 0]
        scale = self.noise + (projected * x).sum(axis=1)
        inverse -= projected[:, :, None] * (projected / scale[:, None])[:, None, :]  # Sherman-Morrison
        state["inverse"][rows, arms] = inverse
        state["vector"][rows, arms] += x * (feedback.reward[rows, arms] / self.noise)[:, None]


@dataclass(frozen=True, slots=True)
class LinTS(LinearPolicy):
    """Linear Thompson sampling: theta ~ N(mean, v^2 covariance) per arm; v = 0 is greedy.

    Only x'theta decides and the arms are independent, so one normal draw per arm has the same law as drawing theta.
    """

    source: ClassVar[str] = "Agrawal & Goyal 2013 (standard)"
    features: tuple[str, ...]
    v: float = 1.0
    ridge: float = 1.0
    noise: float = 0.25

    @property
    def sees(self) -> str:
        return "either" if self.v else "every arm"

    def draws(self, n_arms: int) -> int:
        return n_arms if self.v else 0

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        mean, variance = self.estimates(state, view)
        return (mean + self.v * np.sqrt(variance) * ndtri(uniforms) if self.v else mean).argmax(axis=1)


@dataclass(frozen=True, slots=True)
class LinUCB(LinearPolicy):
    """Linear upper confidence bounds, disjoint models: x'theta + alpha sqrt(x' A^-1 x)."""

    source: ClassVar[str] = "Li et al. 2010 (standard)"
    features: tuple[str, ...]
    explore: float = 1.0  # alpha of the paper
    ridge: float = 1.0
    noise: ClassVar[float] = 1.0

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        mean, variance = self.estimates(state, view)
        return (mean + self.explore * np.sqrt(variance)).argmax(axis=1)


@dataclass(frozen=True, slots=True)
class EXP4(SampledPolicy):
    """Exponential weights over experts that advise an arm from the context; bandit feedback."""

    source: ClassVar[str] = "Auer et al. 2002 (standard)"
    sees: ClassVar[str] = "chosen arm"
    experts: tuple[Policy, ...]  # rules without state: fixed arms, gates
    explore: float = 0.1

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for e in self.experts for name in e.reads))

    def start(self, n: int, n_arms: int) -> State:
        return {"log_weight": np.zeros((n, len(self.experts)))}

    def advice(self, view: View) -> np.ndarray:
        """(n, E, K) distribution over the arms of each expert."""
        arms = np.array([expert.choose({}, view, None) for expert in self.experts]).T
        return np.eye(view.n_arms)[arms]

    def probabilities(self, state: State, view: View) -> np.ndarray:
        return self.mixture(state, self.advice(view))

    def mixture(self, state: State, advice: np.ndarray) -> np.ndarray:
        """(n, K) the experts' advice by weight, and some uniform play."""
        mixed = (softmax(state["log_weight"])[:, None, :] @ advice)[:, 0]
        return (1 - self.explore) * mixed + self.explore / advice.shape[2]

    def update(self, state: State, feedback: Feedback) -> None:
        rows, advice = np.arange(len(feedback.arms)), self.advice(feedback.view)
        p = self.mixture(state, advice)[rows, feedback.arms]
        gain = advice[rows, :, feedback.arms] * (feedback.own_reward / np.maximum(p, TINY))[:, None]
        state["log_weight"] += self.explore * gain / feedback.view.n_arms
        state["log_weight"] -= state["log_weight"].max(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class HedgeOverExperts(EXP4):
    """EXP4 with full information: Hedge over the experts, each charged the loss of its advice; no uniform play."""

    sees: ClassVar[str] = "every arm"
    explore: float = 0.0
    rate: float = 1.0

    def update(self, state: State, feedback: Feedback) -> None:
        state["log_weight"] += self.rate * (self.advice(feedback.view) @ feedback.reward[:, :, None])[..., 0]
        state["log_weight"] -= state["log_weight"].max(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class Router(Policy):
    """The arm with the highest linear score of the features, decided every ``every`` blocks (0: once per request)."""

    source: ClassVar[str] = (
        "every 4 blocks: like MemSpec 2608.10362; once per request: like 2408.08470, TaskSpec "
        "2505.08600; every block: like WhiFlash 2606.07710; our features, linear or logistic fit"
    )
    features: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # (d, K)
    every: int = 1

    @property
    def reads(self) -> tuple[str, ...]:
        return self.features

    def start(self, n: int, n_arms: int) -> State:
        return {"arm": np.zeros(n, dtype=int)}

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        due = view.block % self.every == 0 if self.every else view.block == 0
        if due.any():
            scores = design(view, self.features) @ np.array(self.weights)
            state["arm"][:] = np.where(due, scores.argmax(axis=1), state["arm"])
        return state["arm"].copy()


def fit_linear_router(
    x: np.ndarray, emitted: np.ndarray, features: tuple[str, ...], *, every: int, ridge: float = 1.0
) -> Router:
    """A router that predicts each arm's emitted tokens (n, K) by ridge regression on x = design(...), (n, d)."""
    weights = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ emitted)
    return Router(features, tuple(map(tuple, weights.tolist())), every)


def fit_classifier_router(
    x: np.ndarray, emitted: np.ndarray, features: tuple[str, ...], *, every: int, inverse_ridge: float = 1.0
) -> Router:
    """A router that predicts which arm emits most, by logistic regression; never-best arms are never chosen."""
    best = emitted.argmax(axis=1)
    classes = np.unique(best)
    weights = np.zeros((x.shape[1], emitted.shape[1]))
    weights[0, np.setdiff1d(np.arange(emitted.shape[1]), classes)] = -1e9
    if len(classes) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # ridge keeps the weights bounded either way
            model = LogisticRegression(C=inverse_ridge, max_iter=500).fit(x[:, 1:], best)
        scores = np.vstack([model.intercept_, model.coef_.T])  # (d, classes); one column when there are two classes
        weights[:, classes[-scores.shape[1] :]] = scores
    return Router(features, tuple(map(tuple, weights.tolist())), every)
