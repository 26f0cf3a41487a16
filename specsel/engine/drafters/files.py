"""Drafters on disk: a folder or a hub repository with configuration and weights, and what a manifest says of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specsel.engine.target import Target, pinned
from specsel.logs import SpecselError, drafter_sha256, readable

Config = TypeVar("Config")


class CheckpointError(SpecselError):
    """A drafter checkpoint cannot be used: its files, its configuration or one of its tensors."""


@dataclass(frozen=True, slots=True)
class DrafterFiles:
    """A drafter's folder: its configuration and its tensors, in the dtype of the file."""

    folder: Path
    config: dict
    tensors: dict[str, Tensor]


def read_folder(folder: str | Path) -> DrafterFiles:
    """Reads ``config.json`` and the weights (safetensors, or a ``pytorch_model.bin`` read with weights_only) of a
    drafter folder.

    Raises CheckpointError when a file is missing or damaged.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json; give the folder of a drafter checkpoint.")
    with readable(folder / "config.json", "download or train the drafter again", CheckpointError):
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    load_pickle = functools.partial(torch.load, map_location="cpu", weights_only=True)
    for name, load in (("model.safetensors", load_file), ("pytorch_model.bin", load_pickle)):
        if (folder / name).is_file():
            with readable(folder / name, "download or train the drafter again", CheckpointError, (Exception,)):
                return DrafterFiles(folder, config, load(folder / name))
    raise CheckpointError(f"{folder}: neither model.safetensors nor pytorch_model.bin; download the checkpoint first.")


def load_strictly(
    module: nn.Module, tensors: dict[str, Tensor], folder: Path, *, ignored: tuple[str, ...] = ()
) -> None:
    """Loads tensors into a module by name; a missing, unexpected or wrongly shaped one is a CheckpointError that names
    it."""
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith(ignored)}
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if missing := sorted(wanted.keys() - given.keys()):
        raise CheckpointError(f"{folder}: tensor '{missing[0]}' is missing ({len(missing)} in all).")
    if extra := sorted(given.keys() - wanted.keys()):
        raise CheckpointError(
            f"{folder}: tensor '{extra[0]}' is unknown ({len(extra)} in all); is this another kind of drafter?"
        )
    for name, tensor in given.items():
        if tensor.shape != wanted[name]:
            shapes = f"has shape {tuple(tensor.shape)}, the config asks for {tuple(wanted[name])}"
            raise CheckpointError(f"{folder}: tensor '{name}' {shapes}.")
    module.load_state_dict(given)


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


def read_config(kind: type[Config], config: dict, folder: object, refused: dict[str, str]) -> Config:
    """A drafter's configuration record from the content of a published config.json; the size of a head may be missing
    there. Raises CheckpointError when another field is, and with the sentence of a ``refused`` field that is set."""
    for told in (sentence for name, sentence in refused.items() if config.get(name)):
        raise CheckpointError(f"{folder}: {told}")
    known = {f.name: config[f.name] for f in fields(kind) if config.get(f.name) is not None}
    derived = known.get("hidden_size", 0) // max(known.get("num_attention_heads", 1), 1)
    try:
        return kind(**known | {"head_dim": known.get("head_dim") or derived})
    except TypeError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def loaded(arm: str, build: Callable[[DrafterFiles], Any], name: str | Path, target: Target) -> Any:
    """What ``build`` makes of a drafter's files (see `locate`), on the target's device and in its dtype.
    Raises CheckpointError where the drafter was made for another width of the target."""
    made = build(read_folder(locate(name)))
    size, width = made.config.hidden_size, target.model.config.hidden_size
    if size != width:
        raise CheckpointError(f"{name}: this {arm} drafter has hidden size {size}, the target has {width}.")
    return made.to(target.model.device, target.model.dtype)


def described(name: str | Path, kind: str, tag: str | None) -> dict:
    """What a manifest says of a trained drafter: where it is from, kind, hash of the weights, step and checkpoint."""
    where = locate(name)
    known = where.name if Path(name).is_dir() else str(name)
    return {"id": known, "kind": kind, "sha256": drafter_sha256(where)} | checkpoint_of(where, tag)


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
