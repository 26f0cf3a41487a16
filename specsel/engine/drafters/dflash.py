"""``dflash``: a block-diffusion drafter (DFlash, arXiv 2602.06036) that fills a whole block in one pass.

The block is [anchor, mask, mask, ...]; slot k predicts the k-th token after the anchor. Target features of the
committed text enter as extra keys and values of every layer ("KV injection") with no query, no residual and no update
of their own. Three paths run the same arithmetic: one block (``propose``), all blocks of a request packed into one pass
(``propose_all``), and training, which is the packed pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsel.engine.drafters.base import Drafter, Drafts, best_tokens, from_slots
from specsel.engine.drafters.files import (
    CheckpointError,
    DrafterFiles,
    check_size,
    described,
    load_strictly,
    locate,
    read_folder,
)
from specsel.engine.drafters.layers import (
    MLP,
    RMSNorm,
    own_taps,
    rotary,
    rotate,
    shared_scores,
    shared_values,
)
from specsel.engine.target import Target

PACK = 64
"""Blocks that share one packed pass when all anchors of a request are drafted."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shapes of a drafter; names as in the published config.json, ``block_size`` and ``mask_token_id`` at the top or in
    ``dflash_config``.

    ``block_size`` counts the anchor. ``learned_mask`` (our own heads): the mask is a vector stored beside the weights,
    not a token. ``head_slice``: number of target ids that the drafter scores; 0 = all.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    mask_token_id: int | None = None
    learned_mask: bool = False
    head_slice: int = 0

    @classmethod
    def from_dict(cls, config: dict, folder: object = "config.json") -> DFlashConfig:
        """Reads a published config with either placement of ``block_size``; refuses variants that are not implemented,
        by name."""
        config = config | config.get("dflash_config", {}) | config.get("rope_parameters", {})
        if config.get("is_causal") or "sliding_attention" in (config.get("layer_types") or []):
            raise CheckpointError(
                f"{folder}: 'is_causal' / 'sliding_attention' layers are not supported; "
                "use a bidirectional DFlash drafter."
            )
        if config.get("rope_scaling") or config.get("attention_bias"):
            raise CheckpointError(
                f"{folder}: 'rope_scaling' and 'attention_bias' are not supported in a DFlash drafter."
            )
        known = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        if "target_layer_ids" not in known and "num_target_layers" in config:
            known["target_layer_ids"] = default_layer_ids(
                config["num_target_layers"], known.get("num_hidden_layers", 1)
            )
        known["target_layer_ids"] = tuple(known.get("target_layer_ids", ()))
        known.setdefault("head_dim", known.get("hidden_size", 0) // max(known.get("num_attention_heads", 1), 1))
        try:
            return cls(**known)
        except TypeError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @property
    def taps(self) -> tuple[int, ...]:
        """Hugging Face hidden-state indices: one more than the layer ids of the config."""
        return tuple(i + 1 for i in self.target_layer_ids)


def default_layer_ids(n_target_layers: int, n: int) -> tuple[int, ...]:
    """Layer ids of a config that names none.

    >>> default_layer_ids(32, 5)
    (1, 8, 15, 22, 29)
    """
    return (
        (n_target_layers // 2,) if n == 1 else tuple(round(1 + i * (n_target_layers - 4) / (n - 1)) for i in range(n))
    )


class _Attention(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj, self.k_proj = nn.Linear(c.hidden_size, q, bias=False), nn.Linear(c.hidden_size, kv, bias=False)
        self.v_proj, self.o_proj = nn.Linear(c.hidden_size, kv, bias=False), nn.Linear(q, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(c), MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class Context:
    """Injected keys and values of one request, per layer (S, kv, d), and how many context positions each of A blocks
    sees, (A,)."""

    keys: list[Tensor]
    values: list[Tensor]
    seen: Tensor


class DFlashModel(nn.Module):
    """The drafter's weights, named as in the published checkpoints, and its arithmetic on blocks (A, B)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        if config.learned_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.head_slice:
            self.register_buffer("head_ids", torch.zeros(config.head_slice, dtype=torch.long))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.config.head_dim, self.config.rope_theta)

    def inject(self, taps: Tensor, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values (S, kv, d) of every layer for the taps (S, 3H) of committed positions: project first, then
        norm."""
        context, table = self.hidden_norm(self.fc(taps)), self._table(positions)
        attentions = [layer.self_attn for layer in self.layers]
        keys = [rotate(a.k_norm(self._heads(a.k_proj(context))), table) for a in attentions]
        return keys, [self._heads(a.v_proj(context)) for a in attentions]

    def blocks(self, anchors: Tensor, mask: Tensor) -> Tensor:
        """Block inputs (A, B, H) from anchor embeddings (A, H) and the mask vector (H,)."""
        return torch.cat(
            [anchors[:, None], mask.to(anchors.dtype).expand(len(anchors), self.config.block_size - 1, -1)], 1
        )

    def forward(self, z: Tensor, starts: Tensor, contexts: list[tuple[slice, Context]]) -> Tensor:
        """Final states (A, B, H) of blocks z whose anchors stand at rotary positions ``starts`` (A,).

        ``contexts``: for each request its rows among the A blocks and its injected keys and values.
        """
        size = z.shape[1]
        table = self._table((starts[:, None] + torch.arange(size, device=z.device)).flatten())
        for index, layer in enumerate(self.layers):
            attention, y = layer.self_attn, layer.input_layernorm(z).flatten(0, 1)
            q = rotate(attention.q_norm(self._heads(attention.q_proj(y))), table).unflatten(0, z.shape[:2])
            k = rotate(attention.k_norm(self._heads(attention.k_proj(y))), table).unflatten(0, z.shape[:2])
            v = self._heads(attention.v_proj(y)).unflatten(0, z.shape[:2])
            mixed = torch.cat([self._attend(q[rows], k[rows], v[rows], context, index) for rows, context in contexts])
            z = z + attention.o_proj(mixed)
            z = z + layer.mlp(layer.post_attention_layernorm(z))
        return self.norm(z)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, index: int) -> Tensor:
        """Every block row sees its context positions and the whole of its own block; no causal mask."""
        blocks, size, kv = *q.shape[:2], k.shape[2]
        keys, values = context.keys[index], context.values[index]
        visible = torch.arange(len(keys), device=q.device)[None] < context.seen.repeat_interleave(size)[:, None]
        outer = shared_scores(q.flatten(0, 1), keys, visible)  # kv, groups, A*B, S
        grouped = q.unflatten(2, (kv, -1)).permute(0, 2, 3, 1, 4)  # A, kv, groups, B, d
        inner = (grouped @ k.permute(0, 2, 3, 1)[:, :, None]).float() / q.shape[-1] ** 0.5  # A, kv, groups, B, B
        inner = inner.permute(1, 2, 0, 3, 4).flatten(2, 3)
        weights = torch.cat([outer, inner], -1).softmax(-1)
        mixed = shared_values(weights[..., : len(keys)], values).unflatten(0, (blocks, size))
        own = weights[..., len(keys) :].unflatten(2, (blocks, size)).permute(2, 0, 1, 3, 4).to(v.dtype)
        own = own @ v.permute(0, 2, 1, 3)[:, :, None]  # A, kv, groups, B, d
        return mixed + own.permute(0, 3, 1, 2, 4).flatten(2)


def load_model(files: DrafterFiles) -> DFlashModel:
    """Builds the drafter of a checkpoint folder, strictly."""
    config = DFlashConfig.from_dict(files.config, files.folder)
    if not config.learned_mask and config.mask_token_id is None:
        raise CheckpointError(f"{files.folder}: config names no 'mask_token_id'.")
    model = DFlashModel(config)
    load_strictly(model, files.tensors, files.folder, ignored=("inv_freq",))
    return model


class DFlash(Drafter):
    """The drafter: its model, the target's embedding and head, and the injected keys and values of one request."""

    name = "dflash"
    needs_taps = True

    def __init__(self, model: DFlashModel, embedding: Tensor, head: Tensor, columns: Tensor | None = None) -> None:
        """``columns``: which columns of the target's taps are the drafter's (None: all)."""
        self.model, self.embedding, self.columns = model.eval(), embedding, columns
        self.dtype = model.fc.weight.dtype
        if model.config.mask_token_id is not None and model.config.mask_token_id >= len(embedding):
            raise CheckpointError(
                f"mask_token_id {model.config.mask_token_id} is outside the embedding table of {len(embedding)} rows."
            )
        self.ids = model.head_ids if model.config.head_slice else torch.arange(len(head), device=head.device)
        self.head = (head[self.ids] if model.config.head_slice else head).to(self.dtype)
        self.reset()

    @property
    def window(self) -> int:
        """Largest number of positions of the drafter."""
        return self.model.config.max_position_embeddings

    def reset(self) -> None:
        """Forgets the request."""
        config, device = self.model.config, self.model.fc.weight.device
        none = torch.zeros(0, config.num_key_value_heads, config.head_dim, dtype=self.dtype, device=device)
        self.keys, self.values, self.anchor = [none] * config.num_hidden_layers, [none] * config.num_hidden_layers, None

    @property
    def mask(self) -> Tensor:
        """The mask vector (H,)."""
        model = self.model
        return model.mask_embedding if model.config.learned_mask else self.embedding[model.config.mask_token_id]

    @torch.inference_mode()
    def extend(self, tokens: list[int], taps: Tensor) -> None:
        """Appends the taps (m, 3H) of newly processed tokens; the last committed token, ``tokens[-1]``, becomes the
        anchor."""
        n = len(self.keys[0])
        positions = torch.arange(n, n + len(taps), device=taps.device)
        keys, values = self.model.inject(own_taps(taps, self.columns).to(self.dtype), positions)
        self.keys = [torch.cat(pair) for pair in zip(self.keys, keys, strict=True)]
        self.values = [torch.cat(pair) for pair in zip(self.values, values, strict=True)]
        self.anchor = tokens[-1]

    @torch.inference_mode()
    def propose(self, draft_len: int) -> Drafts:
        """One block from the current anchor, cut to ``draft_len`` tokens; not asked outside the drafter's window."""
        n = torch.tensor([len(self.keys[0])], device=self.embedding.device)
        return self._draft(
            torch.tensor([self.anchor], device=n.device), n, Context(self.keys, self.values, n), draft_len
        )

    def _draft(self, anchors: Tensor, starts: Tensor, context: Context, draft_len: int) -> Drafts:
        z = self.model.blocks(F.embedding(anchors, self.embedding).to(self.dtype), self.mask)
        states = self.model(z, starts, [(slice(0, len(anchors)), context)])
        slots = min(draft_len, self.model.config.block_size - 1)
        best, *statistics = best_tokens(states[:, 1 : slots + 1].flatten(0, 1), self.head)
        drafts = from_slots(*(part.unflatten(0, (-1, slots)) for part in (self.ids[best], *statistics)), draft_len)
        return drafts.without((starts + self.model.config.block_size > self.window).cpu().numpy())

    @torch.inference_mode()
    def propose_all(self, tokens: list[int], n_prompt: int, taps: Tensor, draft_len: int) -> Drafts:
        """All blocks of a request in packed passes: anchors ``n_prompt`` ..

        ``len(tokens) - 2``; taps (len(tokens) - 1, 3H).
        """
        ids = torch.tensor(tokens, device=self.embedding.device)
        own = own_taps(taps, self.columns).to(ids.device, self.dtype)
        keys, values = self.model.inject(own, torch.arange(len(own), device=ids.device))
        starts = torch.arange(n_prompt, len(ids) - 1, device=ids.device)
        parts = [self._draft(ids[s], s, Context(keys, values, s), draft_len) for s in starts.split(PACK)]
        return concatenate(parts)


def concatenate(parts: list[Drafts]) -> Drafts:
    """Drafts of consecutive anchors as one record."""
    return Drafts(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "proposed", "confidence", "entropy"))
    )


SETTING = Path("data/drafters/dflash")


def load(target: Target, folder: str | Path, made: dict[str, Drafter]) -> DFlash:
    """See `Drafter`."""
    model = target.model
    drafter_model = load_model(read_folder(locate(folder))).to(model.device, model.dtype)
    check_size("dflash", folder, drafter_model.config.hidden_size, target)
    drafter = DFlash(drafter_model, model.model.embed_tokens.weight, model.lm_head.weight)
    drafter.taps = tuple(drafter_model.config.taps)
    return drafter


def describe(folder: str | Path, tag: str | None) -> dict:
    """See `Drafter`."""
    return described(folder, "block diffusion, one pass", tag)
