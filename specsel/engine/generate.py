"""Batched generation by a Llama-architecture target: the source of training data and of position logs.

A request enters a free row of the batch as soon as another one has finished (continuous batching), so that the weights
are read once a step for all live rows. Every processed token leaves its tap features behind: no second pass over the
text is needed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specsel.engine.drafters.layers import rotate

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
    processed token (the last output token is never processed). ``said``, when asked for, per output token about the
    distribution that chose it: the largest logits, ``top_ids``/``top_logits`` (T, TOP_K), and ``lse`` (T,), the
    log-sum-exp of all (``keep_top``); ``entropy`` in nats, ``confidence``, and ``margin``, top-1 minus top-2 score,
    (T,) (``observe``).
    """

    index: int
    tokens: Tensor
    n_prompt: int
    taps: Tensor
    stop: str  # "eos", "length" or "loop" (cut early: only where ``stop_loops``)
    said: dict[str, Tensor]

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


def choice_rule(temperature: float, seed: int, keys: list[str]) -> Choose:
    """Greedy at temperature 0, else sampling with one Gumbel noise stream per absolute position of a request (named by
    ``keys[index]``).

    y = argmax(logits / temperature + G[request, position]) is distributed as the softmax, and the same whatever
    drafted: every arm sees identical prefixes at temperature > 0 too (drafters.md, section 4.2).
    """
    if not temperature:
        return greedy

    def choose(logits: Tensor, requests: list[int], positions: list[int]) -> Tensor:
        names = [f"{seed}/{keys[r]}/{p}" for r, p in zip(requests, positions, strict=True)]
        noise = torch.stack([_gumbel(logits.shape[-1], name) for name in names])
        return logits / temperature + noise.to(logits.device)

    return choose


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
        self.head_dim, self.eps, self.rope = config.head_dim, config.rms_norm_eps, core.rotary_emb
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

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """All layers over (b, s) tokens; returns the final hidden states (b, s, H) in fp32 and the taps (b, s, 3H) in
        ``dtype``."""
        x = self.embedding[tokens].float()
        cos, sin = self.rope(x, positions)
        table = cos.unsqueeze(2).to(self.dtype), sin.unsqueeze(2).to(self.dtype)
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        taps = []
        for index, w in enumerate(self.layers):
            if index in self.taps:
                taps.append(x.to(self.dtype))
            h = F.rms_norm(x, x.shape[-1:], w["norm_in"], self.eps).to(self.dtype)
            q, k, v = F.linear(h, w["qkv"]).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=2)
            mixed = attend(index, rotate(q, table), rotate(k, table), v)
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


class Answers:
    """Answers to ``prompts`` (lists of token ids); iterating yields every ``Generation`` when it is done, in any order.

    ``batch`` rows decode together; ``keep_top`` and ``observe`` ask for what `Generation` says of them; ``stop_loops``
    cuts an answer that has fallen into a repetition loop (training data only). Row b of the buffers belongs to
    ``live[b]`` and holds ``length[b]`` processed tokens.
    """

    def __init__(
        self,
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
    ) -> None:
        self.target, self.max_new, self.eos, self.choose = target, max_new, set(eos_ids), choose
        self.kept = (("top_ids", "top_logits", "lse") if keep_top else ()) + (OBSERVED if observe else ())
        self.stop_loops, self.queue, self.batch = stop_loops, deque(enumerate(prompts)), min(batch, len(prompts))
        self.live: list[dict] = []
        capacity = max(map(len, prompts)) + max_new
        shape = (len(target.layers), self.batch, target.kv_heads, capacity, target.head_dim)
        self.keys, self.values = torch.zeros((2, *shape), dtype=target.dtype, device=target.device)
        width = target.embedding.shape[1] * len(target.taps)
        self.taps = torch.zeros(self.batch, capacity, width, dtype=target.dtype, device=target.device)
        self.length, self.current = torch.zeros(2, self.batch, dtype=torch.long, device=target.device)

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
        self.current[rows] = token
        for i, (state, value) in enumerate(zip(states, token.tolist(), strict=True)):
            state["output"].append(value)
            for name, values in said.items():
                state[name].append(values[i])

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Processes the prompts of the newest rows as one flat sequence in which each attends to itself alone: nothing
        is padded."""
        target, first, sizes = self.target, len(self.live) - len(prompts), [len(p) for p in prompts]
        groups = target.heads // target.kv_heads

        def attend(layer: int, *qkv: Tensor) -> Tensor:
            mixed, parts = [], zip(*(t[0].transpose(0, 1).split(sizes, 1) for t in qkv), strict=True)  # heads, n, d
            for row, (q, k, v) in enumerate(parts, first):
                self.keys[layer, row, :, : k.shape[1]], self.values[layer, row, :, : k.shape[1]] = k, v
                wide = [q.float(), *(t.repeat_interleave(groups, 0).float() for t in (k, v))]
                one = F.scaled_dot_product_attention(*(t[None] for t in wide), is_causal=True)[0]
                mixed.append(one.transpose(0, 1))  # fp32: the bf16 kernel is the slower one on a CPU
            return torch.cat(mixed)[None].to(target.dtype)

        flat = torch.tensor(list(itertools.chain.from_iterable(prompts)), device=target.device)
        positions = torch.cat([torch.arange(n, device=target.device) for n in sizes])
        hidden, taps = target.run(flat[None], positions[None], attend)
        for row, part in enumerate(taps[0].split(sizes), first):
            self.taps[row, : len(part)] = part
        lengths = torch.tensor(sizes, device=target.device)
        self.length[first : len(self.live)] = lengths
        self._record(slice(first, len(self.live)), target.logits(hidden[0, lengths.cumsum(0) - 1]))

    def _mask(self, where: Tensor) -> Tensor:
        """Additive mask (b, 1, heads per key head, width) that shows row b its first ``where[b]`` + 1 keys."""
        target, columns = self.target, torch.arange(int(where.max()) + 1, device=where.device)
        mask = torch.zeros(len(where), 1, 1, len(columns), dtype=target.dtype, device=where.device)
        mask.masked_fill_((columns > where[:, None])[:, None, None], float("-inf"))
        return mask.expand(-1, 1, target.heads // target.kv_heads, -1)

    def _step(self) -> None:
        """Processes the current token of every live row."""
        target, n = self.target, len(self.live)
        where, index = self.length[:n].clone(), torch.arange(n, device=target.device)
        masks = [self._mask(part) for part in where.split(STEP_ROWS)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, index, :, where] = k[:, 0]
            self.values[layer, index, :, where] = v[:, 0]
            parts = (q[:, 0].unflatten(1, (target.kv_heads, -1)), self.keys[layer, :n], self.values[layer, :n])
            mixed = []
            for mask, some, keys, values in zip(masks, *(t.split(STEP_ROWS) for t in parts), strict=True):
                seen = (t[:, :, : mask.shape[-1]] for t in (keys, values))
                mixed.append(F.scaled_dot_product_attention(some, *seen, attn_mask=mask))
            return torch.cat(mixed).flatten(1, 2)[:, None]

        hidden, taps = target.run(self.current[:n, None], where[:, None], attend)
        self.taps[index, where] = taps[:, 0]
        self.length[:n] += 1
        self._record(slice(0, n), target.logits(hidden[:, 0]))

    def _stop(self, output: list[int]) -> str | None:
        if output[-1] in self.eos:
            return "eos"
        if len(output) >= self.max_new:
            return "length"
        checked = self.stop_loops and len(output) % 32 == 0 and len(output) >= 96
        return "loop" if checked and is_looping(output) else None

    def _finish(self, row: int, reason: str) -> Generation:
        """Takes a finished request out; the last live row moves into its place, so that live rows stay contiguous."""
        state, last = self.live[row], len(self.live) - 1
        tokens = torch.tensor(state["prompt"] + state["output"])
        taps = self.taps[row, : len(tokens) - 1].cpu().clone()
        if row != last:
            n = int(self.length[last])
            for buffer in (self.keys, self.values):
                buffer[:, row, :, :n] = buffer[:, last, :, :n]
            self.taps[row, :n] = self.taps[last, :n]
            self.length[row], self.current[row] = self.length[last], self.current[last]
            self.live[row] = self.live[last]
        self.live.pop()
        stacked = {name: torch.stack(state[name]).cpu() for name in self.kept}
        return Generation(state["index"], tokens, len(state["prompt"]), taps, reason, stacked)

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Generation]:
        while self.queue or self.live:
            free, waiting = self.batch - len(self.live), len(self.queue)
            if waiting and free >= min(ENTER_BATCH, waiting, max(1, self.batch // 8)):
                entering = [self.queue.popleft() for _ in range(min(waiting, free, PREFILL_BATCH))]
                for index, prompt in entering:
                    self.live.append({"index": index, "prompt": prompt} | {n: [] for n in ("output", *self.kept)})
                self._prefill([prompt for _, prompt in entering])
            else:
                self._step()
            for row in reversed(range(len(self.live))):
                if reason := self._stop(self.live[row]["output"]):
                    yield self._finish(row, reason)
