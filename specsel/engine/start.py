"""The start of a drafter's training: the map to its draft vocabulary, and its initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specsel.engine.drafters.dflash import DFlashConfig, DFlashModel, load_model
from specsel.engine.drafters.eagle import EagleConfig, EagleHead, load_head
from specsel.engine.drafters.files import read_folder
from specsel.engine.recipes import TrainConfig, training_log
from specsel.engine.target import Target
from specsel.logs import drafter_sha256


def inverse_vocabulary(ids: Tensor, vocab: int) -> Tensor:
    """Draft id of every target id, -1 outside the draft vocabulary, (V,)."""
    inverse = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
    inverse[ids] = torch.arange(len(ids), device=ids.device)
    return inverse


def shapes(target: Target) -> dict[str, Any]:
    """Shapes of a drafter whose layers are those of its target."""
    c = target.model.config
    same = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    return {name: getattr(c, name) for name in same.split()} | {"rope_theta": c.rope_parameters["rope_theta"]}


def new_eagle(target: Target, ids: Tensor, config: TrainConfig) -> EagleHead:
    """A head whose draft vocabulary is scored by the target's embedding rows; with ``start`` "target" its layer is the
    target's last one, in the feature half, and fc the identity on the top tap."""
    vocab, h = len(target.model.model.embed_tokens.weight), target.model.config.hidden_size
    head = EagleHead(EagleConfig(**shapes(target), vocab_size=vocab, draft_vocab_size=len(ids)))
    head.set_vocabulary(ids)
    last = target.model.model.layers[-1]
    with torch.no_grad():
        head.lm_head.weight.copy_(target.model.lm_head.weight[ids])
        if config.start == "random":
            return head
        head.fc.weight.normal_(std=0.002)[:, 2 * h :] += torch.eye(h)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head.midlayer.self_attn, name).weight
            weight.normal_(std=0.01)[:, h:] = getattr(last.self_attn, name).weight
        head.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
        head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.model.model.norm.weight)
    return head


def new_dflash(target: Target, ids: Tensor, config: TrainConfig) -> DFlashModel:
    """A drafter with a learned mask vector; with ``start`` "target" its layers are the target's last ones and fc the
    identity on the top tap."""
    drafts = {"num_hidden_layers": config.layers, "block_size": config.draft_len + 1, "head_slice": len(ids)}
    reads = {"target_layer_ids": tuple(i - 1 for i in target.taps), "max_position_embeddings": target.window}
    model = DFlashModel(DFlashConfig(**shapes(target), **drafts, **reads, learned_mask=True))
    h = target.model.config.hidden_size
    with torch.no_grad():
        model.head_ids.copy_(ids)
        model.mask_embedding.copy_(target.model.model.embed_tokens.weight.mean(0))
        if config.start == "random":
            return model
        model.fc.weight.normal_(std=0.002)[:, 2 * h :] += torch.eye(h)
        model.hidden_norm.weight.copy_(target.model.model.layers[target.taps[2]].input_layernorm.weight)
        model.norm.weight.copy_(target.model.model.norm.weight)
        for layer, source in zip(model.layers, target.model.model.layers[-config.layers :], strict=True):
            state = source.state_dict()
            layer.load_state_dict({name: state.get(name, value) for name, value in layer.state_dict().items()})
    return model


def earlier_drafter(kind: str, folder: Path) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """A trained drafter to be trained further, the target ids of its draft vocabulary, and its training log with the
    hash of its weights. Raises TrainError when the folder tells no training of that kind."""
    log = training_log(kind, folder) | {"sha256": drafter_sha256(folder)}
    model = (load_head if kind == "eagle" else load_model)(read_folder(folder))
    return model, model.target_ids if kind == "eagle" else model.head_ids.clone(), log


def exchange_vocabulary(model: nn.Module, ids: Tensor, embedding: Tensor) -> nn.Module:
    """The drafter with the draft vocabulary ``ids`` (sorted target ids) instead of its own.

    DFlash is scored by the target's own rows and needs nothing else. An EAGLE-3 head keeps the rows of the ids that it
    knows; that of a new one is the target's embedding row under the linear map that takes embedding rows to the known
    rows best (least squares).
    """
    state = model.state_dict()
    if isinstance(model, DFlashModel):
        made: nn.Module = DFlashModel(replace(model.config, head_slice=len(ids)))
        made.load_state_dict(state | {"head_ids": ids})
        return made
    known, rows = model.target_ids, state["lm_head.weight"]
    table = embedding.detach().to(rows)
    place = inverse_vocabulary(known, len(table))[ids][:, None]
    fitted = table[ids] @ torch.linalg.lstsq(table[known], rows).solution
    made = EagleHead(replace(model.config, draft_vocab_size=len(ids)))
    made.set_vocabulary(ids)
    own = {"lm_head.weight": torch.where(place < 0, fitted, rows[place[:, 0]])}
    made.load_state_dict(state | own | {name: getattr(made, name) for name in ("d2t", "t2d")})
    return made


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Gives a drafter the weights of an untrained one, in place: matrices normal with deviation 0.02, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            weight = torch.ones(parameter.shape)
            parameter.copy_(weight.normal_(std=0.02, generator=generator) if weight.ndim > 1 else weight)
    return model
