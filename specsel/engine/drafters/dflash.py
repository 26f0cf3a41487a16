"""``dflash``: a block-diffusion drafter (DFlash, arXiv 2602.06036) that fills a whole block in one pass.

The block is [anchor, mask, mask, ...]; slot k predicts the k-th token after the anchor. Target features of the
committed text enter as extra keys and values of every layer ("KV injection") with no query, no residual and no update
of their own. Three paths run the same arithmetic: one block (``propose``), all blocks of a request packed into one pass
(``propose_all``), and training, which is the packed pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsel.engine.drafters.base import Drafter, Drafts, Neural, best_tokens, from_slots
from specsel.engine.drafters.files import CheckpointError, DrafterFiles, described, load_strictly, loaded, read_config
from specsel.engine.drafters.layers import Layer, RMSNorm, shared_scores, shared_values
from specsel.engine.target import Target

_CAUSAL = "'is_causal' / 'sliding_attention' layers are not supported; use a bidirectional DFlash drafter."
_SCALED = "'rope_scaling' and 'attention_bias' are not supported in a DFlash drafter."
REFUSED = {"is_causal": _CAUSAL, "sliding": _CAUSAL, "rope_scaling": _SCALED, "attention_bias": _SCALED}
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
        config |= {"sliding": "sliding_attention" in (config.get("layer_types") or [])}
        layers = config.get("target_layer_ids")
        if layers is None and "num_target_layers" in config:
            layers = default_layer_ids(config["num_target_layers"], config.get("num_hidden_layers") or 1)
        return read_config(cls, config | {"target_layer_ids": tuple(layers or ())}, folder, REFUSED)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hugging Face hidden-state indices: one more than the layer ids of the config."""
        return tuple(i + 1 for i in self.target_layer_ids)


def default_layer_ids(n_target_layers: int, n: int) -> tuple[int, ...]:
    """Layer ids of a config that names none.

    >>> default_layer_ids(32, 5)
    (1, 8, 15, 22, 29)
    """
    if n == 1:
        return (n_target_layers // 2,)
    return tuple(round(1 + i * (n_target_layers - 4) / (n - 1)) for i in range(n))


@dataclass(frozen=True, slots=True)
class Context:
    """Injected keys and values of one request, per layer (S, kv, d), and how many context positions each of A blocks
    sees, (A,)."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    seen: Tensor


class DFlashModel(nn.Module):
    """The drafter's weights, named as in the published checkpoints, and its arithmetic on blocks (A, B)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        norms = ("input_layernorm", "post_attention_layernorm")
        layers = (Layer(config, config.hidden_size, *norms, normed=True) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        if config.learned_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.head_slice:
            self.register_buffer("head_ids", torch.zeros(config.head_slice, dtype=torch.long))

    def inject(self, taps: Tensor, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values (S, kv, d) of every layer for the taps (S, 3H) of committed positions: project first, then
        norm."""
        context = self.hidden_norm(self.fc(taps.to(self.fc.weight)))
        attentions = [layer.self_attn for layer in self.layers]
        table = attentions[0].table(positions)
        return [a.keys(context, table) for a in attentions], [a.values(context) for a in attentions]

    def blocks(self, anchors: Tensor, mask: Tensor) -> Tensor:
        """Block inputs (A, B, H) from anchor embeddings (A, H) and the mask vector (H,)."""
        masks = mask.to(anchors.dtype).expand(len(anchors), self.config.block_size - 1, -1)
        return torch.cat([anchors[:, None], masks], 1)

    def forward(self, z: Tensor, starts: Tensor, contexts: list[tuple[slice, Context]]) -> Tensor:
        """Final states (A, B, H) of blocks z whose anchors stand at rotary positions ``starts`` (A,).

        ``contexts``: for each request its rows among the A blocks and its injected keys and values.
        """
        positions = starts[:, None] + torch.arange(z.shape[1], device=z.device)
        table = self.layers[0].self_attn.table(positions.flatten())
        for index, layer in enumerate(self.layers):
            attention, y = layer.self_attn, layer.input_layernorm(z).flatten(0, 1)
            parts = attention.queries(y, table), attention.keys(y, table), attention.values(y)
            q, k, v = (part.unflatten(0, z.shape[:2]) for part in parts)
            mixed = torch.cat([self._attend(q[rows], k[rows], v[rows], context, index) for rows, context in contexts])
            z = layer.add(z, mixed)
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


class DFlash(Neural):
    """The drafter: scores its states by the rows ``head`` of the target; its keys and values are the injected ones."""

    name = "dflash"

    def __init__(self, model: DFlashModel, embedding: Tensor, head: Tensor) -> None:
        mask = model.config.mask_token_id
        if mask is not None and mask >= len(embedding):
            raise CheckpointError(f"mask_token_id {mask} is outside the embedding table of {len(embedding)} rows.")
        super().__init__(model, embedding)
        self.ids = model.head_ids if model.config.head_slice else torch.arange(len(head), device=head.device)
        self.head = (head[self.ids] if model.config.head_slice else head).to(model.fc.weight.dtype)

    @torch.inference_mode()
    def extend(self, tokens: list[int], taps: Tensor) -> None:
        """Appends the taps (m, 3H) of newly processed tokens; the last committed token, ``tokens[-1]``, becomes the
        anchor."""
        n = len(self.keys[0])
        positions = torch.arange(n, n + len(taps), device=taps.device)
        self.remember(*self.model.inject(self.own(taps), positions))
        self.anchor = tokens[-1]

    @torch.inference_mode()
    def propose(self, draft_len: int) -> Drafts:
        """One block from the current anchor, cut to ``draft_len`` tokens; not asked outside the drafter's window."""
        starts, anchors = torch.tensor([[len(self.keys[0])], [self.anchor]], device=self.embedding.device)
        return self._draft(anchors, starts, self.keys, self.values, draft_len)

    def _draft(
        self, anchors: Tensor, starts: Tensor, keys: list[Tensor], values: list[Tensor], draft_len: int
    ) -> Drafts:
        model, config, found = self.model, self.model.config, []
        mask = model.mask_embedding if config.learned_mask else self.embedding[config.mask_token_id]
        slots = min(draft_len, config.block_size - 1)
        for seen, ids in zip(starts.split(PACK), anchors.split(PACK), strict=True):
            z = model.blocks(F.embedding(ids, self.embedding).to(model.fc.weight.dtype), mask)
            states = model(z, seen, [(slice(0, len(seen)), Context(keys, values, seen))])
            found.append(best_tokens(states[:, 1 : slots + 1].flatten(0, 1), self.head))
        best, *statistics = (torch.cat(part) for part in zip(*found, strict=True))
        drafts = from_slots(*(part.unflatten(0, (-1, slots)) for part in (self.ids[best], *statistics)), draft_len)
        return drafts.without((starts + config.block_size > self.window).cpu().numpy())

    @torch.inference_mode()
    def propose_all(self, tokens: list[int], n_prompt: int, taps: Tensor, draft_len: int) -> Drafts:
        """All blocks of a request in packed passes: anchors ``n_prompt`` ..

        ``len(tokens) - 2``; taps (len(tokens) - 1, 3H).
        """
        ids = torch.tensor(tokens, device=self.embedding.device)
        positions = torch.arange(len(ids) - 1, device=ids.device)
        keys, values = self.model.inject(self.own(taps), positions)
        return self._draft(ids[n_prompt:-1], positions[n_prompt:], keys, values, draft_len)


SETTING = Path("data/drafters/dflash")


def load(target: Target, folder: str | Path, made: dict[str, Drafter]) -> DFlash:
    """See `Drafter`."""
    model = loaded("dflash", load_model, folder, target)
    drafter = DFlash(model, target.model.model.embed_tokens.weight, target.model.lm_head.weight)
    drafter.taps = model.config.taps
    return drafter


def describe(folder: str | Path, tag: str | None) -> dict:
    """See `Drafter`."""
    return described(folder, "block diffusion, one pass", tag)
