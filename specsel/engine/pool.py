"""The pool: the four drafters of a target, from their weight folders. A new drafter is one module and one line here."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specsel.engine.cascade import Cascade, CascadeConfig
from specsel.engine.dflash import DFlash, load_model
from specsel.engine.eagle import Eagle, check_vocabulary, load_head
from specsel.engine.layers import CheckpointError, read_folder
from specsel.engine.ngram import Ngram, NgramConfig
from specsel.engine.target import Target, pinned, tap_indices
from specsel.logs import drafter_sha256, readable

ARMS = ("dflash", "eagle", "ngram", "cascade")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where the neural drafters' weights are (folders) and the settings of the others."""

    eagle: Path = Path("data/drafters/eagle")
    dflash: Path = Path("data/drafters/dflash")
    ngram: NgramConfig = NgramConfig()
    cascade: CascadeConfig = CascadeConfig()


def load_pool(target: Target, config: PoolConfig) -> tuple[Target, dict[str, object]]:
    """The target with the taps that the pool reads, and the drafters by arm name, in the order ARMS, on the target's
    device and in its dtype.

    A drafter's taps are those of its config; a target's features hold the union of them, each drafter takes its own.
    Raises CheckpointError when a checkpoint is unusable or was made for another target shape.
    """
    model = target.model
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    eagle = load_head(read_folder(locate(config.eagle))).to(model.device, model.dtype)
    _check_size("eagle", config.eagle, eagle.config.hidden_size, embedding)
    if warning := check_vocabulary(eagle.d2t, eagle.t2d, target.eos_ids, config.eagle):
        warnings.warn(warning, stacklevel=2)
    dflash = load_model(read_folder(locate(config.dflash))).to(model.device, model.dtype)
    _check_size("dflash", config.dflash, dflash.config.hidden_size, embedding)
    eagle_taps = eagle.config.eagle_aux_hidden_state_layer_ids or tap_indices(model.config.num_hidden_layers)
    taps = tuple(sorted({*eagle_taps, *dflash.config.taps}))
    if taps[-1] >= model.config.num_hidden_layers:
        raise CheckpointError(
            f"a drafter reads hidden state {taps[-1]}, the target has {model.config.num_hidden_layers} layers."
        )
    made = {
        "dflash": DFlash(dflash, embedding, head, _columns(dflash.config.taps, taps, embedding)),
        "eagle": Eagle(eagle, embedding, _columns(eagle_taps, taps, embedding)),
        "ngram": Ngram(config.ngram, target.eos_ids),
    }
    if config.cascade.fallback not in made:
        raise CheckpointError(
            f"cascade: no drafter '{config.cascade.fallback}' to fall back to; choose one of {', '.join(made)}."
        )
    made["cascade"] = Cascade(made["ngram"], made[config.cascade.fallback], config.cascade)
    return replace(target, taps=taps), {arm: made[arm] for arm in ARMS}


def _columns(own: tuple[int, ...], taps: tuple[int, ...], embedding: torch.Tensor) -> torch.Tensor | None:
    """Columns of the union of taps that belong to the taps ``own``, in their order; None when that is all of them."""
    size = embedding.shape[1]
    if tuple(own) == taps:
        return None
    return torch.cat([torch.arange(size, device=embedding.device) + size * taps.index(tap) for tap in own])


def locate(name: str | Path) -> Path:
    """The folder of a drafter: a local one, or a hub repository "owner/name", with "@revision" to pin it, downloaded
    once. Raises CheckpointError when it is neither."""
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = str(name).partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise CheckpointError(f"{name}: no such folder; give a drafter's folder or a hub repository owner/name.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.bin"]
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the library raises a dozen types for "cannot download"
        raise CheckpointError(
            f"{name}: no such folder, and the hub repository cannot be downloaded ({error})."
        ) from error
    pinned(repository, revision, folder.name)  # the folder of a snapshot is named after its commit
    return folder


def _check_size(arm: str, folder: Path, size: int, embedding: torch.Tensor) -> None:
    if size != embedding.shape[1]:
        raise CheckpointError(
            f"{folder}: this {arm} drafter has hidden size {size}, the target has {embedding.shape[1]}."
        )


def _id(name: Path) -> str:
    return name.name if name.is_dir() else str(name)


def checkpoint_of(folder: Path, tag: str | None = None) -> dict:
    """Training step, those of earlier trainings included, and name of a drafter's weights, None where unknown: from
    ``checkpoint.json`` ({"step", "name"}) where there is one, else from the training log beside them, else from a
    folder name of training (``random``, ``step_400``); ``tag`` replaces the name."""
    step, name = None, None
    path = next((path for file in ("checkpoint", "training") if (path := folder / f"{file}.json").is_file()), None)
    if path:
        with readable(path, "restore it or remove it", CheckpointError):
            found = json.loads(path.read_text(encoding="utf-8"))
            trained = path.name == "training.json"
            step, name = (_steps(found), "best") if trained else (found.get("step"), found.get("name"))
    elif match := re.fullmatch(r"random|step_(\d+)", folder.name):
        step, name = int(match[1] or 0), folder.name
    return {"step": step, "checkpoint": tag or name}


def _steps(log: dict) -> int | None:
    if log.get("best_step") is None:
        return None
    return log["best_step"] + (_steps(log.get("earlier", {})) or 0)


def describe(config: PoolConfig, tag: str | None = None) -> dict[str, dict]:
    """What the manifest says of every drafter: kind, settings, hash of the weights, and of the trained ones their step
    and the name of the checkpoint (``tag``, if given)."""

    def trained(folder: Path, kind: str) -> dict:
        where = locate(folder)
        return {"id": _id(folder), "kind": kind, "sha256": drafter_sha256(where)} | checkpoint_of(where, tag)

    return {
        "dflash": trained(config.dflash, "block diffusion, one pass"),
        "eagle": trained(config.eagle, "EAGLE-3 head, greedy chain"),
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
