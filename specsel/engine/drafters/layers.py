"""Pieces that both neural drafters share: norms, rotary positions, SwiGLU, grouped attention over segments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm computed in fp32, whatever the input precision."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of one attention over inputs of ``wide`` columns, heads of the shapes of a drafter's config ``c``;
    ``normed``: queries and keys each go through a norm."""

    def __init__(self, c: Any, wide: int, normed: bool) -> None:
        super().__init__()
        self.head_dim, self.theta = c.head_dim, c.rope_theta
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj, self.k_proj = nn.Linear(wide, q, bias=False), nn.Linear(wide, kv, bias=False)
        self.v_proj, self.o_proj = nn.Linear(wide, kv, bias=False), nn.Linear(q, c.hidden_size, bias=False)
        norms = (RMSNorm(c.head_dim, c.rms_norm_eps) if normed else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables of positions (n,)."""
        return rotary(positions, self.head_dim, self.theta)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries (n, heads, d) of inputs (n, wide)."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), table)

    def keys(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated keys (n, kv, d) of inputs (n, wide)."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), table)

    def values(self, x: Tensor) -> Tensor:
        """Values (n, kv, d) of inputs (n, wide)."""
        return self._heads(self.v_proj(x))


class Layer(nn.Module):
    """Weights of a decoder layer, named as in the published checkpoints: attention, MLP, and ``norms`` by name."""

    def __init__(self, c: Any, wide: int, *norms: str, normed: bool = False) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c, wide, normed), MLP(c.hidden_size, c.intermediate_size)
        for name in norms:
            setattr(self, name, RMSNorm(c.hidden_size, c.rms_norm_eps))

    def add(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The states (..., H) with what was attended to, ``mixed`` (..., heads * d), and with the MLP's part."""
        state = state + self.self_attn.o_proj(mixed)
        return state + self.mlp(self.post_attention_layernorm(state))


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
