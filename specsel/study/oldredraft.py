"""What a redraft gains: per-request sums over the blocks of the dominant arm, and the ratios of them.

Let a_d be the dominant arm's count on a block and M the largest count of any arm (original study, section 4).
Everything is a ratio of per-request sums, so that requests can be resampled. Not handled here: who decides on a redraft
(`specsel.study.oldselector`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from specsel.logs import BlockLog, PositionLog, SpecselError, block_view
from specsel.replay.replay import Replay, fixed
from specsel.study.oldstats import ratio, request_sums

BASE, GAIN, TAKEN, REDRAFTED, BLOCKS = range(5)  # columns of redraft_sums


def dominant_blocks(log: PositionLog) -> BlockLog:
    """The blocks of the dominant arm: the arm that needs the fewest blocks (lowest index on ties), or the only logged
    path.
    """
    if not log.complete:
        return block_view(log)
    return block_view(log, dominant_arm([fixed(log, arm) for arm in range(log.n_arms)]))


def dominant_arm(runs: Sequence[Replay]) -> int:
    """The arm whose run (each arm always, in order) has the fewest blocks; the lowest index on ties."""
    return int(np.argmin([run.blocks.sum() for run in runs]))


def first_arm(blocks: BlockLog) -> int:
    """Index of the arm whose blocks these are."""
    if blocks.path_arm not in blocks.arms:
        raise SpecselError("these blocks belong to no single arm, so none drafts first; name one: block_view(log, arm)")
    return blocks.arms.index(blocks.path_arm)


def gains(blocks: BlockLog, *, count: str = "emitted") -> np.ndarray:
    """(B,) tokens that the best arm has over the dominant one at each block, >= 0; count is "emitted" or "accepted"."""
    arms = getattr(blocks, count).T  # arm by arm: a maximum over a short last axis is slow
    return (reduce(np.maximum, arms) - arms[first_arm(blocks)]).astype(np.int64)


def redraft_sums(blocks: BlockLog, redraft: np.ndarray, *, count: str = "emitted") -> np.ndarray:
    """(R, 5) per-request sums: the dominant arm's tokens, gain available, gain taken, redrafted blocks, blocks.

    redraft (B,) bool says which blocks are redrafted; the ratios below are functions of these sums (last axis).
    """
    gain, redraft = gains(blocks, count=count), np.asarray(redraft, dtype=bool)
    base = getattr(blocks, count)[:, first_arm(blocks)]
    columns = (base, gain, gain * redraft, redraft, np.ones(len(gain)))
    return np.stack([request_sums(c, blocks.request_of, len(blocks.requests)) for c in columns], axis=1)


def oracle_gap(sums: np.ndarray) -> np.ndarray:
    """G: gain available / tokens of the dominant arm (mean best / mean dominant - 1).

    >>> float(oracle_gap(np.array([10., 6., 3., 4., 8.])))
    0.6
    """
    return ratio(sums[..., GAIN], sums[..., BASE])


def capture(sums: np.ndarray) -> np.ndarray:
    """c: gain on redrafted blocks / gain on all blocks; nan when no block has a gain.

    >>> float(capture(np.array([10., 6., 3., 4., 8.])))
    0.5
    """
    return ratio(sums[..., TAKEN], sums[..., GAIN])


def redraft_rate(sums: np.ndarray) -> np.ndarray:
    """r: redrafted blocks / blocks.

    >>> float(redraft_rate(np.array([10., 6., 3., 4., 8.])))
    0.5
    """
    return ratio(sums[..., REDRAFTED], sums[..., BLOCKS])


def skill(sums: np.ndarray) -> np.ndarray:
    """c / r: redrafting at random has skill 1; nan when nothing is redrafted or nothing can be gained.

    >>> float(skill(np.array([10., 6., 3., 4., 16.])))
    2.0
    """
    return ratio(sums[..., TAKEN] * sums[..., BLOCKS], sums[..., GAIN] * sums[..., REDRAFTED])


def token_gain(sums: np.ndarray) -> np.ndarray:
    """c x G: gain taken / tokens of the dominant arm.

    >>> float(token_gain(np.array([10., 6., 3., 4., 8.])))
    0.3
    """
    return ratio(sums[..., TAKEN], sums[..., BASE])
