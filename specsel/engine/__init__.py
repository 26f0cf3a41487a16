"""The engine: target, drafters, harness.

Needs the extra ``engine`` (torch, transformers); names resolve on first use.
"""

from __future__ import annotations

import importlib

_MODULES = {
    "contamination": ("write_overlap",),
    "data": ("build",),
    "decode": ("Decoder",),
    "harness": ("CollectConfig", "collect"),
    "live": ("check_engine", "check_loaded", "race"),
    "pool": ("describe", "load_pool"),
    "recipes": ("TrainConfig", "recipe", "training_log"),
    "target": ("Features", "best_device", "fetch", "load_target"),
    "timing": ("TimingConfig", "measure", "write_timings"),
    "train": ("flush_tiny_numbers", "repeat_training", "train_drafter"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
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
