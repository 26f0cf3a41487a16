"""The pool: the four drafters of a target, from their weight folders. A new drafter is one module and one line here."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from specsel.engine.cascade import Cascade, CascadeConfig
from specsel.engine.dflash import DFlash, load_model
from specsel.engine.eagle import Eagle, check_vocabulary, load_head
from specsel.engine.layers import CheckpointError, read_folder
from specsel.engine.ngram import Ngram, NgramConfig
from specsel.engine.target import Target, sha256_of

ARMS = ("dflash", "eagle", "ngram", "cascade")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where the neural drafters' weights are (folders) and the settings of the others."""

    eagle: Path = Path("data/drafters/eagle")
    dflash: Path = Path("data/drafters/dflash")
    ngram: NgramConfig = NgramConfig()
    cascade: CascadeConfig = CascadeConfig()


def load_pool(target: Target, config: PoolConfig) -> dict[str, object]:
    """The drafters by arm name, in the order ARMS, on the target's device and in the target's dtype.

    Raises CheckpointError when a checkpoint is unusable or was made for another target shape.
    """
    model = target.model
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    eagle = load_head(read_folder(config.eagle)).to(model.device, model.dtype)
    _check_size("eagle", config.eagle, eagle.config.hidden_size, embedding)
    if warning := check_vocabulary(eagle.d2t, eagle.t2d, target.eos_ids, config.eagle):
        warnings.warn(warning, stacklevel=2)
    dflash = load_model(read_folder(config.dflash)).to(model.device, model.dtype)
    _check_size("dflash", config.dflash, dflash.config.hidden_size, embedding)
    made = {
        "dflash": DFlash(dflash, embedding, head),
        "eagle": Eagle(eagle, embedding),
        "ngram": Ngram(config.ngram, target.eos_ids),
    }
    if config.cascade.fallback not in made:
        raise CheckpointError(
            f"cascade: no drafter '{config.cascade.fallback}' to fall back to; choose one of {', '.join(made)}."
        )
    made["cascade"] = Cascade(made["ngram"], made[config.cascade.fallback], config.cascade)
    return {arm: made[arm] for arm in ARMS}


def _check_size(arm: str, folder: Path, size: int, embedding: torch.Tensor) -> None:
    if size != embedding.shape[1]:
        raise CheckpointError(
            f"{folder}: this {arm} drafter has hidden size {size}, the target has {embedding.shape[1]}."
        )


def describe(config: PoolConfig) -> dict[str, dict]:
    """What the manifest says of every drafter: kind, settings, hash of the weights."""

    def weights(folder: Path) -> str:
        files = sorted(
            p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".json") and p.name != "training.json"
        )
        return hashlib.sha256("".join(sha256_of(p) for p in files).encode()).hexdigest()

    return {
        "dflash": {"id": config.dflash.name, "kind": "block diffusion, one pass", "sha256": weights(config.dflash)},
        "eagle": {"id": config.eagle.name, "kind": "EAGLE-3 head, greedy chain", "sha256": weights(config.eagle)},
        "ngram": {
            "kind": "longest suffix, most recent occurrence",
            "n_min": config.ngram.n_min,
            "n_max": config.ngram.n_max,
        },
        "cascade": {
            "kind": "ngram when its match is long enough, else the fallback",
            "n_switch": config.cascade.n_switch,
            "fallback": config.cascade.fallback,
        },
    }
