"""``ngram``: lookup of the longest suffix of prompt + output that has occurred before (prompt lookup decoding).

The rule, frozen: the longest key of n tokens, n_max >= n >= n_min, whose *most recent* earlier occurrence ends before
the text does; the draft is what followed it, at most L tokens, cut at the end of the text and after an end-of-sequence
token. No match = no draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from specsel.engine.drafters.base import NO_TOKEN, Drafter, Drafts
from specsel.engine.target import Target

CONTEXT_CAP = 8
"""Longest suffix match that ``context.match_length`` tells apart."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Shortest and longest key in tokens."""

    n_min: int = 2
    n_max: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.n_min <= self.n_max <= CONTEXT_CAP:
            raise ValueError(
                f"n_min = {self.n_min}, n_max = {self.n_max}: expected 1 <= n_min <= n_max <= {CONTEXT_CAP}."
            )


class SuffixIndex:
    """End positions of the latest occurrence of every n-gram of a growing text, n = 1..CONTEXT_CAP."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []
        """For the current suffix of n + 1 tokens: where the latest earlier occurrence ends, or -1."""

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            self._previous = []
            for n in range(1, min(CONTEXT_CAP, end) + 1):
                key = tuple(self.tokens[end - n : end])
                self._previous.append(self._ends.get(key, -1))
                self._ends[key] = end

    def anchors(self, tokens: list[int], n_prompt: int) -> Iterator[None]:
        """Appends a prompt and then token by token its output; stops at every output token that has a successor."""
        self.extend(tokens[:n_prompt])
        for token in tokens[n_prompt:-1]:
            yield self.extend([token])

    def match_length(self, longest: int = CONTEXT_CAP) -> int:
        """Length of the longest suffix, at most ``longest`` tokens, that occurred earlier; 0 when its last token is
        new."""
        return next((n for n in range(min(longest, len(self._previous)), 0, -1) if self._previous[n - 1] >= 0), 0)

    def continuation(self, match_length: int, limit: int) -> list[int]:
        """What followed the latest earlier occurrence of the suffix of ``match_length`` tokens, at most ``limit``
        tokens."""
        start = self._previous[match_length - 1]
        return self.tokens[start : start + limit]


class Ngram(Drafter):
    """The lookup drafter; state = the index over the committed text of one request."""

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None, eos_ids: tuple[int, ...] = ()) -> None:
        self.config, self.eos = config or NgramConfig(), set(eos_ids)
        self.reset()

    def reset(self) -> None:
        """Forgets the request."""
        self.index = SuffixIndex()

    def extend(self, tokens: list[int], taps: object = None) -> None:
        """Takes newly committed tokens; features are not needed."""
        self.index.extend(tokens)

    def lookup(self, draft_len: int) -> tuple[list[int], int]:
        """The draft at the end of the committed text and the length of the key that gave it (0 = no match)."""
        n = self.index.match_length(self.config.n_max)
        if n < self.config.n_min:
            return [], 0
        draft = self.index.continuation(n, draft_len)
        stop = next((i for i, token in enumerate(draft, 1) if token in self.eos), len(draft))
        return draft[:stop], n

    def propose(self, draft_len: int) -> Drafts:
        """One draft from the current anchor, as Drafts with a single row."""
        return _rows([self.lookup(draft_len)], draft_len)

    def propose_all(self, tokens: list[int], n_prompt: int, taps: object, draft_len: int) -> Drafts:
        """One draft per output position that has a successor: anchors ``n_prompt`` ..

        ``len(tokens) - 2``.
        """
        self.reset()
        return _rows([self.lookup(draft_len) for _ in self.index.anchors(tokens, n_prompt)], draft_len)


def _rows(found: list[tuple[list[int], int]], draft_len: int) -> Drafts:
    tokens = np.full((len(found), draft_len), NO_TOKEN)
    for row, (draft, _) in enumerate(found):
        tokens[row, : len(draft)] = draft
    drafted = np.array([len(draft) for draft, _ in found], dtype=int)
    missing = np.full(tokens.shape, np.nan)
    return Drafts(tokens, drafted, missing, missing, match_length=np.array([n for _, n in found], dtype=int))


def suffix_match_lengths(tokens: list[int], n_prompt: int) -> np.ndarray:
    """``context.match_length`` of every anchor of an output, shape (T - 1,)."""
    index = SuffixIndex()
    return np.array([index.match_length() for _ in index.anchors(tokens, n_prompt)], dtype=int)


SETTING = NgramConfig()


def load(target: Target, config: NgramConfig, made: dict[str, Drafter]) -> Ngram:
    """See `Drafter`."""
    return Ngram(config, target.eos_ids)


def describe(config: NgramConfig, tag: str | None) -> dict:
    """See `Drafter`."""
    return {"kind": "longest suffix, most recent occurrence"} | asdict(config)
