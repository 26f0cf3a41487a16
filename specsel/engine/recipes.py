"""Recipe of a drafter's training: its settings, its schedule, and the recipe that a trained folder tells."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specsel.logs import SpecselError, readable


class TrainError(SpecselError):
    """A training cannot be continued as asked."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Recipe of one training: ``steps`` of ``batch`` answers, all randomness from ``seed``.

    The rate rises over the first ``warm_up`` of the steps, stays, and falls linearly over the last ``cool_down``.
    Training ends early when ``patience`` evaluations in a row bring no better held-out block efficiency. The weights of
    the steps in ``keep`` are written beside the best ones, to measure selection against drafter quality.
    """

    steps: int = 3000
    batch: int = 4
    rate: float = 4e-3
    warm_up: float = 0.03
    cool_down: float = 0.6
    clip: float = 1.0
    seed: int = 0
    optimizer: str = "muon"  # "muon" for the matrices of the layers and AdamW for the rest, or "adamw" for all
    start: str = "target"  # layers copied from the target's last ones; "random"; or "earlier": a trained drafter's
    loss: str = "soft"  # "soft": cross-entropy against the target's distribution; "hard": its choice; "lk"
    draft_vocab: int = 16384
    vocabulary: str = "kept"  # draft vocabulary of an earlier drafter: "kept", or "chosen" anew on these answers
    counted: str = "all"  # prompts counted when it is chosen: "all" training prompts, or the "answered" ones
    draft_len: int = 9
    draft_steps: int = 4  # EAGLE-3: steps of the training-time test
    layers: int = 3  # DFlash: decoder layers
    anchors: int = 32  # DFlash: anchors per answer, drawn anew each time
    short_blocks: tuple[int, ...] = ()  # DFlash: sizes that the block grows through before it is whole, equally long
    short_until: float = 0.7  # DFlash: share of the steps with short blocks; more of them, for the same rows
    slots: str = "pace"  # DFlash: weights by expected accepted length (D-PACE), or "decay": exp(-(k - 1) / gamma)
    gamma: float = 5.0
    eval_every: int = 300
    split: str = "shard"  # held-out answers: those of the last "shard", or every 64th "answer"
    held_out: int = 64  # held-out answers that a training is judged on
    patience: int = 4
    keep: tuple[int, ...] = ()


BLOCKS = {"rate": 8e-3, "steps": 1600, "batch": 8, "eval_every": 160, "short_blocks": (3, 5)}
"""What differs for DFlash: a step of the optimiser costs as much there as the gradient of four answers."""

FURTHER = {"start": "earlier", "vocabulary": "chosen", "steps": 1500, "cool_down": 0.9}
"""What differs when a trained drafter is trained further; besides, half the rate and no short blocks."""


def recipe(kind: str, *, further: bool = False, **changes: Any) -> TrainConfig:
    """The recipe of one kind of drafter ("eagle" or "dflash"), for a new one or to train one ``further``, with some
    settings changed."""
    base: dict[str, Any] = BLOCKS if kind == "dflash" else {}
    if further:
        base = base | FURTHER | {"rate": base.get("rate", TrainConfig().rate) / 2, "short_blocks": ()}
    return TrainConfig(**base | changes)


def recipe_of(log: dict[str, Any], **changes: Any) -> TrainConfig:
    """The recipe that a training log tells, with some settings changed."""
    told = {"vocabulary": "kept", "counted": "answered", "split": "answer"} | log["recipe"]  # not named in older logs
    base = {f.name: told[f.name] for f in fields(TrainConfig)}
    return TrainConfig(**base | {name: tuple(base[name]) for name in ("keep", "short_blocks")} | changes)


def training_log(kind: str, folder: Path) -> dict[str, Any]:
    """The log that a training of one kind of drafter wrote beside its weights. Raises TrainError when it is not
    there."""
    path = folder / "training.json"
    with readable(path, "give the folder of a drafter that was trained here", TrainError):
        log = json.loads(path.read_text(encoding="utf-8"))
        recipe_of(log)
    if log["kind"] != kind:
        raise TrainError(f"{path}: a training of '{log['kind']}', not of '{kind}'.")
    return log


def rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the full rate at a step: warm-up, plateau, linear fall to 0.

    >>> config = TrainConfig(steps=100, warm_up=0.04, cool_down=0.5)
    >>> [round(rate_factor(step, config), 3) for step in (0, 3, 50, 75, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.02]
    """
    warm, cool = max(1, round(config.warm_up * config.steps)), max(1, round(config.cool_down * config.steps))
    return min(1.0, (step + 1) / warm, (config.steps - step) / cool)


def block_size(step: int, config: TrainConfig) -> int:
    """Block size, anchor included, that DFlash is trained with at a step.

    >>> [block_size(step, TrainConfig(steps=10, short_blocks=(3, 5), short_until=0.4)) for step in (0, 1, 2, 3, 4)]
    [3, 3, 5, 5, 10]
    """
    sizes, share = config.short_blocks, step / (config.short_until * config.steps)
    return sizes[int(share * len(sizes))] if sizes and share < 1 else config.draft_len + 1
