"""Verification: several drafts of one anchor in a single target pass, the acceptance rule, and the end of an answer.

The drafts are merged into a trie rooted at the anchor; every node is one row of the pass and sees the committed text,
its ancestors and itself. A node's logits depend on its ancestors alone, so each draft is judged exactly as if it had
been verified by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
