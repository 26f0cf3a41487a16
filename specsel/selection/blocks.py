"""The blocks of the arm that drafts first, as a table: what it drafted, and what the best arm would have emitted there.

A block is a round of that arm when it always runs; its rows are never to be replayed. Not handled here: who decides on
a redraft (`specsel.selection.redraft`).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from specsel.logs import CONTEXT, STATS, PositionLog, SpecselError
from specsel.replay.replay import best_arms, fixed


def blocks(log: PositionLog, arm: str | None = None) -> pd.DataFrame:
    """One row per block (B rows) of ``arm``, by default the arm that needs the fewest blocks over the whole log.

    Columns: workload, request, number (of the request in the log, 0..R-1), position (of the anchor), row (in the log);
    own and best (tokens that the arm and the
    best arm emit there, bonus included), own_accepted and best_accepted (the same without the bonus), best_arm (its
    name, "tie" where several emit most), source (whose draft the arm handed on: its own name unless it is composite);
    the `STATS` of the arm's draft and the `CONTEXT` known before it (nan = missing). ``attrs``: dominant (the arm's
    name), arms, draft_len. A block-anchored log has the blocks of its path arm only; SpecselError for another one.
    """
    name = arm or dominant_arm(log)
    if name not in log.arms:
        raise SpecselError(f"there is no arm '{name}' in {log.run}; expected one of {', '.join(log.arms)}")
    k = log.arms.index(name)
    logged = not log.complete and name == log.path_arm
    rows = np.flatnonzero(log.on_path) if logged else fixed(log, k, keep_path=True).path.rows
    request = np.searchsorted(log.starts, rows, side="right") - 1
    accepted, emitted = log.accepted[rows], log.emitted[rows]
    most = emitted.max(axis=1)
    winners = emitted == most[:, None]
    found = pd.DataFrame(
        {
            "workload": np.array(log.workloads, dtype=object)[log.workload[request]],
            "request": np.array(log.requests, dtype=object)[request],
            "number": request,
            "position": log.position[rows],
            "row": rows,
            "own": emitted[:, k].astype(int),
            "best": most.astype(int),
            "own_accepted": accepted[:, k].astype(int),
            "best_accepted": accepted.max(axis=1).astype(int),
            "best_arm": np.array([*log.arms, "tie"], dtype=object)[
                np.where(winners.sum(axis=1) > 1, log.n_arms, winners.argmax(axis=1))
            ],
            "source": name if log.source is None else _sources(log, k, rows),
            **{feature: known(log, feature, k)[rows] for feature in (*STATS, *CONTEXT)},
        }
    )
    found.attrs = {"dominant": name, "arms": log.arms, "draft_len": log.draft_len}
    return found


def dominant_arm(log: PositionLog) -> str:
    """The arm that needs the fewest blocks over the log (the first on ties); on a block-anchored log its path arm."""
    if log.complete:
        return log.arms[int(best_arms(log, "log")[0])]
    if log.path_arm is None:
        raise SpecselError(f"{log.run}: its blocks belong to no single arm, so none drafts first; name one")
    return log.path_arm


def known(log: PositionLog, feature: str, arm: int) -> np.ndarray:
    """(N,) what is known at every position once an arm has drafted: one of its `STATS`, or of the `CONTEXT` before it;
    nan where missing or not logged.
    """
    if feature in CONTEXT:
        return log.context.get(feature, np.full(log.n_positions, np.nan))
    return log.stats[feature][:, arm] if feature in log.stats else np.full(log.n_positions, np.nan)


def _sources(log: PositionLog, arm: int, rows: np.ndarray) -> np.ndarray:
    """(B,) names of the arms whose drafts a composite arm handed on; its own name where it made the draft."""
    used = log.source[rows, arm]
    return np.array(log.arms, dtype=object)[np.where(used >= 0, used, arm)]
