"""The engine: target, drafters, harness.

Needs the extra ``engine`` (torch, transformers); names resolve on first use.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "CollectConfig": "harness",
    "Decoder": "decode",
    "Features": "target",
    "PoolConfig": "pool",
    "TimingConfig": "timing",
    "TrainConfig": "recipes",
    "best_device": "target",
    "build": "data",
    "check_engine": "equality",
    "check_loaded": "equality",
    "collect": "harness",
    "describe": "pool",
    "fetch": "target",
    "flush_tiny_numbers": "train",
    "load_pool": "pool",
    "load_target": "target",
    "measure": "timing",
    "race": "races",
    "recipe": "recipes",
    "repeat_training": "train",
    "train_drafter": "train",
    "training_log": "recipes",
    "write_overlap": "contamination",
    "write_timings": "timing",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"specsel.engine has no '{name}'")
    try:
        return getattr(importlib.import_module(f"specsel.engine.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers", "safetensors", "platformdirs", "psutil"):
            from specsel.logs import SpecselError

            raise SpecselError(
                f"'{error.name}' is not installed; the engine needs the extra 'engine': pip install 'specsel[engine]'."
            ) from error
        raise
