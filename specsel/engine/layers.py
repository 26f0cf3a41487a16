"""Pieces that both neural drafters share: norms, rotary positions, SwiGLU, grouped attention over segments, weight
files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from specsel.logs import SpecselError, readable


class CheckpointError(SpecselError):
    """A drafter checkpoint cannot be used: its files, its configuration or one of its tensors."""


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in fp32, whatever the input precision."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cos and sin tables (n, 1, dim) in fp32 of plain rotary embedding with base ``theta``."""
    inverse = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.float()[:, None] * inverse
    return torch.cat([angle, angle], -1).cos()[:, None], torch.cat([angle, angle], -1).sin()[:, None]


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary tables to x (n, heads, dim)."""
    half = x.shape[-1] // 2
    return (x * table[0] + torch.cat([-x[..., half:], x[..., :half]], -1) * table[1]).to(x.dtype)


def shared_scores(q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Scaled scores (kv, groups, A, S) in fp32 of queries (A, heads, d) against keys (S, kv, d); hidden where
    ``visible`` (A, S) is False."""
    kv = keys.shape[1]
    grouped = q.unflatten(1, (kv, -1)).permute(1, 2, 0, 3)  # kv, groups, A, d
    scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)).unflatten(1, grouped.shape[1:3])
    return (scores.float() / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))


def shared_values(weights: Tensor, values: Tensor) -> Tensor:
    """Weighted values (A, heads * d) for weights (kv, groups, A, S) and values (S, kv, d)."""
    mixed = weights.flatten(1, 2).to(values.dtype) @ values.transpose(0, 1)
    return mixed.unflatten(1, weights.shape[1:3]).permute(2, 0, 1, 3).flatten(1)


def own_taps(taps: Tensor, columns: Tensor | None) -> Tensor:
    """A drafter's columns of the target's taps (m, n H); None: all of them."""
    return taps if columns is None else taps[:, columns.to(taps.device)]


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
    for name, load in (("model.safetensors", load_file), ("pytorch_model.bin", _load_pickle)):
        if (folder / name).is_file():
            with readable(folder / name, "download or train the drafter again", CheckpointError, (Exception,)):
                return DrafterFiles(folder, config, load(folder / name))
    raise CheckpointError(f"{folder}: neither model.safetensors nor pytorch_model.bin; download the checkpoint first.")


def _load_pickle(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


def load_strictly(
    module: nn.Module, tensors: dict[str, Tensor], folder: Path, *, ignored: tuple[str, ...] = ()
) -> None:
    """Copies tensors into a module by name; a missing, unexpected or wrongly shaped one is a CheckpointError that names
    it."""
    wanted = dict(module.state_dict())
    given = (
        {name: tensor for name, tensor in tensors.items() if not name.endswith(ignored)} if ignored else dict(tensors)
    )
    if missing := sorted(wanted.keys() - given.keys()):
        raise CheckpointError(f"{folder}: tensor '{missing[0]}' is missing ({len(missing)} in all).")
    if extra := sorted(given.keys() - wanted.keys()):
        raise CheckpointError(
            f"{folder}: tensor '{extra[0]}' is unknown ({len(extra)} in all); is this another kind of drafter?"
        )
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{folder}: tensor '{name}' has shape {tuple(tensor.shape)}, "
                f"the config asks for {tuple(wanted[name].shape)}."
            )
    module.load_state_dict(given)
