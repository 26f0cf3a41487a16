"""Claims as a reader sees them, in sentences and tables: the same in JupyterLab, papermill's output and the book."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specsel.paper.claims import UNITS, Claim, ClaimError, describe_origin, render

SPECIAL, ESCAPED = re.compile(r"([\\`*_\[\]<>$|])"), r"\\\1"  # what Markdown would take for its own
ALSO = {"workload": "group", "tier": "group", "arm": "key", "policy": "key"}  # names of parts of a key in a table


@dataclass(frozen=True)
class Shown:
    """Something to read, as plain text and as Markdown or HTML."""

    text: str
    markdown: str = ""
    html: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rich = {"text/markdown": self.markdown, "text/html": self.html}
        return {"text/plain": self.text} | {kind: item for kind, item in rich.items() if item}


def escaped(text: str) -> str:
    """Text of a user (a workload's name, say) that Markdown leaves alone."""
    return SPECIAL.sub(ESCAPED, text)


def mark(claim: Claim, text: str, notebook: str, *, markdown: bool = False) -> str:
    """A claim's text as HTML (that Markdown leaves alone) with its origin, for a pointer, and its name, for a build."""
    value, label, _ = text.rpartition(f"[{claim.label}]") if text.endswith(f"[{claim.label}]") else (text, "", "")
    number, bracket, limits = value.strip().partition(" [") if claim.low is not None else (value.strip(), "", "")
    kind = "value" if isinstance(claim.value, (int, float)) else "words"  # a value never breaks
    parts = [(kind, number), ("value", (bracket + limits).strip()), ("label", label and f"[{claim.label}]")]
    clean = [(kind, html.escape(part, quote=False)) for kind, part in parts if part]  # a line may break between parts
    inside = " ".join(f'<span class="claim-{kind}">{escaped(p) if markdown else p}</span>' for kind, p in clean)
    origin, name = (html.escape(item, quote=True) for item in (describe_origin(claim), f"{notebook}.{claim.name}"))
    return f'<span class="claim" tabindex="0" title="{origin}" data-claim="{name}">{inside}</span>'


def grid(
    claims: Iterable[Claim],
    rows: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    *,
    corner: str = "",
    notebook: str = "",
) -> Shown:
    """Claims (of a notebook) as a table, by parts of their names as in `Ledger.table`; labels stand in the corner."""
    claims = list(claims)
    parts = _parts(claims)
    several = [n for n in ("quantity", "group", "key") if len({p[n] for p in parts}) > 1]
    down = _chosen(rows, ["group"] if "group" in several else several[:1] or ["group"])
    alike = {"group", "key"} if all(p["key"] == p["group"] for p in parts) and {*down} - {"quantity"} else set()
    across = _chosen(columns, [n for n in several if n not in {*down} | alike])
    cells = {(_at(p, down), _at(p, across)): c for p, c in zip(parts, claims, strict=True)}
    if len(cells) < len(claims):
        raise ClaimError(f"two figures share a cell of the table by {down} and {across}; name other rows or columns")
    lines, heads = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    found = [[cells.get((line, head)) for head in heads] for line in lines]
    only = ("value",) if "quantity" in down else (claims[0].quantity,) if claims else ()
    titles = [_title(head or only, [row[i] for row in found]) for i, head in enumerate(heads)]
    names = [_words(line) for line in lines]
    first = " ".join([corner, *sorted({f"[{c.label}]" for c in claims})]).strip()

    def table(shown: Any, words: Any) -> pd.DataFrame:
        texts = [[shown(c) if c else "" for c in row] for row in found]
        return pd.DataFrame(texts, [*map(words, names)], pd.Index([*map(words, titles)], name=words(first)))

    page = table(lambda c: mark(c, bare(c), notebook), html.escape)
    plain = table(bare, str)
    return Shown(plain.to_string(), html=page.to_html(escape=False, border=0, classes="claims", justify="left"))


def bare(claim: Claim) -> str:
    """The text of a claim in a table, whose head carries label and unit."""
    return re.sub(r" tokens/(block|s)\b", "", render(claim).removesuffix(f" [{claim.label}]"))


def _parts(claims: Sequence[Claim]) -> list[dict[str, tuple[str, ...]]]:
    """What a claim is of: its quantity, its group (the first key; () over all requests) and its other keys.

    A quantity's figures over all requests have a key less than those of groups. Where nothing has other keys, group and
    key are the same.
    """
    longest = {c.quantity: max(len(d.keys) for d in claims if d.quantity == c.quantity) for c in claims}
    own = [int(len(c.keys) == longest[c.quantity]) for c in claims]  # keys that say which group: one, or none
    parts = [
        {"quantity": (c.quantity,), "group": c.keys[:n], "key": c.keys[n:]} for c, n in zip(claims, own, strict=True)
    ]
    return parts if any(p["key"] for p in parts) else [p | {"key": p["group"]} for p in parts]


def _chosen(said: str | Sequence[str] | None, otherwise: Sequence[str]) -> list[str]:
    names = otherwise if said is None else [said] if isinstance(said, str) else said
    return [ALSO.get(name, name) for name in names]


def _at(part: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> tuple[str, ...]:
    """The words that a row or column stands for."""
    unknown = [name for name in names if name not in part]
    if unknown:
        raise ClaimError(f"a table has rows and columns by {', '.join((*part, *ALSO))}, not by '{unknown[0]}'")
    return tuple(" · ".join(part[name]) for name in names)


def _words(parts: Sequence[str]) -> str:
    """The head of a row or column."""
    return " · ".join((part.replace("_", " ") if part in UNITS else part) for part in parts if part) or "all"


def _title(head: tuple[str, ...], column: Sequence[Claim | None]) -> str:
    """A column's head, with the unit where its cells do not show it."""
    units, words = {c.unit for c in column if c and not isinstance(c.value, str)}, _words(head)
    unit = units.pop().replace("/", " per ") if len(units) == 1 else ""
    return f"{words}, {unit}" if unit.startswith("tokens") and unit != words else words
