"""Batched generation by a Llama-architecture target: the source of training data and of position logs.

A request enters a free row of the batch as soon as another one has finished (continuous batching), so that the weights
are read once a step for all live rows. Every processed token leaves its tap features behind: no second pass over the
text is needed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Choose = Callable[[Tensor, list[int], list[int]], Tensor]
"""Maps (fp32 logits (B, V), request indices, output indices) to scores (B, V); the first of the largest is chosen."""

TOP_K = 32
OBSERVED = ("entropy", "confidence", "margin")
LOOP_SHARE = 0.5
LOOP_NGRAM = 4
PREFILL_BATCH = 16
"""Most prompts that are processed together."""

ENTER_BATCH = 8
"""Free rows that are waited for before prompts enter (an eighth of the rows if that is less): one prompt at a time is
processed at half the speed."""

STEP_ROWS = 16
"""Rows whose attention is computed together: as wide as the longest of them, not of the whole batch."""


@dataclass(slots=True)
class Generation:
    """One finished answer.

    ``tokens`` (n_prompt + T,) prompt and output ids; ``taps`` (n_prompt + T - 1, 3H) the target features of every
    processed token (the last output token is never processed). When asked for, per output token about the distribution
    that chose it: the largest logits, ``top_ids``/``top_logits`` (T, TOP_K), and ``lse`` (T,), the log-sum-exp of all
    (``keep_top``); ``entropy`` in nats, ``confidence``, and ``margin``, top-1 minus top-2 score, (T,) (``observe``).
    """

    index: int
    tokens: Tensor
    n_prompt: int
    taps: Tensor
    stop: str  # "eos", "length" or "loop" (cut early: only where ``stop_loops``)
    top_ids: Tensor | None = None
    top_logits: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    margin: Tensor | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :].tolist()


def distinct_share(output: list[int], n: int = LOOP_NGRAM) -> float:
    """Share of different n-grams among all n-grams of an output; 1.0 where there is none.

    >>> distinct_share([1, 2, 1, 2, 1, 2, 1])
    0.5
    """
    grams = [tuple(output[i : i + n]) for i in range(len(output) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_looping(output: list[int]) -> bool:
    """True when fewer than half of the 4-grams of an output are different: a repetition loop."""
    return distinct_share(output) < LOOP_SHARE


def greedy(logits: Tensor, requests: list[int], positions: list[int]) -> Tensor:
    """The logits themselves: the lowest id among the largest, the one greedy choice of the project."""
    return logits


def sampled(temperature: float, seed: int, keys: list[str]) -> Choose:
    """Sampling at ``temperature`` with one Gumbel noise stream per absolute position of a request (named by
    ``keys[index]``).

    y = argmax(logits / temperature + G[request, position]) is distributed as the softmax, and the same whatever
    drafted: every arm sees identical prefixes at temperature > 0 too (drafters.md, section 4.2).
    """

    def choose(logits: Tensor, requests: list[int], positions: list[int]) -> Tensor:
        noise = torch.stack(
            [_gumbel(logits.shape[-1], f"{seed}/{keys[r]}/{p}") for r, p in zip(requests, positions, strict=True)]
        )
        return logits / temperature + noise.to(logits.device)

    return choose


def choice_rule(temperature: float, seed: int, keys: list[str]) -> Choose:
    """Greedy at temperature 0, else sampling with the noise streams of the requests ``keys``."""
    return sampled(temperature, seed, keys) if temperature else greedy


def observations(logits: Tensor, scores: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy in nats and top-1 probability of logits (B, V), and the margin of the chosen ``token`` (B,) over the next
    best score."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    best = scores.gather(-1, token[:, None])
    second = scores.scatter(-1, token[:, None], float("-inf")).amax(-1)
    return -(p * log_p).sum(-1), p.amax(-1), best[:, 0] - second


def _gumbel(size: int, name: str) -> Tensor:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    uniform = np.random.default_rng(key).random(size, dtype=np.float32)
    return torch.from_numpy(-np.log(-np.log(np.clip(uniform, 1e-20, 1 - 1e-7))))


class BatchedTarget:
    """The weights of a Hugging Face Llama model, arranged for batched decoding in ``dtype``.

    Residual stream, norms and logits stay in fp32 whatever ``dtype`` is; in a low precision the head scores all tokens
    in that precision and the best ``TOP_K`` of them again in fp32, so that the choice never rests on a rounded logit.
    """

    def __init__(self, model: torch.nn.Module, taps: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> None:
        core, config = model.model, model.config
        self.dtype, self.taps, self.device = dtype, taps, model.device
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps, self.rope = config.rms_norm_eps, core.rotary_emb
        self.embedding, self.norm = core.embed_tokens.weight, core.norm.weight.float()
        self.head = model.lm_head.weight
        self.head_low = self.head.to(dtype)
        self.layers = [self._pack(layer) for layer in core.layers]

    def _pack(self, layer: torch.nn.Module) -> dict[str, Tensor]:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        packed = {"qkv": qkv, "o": attention.o_proj.weight, "gate_up": gate_up, "down": mlp.down_proj.weight}
        return {name: weight.detach().to(self.dtype) for name, weight in packed.items()} | {
            "norm_in": layer.input_layernorm.weight.float(),
            "norm_post": layer.post_attention_layernorm.weight.float(),
        }

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """All layers over (b, s) tokens; returns the final hidden states (b, s, H) in fp32 and the taps (b, s, 3H) in
        ``dtype``."""
        x = self.embedding[tokens].float()
        cos, sin = (t.unsqueeze(2).to(self.dtype) for t in self.rope(x, positions))
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        taps = []
        for index, w in enumerate(self.layers):
            if index in self.taps:
                taps.append(x.to(self.dtype))
            h = F.rms_norm(x, x.shape[-1:], w["norm_in"], self.eps).to(self.dtype)
            q, k, v = F.linear(h, w["qkv"]).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=2)
            mixed = attend(index, self._rotate(q, cos, sin), self._rotate(k, cos, sin), v)
            x = x + F.linear(mixed.flatten(2), w["o"])
            h = F.rms_norm(x, x.shape[-1:], w["norm_post"], self.eps).to(self.dtype)
            gate, up = F.linear(h, w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.rms_norm(x, x.shape[-1:], self.norm, self.eps), torch.cat(taps, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (b, V) in fp32; exact where ``dtype`` is fp32, else exact for the ``TOP_K`` largest of each row."""
        low = F.linear(hidden.to(self.dtype), self.head_low).float()
        if self.dtype == torch.float32:
            return low
        top = low.topk(TOP_K, -1).indices
        exact = torch.einsum("bkh,bh->bk", self.head[top].float(), hidden)
        return low.scatter_(-1, top, exact)


class _Rows:
    """Key/value buffers, tap buffers and bookkeeping of the live rows; row b holds ``length[b]`` processed tokens."""

    def __init__(self, target: BatchedTarget, size: int, capacity: int) -> None:
        shape = (len(target.layers), size, target.kv_heads, capacity, target.head_dim)
        self.keys = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.values = torch.zeros_like(self.keys)
        width = target.embedding.shape[1] * len(target.taps)
        self.taps = torch.zeros(size, capacity, width, dtype=target.dtype, device=target.device)
        self.length = torch.zeros(size, dtype=torch.long, device=target.device)
        self.current = torch.zeros(size, dtype=torch.long, device=target.device)


class _Stream:
    """One run of continuous batching: fills rows, steps them together, yields what has finished."""

    def __init__(
        self,
        target: BatchedTarget,
        prompts: Iterable[tuple[int, list[int]]],
        *,
        batch: int,
        max_new: int,
        capacity: int,
        eos_ids: tuple[int, ...],
        choose: Choose,
        keep_top: bool,
        observe: bool,
        stop_loops: bool,
    ) -> None:
        self.target, self.queue, self.max_new, self.eos = target, deque(prompts), max_new, set(eos_ids)
        self.choose, self.stop_loops = choose, stop_loops
        self.kept = (("top_ids", "top_logits", "lse") if keep_top else ()) + (OBSERVED if observe else ())
        self.rows = _Rows(target, batch, capacity)
        self.batch = batch
        self.live: list[dict] = []  # row b of the buffers belongs to live[b]

    def _record(self, rows: slice, logits: Tensor) -> None:
        """Chooses the next token of every row and stores what the distribution said about it."""
        states = self.live[rows]
        scores = self.choose(logits, [s["index"] for s in states], [len(s["output"]) for s in states])
        token = scores.argmax(-1)
        said = {}
        if "lse" in self.kept:
            top = logits.topk(TOP_K, -1)
            said = {"top_ids": top.indices.to(torch.int32), "top_logits": top.values.half()}
            said["lse"] = logits.logsumexp(-1)
        if "margin" in self.kept:
            said |= dict(zip(OBSERVED, observations(logits, scores, token), strict=True))
        self.rows.current[rows] = token
        for i, (state, value) in enumerate(zip(states, token.tolist(), strict=True)):
            state["output"].append(value)
            for name, values in said.items():
                state[name].append(values[i])

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Processes the prompts of the newest rows as one flat sequence in which each attends to itself alone: nothing
        is padded."""
        buffers, target, first = self.rows, self.target, len(self.live) - len(prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=target.device)
        ends = lengths.cumsum(0)
        spans = [slice(int(end - n), int(end)) for n, end in zip(lengths, ends, strict=True)]
        groups = target.heads // target.kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = []
            for row, span in enumerate(spans, first):
                heads = [t[0, span].transpose(0, 1) for t in (q, k, v)]  # heads, n, d
                n = span.stop - span.start
                buffers.keys[layer, row, :, :n], buffers.values[layer, row, :, :n] = heads[1:]
                wide = [heads[0].float(), *(t.repeat_interleave(groups, 0).float() for t in heads[1:])]
                one = F.scaled_dot_product_attention(*(t[None] for t in wide), is_causal=True)[0]
                mixed.append(one.transpose(0, 1))  # fp32: the bf16 kernel is the slower one on a CPU
            return torch.cat(mixed)[None].to(target.dtype)

        flat = torch.tensor([token for prompt in prompts for token in prompt], device=target.device)
        positions = torch.cat([torch.arange(len(p), device=target.device) for p in prompts])
        hidden, taps = target.run(flat[None], positions[None], attend)
        for row, span in enumerate(spans, first):
            buffers.taps[row, : span.stop - span.start] = taps[0, span]
        buffers.length[first : len(self.live)] = lengths
        self._record(slice(first, len(self.live)), target.logits(hidden[0, ends - 1]))

    def _mask(self, where: Tensor) -> Tensor:
        """Additive mask (b, 1, heads per key head, width) that shows row b its first ``where[b]`` + 1 keys."""
        target, columns = self.target, torch.arange(int(where.max()) + 1, device=where.device)
        mask = torch.zeros(len(where), 1, 1, len(columns), dtype=target.dtype, device=where.device)
        mask.masked_fill_((columns > where[:, None])[:, None, None], float("-inf"))
        return mask.expand(-1, 1, target.heads // target.kv_heads, -1)

    def _step(self) -> None:
        """Processes the current token of every live row."""
        buffers, target, n = self.rows, self.target, len(self.live)
        where, index = buffers.length[:n].clone(), torch.arange(n, device=target.device)
        groups = [slice(i, min(i + STEP_ROWS, n)) for i in range(0, n, STEP_ROWS)]
        masks = [self._mask(where[rows]) for rows in groups]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            buffers.keys[layer, index, :, where] = k[:, 0]
            buffers.values[layer, index, :, where] = v[:, 0]
            q = q[:, 0].unflatten(1, (target.kv_heads, -1))
            mixed = [
                F.scaled_dot_product_attention(
                    q[rows],
                    buffers.keys[layer, rows, :, : mask.shape[-1]],
                    buffers.values[layer, rows, :, : mask.shape[-1]],
                    attn_mask=mask,
                )
                for rows, mask in zip(groups, masks, strict=True)
            ]
            return torch.cat(mixed).flatten(1, 2)[:, None]

        hidden, taps = target.run(buffers.current[:n, None], where[:, None], attend)
        buffers.taps[index, where] = taps[:, 0]
        buffers.length[:n] += 1
        self._record(slice(0, n), target.logits(hidden[:, 0]))

    def _stop(self, state: dict) -> str | None:
        output = state["output"]
        if output[-1] in self.eos:
            return "eos"
        if len(output) >= self.max_new:
            return "length"
        return (
            "loop" if self.stop_loops and len(output) % 32 == 0 and len(output) >= 96 and is_looping(output) else None
        )

    def _finish(self, row: int, reason: str) -> Generation:
        """Takes a finished request out; the last live row moves into its place, so that live rows stay contiguous."""
        state, last, buffers = self.live[row], len(self.live) - 1, self.rows
        tokens = torch.tensor(state["prompt"] + state["output"])
        taps = buffers.taps[row, : len(tokens) - 1].cpu().clone()
        if row != last:
            n = int(buffers.length[last])
            for buffer in (buffers.keys, buffers.values):
                buffer[:, row, :, :n] = buffer[:, last, :, :n]
            buffers.taps[row, :n] = buffers.taps[last, :n]
            buffers.length[row], buffers.current[row] = buffers.length[last], buffers.current[last]
            self.live[row] = self.live[last]
        self.live.pop()
        stacked = {name: torch.stack(state[name]).cpu() for name in self.kept}
        return Generation(state["index"], tokens, len(state["prompt"]), taps, stop=reason, **stacked)

    def __iter__(self) -> Iterator[Generation]:
        empty = ("output", *self.kept)
        while self.queue or self.live:
            free, waiting = self.batch - len(self.live), len(self.queue)
            if waiting and free >= min(ENTER_BATCH, waiting, max(1, self.batch // 8)):
                entering = [self.queue.popleft() for _ in range(min(waiting, free, PREFILL_BATCH))]
                self.live += [
                    {"index": index, "prompt": prompt} | {name: [] for name in empty} for index, prompt in entering
                ]
                self._prefill([prompt for _, prompt in entering])
            else:
                self._step()
            for row in reversed(range(len(self.live))):
                if reason := self._stop(self.live[row]):
                    yield self._finish(row, reason)


@torch.inference_mode()
def generate(
    target: BatchedTarget,
    prompts: list[list[int]],
    *,
    max_new: int,
    eos_ids: tuple[int, ...],
    batch: int = 64,
    choose: Choose = greedy,
    keep_top: bool = False,
    observe: bool = False,
    stop_loops: bool = False,
) -> Iterator[Generation]:
    """Answers ``prompts`` (lists of token ids) and yields every ``Generation`` when it is done, in any order.

    ``batch`` rows decode together; ``stop_loops`` cuts an answer that has fallen into a repetition loop (training data
    only).
    """
    capacity = max(map(len, prompts)) + max_new
    yield from _Stream(
        target,
        enumerate(prompts),
        batch=min(batch, len(prompts)),
        max_new=max_new,
        capacity=capacity,
        eos_ids=eos_ids,
        choose=choose,
        keep_top=keep_top,
        observe=observe,
        stop_loops=stop_loops,
    )
