"""Position logs from a stated model, with exact expectations: for coverage studies, predictions and benchmarks.

The model (all logs are labelled SIM). Every request of workload w has an effect b ~ N(0, request_sd) shared by its
arms. Its output is cut into passages of mean length ``passage_len``, each of one of M kinds, drawn uniformly. At every
position of kind m, arm k accepts each further token with probability sigmoid(logit[w, k] + b + passage[m, k]), up to
L tokens or the end of the output; with probability ``no_draft[k]`` it proposes nothing. Blocks of one request are
therefore correlated, and rankings flip between workloads (``logit``), requests and passages, as far as the model says.

Nothing here is read from a measured log: what a model assumes, it states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from specsel.logs import CONTEXT, STATS, LogError, PositionLog

QUADRATURE = 41  # nodes for the request effect; exact to about 1e-9 for request_sd up to 1


@dataclass(frozen=True, slots=True)
class Model:
    """Assumptions behind a simulated log (W workloads, K arms, M kinds of passages)."""

    arms: tuple[str, ...] = ("dflash", "eagle", "ngram", "cascade")  # K names
    workloads: tuple[str, ...] = ("gsm8k", "code", "chat", "copy")  # W names
    logit: tuple[tuple[float, ...], ...] = ((0.9, 0.5, -1.6, 0.8),) * 4  # (W, K) log-odds of accepting a token
    passage: tuple[tuple[float, ...], ...] = ((0.0, 0.0, 0.0, 0.0),)  # (M, K) added to the log-odds
    passage_len: float = 12.0  # mean positions per passage, 1 or more
    request_sd: float = 0.5  # standard deviation of the request effect, log-odds
    no_draft: tuple[float, ...] = (0.0, 0.0, 0.4, 0.0)  # (K,) probability of proposing nothing
    silent: tuple[str, ...] = ("ngram",)  # arms without a distribution: no draft statistics
    requests_per_workload: int = 50
    output_len: tuple[int, int] = (80, 160)  # smallest and largest number of positions of a request, drawn uniformly
    draft_len: int = 9  # L
    signal: float = 0.7  # 0..1: how far an arm's confidence follows its acceptance probability; 0 = noise

    def __post_init__(self) -> None:
        n_arms = len(self.arms)
        shapes = {"logit": (len(self.workloads), n_arms), "passage": (len(self.passage), n_arms), "no_draft": (n_arms,)}
        found = {n: np.shape(getattr(self, n)) for n in shapes}
        wrong = [f"{n} has shape {found[n]}, expected {s}" for n, s in shapes.items() if found[n] != s]
        wrong += [f"silent names {a!r}, which is no arm" for a in self.silent if a not in self.arms]
        bounds = {
            "passage_len": self.passage_len >= 1,
            "request_sd": self.request_sd >= 0,
            "draft_len": self.draft_len >= 1,
            "output_len": 1 <= self.output_len[0] <= self.output_len[1],
            "signal": 0 <= self.signal <= 1,
            "no_draft": all(0 <= p <= 1 for p in self.no_draft),
            "passage": len(self.passage) > 0,
        }
        wrong += [f"{n} = {getattr(self, n)} is out of range" for n, fine in bounds.items() if not fine]
        if wrong:
            raise LogError(f"simulation model: {'; '.join(wrong)}")


def simulate_positions(model: Model, *, rng: np.random.Generator, with_stats: bool = True) -> PositionLog:
    """Draw a log from the model; ``with_stats=False`` leaves draft statistics and context missing (10^7 positions)."""
    n_workloads, per = len(model.workloads), model.requests_per_workload
    workload = np.repeat(np.arange(n_workloads), per)
    lengths = rng.integers(model.output_len[0], model.output_len[1], size=len(workload), endpoint=True)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    request_of = np.repeat(np.arange(len(workload)), lengths)
    position = (np.arange(starts[-1]) - starts[request_of]).astype(np.int32)
    remaining = (lengths[request_of] - position).astype(np.int32)
    effect = rng.normal(0.0, model.request_sd, size=len(workload)).astype(np.float32)
    kind = _passages(position, model, rng)
    odds = np.asarray(model.logit, np.float32)[workload[request_of]] + effect[request_of, None]
    odds += np.asarray(model.passage, np.float32)[kind]
    proposed, accepted = _draft(odds, remaining, model, rng)
    stats, context = _signals(odds, proposed, model, rng) if with_stats else _missing(*odds.shape)
    log = PositionLog(
        model.arms,
        model.draft_len,
        model.workloads,
        tuple(f"{w}/{i}" for w in model.workloads for i in range(per)),
        workload,
        starts,
        proposed,
        accepted,
        np.zeros(len(position), dtype=bool),
        position,
        remaining,
        context,
        stats,
        run="simulation",
        label="SIM",
        path_arm=model.arms[0],
    )
    return log.with_path()


def _passages(position: np.ndarray, model: Model, rng: np.random.Generator) -> np.ndarray:
    """(N,) kind of the passage of every position; a passage starts with every request."""
    begins = (rng.random(len(position), dtype=np.float32) < 1 / model.passage_len) | (position == 0)
    number = np.cumsum(begins) - 1
    return rng.integers(len(model.passage), size=number[-1] + 1)[number]


def _draft(
    odds: np.ndarray, remaining: np.ndarray, model: Model, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) proposed and accepted: a geometric number of matches, cut at the draft and at the end of the output."""
    proposed = np.full(odds.shape, model.draft_len, dtype=np.int16)
    accepted = np.empty_like(proposed)
    for k in range(odds.shape[1]):
        proposed[rng.random(len(odds), dtype=np.float32) < model.no_draft[k], k] = 0
        tail = np.log1p(-rng.random(len(odds), dtype=np.float32))  # log of a uniform number in (0, 1]
        matches = tail / -np.logaddexp(0, -odds[:, k])  # log(u) / log(sigmoid(odds))
        accepted[:, k] = np.minimum(np.minimum(matches, model.draft_len), np.minimum(proposed[:, k], remaining))
    return proposed, accepted


def _missing(n: int, n_arms: int) -> tuple[dict, dict]:
    """Statistics that are all missing, without memory."""
    return {name: np.broadcast_to(np.nan, (n, n_arms)) for name in (*STATS, "match_length")}, {}


def _signals(odds: np.ndarray, proposed: np.ndarray, model: Model, rng: np.random.Generator) -> tuple[dict, dict]:
    """Draft statistics that follow the odds as far as ``signal`` says, and the context known before drafting."""
    noisy = model.signal * odds + (1 - model.signal) * rng.normal(0.5, 1.0, size=odds.shape)
    mean = expit(noisy)
    low = mean * expit(noisy + rng.normal(0.0, 0.5, size=odds.shape))
    first = mean + (1 - mean) * rng.random(odds.shape) * 0.5
    stats = {"conf_mean": mean, "conf_min": low, "conf_first": first, "ent_mean": -3.0 * np.log(mean) * mean}
    without = (proposed == 0) | np.isin(model.arms, model.silent)
    stats = {name: np.where(without, np.nan, values) for name, values in stats.items()}
    stats["match_length"] = np.full(odds.shape, np.nan)
    best = odds.max(axis=1)
    confidence = expit(model.signal * best + (1 - model.signal) * rng.normal(0.5, 1.0, size=len(best)))
    copied = [model.arms.index(a) for a in model.silent][:1] or [0]
    matched = np.where(proposed[:, copied[0]] > 0, 1 + rng.poisson(4 * expit(odds[:, copied[0]])), 0)
    values = (matched.astype(float), -3.0 * np.log(confidence) * confidence, confidence)
    return stats, dict(zip(CONTEXT, values, strict=True))


# ---- what is true of the model


def acceptance_distribution(odds: np.ndarray, limit: int, no_draft: np.ndarray) -> np.ndarray:
    """Probability of accepting exactly 0..limit tokens; odds (..., K), no_draft (K,) -> (..., K, limit+1).

    >>> acceptance_distribution(np.array([0.0]), 2, np.array([0.0]))
    array([[0.5 , 0.25, 0.25]])
    """
    theta = expit(odds)[..., None]
    powers = theta ** np.arange(limit + 1)
    exact = powers * np.where(np.arange(limit + 1) < limit, 1 - theta, 1.0)
    none = np.asarray(no_draft)[:, None]
    return (1 - none) * exact + none * (np.arange(limit + 1) == 0)


def expected_over_blocks(model: Model, arm: int, reward: str = "blocks") -> np.ndarray:
    """(W,) expected sum per request of a reward over the blocks of an arm that always runs: "blocks" (1 each) or "best"
    (the largest emitted count of all arms there). Exact, by recursion over the tokens that are left:
    V(n, m) = reward(n, m) + sum_y P(y | n, m) [ s^y V(n-y, m) + (1 - s^y) mean_m' V(n-y, m') ], s = 1 - 1/passage_len,
    averaged over the request effect (Gauss-Hermite) and the output length.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
    odds = (
        np.asarray(model.logit)[None, :, None, :]
        + np.asarray(model.passage)[None, None]
        + model.request_sd * nodes[:, None, None, None]
    )  # (Q, W, M, K)
    longest, stay = model.output_len[1], 1 - 1 / model.passage_len
    value = np.zeros((longest + 1, *odds.shape[:-1]))
    for left in range(1, longest + 1):
        chance = acceptance_distribution(odds, min(model.draft_len, left), np.asarray(model.no_draft))
        value[left] = 1.0 if reward == "blocks" else _expected_best(chance, left)
        for accepted in range(chance.shape[-1]):
            emitted = min(accepted + 1, left)
            after, same = value[left - emitted], stay**emitted
            value[left] += chance[..., arm, accepted] * (same * after + (1 - same) * after.mean(axis=-1, keepdims=True))
    at_start = value[model.output_len[0] :].mean(axis=(0, 3))
    return weights @ at_start / weights.sum()


def _expected_best(chance: np.ndarray, left: int) -> np.ndarray:
    """(...) expected largest emitted count of independent arms; chance (..., K, limit+1)."""
    below = np.cumsum(chance, axis=-1).prod(axis=-2)  # P(no arm accepts more than j)
    exactly = np.diff(below, axis=-1, prepend=0.0)
    return exactly @ np.minimum(np.arange(chance.shape[-1]) + 1, left)


def true_oracle_gap(model: Model, arm: int) -> float:
    """Oracle gap on the blocks of ``arm`` (emitted tokens) in an infinitely long log of this model."""
    tokens = sum(model.output_len) / 2 * len(model.workloads)
    return float(expected_over_blocks(model, arm, "best").sum() / tokens - 1)
