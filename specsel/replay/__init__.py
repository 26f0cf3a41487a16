"""Exact replay of a choice rule on a position log."""

from specsel.replay.policy import Feedback, Policy, View
from specsel.replay.replay import (
    Path,
    Plan,
    Replay,
    best_arms,
    context_length,
    fewest_blocks,
    fixed,
    follow,
    oracle_block,
    oracle_dp,
    oracle_plan,
    per_request,
    replay,
    replay_runs,
)
from specsel.replay.streams import Run

__all__ = [
    "Feedback",
    "Path",
    "Plan",
    "Policy",
    "Replay",
    "Run",
    "View",
    "best_arms",
    "context_length",
    "fewest_blocks",
    "fixed",
    "follow",
    "oracle_block",
    "oracle_dp",
    "oracle_plan",
    "per_request",
    "replay",
    "replay_runs",
]
