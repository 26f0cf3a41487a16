"""Parity with the authors' code: imported from checkouts named by SPECSEL_REFERENCE (a folder with ``EAGLE`` and
``dflash``), never vendored.

Run against SafeAILab/EAGLE at cb7e0841 and z-lab/dflash at 44947fbf; skipped where the folder is not given.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import randomise

from specsel.engine.drafters.dflash import Context, DFlashConfig, DFlashModel
from specsel.engine.drafters.eagle import Eagle, EagleConfig, EagleHead, Segment

REFERENCE = os.environ.get("SPECSEL_REFERENCE")
pytestmark = pytest.mark.skipif(not REFERENCE, reason="SPECSEL_REFERENCE names no folder with the authors' code")

H, INNER, HEADS, KV, V, VD = 64, 128, 4, 2, 97, 41


def authors(repository: str, module: str):
    sys.path.insert(0, str(Path(REFERENCE) / repository))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def eagle_pair():
    """The authors' head and ours with the same random weights, norms included, and a random draft vocabulary."""
    config = SimpleNamespace(
        hidden_size=H,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        intermediate_size=INNER,
        vocab_size=V,
        draft_vocab_size=VD,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope_scaling=None,
        max_position_embeddings=256,
        pretraining_tp=1,
        pad_token_id=0,
    )
    theirs = randomise(authors("EAGLE", "eagle.model.cnets").Model(config), seed=1, scale=0.1)
    head = EagleHead(EagleConfig(H, INNER, HEADS, KV, V, VD, H // HEADS, max_position_embeddings=256)).eval()
    head.load_state_dict({n: t for n, t in theirs.state_dict().items() if n != "embed_tokens.weight"}, strict=True)
    ids = torch.tensor(np.sort(np.random.default_rng(0).choice(V, VD, replace=False)))
    head.set_vocabulary(ids)
    return theirs, Eagle(head, theirs.embed_tokens.weight.detach())


@torch.inference_mode()
def test_eagle_states_equal_the_authors_forward_pass(eagle_pair):
    """Prefix pass, then a chain of self-fed steps with their cache against ours, at 1e-5 relative."""
    theirs, ours = eagle_pair
    generator = torch.Generator().manual_seed(2)
    taps, tokens = torch.randn(12, 3 * H, generator=generator), torch.randint(1, V, (13,), generator=generator).tolist()
    expected, cache = theirs(taps[None], torch.tensor([tokens[1:]]), use_cache=True)
    ours.reset()
    ours.extend(tokens, taps)
    state, u, position = ours.last
    segment = Segment(slice(0, 1), ours.keys[0], ours.values[0], torch.ones(1, 12, dtype=torch.bool))
    for j, token in enumerate([5, 9, 17, 30]):
        state = ours.model.layer(state, u, position + j, [segment], step=j > 0)
        torch.testing.assert_close(state[0], expected[0, -1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            ours.model.lm_head(ours.model.norm(state))[0],
            theirs.lm_head(theirs.norm(expected[0, -1])),
            rtol=1e-5,
            atol=1e-5,
        )
        u = ours.model.inputs(state, ours._embed(torch.tensor([token])))
        expected, cache = theirs(expected[:, -1:], torch.tensor([[token]]), past_key_values=cache, use_cache=True)


@pytest.fixture(scope="module")
def dflash_pair():
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=H,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=H // HEADS,
        vocab_size=V,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        layer_types=["full_attention"] * 3,
        attention_dropout=0.0,
    )
    config.num_target_layers, config.block_size = 32, 6
    config.dflash_config = {"mask_token_id": 7, "target_layer_ids": [1, 14, 26]}
    config._attn_implementation = "sdpa"
    theirs = randomise(authors("dflash", "dflash.model").DFlashDraftModel(config), seed=3, scale=0.1)
    theta = config.rope_parameters["rope_theta"]
    ours = DFlashModel(
        DFlashConfig(H, INNER, 3, HEADS, KV, 6, (1, 14, 26), H // HEADS, 1e-6, theta, mask_token_id=7)
    ).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@torch.inference_mode()
def test_dflash_states_equal_the_authors_forward_pass(dflash_pair):
    """One shot for each of several anchors: their pass over context and block against our packed pass over all anchors,
    at 1e-5."""
    theirs, ours = dflash_pair
    generator = torch.Generator().manual_seed(4)
    taps, embeddings, mask = (torch.randn(*shape, generator=generator) for shape in ((20, 3 * H), (4, H), (H,)))
    anchors = torch.tensor([5, 9, 14, 20])
    blocks = ours.blocks(embeddings, mask)
    keys, values = ours.inject(taps, torch.arange(20))
    packed = ours(blocks, anchors, [(slice(0, 4), Context(keys, values, anchors))])
    for row, n in enumerate(anchors.tolist()):
        expected = theirs(
            position_ids=torch.arange(n + 6)[None], noise_embedding=blocks[row : row + 1], target_hidden=taps[None, :n]
        )
        torch.testing.assert_close(packed[row], expected[0], rtol=1e-5, atol=1e-5)
