"""Speculative decoding of one request: draft, verify the union in one target pass, commit, roll the caches back,
repeat.

The drafts of an anchor are merged into a trie rooted there; every node is one row of the target pass and sees the
committed text, its ancestors and itself. A node's logits depend on its ancestors alone, so each draft is judged exactly
as if it had been verified by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specsel.engine.generate import Choose, greedy
from specsel.engine.target import Features, cache_length, keep
from specsel.selection.selector import Selector


@dataclass(frozen=True, slots=True)
class Trie:
    """Union of drafts: per node its token, its parent (the root is node 0, its own parent) and its depth; per draft the
    node path."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    paths: list[list[int]]

    def __len__(self) -> int:
        return len(self.tokens)


def merge(anchor: int, drafts: list[list[int]]) -> Trie:
    """The trie of some drafts; common prefixes share their rows, parents come before children.

    >>> merge(7, [[1, 2], [1, 3]]).tokens
    [7, 1, 2, 3]
    """
    trie = Trie([anchor], [0], [0], [])
    children: dict[tuple[int, int], int] = {}
    for draft in drafts:
        node, path = 0, []
        for token in draft:
            child = children.get((node, token))
            if child is None:
                child = children[node, token] = len(trie)
                trie.tokens.append(token)
                trie.parents.append(node)
                trie.depths.append(trie.depths[node] + 1)
            node = child
            path.append(node)
        trie.paths.append(path)
    return trie


def attention_mask(trie: Trie, cached: int, device: torch.device | str = "cpu") -> Tensor:
    """Boolean mask (1, 1, N, cached + N), True = attend: all cached tokens, the node's ancestors and the node
    itself."""
    n = len(trie)
    tree = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        tree[node] = tree[trie.parents[node]]
        tree[node, node] = True
    return torch.cat([torch.ones(n, cached, dtype=torch.bool), tree], 1)[None, None].to(device)


def accept(
    draft: list[int], choices: list[int], *, remaining: int, eos_ids: tuple[int, ...]
) -> tuple[int, list[int], str | None]:
    """The acceptance rule: longest prefix of the draft that equals the target's choices, plus the target's own next
    token.

    ``choices[i]`` is the target's choice after the anchor and the first i drafted tokens (len(draft) + 1 of them).
    Returns the accepted count (bonus excluded, cut where the answer stops), the emitted tokens, and the stop reason
    "eos", "length" or None.

    >>> accept([11, 2, 13], [11, 2, 13, 14], remaining=50, eos_ids=(2,))
    (2, [11, 2], 'eos')
    """
    matched = next(
        (i for i, (token, choice) in enumerate(zip(draft, choices, strict=False)) if token != choice), len(draft)
    )
    emitted = draft[:matched] + [choices[matched]]
    end = next((i for i, token in enumerate(emitted, 1) if token in eos_ids), None)
    stop = "eos" if end is not None and end <= remaining else "length" if len(emitted) >= remaining else None
    emitted = emitted[: min(end or len(emitted), remaining)]
    return min(matched, len(emitted)), emitted, stop


@dataclass(frozen=True, slots=True)
class Block:
    """One block: where it started, which arm was committed, and per verified arm what it proposed and had accepted
    (bonus excluded)."""

    position: int
    arm: str
    proposed: dict[str, int]
    accepted: dict[str, int]
    emitted: int
    rows: int  # rows of the target pass


@dataclass(slots=True)
class Trace:
    """An answer with the blocks that made it; ``margins`` are the target's top-1 minus top-2 scores (greedy: logits) at
    every committed token."""

    output: list[int]
    stop: str
    blocks: list[Block] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


Decide = Callable[[int, dict], tuple[list[str], str | None]]
"""Maps (position, state) to the arms to draft with and the arm to commit (None = the one with most accepted, first on
ties). The state holds the output so far, the pool, and ``draft``: the drafts of an arm, made once a block."""


def always(arm: str) -> Decide:
    """The fixed policy."""
    return lambda position, state: ([arm], arm)


def redrafting(selector: Selector, arms: tuple[str, ...]) -> Decide:
    """The selector as a policy: its arm drafts first, then all arms where its confidence speaks for another one."""
    first = arms.index(selector.dominant)

    def decide(position: int, state: dict) -> tuple[list[str], None]:
        found, mine = state["draft"](selector.dominant).statistics(), np.arange(len(arms)) == first
        stats = {name: np.where(mine, values[:, None], np.nan) for name, values in found.items()}
        return (list(arms) if selector.redraft(stats)[0] else [selector.dominant]), None

    return decide


def plain(position: int, state: dict) -> tuple[list[str], None]:
    """No drafts at all: plain decoding through the same code."""
    return [], None


class Decoder:
    """A target and a pool of drafters that are kept in step with the committed text; drafts come from whichever arms
    are asked."""

    def __init__(
        self, features: Features, pool: dict[str, object], *, draft_len: int = 9, choose: Choose = greedy
    ) -> None:
        self.features, self.pool, self.draft_len, self.choose = features, pool, draft_len, choose
        self.target = features.target

    def run(self, prompt: list[int], decide: Decide, *, max_new: int, index: int = 0) -> Trace:
        """Decodes one request of at most ``max_new`` output tokens; ``index`` names the request to the choice rule (its
        noise stream)."""
        logits, taps, cache = self.features(self._tensor(prompt), last_only=True)
        for drafter in self.pool.values():
            drafter.reset()
        scores = self.choose(logits, [index], [0])
        token = int(scores[0].argmax())
        stop = "eos" if token in self.target.eos_ids else "length" if max_new == 1 else ""
        trace = Trace([token], stop, margins=_margins(scores))
        self._extend(prompt + [token], taps)
        while not trace.stop:
            self._block(cache, decide, trace, max_new, index)
        return trace

    def _tensor(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self.target.model.device)

    def _extend(self, tokens: list[int], taps: Tensor) -> None:
        for drafter in self.pool.values():
            drafter.extend(tokens, taps)

    def _block(self, cache, decide: Decide, trace: Trace, max_new: int, index: int) -> None:
        position, cached = len(trace.output) - 1, cache_length(cache)
        draft = functools.cache(lambda arm: self.pool[arm].propose(self.draft_len))
        arms, commit = decide(position, {"output": trace.output, "pool": self.pool, "draft": draft})
        drafts = {arm: draft(arm).row(0) for arm in arms} | {"": []}  # and nothing: the target's own token
        trie = merge(trace.output[-1], list(drafts.values()))
        depths = self._tensor(trie.depths)
        mask = attention_mask(trie, cached, depths.device)
        logits, taps, _ = self.features(self._tensor(trie.tokens), cache=cache, positions=cached + depths, mask=mask)
        scores = self.choose(logits, [index] * len(trie), [position + 1 + depth for depth in trie.depths])
        choices = scores.argmax(-1).tolist()
        rule = {"remaining": max_new - len(trace.output), "eos_ids": self.target.eos_ids}
        paths = dict(zip(drafts, trie.paths, strict=True))
        judged = {arm: accept(drafts[arm], [choices[node] for node in [0, *paths[arm]]], **rule) for arm in drafts}
        best = commit or max(drafts, key=lambda arm: judged[arm][0])
        accepted, emitted, stop = judged[best]
        path = [0, *paths[best][:accepted]]
        rows = self._tensor(path[: len(emitted)])
        keep(cache, cached, cached + rows)
        trace.margins += _margins(scores[rows])
        proposed, right = {a: len(drafts[a]) for a in arms}, {a: judged[a][0] for a in arms}
        trace.blocks.append(Block(position, best, proposed, right, len(emitted), len(trie)))
        trace.output += emitted
        trace.stop = stop or ""
        self._extend(emitted, taps[rows])


def _margins(scores: Tensor) -> list[float]:
    best, second = scores.topk(2).values.unbind(-1)
    return (best - second).tolist()
