"""The ledger of a chapter: figures become claims, and claims become tables and sentences.

A claim is made from an `Estimate`, whose interval, resamples and seed it keeps. `table` shows figures, `publish` a
count or a word, `say` a sentence with claims in it: the same in JupyterLab, in papermill's output and in the book.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from specsel.logs import project_folder, write_bytes_atomically
from specsel.paper.claims import UNITS, Claim, ClaimError, Label, cite, dump_claims, format_value, make_claim
from specsel.paper.show import Shown, escaped, grid, mark

Keys = tuple[str, ...]
FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")  # of a template: an escaped brace, or a claim or word
SET_UP = 2  # the code cell of a chapter that opens the ledger
ROUNDING = 1e-9  # below it a difference is one of the arithmetic


@dataclass
class Ledger:
    """The claims of one chapter and the file that they are written to at the end of a cell."""

    path: Path
    origin: dict[str, str]
    label: Label = Label.MEASURED
    entries: dict[Keys, Claim] = field(default_factory=dict)  # (quantity, *keys) -> claim
    units: dict[str, str] = field(default_factory=dict)  # of quantities that only this chapter has
    stale: bool = False  # is there a claim that the file lacks?
    cell: int = 0  # number of the code cell that runs, the parameters being the first; 0 outside of a notebook

    @property
    def claims(self) -> dict[str, Claim]:
        """Name -> claim."""
        return {claim.name: claim for claim in self.entries.values()}

    def add(self, claim: Claim) -> Claim:
        """Store one claim; the same name with another content is refused."""
        old = self.entries.setdefault((claim.quantity, *claim.keys), claim)
        if old.content() != claim.content():
            raise ClaimError(
                f"claim '{claim.name}' was already published as {old} and now comes as {claim}; give the "
                "second one another name, or run the notebook from its first cell"
            )
        self.stale = True
        return old

    def write(self) -> None:
        """Write the file, in the order of publication, unless it is up to date."""
        if self.stale:
            write_bytes_atomically(self.path, dump_claims(self.entries.values()))
            self.stale = False

    def count(self, *_: Any) -> None:
        """The next cell runs."""
        self.cell += 1

    def done(self) -> None:
        """The end of a public verb: write now, unless a notebook's cell will do it at its end."""
        if _shell() is None:
            self.write()

    # ---- the three verbs; `how`: label (default: that of the log), headline, function, source, as in `make_claim`

    def table(
        self,
        figures: pd.DataFrame,
        rows: str | Sequence[str] | None = None,
        columns: str | Sequence[str] | None = None,
        *,
        units: Mapping[str, str] | None = None,
        corner: str = "",
        show: bool = True,
        **how: Any,
    ) -> None:
        """Publish every Estimate of `figures` (see `stats.by`) as a claim and show them as a table.

        rows, columns: "quantity", "group" or "workload" (the first part of the key), "key" or "arm" (its rest), or a
        list of them; by default groups go down and the others across. A quantity that is not in UNITS states its unit
        once, in `units`. Raises ClaimError for a quantity without a unit or with two.
        """
        columns_of = zip(figures["quantity"], figures["key"], figures["estimate"], strict=True)
        units = units or {}
        made = [self._claim((q, *map(str, key)), e, self.unit(q, units.get(q)), **how) for q, key, e in columns_of]
        self.done()
        if show:
            _display(grid(made, rows, columns, corner=corner, notebook=self.path.stem))

    def publish(self, name: str | Keys, value: Any, *, unit: str | None = None, reason: str = "", **how: Any) -> Claim:
        """A count, a word, or one Estimate that prose cites; `reason` says why a number has no interval."""
        keys = (name,) if isinstance(name, str) else tuple(map(str, name))
        words = isinstance(getattr(value, "value", value), (str, bool))
        unit = "" if words else self.unit(keys[0], unit, "count" if isinstance(value, int) else None)
        claim = self._claim(keys, value, unit, reason=reason, **how)
        self.done()
        return claim

    def say(self, template: str, **words: object) -> None:
        """Show Markdown with claims, ``{capture}``, ``{skill:chat}``, ``{requests|value}``, and computed words in it.

        A claim is shown as value [interval] [LABEL], its origin under the pointer; a brace is written twice. Raises
        ClaimError for a name that is neither a claim nor a word, and for a number among the words.
        """
        plain, marked = (FIELD.sub(lambda m, i=i: self._filled(m, words)[i], template) for i in (0, 1))
        _display(Shown(plain, markdown=marked))

    # ---- what they are made of

    def unit(self, quantity: str, said: str | None = None, otherwise: str | None = None) -> str:
        """The unit of a quantity; ClaimError when it has none, or gets a second one."""
        known = UNITS.get(quantity, self.units.get(quantity))
        found = next((unit for unit in (known, said, otherwise) if unit is not None), None)
        if found is None:
            raise ClaimError(f"quantity '{quantity}' has no unit; state it once, as units={{'{quantity}': 'ratio'}}")
        if said is not None and found != said:
            raise ClaimError(f"quantity '{quantity}' has the unit '{known}' and now gets '{said}'; rename one")
        self.units[quantity] = found
        return found

    def _claim(self, keys: Keys, value: Any, unit: str, *, headline: bool = False, **how: Any) -> Claim:
        origin = None if how.get("source") else self.origin
        how = {"label": self.label, "function": self.cell and f"cell {self.cell}", "origin": origin} | how
        headline = headline and getattr(value, "defined", True)
        return self.add(make_claim(keys, value, unit=unit, headline=headline, **how))

    def _filled(self, match: re.Match, words: Mapping[str, object]) -> tuple[str, str]:
        """A field of a template as plain text and as Markdown."""
        reference = match.group(1)
        if reference is None:
            return (match.group(0)[0],) * 2
        if reference in words:
            word = words[reference]
            if isinstance(word, float):
                raise ClaimError(f"the word '{reference}' is the number {word}; publish it, to tell its origin")
            return str(word), escaped(str(word))
        try:
            claim, text = cite({"": self.claims}, f".{reference}")
        except KeyError as error:
            raise ClaimError(f"'{{{reference}}}' is neither a word nor a claim: {error.args[0]}") from None
        return text, mark(claim, text, self.path.stem, markdown=True)


def _display(shown: Shown) -> None:
    if _shell() is not None:
        from IPython.display import display

        display(shown)


def _shell() -> Any:
    """The notebook's shell, or None outside of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return shell if shell is not None and hasattr(shell, "kernel") else None


def open_ledger(
    notebook: str,
    *,
    run: str = "",
    log_sha256: str = "",
    label: Label | str = Label.MEASURED,
    folder: str | Path | None = None,
) -> Ledger:
    """Start the claims file of a notebook, empty, in `folder` (default: $SPECSEL_VALUES, else _build/values of the
    book's folder).

    run and log_sha256 become the origin of every claim that is published afterwards, label its label.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", notebook):
        raise ClaimError(f"ledger name '{notebook}': use letters, digits, '_' and '-', like the notebook's file")
    where = Path(folder or os.environ.get("SPECSEL_VALUES") or (project_folder() or Path()) / "_build/values")
    where.mkdir(parents=True, exist_ok=True)
    origin = {"notebook": notebook, "run": run, "log_sha256": log_sha256}
    ledger = Ledger(where / f"{notebook}.json", origin, Label(label), stale=True)
    ledger.write()
    if shell := _shell():
        ledger.cell = SET_UP
        shell.events.register("pre_run_cell", ledger.count)
        shell.events.register("post_run_cell", lambda *_: ledger.write())
    return ledger


# ---- words that are computed


def verdict(
    estimate: Any,
    null: float = 0.0,
    material: float = 0.0,
    *,
    undefined: str = "is undefined",
    no_interval: str = "has no interval",
    larger: str = "is larger",
    immaterial: str = "is larger, but by too little to matter",
    alike: str = "cannot be told apart from it",
    smaller: str = "is smaller",
) -> str:
    """How an Estimate stands to `null`, in words of the caller; below `material` a difference is too small to matter.

    >>> from specsel.stats import Estimate
    >>> gain = Estimate(1.3, 1.1, 1.5, 0.95, 64, "BCa", 1000, 7)
    >>> verdict(gain, 1.0, larger="beats random", smaller="is worse than random")
    'beats random'
    """
    if estimate.value is None or not math.isfinite(estimate.value):
        return undefined
    if estimate.low is None:
        return no_interval
    if estimate.high < null - ROUNDING:
        return smaller
    if estimate.low <= null + ROUNDING:
        return alike
    return larger if estimate.value - null > material else immaterial


def listed(items: Iterable[Any], *, none: str = "none") -> str:
    """Names in a sentence.

    >>> listed(["code", "chat", "copy"]), listed([])
    ('code, chat and copy', 'none')
    """
    words = [format_value(item) if isinstance(item, float) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or none
