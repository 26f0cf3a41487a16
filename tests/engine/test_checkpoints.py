"""Loading published checkpoints: synthetic files with the published names and tiny shapes, through the production
loader."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from conftest import make_eagle, randomise
from safetensors.torch import save_file

from specsel.engine.decode import Decoder, always
from specsel.engine.drafters.dflash import DFlash, DFlashConfig, DFlashModel, load_model
from specsel.engine.drafters.eagle import EagleConfig, load_head
from specsel.engine.drafters.files import CheckpointError, checkpoint_of, locate, read_folder
from specsel.engine.pool import load_pool
from specsel.engine.target import Features, pinned

H, INNER, HEADS, KV, V, VD = 16, 24, 4, 2, 30, 12


def eagle_tensors(prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    """Names and shape relations of `yuhuili/EAGLE3-LLaMA3.1-Instruct-8B`, tiny."""
    d = H // HEADS
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H)}
    layer = {
        "self_attn.q_proj": (HEADS * d, 2 * H),
        "self_attn.k_proj": (KV * d, 2 * H),
        "self_attn.v_proj": (KV * d, 2 * H),
        "self_attn.o_proj": (H, HEADS * d),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
        "hidden_norm": (H,),
        "input_layernorm": (H,),
        "post_attention_layernorm": (H,),
    }
    shapes |= {f"{prefix}{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(0, 2 * VD, 2)
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()} | {
        "d2t": ids - torch.arange(VD),
        "t2d": t2d,
    }


EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}


def write(folder, config: dict, tensors: dict, *, torch_file: bool = False):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if torch_file:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix, torch_file", [("midlayer.", True), ("layers.0.", False)])
def test_both_spellings_of_an_eagle_head_load_to_the_same_weights(tmp_path, prefix, torch_file):
    """The official `.bin` and the vLLM-style safetensors with an extra embedding give one and the same head, RoPE base
    10000."""
    tensors = eagle_tensors(prefix) | ({} if torch_file else {"embed_tokens.weight": torch.zeros(V, H)})
    head = load_head(read_folder(write(tmp_path, EAGLE_CONFIG, tensors, torch_file=torch_file)))
    torch.testing.assert_close(
        head.midlayer.self_attn.q_proj.weight, eagle_tensors()["midlayer.self_attn.q_proj.weight"].float()
    )
    assert head.config.rope_theta == 10000.0
    assert head.target_ids.tolist() == list(range(0, 2 * VD, 2))


def test_a_nested_config_reads_as_a_flat_one():
    nested = {
        "draft_vocab_size": VD,
        "transformer_layer_config": {k: v for k, v in EAGLE_CONFIG.items() if k != "draft_vocab_size"},
    }
    assert EagleConfig.from_dict(nested) == EagleConfig.from_dict(EAGLE_CONFIG)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_an_unknown_eagle_variant_is_refused_by_its_name(flag):
    with pytest.raises(CheckpointError, match=flag):
        EagleConfig.from_dict(EAGLE_CONFIG | {flag: True})


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda t: t.pop("fc.weight"), "'fc.weight' is missing"),
        (lambda t: t.update({"midlayer.extra.weight": torch.zeros(1)}), "'midlayer.extra.weight' is unknown"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"'norm.weight' has shape \(3,\)"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, change, reason):
    tensors = eagle_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=reason):
        load_head(read_folder(write(tmp_path, EAGLE_CONFIG, tensors)))


def dflash_tensors(layers: int = 2, taps: int = 5) -> dict[str, torch.Tensor]:
    """Names and shape relations of `z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat`, tiny."""
    d = H // HEADS
    shapes = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(layers):
        layer = {
            "self_attn.q_proj": (HEADS * d, H),
            "self_attn.k_proj": (KV * d, H),
            "self_attn.v_proj": (KV * d, H),
            "self_attn.o_proj": (H, HEADS * d),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (INNER, H),
            "mlp.up_proj": (INNER, H),
            "mlp.down_proj": (H, INNER),
            "input_layernorm": (H,),
            "post_attention_layernorm": (H,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


DFLASH_CONFIG = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": H // HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": V,
    "num_target_layers": 32,
    "layer_types": ["full_attention"] * 2,
    "attention_bias": False,
}


@pytest.mark.parametrize(
    "placed",
    [
        {"block_size": 10, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 8, 15, 22, 29]}},
        {"dflash_config": {"block_size": 10, "mask_token_id": 7, "target_layer_ids": [1, 8, 15, 22, 29]}},
    ],
)
def test_both_placements_of_block_size_load(tmp_path, placed):
    model = load_model(read_folder(write(tmp_path, DFLASH_CONFIG | placed, dflash_tensors())))
    assert model.config.block_size == 10 and model.config.taps == (2, 9, 16, 23, 30)
    assert model.config.rope_theta == 500000.0


@pytest.mark.parametrize(
    "variant, name",
    [
        ({"is_causal": True}, "is_causal"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
    ],
)
def test_an_unknown_dflash_variant_is_refused_by_its_name(variant, name):
    with pytest.raises(CheckpointError, match=name):
        DFlashConfig.from_dict(DFLASH_CONFIG | {"block_size": 10} | variant)


def test_a_dflash_config_without_a_mask_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="mask_token_id"):
        load_model(
            read_folder(
                write(
                    tmp_path,
                    DFLASH_CONFIG | {"block_size": 4, "target_layer_ids": [1, 8, 15, 22, 29]},
                    dflash_tensors(),
                )
            )
        )


def test_missing_layer_ids_follow_the_published_rule():
    assert DFlashConfig.from_dict(DFLASH_CONFIG | {"block_size": 10, "num_hidden_layers": 5}).target_layer_ids == (
        1,
        8,
        15,
        22,
        29,
    )


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        read_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "training.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00" * 400, b"[1]"])
def test_a_damaged_file_is_told_in_one_sentence(tmp_path, name, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as told:
        checkpoint_of(tmp_path)
        read_folder(tmp_path)
    assert "\n" not in str(told.value)


def test_published_parameter_count_of_the_eagle_head():
    """424,689,664 parameters of the published head follow from its config (meta device: nothing is allocated)."""
    from specsel.engine.drafters.eagle import EagleHead

    config = EagleConfig.from_dict(
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "draft_vocab_size": 32000,
        }
    )
    with torch.device("meta"):
        head = EagleHead(config)
    assert sum(p.numel() for p in head.parameters()) == 424_689_664


def test_drafter_modules_use_the_published_names():
    """Every name of the synthetic checkpoint is a parameter of the module, and the other way round."""
    model = DFlashModel(
        DFlashConfig.from_dict(
            DFLASH_CONFIG | {"block_size": 10, "target_layer_ids": [1, 8, 15, 22, 29], "mask_token_id": 7}
        )
    )
    assert set(model.state_dict()) == set(dflash_tensors())


def save_drafters(folder, target):
    """An EAGLE-3 head with the usual three taps and a block drafter with five others, for the tiny target."""
    eagle = make_eagle(target)
    write(folder / "eagle", asdict(eagle.model.config), eagle.model.state_dict())
    layer_ids = (0, 2, 3, 5, 6)
    model = randomise(DFlashModel(DFlashConfig(32, 48, 2, 4, 2, 5, layer_ids, 8, mask_token_id=5)), seed=2)
    write(folder / "dflash", asdict(model.config), model.state_dict())
    return {"eagle": folder / "eagle", "dflash": folder / "dflash"}, model


def test_drafters_with_different_taps_read_one_pass_of_the_target(tmp_path, target):
    """The features hold the union of the taps; each drafter drafts as if they were its own alone."""
    config, model = save_drafters(tmp_path, target)
    wide, pool = load_pool(target, config)
    assert wide.taps == (1, 2, 3, 4, 5, 6, 7)
    tokens = [3, 9, 4, 9, 4, 7, 8, 9]
    _, taps, _ = Features(wide)(torch.tensor(tokens[:-1]))
    _, narrow, _ = Features(replace(target, taps=model.config.taps))(torch.tensor(tokens[:-1]))
    alone = DFlash(model, target.model.model.embed_tokens.weight, target.model.lm_head.weight)
    assert pool["dflash"].propose_all(tokens, 4, taps, 4).tokens.tolist() == (
        alone.propose_all(tokens, 4, narrow, 4).tokens.tolist()
    )
    decoded = {arm: Decoder(Features(wide), pool).run(tokens[:4], always(arm), max_new=12).output for arm in pool}
    assert len({tuple(output) for output in decoded.values()}) == 1


def test_a_drafter_that_reads_a_layer_the_target_has_not_is_refused(tmp_path, target):
    config, _ = save_drafters(tmp_path, target)
    written = json.loads((tmp_path / "dflash" / "config.json").read_text())
    (tmp_path / "dflash" / "config.json").write_text(json.dumps(written | {"target_layer_ids": [0, 2, 3, 5, 9]}))
    with pytest.raises(CheckpointError, match="hidden state 10"):
        load_pool(target, config)


@pytest.mark.parametrize("name", ["nowhere", "no/such/folder"])
def test_a_drafter_that_is_neither_a_folder_nor_a_repository_is_named(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        locate(name)


def test_a_moving_revision_is_told_and_the_commit_is_kept(tmp_path):
    """A branch, or none, gives a warning that names the commit; a commit and a local folder give none."""
    commit = "0123456789abcdef" * 2 + "01234567"
    for revision in (None, "main", "v1.0"):
        with pytest.warns(UserWarning, match=f"'{revision or 'main'}', which can move; pin the commit {commit}"):
            assert pinned("owner/name", revision, commit) == commit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned("owner/name", commit, commit) == commit
        assert pinned(tmp_path, None, None) is None


def test_a_drafter_of_the_hub_is_pinned_by_its_snapshot(tmp_path, monkeypatch):
    """The folder of a snapshot is named after the commit; the download itself is replaced."""
    commit = "89abcdef" * 5
    (tmp_path / commit).mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(tmp_path / commit))
    with pytest.warns(UserWarning, match=f"owner/name: loaded from 'main'.*{commit}"):
        assert locate("owner/name") == tmp_path / commit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert locate(f"owner/name@{commit}") == tmp_path / commit
