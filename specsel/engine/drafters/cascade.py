"""``cascade``: the lookup draft when its match is long enough, else the draft of a neural drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from specsel.engine.drafters.base import Drafter, Drafts
from specsel.engine.drafters.files import CheckpointError
from specsel.engine.target import Target


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """Shortest match in tokens that lets the lookup draft, and the name of the drafter that drafts otherwise."""

    n_switch: int = 4
    fallback: str = "dflash"


class Cascade(Drafter):
    """Composite drafter over two drafters that are kept up to date by whoever owns them: it has no state of its own."""

    name = "cascade"

    def __init__(self, ngram: Drafter, fallback: Drafter, config: CascadeConfig | None = None) -> None:
        self.ngram, self.fallback, self.config = ngram, fallback, config or CascadeConfig(fallback=fallback.name)
        self.parts = ("ngram", self.config.fallback)

    def propose(self, draft_len: int) -> Drafts:
        """One draft from the current anchor; the fallback runs only when the lookup has no long match."""
        lookup = self.ngram.propose(draft_len)
        if lookup.match_length[0] >= self.config.n_switch and lookup.proposed[0] > 0:
            return replace(lookup, source=np.array([0]), sources=self.parts)
        return self.combine(lookup, self.fallback.propose(draft_len))

    def combine(self, lookup: Drafts, fallback: Drafts) -> Drafts:
        """Row by row the lookup draft where its match is at least ``n_switch``, else the fallback's draft, tagged with
        its source.

        On rows without a long match the arm is therefore identical to its fallback. A short lookup draft is not padded.
        """
        use = (lookup.match_length >= self.config.n_switch) & (lookup.proposed > 0)
        return Drafts(
            np.where(use[:, None], lookup.tokens, fallback.tokens),
            np.where(use, lookup.proposed, fallback.proposed),
            np.where(use[:, None], np.nan, fallback.confidence),
            np.where(use[:, None], np.nan, fallback.entropy),
            match_length=lookup.match_length,
            source=np.where(use, 0, 1),
            sources=self.parts,
        )

    def propose_all(self, tokens: list[int], n_prompt: int, taps: object, draft_len: int) -> Drafts:
        """The batched twin: both parts at every anchor, combined row by row."""
        parts = (self.ngram, self.fallback)
        return self.combine(*(part.propose_all(tokens, n_prompt, taps, draft_len) for part in parts))


SETTING = CascadeConfig()


def load(target: Target, config: CascadeConfig, made: dict[str, Drafter]) -> Cascade:
    """See `Drafter`."""
    if config.fallback not in made:
        raise CheckpointError(
            f"cascade: no drafter '{config.fallback}' to fall back to; choose one of {', '.join(made)}."
        )
    return Cascade(made["ngram"], made[config.fallback], config)


def describe(config: CascadeConfig, tag: str | None) -> dict:
    """See `Drafter`."""
    return {"kind": "ngram when its match is long enough, else the fallback"} | asdict(config)
