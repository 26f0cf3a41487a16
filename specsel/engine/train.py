"""Training of the two neural drafters on the target's own greedy answers: losses, initial weights, one resumable loop
for both."""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specsel.engine.data import Example, examples, read_report, shards
from specsel.engine.dflash import Context, DFlash, DFlashConfig, DFlashModel
from specsel.engine.draft import Drafts
from specsel.engine.eagle import Eagle, EagleConfig, EagleHead, Segment
from specsel.engine.target import Target, sha256_of
from specsel.log import SpecselError

HELD_OUT_EVERY = 64
"""Every 64th answer is never trained on: the held-out set of the learning curve."""

DECAY = 0.8
"""Weight of draft step j in the EAGLE-3 loss is DECAY ** j (arXiv 2503.01840)."""


PIECE = 64
"""Rows of logits that are turned into gradients together."""


class TrainError(SpecselError):
    """A training cannot be continued as asked."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Recipe of one training: ``steps`` of ``batch`` answers, all randomness from ``seed``.

    The rate rises over the first ``warm_up`` of the steps, stays, and falls linearly over the last ``cool_down``.
    Training ends early when ``patience`` evaluations in a row bring no better held-out block efficiency. The weights of
    the steps in ``keep`` are written beside the best ones, to measure selection against drafter quality.
    """

    steps: int = 2000
    batch: int = 8
    rate: float = 1e-3
    warm_up: float = 0.03
    cool_down: float = 0.4
    clip: float = 1.0
    seed: int = 0
    optimizer: str = "muon"  # "muon" for the matrices of the layers and AdamW for the rest, or "adamw" for all
    start: str = "target"  # layers copied from the target's last ones, or "random"
    loss: str = "soft"  # "soft": cross-entropy against the target's distribution; "hard": its choice; "lk"
    draft_vocab: int = 16384
    draft_len: int = 9
    draft_steps: int = 4  # EAGLE-3: steps of the training-time test
    layers: int = 3  # DFlash: decoder layers
    anchors: int = 32  # DFlash: anchors per answer, drawn anew each time
    short_block: int = 0  # DFlash: block size of the first part of the training, 0 = the whole block throughout
    short_until: float = 0.7  # DFlash: share of the steps with short blocks; more of them, for the same rows
    slots: str = "decay"  # DFlash: weight exp(-(k - 1) / gamma) of slot k, or "pace"
    gamma: float = 5.0
    eval_every: int = 250
    held_out: int = 48
    patience: int = 4
    keep: tuple[int, ...] = ()


def recipe(kind: str, like: Path | None = None, **changes: Any) -> TrainConfig:
    """The recipe of one kind of drafter ("eagle" or "dflash"), or the one that the drafter folder ``like`` was trained
    by, with some settings changed. Raises TrainError when the folder tells no recipe."""
    base: dict[str, Any] = {"loss": "hard"} if kind == "dflash" else {}
    if like is not None:
        try:
            log = json.loads((like / "training.json").read_text(encoding="utf-8"))
            base = log["recipe"] | {"keep": tuple(log["recipe"]["keep"])}
        except (OSError, ValueError, KeyError) as error:
            raise TrainError(f"{like / 'training.json'}: no recipe of a drafter here ({error}).") from error
        if log["kind"] != kind:
            raise TrainError(f"{like / 'training.json'}: the recipe is one of '{log['kind']}', not of '{kind}'.")
    return TrainConfig(**base | changes)


def draft_vocabulary(paths: list[Path], size: int, vocab: int, eos_ids: tuple[int, ...]) -> tuple[Tensor, float]:
    """The ``size`` most frequent ids of the training answers, end ids included, sorted; and the share of held-out
    output tokens covered.

    Output tokens count fully, prompt tokens a quarter (rare words of an answer mostly stand in some prompt); ids that
    never occur fill the rest from the lowest on: in a byte-pair vocabulary low ids are the early, frequent merges.
    """
    counts, test = torch.zeros(vocab), torch.zeros(vocab)
    for path in paths:
        for i, example in enumerate(examples(path)):
            prompt, output = example.tokens.tensor_split([example.n_prompt])
            if i % HELD_OUT_EVERY:
                counts += output.bincount(minlength=vocab) + prompt.bincount(minlength=vocab) / 4
            else:
                test += output.bincount(minlength=vocab)
    counts[list(eos_ids)] = counts.max() + 1
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(test[ids].sum() / test.sum())


def inverse_vocabulary(ids: Tensor, vocab: int) -> Tensor:
    """Draft id of every target id, -1 outside the draft vocabulary, (V,)."""
    inverse = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
    inverse[ids] = torch.arange(len(ids), device=ids.device)
    return inverse


def soft_targets(example: Example, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Target distributions of all output tokens, restricted to the draft vocabulary and renormalised over the stored
    top logits.

    Returns draft ids (T, K), probabilities (T, K) and the mask (T,): the target's own choice is in the draft
    vocabulary.
    """
    ids = inverse[example.top_ids.long()]
    p = (example.top_logits.float() - example.lse[:, None]).exp().masked_fill(ids < 0, 0)
    return ids.clamp(min=0), p / p.sum(-1, keepdim=True).clamp(min=1e-9), ids[:, 0] >= 0


def eagle_states(head: EagleHead, batch: list[Example], embedding: Tensor, steps: int) -> Iterator[Tensor]:
    """Un-normed states of draft steps 0..``steps``-1 for all anchors of a batch, each (sum of T - 1, H), fed with the
    true tokens.

    The training-time test of EAGLE-3: row t of step j reads the true token x_{t+1+j} and its own state of step j - 1.
    """
    pairs = [len(e.tokens) - 2 for e in batch]
    state = head.fc(torch.cat([e.taps[:n] for e, n in zip(batch, pairs, strict=True)]).to(head.fc.weight.dtype))
    u = head.inputs(
        state, F.embedding(torch.cat([e.tokens[1 : n + 1] for e, n in zip(batch, pairs, strict=True)]), embedding)
    )
    positions = torch.cat([torch.arange(n, device=u.device) for n in pairs])
    keys, values = head.keys_values(u, positions)
    segments, rows, start, row = [], [], 0, 0
    for e, n in zip(batch, pairs, strict=True):
        own = torch.arange(e.n_prompt - 1, n, device=u.device)
        where = slice(start, start + n)
        visible = torch.arange(n, device=u.device)[None] <= own[:, None]
        segments.append(Segment(slice(row, row + len(own)), keys[where], values[where], visible))
        rows.append(start + own)
        start, row = start + n, row + len(own)
    rows = torch.cat(rows)
    state, u, positions = state[rows], u[rows], positions[rows]
    for j in range(steps):
        state = head.layer(state, u, positions + j, segments, step=j > 0)
        yield state
        following = [F.pad(e.tokens, (0, steps))[e.n_prompt + j + 1 : len(e.tokens) + j] for e in batch]
        u = head.inputs(state, F.embedding(torch.cat(following), embedding))


def eagle_loss(
    head: EagleHead, batch: list[Example], embedding: Tensor, inverse: Tensor, config: TrainConfig
) -> Tensor:
    """Cross-entropy against soft targets over the steps of the training-time test, step j weighted by DECAY ** j."""
    targets = [soft_targets(e, inverse) for e in batch]
    loss = torch.zeros((), device=embedding.device)
    for j, state in enumerate(eagle_states(head, batch, embedding, config.draft_steps)):
        # row i of an answer is anchor i of its output; step j is judged by the distribution that chose output i + j + 1
        valid = torch.cat([torch.arange(len(e.lse) - 1, device=state.device) + j + 1 < len(e.lse) for e in batch])
        ids, p, mask = (torch.cat([part[j + 1 :] for part in parts]) for parts in zip(*targets, strict=True))
        entropy = token_loss(head.norm(state[valid]), head.lm_head.weight, ids, p, config.loss)
        loss = loss + DECAY**j * (entropy * mask).sum() / mask.sum().clamp(min=1)
    return loss


class _HeadEntropy(torch.autograd.Function):
    """Cross-entropy of the distributions that ``head`` (V_d, H) gives states (n, H) against ``p`` (n, K) over ``ids``.

    Logits stay in bf16 and are read in pieces that fit a processor's cache: a quarter less time than a linear layer
    followed by a log-softmax.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        low, rows = states.bfloat16(), head.bfloat16()
        logits = low @ rows.T
        total = torch.cat([piece.float().logsumexp(-1) for piece in logits.split(PIECE)])
        ctx.save_for_backward(low, rows, logits, total, ids, p)
        return total * p.sum(-1) - (p * logits.gather(-1, ids).float()).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        low, rows, logits, *parts = ctx.saved_tensors
        total, ids, p = parts
        for piece, z, i, q, g in zip(*(t.split(PIECE) for t in (logits, total, ids, p, gradient)), strict=True):
            softmax = (piece.float() - z[:, None]).exp_().mul_((q.sum(-1) * g)[:, None])
            piece.copy_(softmax.scatter_add_(-1, i, -q * g[:, None]))
        by_head = (logits.T @ low).float() if ctx.needs_input_grad[1] else None
        return (logits @ rows).float(), by_head, None, None


def token_loss(states: Tensor, head: Tensor, ids: Tensor, p: Tensor, kind: str) -> Tensor:
    """Loss (n,) of states (n, H) under a head (V_d, H), against the distribution ``p`` (n, K) over draft ids ``ids``.

    "soft": cross-entropy against p. "hard": against its most likely id, the first. "lk": the negative logarithm of the
    acceptance rate sum(min(p, q)) of lossless sampling (LK loss, arXiv 2602.23881).

    >>> states, head = torch.zeros(1, 2), torch.ones(4, 2)
    >>> ids, p = torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]])
    >>> [round(token_loss(states, head, ids, p, kind).exp().item(), 4) for kind in ("soft", "hard", "lk")]
    [4.0, 4.0, 2.0]
    """
    if kind == "lk":
        q = F.linear(states, head).float().log_softmax(-1).gather(-1, ids).exp()
        return -torch.minimum(p, q).sum(-1).clamp(min=1e-6).log()
    if kind == "hard":
        ids, p = ids[:, :1], torch.ones_like(p[:, :1])
    return _HeadEntropy.apply(states, head, ids, p)


def dflash_loss(
    model: DFlashModel,
    batch: list[Example],
    embedding: Tensor,
    inverse: Tensor,
    config: TrainConfig,
    generator: torch.Generator,
    head: Tensor,
    size: int,
) -> Tensor:
    """Weighted loss of all slots of randomly drawn blocks of ``size`` tokens, the anchor included; slots past the end
    or outside the draft vocabulary weigh nothing."""
    count = config.anchors * model.config.block_size // size
    lengths = [len(e.taps) for e in batch]
    keys, values = model.inject(
        torch.cat([e.taps for e in batch]).to(model.fc.weight.dtype),
        torch.cat([torch.arange(n) for n in lengths]).to(embedding.device),
    )
    keys, values = ([t.split(lengths) for t in part] for part in (keys, values))
    contexts, anchors, starts, labels, row, first = [], [], [], [], 0, 0
    targets = [torch.cat(part) for part in zip(*(soft_targets(e, inverse) for e in batch), strict=True)]
    for i, e in enumerate(batch):
        t = e.n_prompt + torch.randperm(len(e.tokens) - 1 - e.n_prompt, generator=generator)[:count]
        contexts.append(
            (slice(row, row + len(t)), Context([k[i] for k in keys], [v[i] for v in values], t.to(embedding.device)))
        )
        slots = t[:, None].to(embedding.device) + torch.arange(1, size, device=embedding.device)
        labels.append((slots - e.n_prompt + first).masked_fill(slots >= len(e.tokens), -1))
        anchors.append(e.tokens[t])
        starts.append(t)
        row, first = row + len(t), first + len(e.lse)
    z = model.blocks(F.embedding(torch.cat(anchors), embedding), model.mask_embedding)[:, :size]
    states = model(z, torch.cat(starts).to(embedding.device), contexts)[:, 1:]
    label = torch.cat(labels)  # row of ``targets`` that judges each slot, -1 past the end
    ids, p, mask = targets
    used = (label >= 0) & mask[label]
    loss = token_loss(states[used], head, ids[label[used]], p[label[used]], config.loss)
    weight = pace_weights(loss.detach(), used) if config.slots == "pace" else decay_weights(used, config.gamma)
    return (weight[used] * loss).sum() / weight[used].sum()


def decay_weights(used: Tensor, gamma: float) -> Tensor:
    """Weight exp(-(k - 1) / gamma) of slot k = 1.. of every block, (A, B - 1) (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(used.shape[1], device=used.device) / gamma).expand(used.shape)


def pace_weights(loss: Tensor, used: Tensor, smoothing: float = 0.1) -> Tensor:
    """Weights of slots by what they now contribute to the expected accepted length (D-PACE, arXiv 2605.18810).

    With c_i the smoothed probability of the right token at slot i, slot k weighs sum over j >= k of c_1 .. c_j, the
    gradient of the expected accepted length by log c_k. ``loss`` (n,) of the ``used`` slots (A, B - 1); an unused slot
    accepts nothing.

    >>> pace_weights(torch.tensor([0.0, 0.0]), torch.tensor([[True, True, False]]), smoothing=0.0)
    tensor([[2., 1., 0.]])
    """
    confidence = torch.zeros(used.shape, device=used.device)
    confidence[used] = smoothing + (1 - smoothing) * (-loss).exp()
    return confidence.cumprod(1).flip(1).cumsum(1).flip(1)


def new_eagle(target: Target, ids: Tensor, config: TrainConfig) -> EagleHead:
    """A head whose draft vocabulary is scored by the target's embedding rows; with ``start`` "target" its layer is the
    target's last one, in the feature half, and fc the identity on the top tap."""
    c = target.model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    head = EagleHead(
        EagleConfig(
            c.hidden_size,
            c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.vocab_size,
            len(ids),
            head_dim,
            c.rms_norm_eps,
            c.rope_parameters["rope_theta"],
        )
    )
    head.set_vocabulary(ids)
    last, h = target.model.model.layers[-1], c.hidden_size
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
    c = target.model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    model = DFlashModel(
        DFlashConfig(
            c.hidden_size,
            c.intermediate_size,
            config.layers,
            c.num_attention_heads,
            c.num_key_value_heads,
            config.draft_len + 1,
            tuple(i - 1 for i in target.taps),
            head_dim,
            c.rms_norm_eps,
            c.rope_parameters["rope_theta"],
            c.max_position_embeddings,
            learned_mask=True,
            head_slice=len(ids),
        )
    )
    h = c.hidden_size
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


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Gives a drafter the weights of an untrained one, in place: matrices normal with deviation 0.02, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def accepted_counts(drafts: Drafts, output: np.ndarray) -> np.ndarray:
    """Accepted tokens of a draft at every anchor of an output: the common prefix with what follows, (T - 1,)."""
    padded = np.pad(output, (0, drafts.tokens.shape[1]), constant_values=-2)
    following = np.lib.stride_tricks.sliding_window_view(padded[1:], drafts.tokens.shape[1])[: len(drafts)]
    return (drafts.tokens == following).cumprod(1).sum(1)


def held_out_score(drafter, batch: list[Example], draft_len: int) -> dict[str, Any]:
    """First-token acceptance over all positions and block efficiency of always running one drafter on held-out answers,
    with tokens and blocks of every answer for an interval."""
    first, emitted, blocks = 0, [], []
    for e in batch:
        output = e.tokens[e.n_prompt :].numpy()
        accepted = accepted_counts(drafter.propose_all(e.tokens.tolist(), e.n_prompt, e.taps, draft_len), output)
        first += int((accepted > 0).sum())
        p, n = 0, 0
        while p < len(accepted):
            p, n = p + int(accepted[p]) + 1, n + 1
        emitted.append(len(accepted))
        blocks.append(n)
    return {
        "first_token": first / sum(emitted),
        "block_efficiency": sum(emitted) / sum(blocks),
        "answers": {"emitted": emitted, "blocks": blocks},
    }


class _Stream:
    """Training answers in an order that ``seed`` and the number of answers taken so far determine: shard after shard,
    shuffled inside."""

    def __init__(self, paths: list[Path], seed: int, taken: int = 0) -> None:
        self.paths, self.seed, self.taken = paths, seed, 0
        self._iterator = self._answers()
        for _ in range(taken):
            next(self._iterator)
            self.taken += 1

    def _answers(self) -> Iterator[Example]:
        for epoch in itertools.count():
            for index in np.random.default_rng([self.seed, epoch]).permutation(len(self.paths)):
                kept = [e for i, e in enumerate(examples(self.paths[index])) if i % HELD_OUT_EVERY]
                for i in np.random.default_rng([self.seed, epoch, index]).permutation(len(kept)):
                    yield kept[i]

    def take(self, n: int) -> list[Example]:
        self.taken += n
        return [next(self._iterator) for _ in range(n)]


def held_out(paths: list[Path], n: int) -> list[Example]:
    """The first ``n`` held-out answers."""
    return list(
        itertools.islice((e for path in paths for i, e in enumerate(examples(path)) if i % HELD_OUT_EVERY == 0), n)
    )


def rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the full rate at a step: warm-up, plateau, linear fall to 0.

    >>> config = TrainConfig(steps=100, warm_up=0.04, cool_down=0.5)
    >>> [round(rate_factor(step, config), 3) for step in (0, 3, 50, 75, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.02]
    """
    warm, cool = max(1, round(config.warm_up * config.steps)), max(1, round(config.cool_down * config.steps))
    return min(1.0, (step + 1) / warm, (config.steps - step) / cool)


def block_size(step: int, config: TrainConfig) -> int:
    """Block size, anchor included, that DFlash is trained with at a step.

    >>> [block_size(step, TrainConfig(steps=10, short_block=5, short_until=0.5)) for step in (4, 5)]
    [5, 10]
    """
    short = config.short_block and step < config.short_until * config.steps
    return config.short_block if short else config.draft_len + 1


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a recipe: Muon (orthogonalised momentum, its update scaled to AdamW's size) for the matrices
    between input and head, AdamW for vectors and heads; or AdamW for everything."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "lm_head" not in name]
    if config.optimizer == "adamw":
        matrices = []
    inside = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in inside]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=config.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def train_drafter(
    kind: str, target: Target, data: Path, out: Path, config: TrainConfig, *, report: Callable[[dict], None] = print
) -> dict:
    """Trains one drafter ("eagle" or "dflash") and writes weights, config and log to ``out``; resumes from
    ``out/state`` when it is there.

    The best held-out weights are written (bf16 safetensors), with ``config.json`` and ``training.json`` (recipe, data
    hash, learning curve).
    """
    paths = shards(data)
    ids, coverage = draft_vocabulary(paths, config.draft_vocab, target.model.config.vocab_size, target.eos_ids)
    torch.manual_seed(config.seed)
    device = target.model.device
    model = (new_eagle if kind == "eagle" else new_dflash)(target, ids, config).to(device)
    embedding, head = target.model.model.embed_tokens.weight, target.model.lm_head.weight
    sliced, inverse = head[ids.to(device)], inverse_vocabulary(ids, len(embedding)).to(device)
    drafter = Eagle(model, embedding) if kind == "eagle" else DFlash(model, embedding, head)
    optimizers = make_optimizers(model, config)
    log = {
        "kind": kind,
        "recipe": asdict(config),
        "coverage": coverage,
        "dtype": "bf16 autocast",
        "target": target.sha256,
        "data": [{"shard": path.name, "sha256": sha256_of(path)} for path in paths],
        "data_report": read_report(data),
        "curve": [],
    }
    first = _resume(out / "state", model, optimizers, log)
    if config.keep and not first:
        _write_weights(out / "checkpoints" / "random", randomise(copy.deepcopy(model), config.seed))
    stream, test = _Stream(paths, config.seed, first * config.batch), held_out(paths, config.held_out)
    started, losses, tokens = time.monotonic(), [], (log["curve"][-1]["tokens"] if log["curve"] else 0)
    for step in range(first, config.steps):
        if _stalled(log["curve"], config.patience):
            break
        for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
            group["lr"] = config.rate * rate_factor(step, config)
        batch = [_to(e, device) for e in stream.take(config.batch)]
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        model.train()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            if kind == "eagle":
                loss = eagle_loss(model, batch, embedding, inverse, config)
            else:
                size = block_size(step, config)
                loss = dflash_loss(model, batch, embedding, inverse, config, generator, sliced, size)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        tokens += sum(len(e.lse) for e in batch)
        if step + 1 in config.keep:
            _write_weights(out / "checkpoints" / f"step_{step + 1}", model)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            model.eval()
            score = held_out_score(drafter, test, config.draft_len)
            log["curve"].append({"step": step + 1, "tokens": tokens, "loss": float(np.mean(losses)), **score})
            report(log["curve"][-1] | {"seconds": round(time.monotonic() - started, 1)})
            losses = []
            _save(out, model, optimizers, log)
    return log


def _stalled(curve: list[dict], patience: int) -> bool:
    """True when the last ``patience`` evaluations did not exceed the best block efficiency before them."""
    scores = [point["block_efficiency"] for point in curve]
    return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])


def _to(example: Example, device: torch.device) -> Example:
    return (
        example
        if device.type == "cpu"
        else Example(*(v if isinstance(v, int) else v.to(device) for v in asdict(example).values()))
    )


def _resume(state: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], log: dict) -> int:
    """Restores weights, optimisers and curve of an interrupted run of the same recipe and data; returns the first step
    to do. Raises TrainError for another recipe, data or target: a curve must describe one training."""
    if not (state / "log.json").is_file():
        return 0
    saved = json.loads((state / "log.json").read_text(encoding="utf-8"))
    for name in ("kind", "recipe", "data", "target"):
        if saved[name] != json.loads(json.dumps(log[name])):
            raise TrainError(
                f"{state}: the unfinished training has another '{name}'; continue it as it was, or remove the folder."
            )
    model.load_state_dict(load_file(state / "weights.safetensors"))
    for optimizer, tensors in zip(optimizers, torch.load(state / "optimizer.pt", weights_only=True), strict=True):
        optimizer.load_state_dict(tensors)
    log["curve"] = saved["curve"]
    return saved["curve"][-1]["step"]


def _save(out: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], log: dict) -> None:
    state = out / "state"
    state.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), state / "weights.part")
    torch.save([optimizer.state_dict() for optimizer in optimizers], state / "optimizer.part")
    os.replace(state / "weights.part", state / "weights.safetensors")
    os.replace(state / "optimizer.part", state / "optimizer.pt")
    (state / "log.json").write_text(json.dumps(log), encoding="utf-8")
    best = max(log["curve"], key=lambda point: point["block_efficiency"])
    if best is log["curve"][-1]:
        _write_weights(out, model)
    (out / "training.json").write_text(json.dumps(log | {"best_step": best["step"]}, indent=1) + "\n", encoding="utf-8")


def _write_weights(folder: Path, model: nn.Module) -> None:
    """Writes a drafter's folder: bf16 weights and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    low = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_file(low, folder / "model.part")
    os.replace(folder / "model.part", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n", encoding="utf-8")
