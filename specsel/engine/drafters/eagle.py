"""``eagle``: an EAGLE-3 draft head (arXiv 2503.01840), drafting a chain of tokens autoregressively.

The pair (target feature g_t, embedding of x_{t+1}) sits at rotary position t and its output predicts x_{t+2}. "Stable"
keys and values come from target features; those of draft steps come from the head's own states and are thrown away
after every block. Three paths run the same arithmetic: one chain at a time (``propose``), all chains of a request in
lock-step (``propose_all``), and training, which is the lock-step with the true tokens ("training-time test").
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsel.engine.drafters.base import Drafter, Drafts, Neural, best_tokens, from_slots
from specsel.engine.drafters.files import CheckpointError, DrafterFiles, described, load_strictly, loaded, read_config
from specsel.engine.drafters.layers import Layer, RMSNorm, shared_scores, shared_values
from specsel.engine.target import Target, tap_indices

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
REFUSED = {flag: f"variant flag '{flag}' is not supported; use a plain EAGLE-3 head." for flag in VARIANTS}
REFUSED |= {"rope_scaling": "'rope_scaling' is not supported in a draft head."}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shapes of a head; names as in the published config.json.

    A missing ``rope_theta`` means base 10000, never the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    draft_vocab_size: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = ()  # Hugging Face indices of the taps; empty: the usual three

    @classmethod
    def from_dict(cls, config: dict, folder: object = "config.json") -> EagleConfig:
        """Reads a published config, nested or flat; refuses a variant flag that is not implemented, by its name."""
        config = config | config.get("transformer_layer_config", {})
        return read_config(cls, config, folder, REFUSED)


@dataclass(slots=True)
class Segment:
    """Rows of one request inside a flat batch: which stable keys each query row may see, and the request's stable keys
    and values."""

    rows: slice
    keys: Tensor
    values: Tensor
    visible: Tensor
    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of each draft step


class EagleHead(nn.Module):
    """The head's weights, named as in the published checkpoints, and its arithmetic on flat rows."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.midlayer = Layer(config, 2 * config.hidden_size, *norms)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def set_vocabulary(self, ids: Tensor) -> None:
        """Sets the draft vocabulary to sorted target ids (V_d,); ``d2t`` stores offsets: target id = draft id +
        d2t[draft id]."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()
        self.t2d[ids] = True

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, (V_d,)."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def inputs(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input (n, 2H): embedding half first, each half under its own norm."""
        halves = self.midlayer.input_layernorm(embedded.to(state.dtype)), self.midlayer.hidden_norm(state)
        return torch.cat(halves, -1)

    def pairs(self, taps: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """State (n, H), layer input (n, 2H) and stable keys and values (n, kv, d) of taps (n, 3H), each with the
        embedding (n, H) of the token that follows."""
        state, attention = self.fc(taps.to(self.fc.weight)), self.midlayer.self_attn
        u = self.inputs(state, embedded)
        return state, u, attention.keys(u, attention.table(positions)), attention.values(u)

    def layer(self, state: Tensor, u: Tensor, positions: Tensor, segments: list[Segment], step: bool) -> Tensor:
        """Output states a (n, H), un-normed, of the rows' states and layer inputs.

        At a draft step (``step``) the rows' own keys and values join their segments first: a row sees the stable keys
        of its prefix and, of each draft step so far, the key of its own chain alone.
        """
        attention = self.midlayer.self_attn
        table = attention.table(positions)
        q = attention.queries(u, table)
        if step:
            keys, values = attention.keys(u, table), attention.values(u)
            for segment in segments:
                segment.steps.append((keys[segment.rows], values[segment.rows]))
        return self.midlayer.add(state, torch.cat([self._attend(q[s.rows], s) for s in segments]))

    def _attend(self, q: Tensor, s: Segment) -> Tensor:
        scores = [shared_scores(q, s.keys, s.visible)]
        grouped = q.unflatten(1, (s.keys.shape[1], -1))  # A, kv, groups, d
        for key, _ in s.steps:
            own = (grouped * key[:, :, None]).sum(-1).float() / q.shape[-1] ** 0.5
            scores.append(own.permute(1, 2, 0)[..., None])
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = shared_values(weights[..., : len(s.keys)], s.values).unflatten(1, grouped.shape[1:])
        for i, (_, value) in enumerate(s.steps, len(s.keys)):
            mixed = mixed + weights[..., i].permute(2, 0, 1)[..., None].to(value.dtype) * value[:, :, None]
        return mixed.flatten(1)


def check_vocabulary(d2t: Tensor, t2d: Tensor, eos_ids: tuple[int, ...], where: object = "checkpoint") -> str | None:
    """Checks the draft vocabulary maps; returns a warning when no end id can be drafted.

    Raises CheckpointError naming the tensor when the map is out of range, not increasing, or disagrees with ``t2d``.
    """
    ids = torch.arange(len(d2t)) + d2t.cpu()
    if ids.min() < 0 or ids.max() >= len(t2d):
        raise CheckpointError(
            f"{where}: tensor 'd2t' maps a draft id to {int(ids.max())}, outside the vocabulary of {len(t2d)}."
        )
    if (ids.diff() <= 0).any():
        raise CheckpointError(f"{where}: tensor 'd2t' is not increasing (draft id + offset must grow).")
    if int(t2d.sum()) != len(d2t):
        raise CheckpointError(f"{where}: tensor 't2d' marks {int(t2d.sum())} ids, 'd2t' has {len(d2t)}.")
    if not bool(t2d.cpu()[ids].all()):
        raise CheckpointError(
            f"{where}: tensor 'd2t' does not agree with 't2d': "
            "it must hold offsets, not target ids, and must be loaded."
        )
    if eos_ids and not bool(t2d.cpu()[list(eos_ids)].any()):
        return f"{where}: no end id {list(eos_ids)} is in the draft vocabulary; this head can never propose the end."
    return None


def load_head(files: DrafterFiles) -> EagleHead:
    """Builds the head of a checkpoint in either published spelling (``midlayer.`` or ``layers.0.``), strictly.

    Without vocabulary maps the draft vocabulary must be the whole target vocabulary.
    """
    config = EagleConfig.from_dict(files.config, files.folder)
    tensors = {name.replace("layers.0.", "midlayer.", 1): t for name, t in files.tensors.items()}
    head = EagleHead(config)
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        zeros = torch.zeros(config.vocab_size, dtype=torch.long)
        tensors |= {"d2t": zeros, "t2d": zeros == 0}
    load_strictly(head, tensors, files.folder, ignored=("embed_tokens.weight", "inv_freq"))
    return head


class Eagle(Neural):
    """The drafter: its model is a head, its keys and values the stable ones."""

    name = "eagle"

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def extend(self, tokens: list[int], taps: Tensor) -> None:
        """Appends stable pairs: taps (m, 3H) of newly processed tokens, each paired with the token that follows it.

        ``tokens`` are all tokens committed since the last call (at first prompt + first output token); their last m
        follow the taps.
        """
        start = len(self.keys[0])
        ids = torch.tensor(tokens[-len(taps) :], device=self.embedding.device)
        positions = torch.arange(start, start + len(ids), device=ids.device)
        state, u, keys, values = self.model.pairs(self.own(taps), self._embed(ids), positions)
        self.remember([keys], [values])
        self.last = (state[-1:], u[-1:], positions[-1:])

    @torch.inference_mode()
    def propose(self, draft_len: int) -> Drafts:
        """One chain of ``draft_len`` tokens from the current anchor; not asked when it would leave the head's
        window."""
        keys, values = self.keys[0], self.values[0]
        visible = torch.ones(1, len(keys), dtype=torch.bool, device=keys.device)
        return self._chains(*self.last, keys, values, visible, draft_len)

    def _chains(
        self, state: Tensor, u: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor, draft_len: int
    ) -> Drafts:
        segment = Segment(slice(0, len(positions)), keys, values, visible)
        slots = []
        for j in range(draft_len):
            state = self.model.layer(state, u, positions + j, [segment], step=j > 0)
            best, *statistics = best_tokens(self.model.norm(state), self.model.lm_head.weight)
            slots.append((self.model.target_ids[best], *statistics))
            u = self.model.inputs(state, self._embed(slots[-1][0]))
        drafts = from_slots(*(torch.stack(part, 1) for part in zip(*slots, strict=True)), draft_len)
        return drafts.without((positions + draft_len > self.window).cpu().numpy())

    @torch.inference_mode()
    def propose_all(self, tokens: list[int], n_prompt: int, taps: Tensor, draft_len: int) -> Drafts:
        """All chains of a request in lock-step: anchors ``n_prompt`` ..

        ``len(tokens) - 2``; taps (len(tokens) - 1, 3H).
        """
        ids = torch.tensor(tokens, device=self.embedding.device)
        positions = torch.arange(len(ids) - 2, device=ids.device)  # pairs that an anchor with a successor can use
        state, u, keys, values = self.model.pairs(self.own(taps[: len(positions)]), self._embed(ids[1:-1]), positions)
        rows = positions[n_prompt - 1 :]  # anchor x_{t+1} belongs to pair t
        return self._chains(state[rows], u[rows], rows, keys, values, positions[None] <= rows[:, None], draft_len)


SETTING = Path("data/drafters/eagle")


def load(target: Target, folder: str | Path, made: dict[str, Drafter]) -> Eagle:
    """See `Drafter`. Warns where the head can never propose the end of an answer."""
    head = loaded("eagle", load_head, folder, target)
    if warning := check_vocabulary(head.d2t, head.t2d, target.eos_ids, folder):
        warnings.warn(warning, stacklevel=2)
    drafter = Eagle(head, target.model.model.embed_tokens.weight)
    drafter.taps = head.config.eagle_aux_hidden_state_layer_ids or tap_indices(target.model.config.num_hidden_layers)
    return drafter


def describe(folder: str | Path, tag: str | None) -> dict:
    """See `Drafter`."""
    return described(folder, "EAGLE-3 head, greedy chain", tag)
