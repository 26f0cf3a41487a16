"""Choice rules without context: which arm drafts the next block, from the counts of earlier blocks alone.

Every rule is an immutable record of its settings (``decisions.Policy``). Not handled here: rules that look at the text
or at the target (``contextual``), names and tuning grids (``catalogue``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import betaincinv, ndtri

from specsel.replay.policy import (
    Feedback,
    IndexPolicy,
    Policy,
    SampledPolicy,
    State,
    View,
    bump,
    inverse_cdf,
    leader,
    softmax,
)

TINY = 1e-100  # keeps importance weights finite when a forced arm had no probability left


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Always the same arm."""

    arm: int

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        return np.full(len(view.block), self.arm)


@dataclass(frozen=True, slots=True)
class Random(SampledPolicy):
    """Every arm with equal probability, each block anew."""

    def probabilities(self, state: State, view: View) -> np.ndarray:
        return np.full((len(view.block), view.n_arms), 1 / view.n_arms)


@dataclass(frozen=True, slots=True)
class FollowTheLeader(Policy):
    """The arm with the most emitted tokens so far; a ``discount`` below 1 forgets, 0 repeats the last winner."""

    source: ClassVar[str] = "standard (full information)"
    sees: ClassVar[str] = "every arm"
    discount: float = 1.0  # weight of the past per block, 0..1
    prefer: int = 0  # arm that wins ties, and so the first block

    def start(self, n: int, n_arms: int) -> State:
        return {"gain": np.zeros((n, n_arms))}

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        return leader(state["gain"], self.prefer)

    def update(self, state: State, feedback: Feedback) -> None:
        state["gain"] *= self.discount
        state["gain"] += feedback.emitted


class CountingPolicy(IndexPolicy):
    """Pulls and sums of rewards of the chosen arms."""

    __slots__ = ()
    sees: ClassVar[str] = "chosen arm"

    def start(self, n: int, n_arms: int) -> State:
        return {"pulls": np.zeros((n, n_arms)), "sum": np.zeros((n, n_arms))}

    def update(self, state: State, feedback: Feedback) -> None:
        bump(state["pulls"], feedback.arms, 1)
        bump(state["sum"], feedback.arms, feedback.own_reward)

    def index(self, state: State, view: View) -> np.ndarray:
        """(n, K) mean + bonus; infinite for an arm without a pull."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.mean(state, view) + self.bonus(state["pulls"], view)
        return np.where(state["pulls"] > 0, found, np.inf)

    def mean(self, state: State, view: View) -> np.ndarray:
        """(n, K) mean reward."""
        return state["sum"] / state["pulls"]


@dataclass(frozen=True, slots=True)
class UCB1(CountingPolicy):
    """Each arm once, then the highest mean + sqrt(c ln(plays) / pulls)."""

    source: ClassVar[str] = "Auer et al. 2002 (standard)"
    c: float = 2.0

    def bonus(self, pulls: np.ndarray, view: View) -> np.ndarray:
        return np.sqrt(self.c * np.log(pulls.sum(axis=1, keepdims=True)) / pulls)


@dataclass(frozen=True, slots=True)
class MetaSDUCB(CountingPolicy):
    """UCB1 on accepted / L with bonus beta sqrt(2 ln(plays) / pulls); beta = 1 is UCB1 itself."""

    source: ClassVar[str] = "MetaSD, arXiv 2604.05417 (BE reward; beta is not reported)"
    beta: float = 1.0

    def bonus(self, pulls: np.ndarray, view: View) -> np.ndarray:
        return self.beta * np.sqrt(2 * np.log(pulls.sum(axis=1, keepdims=True)) / pulls)


@dataclass(frozen=True, slots=True)
class DiscountedUCB(CountingPolicy):
    """UCB on counts and sums that fade by ``discount`` per block; bonus 2 sqrt(xi ln(sum of counts) / count)."""

    source: ClassVar[str] = "Garivier & Moulines 2011; appendix of MetaSD"
    discount: float = 0.95
    xi: float = 0.6

    def bonus(self, pulls: np.ndarray, view: View) -> np.ndarray:
        return 2 * np.sqrt(self.xi * np.log(np.maximum(pulls.sum(axis=1, keepdims=True), 1)) / pulls)

    def update(self, state: State, feedback: Feedback) -> None:
        state["pulls"] *= self.discount
        state["sum"] *= self.discount
        CountingPolicy.update(self, state, feedback)


@dataclass(frozen=True, slots=True)
class SlidingWindowUCB(CountingPolicy):
    """UCB on the last ``window`` blocks; bonus sqrt(xi ln(min(blocks, window)) / pulls in the window)."""

    source: ClassVar[str] = "Garivier & Moulines 2011; appendix of MetaSD"
    window: int = 25
    xi: float = 0.6

    def start(self, n: int, n_arms: int) -> State:
        return {
            **CountingPolicy.start(self, n, n_arms),
            "arm": np.full((n, self.window), -1),
            "reward": np.zeros((n, self.window)),
            "next": np.zeros(n, dtype=int),
        }

    def bonus(self, pulls: np.ndarray, view: View) -> np.ndarray:
        return np.sqrt(self.xi * np.log(np.maximum(pulls.sum(axis=1, keepdims=True), 1)) / pulls)

    def update(self, state: State, feedback: Feedback) -> None:
        rows = np.arange(len(feedback.arms))
        slot = state["next"] % self.window
        state["arm"][rows, slot], state["reward"][rows, slot] = feedback.arms, feedback.own_reward
        state["next"] += 1
        for arm in range(state["pulls"].shape[1]):  # recounted, so that sums do not drift
            inside = state["arm"] == arm
            state["pulls"][:, arm] = inside.sum(axis=1)
            state["sum"][:, arm] = (state["reward"] * inside).sum(axis=1)


@dataclass(frozen=True, slots=True)
class UCBSpecPaper(CountingPolicy):
    """UCBSpec as printed: mean emitted + (L/2) sqrt((1+n)/n^2 (1 + 2 ln(K t^2 sqrt(1+n) / delta))).

    L is the cap over all arms.
    """

    source: ClassVar[str] = "BanditSpec, arXiv 2505.15141 (ICML 2025); delta of the experiments is not reported"
    delta: float = 0.5
    scale: float = 1.0  # multiplies the radius; 1 in the paper

    def mean(self, state: State, view: View) -> np.ndarray:
        return state["sum"] / state["pulls"] * view.draft_len + 1

    def bonus(self, pulls: np.ndarray, view: View) -> np.ndarray:
        rounds = pulls.sum(axis=1, keepdims=True)
        log = np.log(view.n_arms * rounds**2 * np.sqrt(1 + pulls) / self.delta)
        return self.scale * view.draft_len / 2 * np.sqrt((1 + pulls) / pulls**2 * (1 + 2 * log))


@dataclass(frozen=True, slots=True)
class UCBSpecReleased(CountingPolicy):
    """UCBSpec as in the released code, for drafter arms: ``passes`` over all arms, then greedy on the mean.

    The mean is that of emitted tokens: whole numbers, so that equal means are exact ties.
    """

    source: ClassVar[str] = "code of BanditSpec, whose bonus is equal for all arms; our drafter-arm analogue"
    passes: int = 2

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        rounds = state["pulls"].sum(axis=1).astype(int)
        greedy = IndexPolicy.choose(self, state, view, uniforms)
        return np.where(rounds < self.passes * view.n_arms, rounds % view.n_arms, greedy)

    def update(self, state: State, feedback: Feedback) -> None:
        bump(state["pulls"], feedback.arms, 1)
        bump(state["sum"], feedback.arms, feedback.emitted[np.arange(len(feedback.arms)), feedback.arms])

    def bonus(self, pulls: np.ndarray, view: View) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class EMAPerCost(CountingPolicy):
    """The arm with the highest moving average of emitted tokens per cost of a block; unplayed arms first."""

    source: ClassVar[str] = "CAS-Spec / DyTC, arXiv 2510.26843 (its rate is not known)"
    rate: float = 0.1
    costs: tuple[float, ...] | None = None  # K costs of a block in any one unit; None = equal

    def update(self, state: State, feedback: Feedback) -> None:
        rows = np.arange(len(feedback.arms))
        old, emitted = state["sum"][rows, feedback.arms], feedback.emitted[rows, feedback.arms]
        first = state["pulls"][rows, feedback.arms] == 0
        state["sum"][rows, feedback.arms] = np.where(first, emitted, old + self.rate * (emitted - old))
        bump(state["pulls"], feedback.arms, 1)

    def mean(self, state: State, view: View) -> np.ndarray:
        return state["sum"] / (1 if self.costs is None else np.array(self.costs))

    def bonus(self, pulls: np.ndarray, view: View) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class EXP3(SampledPolicy):
    """Exponential weights on importance-weighted gains, mixed with uniform play."""

    source: ClassVar[str] = "Auer et al. 2002 (standard)"
    sees: ClassVar[str] = "chosen arm"
    explore: float = 0.1  # share of uniform play, 0..1

    def start(self, n: int, n_arms: int) -> State:
        return {"log_weight": np.zeros((n, n_arms))}

    def probabilities(self, state: State, view: View) -> np.ndarray:
        return (1 - self.explore) * softmax(state["log_weight"]) + self.explore / view.n_arms

    def update(self, state: State, feedback: Feedback) -> None:
        p = self.probabilities(state, feedback.view)[np.arange(len(feedback.arms)), feedback.arms]
        gain = feedback.own_reward / np.maximum(p, TINY)
        bump(state["log_weight"], feedback.arms, self.explore * gain / feedback.view.n_arms)
        state["log_weight"] -= state["log_weight"].max(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class EXP3Spec(SampledPolicy):
    """Exponential weights on importance-weighted losses, rate sqrt(ln K / (t K)), no mixing."""

    source: ClassVar[str] = "BanditSpec, arXiv 2505.15141, full listing"
    sees: ClassVar[str] = "chosen arm"
    scale: float = 1.0  # multiplies the rate; 1 in the paper

    def start(self, n: int, n_arms: int) -> State:
        return {"loss": np.zeros((n, n_arms)), "round": np.ones((n, 1))}

    def probabilities(self, state: State, view: View) -> np.ndarray:
        rate = self.scale * np.sqrt(np.log(view.n_arms) / (state["round"] * view.n_arms))
        lag = state["loss"] - state["loss"].min(axis=1, keepdims=True)  # exact where losses are large and close
        return softmax(-rate * lag)

    def update(self, state: State, feedback: Feedback) -> None:
        p = self.probabilities(state, feedback.view)[np.arange(len(feedback.arms)), feedback.arms]
        bump(state["loss"], feedback.arms, (1 - feedback.own_reward) / np.maximum(p, TINY))
        state["round"] += 1


class LossPolicy(SampledPolicy):
    """Full-information learners on losses; ``greedy`` plays the most probable arm instead of drawing."""

    __slots__ = ()
    sees: ClassVar[str] = "every arm"

    def draws(self, n_arms: int) -> int:
        return 0 if self.greedy else 1

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        p = self.probabilities(state, view)
        return p.argmax(axis=1) if self.greedy else inverse_cdf(p, uniforms[:, 0])

    def losses(self, feedback: Feedback) -> np.ndarray:
        """(n, K) losses in 0..1: 1 - r, or 1 - emitted / (L + 1) when the bonus token counts (HedgeSpec)."""
        scale = feedback.view.draft_len / (feedback.view.draft_len + 1) if self.with_bonus else 1.0
        return (1 - feedback.reward) * scale


@dataclass(frozen=True, slots=True)
class Hedge(LossPolicy):
    """Exponential weights on cumulative losses; rate sqrt(8 ln K / horizon), or the current round for the horizon."""

    source: ClassVar[str] = "Freund & Schapire 1997 (standard); with_bonus: HedgeSpec, arXiv 2510.20064"
    horizon: int | None = None  # blocks, known in advance; None = anytime
    rate: float | None = None  # replaces the formula
    scale: float = 1.0  # multiplies the rate
    greedy: bool = False
    with_bonus: bool = False

    def start(self, n: int, n_arms: int) -> State:
        return {"loss": np.zeros((n, n_arms)), "round": np.ones((n, 1))}

    def probabilities(self, state: State, view: View) -> np.ndarray:
        formula = np.sqrt(8 * np.log(view.n_arms) / (self.horizon or state["round"]))
        rate = formula if self.rate is None else self.rate
        return softmax(-self.scale * rate * state["loss"])

    def update(self, state: State, feedback: Feedback) -> None:
        state["loss"] += self.losses(feedback)
        state["round"] += 1


@dataclass(frozen=True, slots=True)
class NormalHedge(LossPolicy):
    """The parameter-free learner of HedgeSpec's experiments: weights grow with positive regret only.

    A constant factor on all losses changes nothing, so counting the bonus token (HedgeSpec's loss) does not either.
    """

    source: ClassVar[str] = "Chaudhuri et al. 2009; HedgeSpec, arXiv 2510.20064"
    with_bonus: ClassVar[bool] = True
    greedy: bool = False

    def start(self, n: int, n_arms: int) -> State:
        return {"regret": np.zeros((n, n_arms))}

    def probabilities(self, state: State, view: View) -> np.ndarray:
        positive = np.maximum(state["regret"], 0)
        top = positive.max(axis=1, keepdims=True)
        z = np.divide(positive, top, out=np.zeros_like(positive), where=top > 0)  # 0..1
        weights = np.where(top > 0, z * np.exp(potential_rate(z) * (z**2 - 1)), 1)  # no positive regret: uniform
        return weights / weights.sum(axis=1, keepdims=True)

    def update(self, state: State, feedback: Feedback) -> None:
        losses = self.losses(feedback)
        played = (self.probabilities(state, feedback.view) * losses).sum(axis=1, keepdims=True)
        state["regret"] += played - losses


def potential_rate(z: np.ndarray) -> np.ndarray:
    """(n, 1) solution b of mean_i exp(b z_i^2) = e, for z (n, K) scaled to maximum 1; c = top^2 / (2 b).

    b lies in [1, 1 + ln K]; the left side is convex and increasing, so Newton steps from the right end stay there.

    >>> potential_rate(np.array([[1.0, 1.0]])).round(6).tolist()
    [[1.0]]
    """
    square = z**2
    b = np.full((len(z), 1), 1 + np.log(z.shape[1]))
    for _ in range(8):  # each step doubles the digits: 7 reach rounding for 16 arms
        terms = np.exp(b * square)
        slope = (terms * square).sum(axis=1, keepdims=True)
        excess = terms.sum(axis=1, keepdims=True) - np.e * z.shape[1]
        b -= np.divide(excess, slope, out=np.zeros_like(b), where=slope > 0)
    return b


@dataclass(frozen=True, slots=True)
class FixedShare(LossPolicy):
    """Hedge that competes with switching sequences: after each block a ``share`` of the weight is spread evenly."""

    source: ClassVar[str] = "Herbster & Warmuth 1998 (standard)"
    rate: float = 2.0
    share: float = 0.05  # 0..1
    greedy: bool = False
    with_bonus: bool = False

    def start(self, n: int, n_arms: int) -> State:
        return {"p": np.full((n, n_arms), 1 / n_arms)}

    def probabilities(self, state: State, view: View) -> np.ndarray:
        return state["p"]

    def update(self, state: State, feedback: Feedback) -> None:
        kept = softmax(np.log(np.maximum(state["p"], TINY)) - self.rate * self.losses(feedback))
        state["p"] = (1 - self.share) * kept + self.share / feedback.view.n_arms


@dataclass(frozen=True, slots=True)
class GaussianThompson(Policy):
    """Thompson sampling on mean rewards: prior N(0.5, 1), noise variance ``noise``; one normal draw per arm."""

    source: ClassVar[str] = "standard"
    sees: ClassVar[str] = "either"
    release: ClassVar[str] = "arm"
    noise: float = 0.25

    def draws(self, n_arms: int) -> int:
        return n_arms

    def start(self, n: int, n_arms: int) -> State:
        return {"pulls": np.zeros((n, n_arms)), "sum": np.zeros((n, n_arms))}

    def posterior(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        """(n, K) mean and variance."""
        precision = 1 + state["pulls"] / self.noise
        return (0.5 + state["sum"] / self.noise) / precision, 1 / precision

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        mean, variance = self.posterior(state)
        return (mean + np.sqrt(variance) * ndtri(uniforms)).argmax(axis=1)

    def update(self, state: State, feedback: Feedback) -> None:
        state["pulls"] += feedback.seen
        state["sum"] += feedback.reward


@dataclass(frozen=True, slots=True)
class BetaThompson(Policy):
    """Thompson sampling on the chance that a drafted token is accepted: Beta(1, 1) prior, score 1 + p + ... + p^L."""

    source: ClassVar[str] = "standard"
    sees: ClassVar[str] = "either"
    release: ClassVar[str] = "arm"

    def draws(self, n_arms: int) -> int:
        return n_arms

    def start(self, n: int, n_arms: int) -> State:
        return {"accepted": np.ones((n, n_arms)), "rejected": np.ones((n, n_arms))}

    def choose(self, state: State, view: View, uniforms: np.ndarray | None) -> np.ndarray:
        # the score increases with p, so the arm with the largest draw has the largest score
        return betaincinv(state["accepted"], state["rejected"], uniforms).argmax(axis=1)

    def update(self, state: State, feedback: Feedback) -> None:
        accepted = np.maximum(feedback.emitted - 1, 0)
        state["accepted"] += accepted
        state["rejected"] += feedback.seen & (accepted < feedback.view.draft_len)
