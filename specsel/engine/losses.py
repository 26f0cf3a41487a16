"""Losses of the two neural drafters: what a batch of answers says about the weights.

Both are judged by the target's distribution over the draft vocabulary: the EAGLE-3 head over the steps of its own
chain, the block drafter over the slots of randomly drawn blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specsel.engine.data import Example
from specsel.engine.drafters.dflash import Context, DFlashModel
from specsel.engine.drafters.eagle import EagleHead, Segment
from specsel.engine.recipes import TrainConfig

DECAY = 0.8
"""Weight of draft step j in the EAGLE-3 loss is DECAY ** j (arXiv 2503.01840)."""

PIECE = 64
"""Rows of logits that are turned into gradients together."""


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
    taps = torch.cat([e.taps[:n] for e, n in zip(batch, pairs, strict=True)])
    following = torch.cat([e.tokens[1:-1] for e in batch])
    positions = torch.cat([torch.arange(n, device=embedding.device) for n in pairs])
    state, u, keys, values = head.pairs(taps, F.embedding(following, embedding), positions)
    segments, rows, start, row = [], [], 0, 0
    for e, n, k, v in zip(batch, pairs, keys.split(pairs), values.split(pairs), strict=True):
        own = torch.arange(e.n_prompt - 1, n, device=u.device)
        visible = torch.arange(n, device=u.device)[None] <= own[:, None]
        segments.append(Segment(slice(row, row + len(own)), k, v, visible))
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

    Logits stay in the precision of the products (bf16 under autocast) and are read in pieces that fit a processor's
    cache: a quarter less time than a linear layer followed by a log-softmax.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        low, rows = states.to(dtype), head.to(dtype)
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
    positions = torch.cat([torch.arange(n, device=embedding.device) for n in lengths])
    injected = model.inject(torch.cat([e.taps for e in batch]), positions)
    keys, values = (zip(*(t.split(lengths) for t in part), strict=True) for part in injected)
    contexts, anchors, starts, labels, row, first = [], [], [], [], 0, 0
    targets = [torch.cat(part) for part in zip(*(soft_targets(e, inverse) for e in batch), strict=True)]
    for e, k, v in zip(batch, keys, values, strict=True):
        t = e.n_prompt + torch.randperm(len(e.tokens) - 1 - e.n_prompt, generator=generator)[:count]
        t = t.to(embedding.device)
        contexts.append((slice(row, row + len(t)), Context(k, v, t)))
        slots = t[:, None] + torch.arange(1, size, device=embedding.device)
        labels.append((slots - e.n_prompt + first).masked_fill(slots >= len(e.tokens), -1))
        anchors.append(e.tokens[t])
        starts.append(t)
        row, first = row + len(t), first + len(e.lse)
    z = model.blocks(F.embedding(torch.cat(anchors), embedding), model.mask_embedding)[:, :size]
    states = model(z, torch.cat(starts), contexts)[:, 1:]
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
