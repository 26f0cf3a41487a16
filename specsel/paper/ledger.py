"""The ledger of a chapter: figures become claims, and claims become tables and sentences.

A claim is made from an `Estimate`, whose interval, resamples and seed it keeps. `table` shows figures, `publish` a
count or a word, `say` a sentence with claims in it: the same in JupyterLab, in papermill's output and in the book.
"""

from __future__ import annotations

import html
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
from specsel.paper.claims import (
    UNITS,
    Claim,
    ClaimError,
    Label,
    cite,
    describe_origin,
    dump_claims,
    format_value,
    make_claim,
)
from specsel.stats import Estimate

Keys = tuple[str, ...]
FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")  # of a template: an escaped brace, or a claim or word
SPECIAL, ESCAPED = re.compile(r"([\\`*_\[\]<>$|])"), r"\\\1"  # what Markdown would take for its own
ALSO = {"workload": "group", "tier": "group", "arm": "key", "policy": "key"}  # names of parts of a key in a table
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

    @property
    def claims(self) -> dict[str, Claim]:
        """Name -> claim."""
        return {claim.name: claim for claim in self.entries.values()}

    def add(self, claim: Claim) -> Claim:
        """Store one claim; the same name with another content is refused."""
        key = (claim.quantity, *claim.keys)
        old = self.entries.get(key)
        if old is not None and old.content() != claim.content():
            raise ClaimError(
                f"claim '{claim.name}' was already published as {old} and now comes as {claim}; give the "
                "second one another name, or run the notebook from its first cell"
            )
        self.entries[key] = old or claim
        self.stale = True
        return self.entries[key]

    def write(self) -> None:
        """Write the file, in the order of publication, unless it is up to date."""
        if self.stale:
            write_bytes_atomically(self.path, dump_claims(self.entries.values()))
            self.stale = False

    def done(self) -> None:
        """The end of a public verb: write now, unless a notebook's cell will do it at its end."""
        if _shell() is None:
            self.write()

    # ---- the three verbs

    def table(
        self,
        figures: pd.DataFrame,
        rows: str | Sequence[str] | None = None,
        columns: str | Sequence[str] | None = None,
        *,
        units: Mapping[str, str] | None = None,
        label: Label | str | None = None,
        headline: bool = False,
        function: str = "",
        corner: str = "",
        show: bool = True,
    ) -> None:
        """Publish every Estimate of `figures` (see `stats.by`) as a claim and show them as a table.

        rows, columns: "quantity", "group" or "workload" (the first part of the key), "key" or "arm" (its rest), or a
        list of them; by default groups go down and the others across. A quantity that is not in UNITS states its unit
        once, in `units`. Raises ClaimError for a quantity without a unit or with two.
        """
        made = []
        for quantity, key, estimate in zip(figures["quantity"], figures["key"], figures["estimate"], strict=True):
            unit = self.unit(quantity, (units or {}).get(quantity))
            made.append(self._claim((quantity, *map(str, key)), estimate, unit, label, headline, function))
        self.done()
        if show:
            _display(grid(made, rows, columns, corner=corner, notebook=self.path.stem))

    def publish(
        self,
        name: str | Keys,
        value: Any,
        *,
        unit: str | None = None,
        reason: str = "",
        label: Label | str | None = None,
        headline: bool = False,
        function: str = "",
        source: str = "",
    ) -> Claim:
        """A count, a word, or one Estimate that prose cites; `reason` says why a number has no interval."""
        keys = (name,) if isinstance(name, str) else tuple(map(str, name))
        number = not isinstance(getattr(value, "value", value), (str, bool))
        unit = self.unit(keys[0], unit, otherwise="count" if isinstance(value, int) else None) if number else ""
        claim = self._claim(keys, value, unit, label, headline, function, reason=reason, source=source)
        self.done()
        return claim

    def say(self, template: str, **words: object) -> None:
        """Show Markdown with claims, ``{capture}``, ``{skill:chat}``, ``{requests|value}``, and computed words in it.

        A claim is shown as value [interval] [LABEL], its origin under the pointer; a brace is written twice. Raises
        ClaimError for a name that is neither a claim nor a word, and for a number among the words.
        """
        _display(self.sentence(template, **words))

    # ---- what they are made of

    def unit(self, quantity: str, said: str | None = None, *, otherwise: str | None = None) -> str:
        """The unit of a quantity; ClaimError when it has none, or gets a second one."""
        known = UNITS.get(quantity, self.units.get(quantity))
        if known is None and said is None and otherwise is None:
            raise ClaimError(f"quantity '{quantity}' has no unit; state it once, as units={{'{quantity}': 'ratio'}}")
        if known is not None and said is not None and known != said:
            raise ClaimError(f"quantity '{quantity}' has the unit '{known}' and now gets '{said}'; rename one")
        found = known if known is not None else said if said is not None else otherwise
        return found if quantity in UNITS else self.units.setdefault(quantity, found)

    def _claim(
        self,
        keys: Keys,
        value: Any,
        unit: str,
        label: Label | str | None,
        headline: bool,
        function: str,
        *,
        reason: str = "",
        source: str = "",
    ) -> Claim:
        defined = not isinstance(value, Estimate) or value.defined
        return self.add(
            make_claim(
                keys,
                value,
                label=label or self.label,
                unit=unit,
                function=function or _cell(),
                source=source,
                origin=None if source else self.origin,
                headline=headline and defined,
                reason=reason,
            )
        )

    def sentence(self, template: str, **words: object) -> Shown:
        """What `say` shows, as Markdown and as plain text."""
        plain, marked = [], []
        at = 0
        for match in FIELD.finditer(template):
            between = template[at : match.start()]
            text, mark = self._filled(match, words)
            plain += [between, text]
            marked += [between, mark]
            at = match.end()
        rest = template[at:]
        return Shown("".join([*plain, rest]), markdown="".join([*marked, rest]))

    def _filled(self, match: re.Match, words: Mapping[str, object]) -> tuple[str, str]:
        """A field of a template as plain text and as Markdown."""
        reference = match.group(1)
        if reference is None:
            return (match.group(0)[0],) * 2
        if reference in words:
            word = words[reference]
            if isinstance(word, float):
                raise ClaimError(f"the word '{reference}' is the number {word}; publish it, to tell its origin")
            return str(word), SPECIAL.sub(ESCAPED, str(word))
        try:
            claim, text = cite({"": self.claims}, f".{reference}")
        except KeyError as error:
            raise ClaimError(f"'{{{reference}}}' is neither a word nor a claim: {error.args[0]}") from None
        return text, mark(claim, text, self.path.stem, markdown=True)


@dataclass(frozen=True)
class Shown:
    """Something to read, as plain text and as Markdown or HTML."""

    text: str
    markdown: str = ""
    html: str = ""

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rich = {"text/markdown": self.markdown, "text/html": self.html}
        return {"text/plain": self.text} | {kind: item for kind, item in rich.items() if item}


def mark(claim: Claim, text: str, notebook: str, *, markdown: bool = False) -> str:
    """A claim's text as HTML (that Markdown leaves alone) with its origin, for a pointer, and its name, for a build."""

    def part(kind: str, shown: str) -> str:
        shown = html.escape(shown, quote=False)
        return f'<span class="claim-{kind}">{SPECIAL.sub(ESCAPED, shown) if markdown else shown}</span>'

    value, label, _ = text.rpartition(f" [{claim.label}]") if text.endswith(f"[{claim.label}]") else (text, "", "")
    number, bracket, limits = value.partition(" [") if claim.low is not None else (value, "", "")
    inside = part(
        "value" if not isinstance(claim.value, str) else "words", number
    )  # a line may break between the parts
    inside += " " + part("value", bracket[1:] + limits) if bracket else ""
    inside += " " + part("label", label.strip()) if label else ""
    origin, name = (html.escape(item, quote=True) for item in (describe_origin(claim), f"{notebook}.{claim.name}"))
    return f'<span class="claim" title="{origin}" data-claim="{name}">{inside}</span>'


def grid(
    claims: Iterable[Claim],
    rows: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    *,
    corner: str = "",
    notebook: str = "",
) -> Shown:
    """Claims (of a notebook) as a table, a row for each value of `rows`; the labels stand in the corner."""
    claims = list(claims)
    parts = _parts(claims)
    alike = all(p["key"] == p["group"] for p in parts)
    several = [n for n in ("quantity", "group", "key") if len({p[n] for p in parts}) > 1]
    first = "group" if "group" in several else "quantity" if "quantity" in several else "key"
    down = _chosen(rows, [first])
    taken = {*down, *(("group", "key") if alike and {"group", "key"} & {*down} else ())}
    across = _chosen(columns, [n for n in several if n not in taken])
    cells = {(_at(p, down), _at(p, across)): c for p, c in zip(parts, claims, strict=True)}
    if len(cells) < len(claims):
        raise ClaimError(f"two figures share a cell of the table by {down} and {across}; name other rows or columns")
    heads = list(dict.fromkeys(c for _, c in cells)) or [("",)]
    lines = list(dict.fromkeys(r for r, _ in cells))
    labels = ", ".join(sorted({f"[{c.label}]" for c in claims}))
    if heads == [()]:
        titles = [_title(claims[0].quantity, claims)]
    else:
        titles = [_title(" · ".join(_words(h)), [c for (_, a), c in cells.items() if a == h]) for h in heads]
    names = [" · ".join(_words(line)) or "all" for line in lines]
    texts = [[_cell_text(cells.get((line, head))) for head in heads] for line in lines]
    first = f"{corner} {labels}".strip()
    frame = pd.DataFrame(texts, index=pd.Index(names, name=None), columns=titles)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{_cell_html(cells.get((line, head)), notebook)}</td>" for head in heads)
        + "</tr>"
        for name, line in zip(names, lines, strict=True)
    )
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in (first, *titles))
    page = f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return Shown(f"{first}\n{frame.to_string()}", html=page)


def _parts(claims: Sequence[Claim]) -> list[dict[str, Keys]]:
    """What a claim is of: its quantity, its group (the first key; () over all requests) and its other keys.

    A quantity's figures over all requests have a key less than those of groups. Where nothing has other keys, group and
    key are the same.
    """
    longest: dict[str, int] = {}
    for c in claims:
        longest[c.quantity] = max(longest.get(c.quantity, 0), len(c.keys))
    split = [(c, len(c.keys) == longest[c.quantity]) for c in claims]
    parts = [
        {"quantity": (c.quantity,), "group": c.keys[:1] if full else (), "key": c.keys[1:] if full else c.keys}
        for c, full in split
    ]
    alike = not any(p["key"] for p in parts)
    return [p | {"key": p["group"]} for p in parts] if alike else parts


def _chosen(said: str | Sequence[str] | None, otherwise: Sequence[str]) -> list[str]:
    names = otherwise if said is None else [said] if isinstance(said, str) else said
    return [ALSO.get(name, name) for name in names]


def _at(part: Mapping[str, Keys], names: Sequence[str]) -> Keys:
    """The parts that a row or column stands for."""
    unknown = [name for name in names if name not in part]
    if unknown:
        raise ClaimError(f"a table has rows and columns by {', '.join((*part, *ALSO))}, not by '{unknown[0]}'")
    return tuple(" · ".join(part[name]) if name != "quantity" else part[name][0] for name in names)


def _words(parts: Keys) -> list[str]:
    return [part.replace("_", " ") if part in UNITS else part for part in parts if part]


def _title(text: str, claims: Sequence[Claim]) -> str:
    """A column's head, with the unit where it is one that its cells do not show."""
    units = {c.unit for c in claims if not isinstance(c.value, str)}
    unit = units.pop() if len(units) == 1 else ""
    text = text.replace("_", " ") if text in UNITS else text
    return f"{text}, {unit.replace('/', ' per ')}" if unit in ("tokens/block", "tokens/s") else text


def _cell_text(claim: Claim | None) -> str:
    if claim is None:
        return ""
    text = str(claim).removesuffix(f" [{claim.label}]")
    return re.sub(r" tokens/(block|s)\b", "", text)


def _cell_html(claim: Claim | None, notebook: str) -> str:
    return "" if claim is None else mark(claim, _cell_text(claim), notebook)


def _display(shown: Shown) -> None:
    if _shell() is None:
        return
    from IPython.display import display

    display(shown)


def _shell() -> Any:
    """The notebook's shell, or None outside of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module else None
    return shell if shell is not None and hasattr(shell, "kernel") else None


def _cell() -> str:
    """The running cell, as the origin of a figure that it computes in view."""
    shell = _shell()
    return f"cell {shell.execution_count}" if shell else ""


# the open ledger of this process (a notebook is a process); a ContextVar would not outlive a cell
_ledgers: list[Ledger] = []


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
    ledger = Ledger(where / f"{notebook}.json", {k: v for k, v in origin.items() if v}, Label(label), stale=True)
    ledger.write()
    if not _ledgers and (shell := _shell()):
        shell.events.register("post_run_cell", lambda *_: _ledgers[-1].write())
    _ledgers[:] = [ledger]
    return ledger


def publish(name: str, value: Any, **how: Any) -> Claim:
    """`make_claim` with the origin of the open ledger, stored in that ledger; raises ClaimError when none is open."""
    ledger = _open(name)
    claim = ledger.add(make_claim(name, value, origin=None if how.get("source") else ledger.origin, **how))
    ledger.done()
    return claim


def publish_all(claims: list[Claim]) -> list[Claim]:
    """Store claims that were built elsewhere (for instance by `headline`) in the open ledger."""
    made = [_open(claim.name).add(claim) for claim in claims]
    if claims:
        _ledgers[-1].done()
    return made


def _open(name: str) -> Ledger:
    if not _ledgers:
        raise ClaimError(f"claim '{name}' has no ledger to go to; call open_ledger(<notebook name>) first")
    return _ledgers[-1]


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
