"""A tiny random target and its pool: real code paths at a size where every test takes a moment."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine tests need the extra 'engine'")
transformers = pytest.importorskip("transformers", reason="the engine tests need the extra 'engine'")

from specsel.engine.drafters.base import NO_TOKEN, Drafts  # noqa: E402
from specsel.engine.drafters.cascade import Cascade, CascadeConfig  # noqa: E402
from specsel.engine.drafters.dflash import DFlash, DFlashConfig, DFlashModel  # noqa: E402
from specsel.engine.drafters.eagle import Eagle, EagleConfig, EagleHead  # noqa: E402
from specsel.engine.drafters.ngram import Ngram, NgramConfig  # noqa: E402
from specsel.engine.target import Features, Target, tap_indices  # noqa: E402

VOCAB, EOS = 97, (2,)


class TinyTokenizer:
    """Turns a prompt into ids by its characters; enough of a tokenizer for the harness."""

    chat_template = "tiny"

    def apply_chat_template(self, messages, **options):
        return [3 + ord(c) % (VOCAB - 3) for c in messages[0]["content"]]


def randomise(module: torch.nn.Module, seed: int, scale: float = 0.3) -> torch.nn.Module:
    """Gives every weight, norms included, a random value: defaults of one would hide a norm in the wrong place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else scale * noise
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def target() -> Target:
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_hidden_layers=8,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = randomise(transformers.LlamaForCausalLM(config), seed=0)
    return Target("tiny", model, TinyTokenizer(), EOS, tap_indices(8), "0" * 64)


@pytest.fixture(scope="session")
def features(target: Target) -> Features:
    return Features(target)


def make_eagle(target: Target, window: int = 256) -> Eagle:
    head = EagleHead(EagleConfig(32, 48, 4, 2, VOCAB, 41, 8, max_position_embeddings=window))
    ids = np.sort(np.random.default_rng(3).choice(np.arange(3, VOCAB), 40, replace=False))
    head.set_vocabulary(torch.tensor([2, *ids]))
    return Eagle(randomise(head, seed=1), target.model.model.embed_tokens.weight)


def make_dflash(target: Target, block_size: int = 5) -> DFlash:
    model = DFlashModel(
        DFlashConfig(32, 48, 2, 4, 2, block_size, tuple(i - 1 for i in target.taps), 8, mask_token_id=5)
    )
    return DFlash(randomise(model, seed=2), target.model.model.embed_tokens.weight, target.model.lm_head.weight)


@pytest.fixture
def pool(target: Target) -> dict:
    eagle, dflash, ngram = make_eagle(target), make_dflash(target), Ngram(NgramConfig(1, 3), EOS)
    return {
        "dflash": dflash,
        "eagle": eagle,
        "ngram": ngram,
        "cascade": Cascade(ngram, dflash, CascadeConfig(2, "dflash")),
    }


class Scripted:
    """An adversarial drafter: proposes what a function of the committed tokens says."""

    needs_taps = False

    def __init__(self, name: str, propose) -> None:
        self.name, self._propose = name, propose

    def reset(self) -> None:
        self.tokens = []

    def extend(self, tokens, taps=None) -> None:
        self.tokens += tokens

    def propose(self, draft_len: int) -> Drafts:
        row = self._propose(self.tokens)[:draft_len]
        tokens = np.full((1, draft_len), NO_TOKEN)
        tokens[0, : len(row)] = row
        nothing = np.full((1, draft_len), np.nan)
        return Drafts(tokens, np.array([len(row)]), nothing, nothing)


def prompts(n: int = 5) -> list[list[int]]:
    """Random prompts of 1 to 24 tokens with some repetition, so that lookups find something."""
    rng = np.random.default_rng(11)
    return [
        (rng.integers(3, 20, size=int(rng.integers(1, 9))).tolist() * 3)[: int(rng.integers(1, 25))] for _ in range(n)
    ]
