"""The pool of a target: its drafters by name. A new drafter is one module in `specsel.engine.drafters` (see `Drafter`
there for what it holds) and one line of the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from specsel.engine.drafters.base import Drafter
from specsel.engine.drafters.files import CheckpointError
from specsel.engine.target import Target

ARMS = (  # the registry, in the order of a log's arms: modules of specsel.engine.drafters
    "dflash",
    "eagle",
    "ngram",
    "cascade",  # builds on others, so it stands behind them
)
DRAFTERS = {name: import_module(f"specsel.engine.drafters.{name}") for name in ARMS}


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What every drafter is made from: as given, else its default. Raises CheckpointError for an unknown drafter."""
    if unknown := given.keys() - DRAFTERS.keys():
        raise CheckpointError(f"there is no drafter '{min(unknown)}'; expected one of {', '.join(DRAFTERS)}.")
    return {name: given.get(name, module.SETTING) for name, module in DRAFTERS.items()}


def load_pool(target: Target, given: Mapping[str, Any] | None = None) -> tuple[Target, dict[str, Drafter]]:
    """The target with the taps that the pool reads, and its drafters, on the target's device and in its dtype.

    ``given``: weights or settings of drafters by name. A target's features hold the union of all taps, each drafter
    takes its own. Raises CheckpointError when a checkpoint is unusable or was made for another target shape.
    """
    made: dict[str, Drafter] = {}
    for name, setting in settings_of(given or {}).items():
        made[name] = DRAFTERS[name].load(target, setting, made)
    layers, width = target.model.config.num_hidden_layers, target.model.config.hidden_size
    taps = tuple(sorted({tap for drafter in made.values() for tap in drafter.taps}))
    if taps and taps[-1] >= layers:
        raise CheckpointError(f"a drafter reads hidden state {taps[-1]}, the target has {layers} layers.")
    places = torch.arange(len(taps) * width, device=target.model.device).view(len(taps), width)
    for drafter in made.values():
        if drafter.taps and tuple(drafter.taps) != taps:
            drafter.columns = places[[taps.index(tap) for tap in drafter.taps]].flatten()
    return replace(target, taps=taps or target.taps), made


def describe(given: Mapping[str, Any] | None = None, tag: str | None = None) -> dict[str, dict]:
    """What the manifest says of every drafter: kind, settings, hash of the weights, and of the trained ones their step
    and the name of the checkpoint (``tag``, if given)."""
    return {name: DRAFTERS[name].describe(setting, tag) for name, setting in settings_of(given or {}).items()}
