"""What every drafter is and returns: drafts as arrays, one row per anchor, with the statistics of the drafter's own
distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NO_TOKEN = -1
NOT_ASKED = -1
HEAD_ROWS, CACHED_ROWS = 288, 32


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts from A anchors.

    ``tokens`` (A, L) int, NO_TOKEN after the end of a draft; ``proposed`` (A,) their number, NOT_ASKED where the
    drafter cannot run (anchor outside its window); ``confidence`` and ``entropy`` (A, L) top-1 probability and entropy
    in nats of each drafted slot, nan where there is none (always for ``ngram``, which has no distribution);
    ``match_length`` (A,) length of the matched suffix, NO_TOKEN where no lookup was made; ``source`` (A,) index into
    ``sources`` of the drafter whose draft a composite one used.
    """

    tokens: np.ndarray
    proposed: np.ndarray
    confidence: np.ndarray
    entropy: np.ndarray
    match_length: np.ndarray | None = None
    source: np.ndarray | None = None
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.proposed)

    def row(self, anchor: int) -> list[int]:
        """The drafted tokens of one anchor."""
        return self.tokens[anchor, : max(self.proposed[anchor], 0)].tolist()

    def accepted(self, output: np.ndarray) -> np.ndarray:
        """Accepted tokens at every anchor of an output (T,): the common prefix of draft and what follows, (T - 1,)."""
        width = self.tokens.shape[1]
        padded = np.pad(output, (0, width), constant_values=NO_TOKEN - 1)
        following = np.lib.stride_tricks.sliding_window_view(padded[1:], width)[: len(self)]
        return (self.tokens == following).cumprod(1).sum(1)

    def statistics(self) -> dict[str, np.ndarray]:
        """conf_mean, conf_min, conf_first, ent_mean over the proposed slots, each (A,); nan where there is no
        distribution."""
        has = ~np.isnan(self.confidence)
        n = np.where(has.any(1), has.sum(1), np.nan)
        return {
            "conf_mean": np.where(has, self.confidence, 0).sum(1) / n,
            "conf_min": np.where(has.any(1), np.where(has, self.confidence, np.inf).min(1, initial=np.inf), np.nan),
            "conf_first": self.confidence[:, 0] if self.confidence.shape[1] else np.full(len(self), np.nan),
            "ent_mean": np.where(has, self.entropy, 0).sum(1) / n,
        }

    def without(self, skipped: np.ndarray) -> Drafts:
        """The same drafts with some anchors (A,) bool marked as not asked."""
        if not skipped.any():
            return self
        hide = skipped[:, None]
        return replace(
            self,
            tokens=np.where(hide, NO_TOKEN, self.tokens),
            proposed=np.where(skipped, NOT_ASKED, self.proposed),
            confidence=np.where(hide, np.nan, self.confidence),
            entropy=np.where(hide, np.nan, self.entropy),
        )


class Drafter:
    """A drafter of one request at a time. Its module, named in the registry (`specsel.engine.pool`), has besides the
    class: ``SETTING``, what it is made from unless told otherwise (a folder of weights, or a record);
    ``load(target, setting, made)``, the drafter, which may build on those ``made`` before it; and
    ``describe(setting, tag)``, what a manifest says of it.
    """

    name = ""
    needs_taps = False  # does it read hidden states of the target?
    taps: tuple[int, ...] = ()  # which ones, by layer
    columns: torch.Tensor | None = None  # of the states that the whole pool reads, its own; None: all
    parts: tuple[str, ...] = ()  # drafters whose drafts a composite one hands on, see `combine`

    def reset(self) -> None:
        """Forgets the request."""

    def extend(self, tokens: list[int], taps: object = None) -> None:
        """Takes newly committed tokens, and the target's hidden states at the tokens that were processed."""

    def propose(self, draft_len: int) -> Drafts:
        """One draft from the current anchor, as Drafts with a single row."""
        raise NotImplementedError

    def propose_all(self, tokens: list[int], n_prompt: int, taps: object, draft_len: int) -> Drafts:
        """The batched twin: one draft per output position that has a successor, anchors n_prompt .. len(tokens) - 2."""
        raise NotImplementedError

    def combine(self, *drafts: Drafts) -> Drafts:
        """The drafts of a composite arm from those of its ``parts`` at the same anchors."""
        raise NotImplementedError


class Neural(Drafter):
    """A drafter with weights that reads the target's features: its model, the target's embedding (V, H), and the keys
    and values of one request, per layer (n, kv, d)."""

    needs_taps = True

    def __init__(self, model: nn.Module, embedding: Tensor) -> None:
        self.model, self.embedding = model.eval(), embedding
        self.reset()

    @property
    def window(self) -> int:
        """Largest number of positions of the drafter."""
        return self.model.config.max_position_embeddings

    def reset(self) -> None:
        """Forgets the request."""
        config, weight = self.model.config, self.model.fc.weight
        none = weight.new_zeros(0, config.num_key_value_heads, config.head_dim)
        self.keys = self.values = [none] * getattr(config, "num_hidden_layers", 1)

    def remember(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Appends keys and values of newly committed text."""
        self.keys = [torch.cat(pair) for pair in zip(self.keys, keys, strict=True)]
        self.values = [torch.cat(pair) for pair in zip(self.values, values, strict=True)]

    def own(self, taps: Tensor) -> Tensor:
        """The drafter's columns of the target's taps (m, n H)."""
        return taps if self.columns is None else taps[:, self.columns.to(taps.device)]


def from_slots(tokens: Tensor, confidence: Tensor, entropy: Tensor, draft_len: int) -> Drafts:
    """Drafts from token ids, confidences and entropies, each (A, slots); missing slots up to ``draft_len`` stay
    empty."""
    rows = ((0, 0), (0, draft_len - tokens.shape[1]))
    parts = [np.pad(part.double().cpu().numpy(), rows, constant_values=np.nan) for part in (confidence, entropy)]
    ids = np.pad(tokens.cpu().numpy(), rows, constant_values=NO_TOKEN)
    return Drafts(ids, np.full(len(ids), tokens.shape[1]), *parts)


def best_tokens(states: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index of the best token, its probability, and the entropy in nats of the distribution, each (n,), of states
    (n, H) under the rows of ``head``; in fp32 at temperature 1, before any truncation.

    In pieces: as many rows as the product likes, then as many as stay in the cache.
    """
    found = []
    for some in states.split(HEAD_ROWS):
        for logits in F.linear(some, head).split(CACHED_ROWS):
            log_q = torch.log_softmax(logits.float(), -1)
            q = log_q.exp()
            found.append((logits.argmax(-1), q.amax(-1), -(q * log_q).sum(-1)))
    best, confidence, entropy = (torch.cat(part) for part in zip(*found, strict=True))
    return best, confidence, entropy
