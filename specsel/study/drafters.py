"""How a drafter became what it is: the log of its training, whether it was still rising, whether a repetition agrees.

Reads the ``training.json`` beside the weights. Not handled here: training itself, acceptance on a log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from specsel.logs import LogError, readable
from specsel.paper.ledger import verdict
from specsel.stats import Estimate, Resampling, estimate, ratio


def training_log(folder: str | Path) -> dict[str, Any]:
    """The log that a training wrote beside its weights, its curve after that of the training that it went on from;
    raises LogError naming the file when there is none, or no curve in it."""
    path = Path(folder) / "training.json"
    with readable(path, "give the folder of a trained drafter"):
        log = json.loads(path.read_text(encoding="utf-8"))
        curve = _curve(log)
        for point in curve:
            numbers = [point[name] for name in ("step", "tokens", "loss", "first_token", "block_efficiency")]
            answers = np.array([point["answers"][name] for name in ("emitted", "blocks")], float)
            if not (np.isfinite(numbers).all() and np.isfinite(answers).all()):
                raise ValueError("a point of the curve holds nan or infinity")
        return log | {"kind": str(log["kind"]), "curve": curve}


def _curve(log: dict[str, Any]) -> list[dict[str, Any]]:
    return (_curve(log["earlier"]) if "earlier" in log else []) + log["curve"]


def held_out(point: dict[str, Any], *, resampling: Resampling) -> Estimate:
    """Tokens per block of a point of a curve on the answers that were kept out of the training; these are resampled."""
    sums = np.column_stack([point["answers"]["emitted"], point["answers"]["blocks"]])
    alike = np.zeros(len(sums))
    return estimate(lambda s: ratio(s[:, 0], s[:, 1]), sums, workload=alike, resampling=resampling)


def change(before: dict[str, Any], after: dict[str, Any], *, resampling: Resampling) -> Estimate:
    """Tokens per block of a point of a curve less those of another, paired on the same held-out answers."""
    emitted = before["answers"]["emitted"]
    if emitted != after["answers"]["emitted"]:
        raise LogError("two trainings were judged on different held-out answers; train both on the same data.")
    sums = np.column_stack([emitted, before["answers"]["blocks"], after["answers"]["blocks"]])

    def difference(s: np.ndarray) -> np.ndarray:
        return ratio(s[:, 0], s[:, 2]) - ratio(s[:, 0], s[:, 1])

    return estimate(difference, sums, workload=np.zeros(len(sums)), resampling=resampling)


def last_third(curve: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last point with at most two thirds of the tokens (the first one, if there is none), and the last point."""
    early = [point for point in curve if 3 * point["tokens"] <= 2 * curve[-1]["tokens"]]
    return (early or curve)[-1 if early else 0], curve[-1]


def added(gain: Estimate) -> str:
    """What a part of a training did, in words."""
    return verdict(
        gain,
        larger="still adds",
        smaller="takes away",
        alike="adds nothing measurable",
        no_interval="is one point, too few to say more",
        undefined="is undefined",
    )


def differing(recipe: dict[str, Any], other: dict[str, Any], *, ignore: tuple[str, ...] = ()) -> str:
    """Settings that both recipes name and that differ; older recipes name fewer.

    >>> differing({"loss": "lk", "batch": 8}, {"loss": "soft"})
    'loss lk instead of soft'
    """
    return ", ".join(
        f"{name.replace('_', ' ')} {_setting(value)} instead of {_setting(other[name])}"
        for name, value in recipe.items()
        if value != other.get(name, value) and name not in ignore
    )


def _setting(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- what a command tells when a training has ended


def still_rising(folder: str | Path, *, resampling: Resampling) -> str:
    """One sentence: how far the curve of a drafter rose, and whether its last third still added anything."""
    log = training_log(folder)
    gain = change(*last_third(log["curve"]), resampling=resampling)
    start, end = (point["block_efficiency"] for point in (log["curve"][0], log["curve"][-1]))
    shown = f" ({gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}])" if gain.low is not None else ""
    rise = f"{log['kind']} rises from {start:.2f} to {end:.2f} tokens per block"
    return f"{rise}, and the last third of its training {added(gain)}{shown}."


def repetition(folder: str | Path, again: str | Path, *, resampling: Resampling) -> str:
    """One sentence: does the training of the folder ``again`` end where that of ``folder`` ended? It does when its last
    point lies in the interval of the other's; settings in which the two differ are named."""
    told, repeated = training_log(folder), training_log(again)
    n, of = len(repeated["curve"]), len(told["curve"])
    if n != of:
        return f"The repetition of {told['kind']}'s training has {n} of {of} points."
    end, value = held_out(told["curve"][-1], resampling=resampling), repeated["curve"][-1]["block_efficiency"]
    limits = "" if end.low is None else f" [{end.low:.3f}, {end.high:.3f}]"
    other = differing(repeated["recipe"], told["recipe"])
    return (
        f"The repetition of {told['kind']}'s training{other and f', with {other},'} ends at {value:.3f} tokens per "
        f"block, {'inside' if inside(value, end) else 'outside'} the interval of the training itself "
        f"({end.value:.3f}{limits}); {same_files(told, repeated)} of its {len(repeated['data'])} files of answers are "
        "the same bytes."
    )


def inside(value: float, interval: Estimate) -> bool:
    """Does a value lie in an interval? In none that is not there."""
    return interval.low is not None and interval.low <= value <= interval.high


def same_files(told: dict[str, Any], repeated: dict[str, Any]) -> int:
    """How many files of answers of a repetition are those of the training."""
    files = {entry["sha256"] for entry in told["data"]}
    return sum(entry["sha256"] in files for entry in repeated["data"])
