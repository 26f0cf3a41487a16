"""Tables of claims: publish the rows of a result as claims, and show claims as a grid of text.

A number is shown only after it has become a claim, so every table of the book has label, interval and origin behind it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specsel.paper.claims import Claim, in_table, render
from specsel.paper.ledger import Ledger, publish
from specsel.stats import Estimate

Claims = Ledger | Iterable[Claim]
INTERVAL = re.compile(r"\[[^\[\]]*, [^\[\]]*\]|(?<=\d) (?=[%µm]?s?\b|%|tokens)")  # never broken over two lines


def publish_counts(table: pd.DataFrame, *, by: str, label: str, function: str, missing: str = "not recorded") -> None:
    """One claim `column:key` per number of a table of counts; a missing one says why it is."""
    for row in table.to_dict("records"):
        for column in (c for c in table.columns if c != by):
            value = None if pd.isna(row[column]) else row[column]
            publish(
                f"{column}:{row[by]}",
                value,
                label=label,
                unit="count",
                function=function,
                reason="a count" if value is not None else missing,
            )


def publish_words(label: str, **sentences: str) -> None:
    """Several sentences (or names) at once, as claims of their keyword."""
    for name, sentence in sentences.items():
        publish(name, sentence, label=label, function="verdicts")


def publish_numbers(
    label: str, function: str, unit: str = "count", reason: str = "a count", **numbers: float | int | None
) -> None:
    """Several numbers without interval at once, as claims of their keyword; reason says why they have none."""
    for name, number in numbers.items():
        publish(
            name,
            number,
            label=label,
            function=function,
            unit=unit,
            reason=reason if number is not None else "undefined here",
        )


def publish_estimates(label: str, function: str, unit: str = "fraction", **estimates: Estimate) -> None:
    """Several estimates at once, as claims of their keyword."""
    for name, estimate in estimates.items():
        publish(name, estimate, label=label, function=function, unit=unit)


def publish_rows(
    prefix: str,
    table: pd.DataFrame,
    *,
    by: Sequence[str],
    value: str,
    label: str,
    function: str,
    unit: str = "",
    limits: tuple[str, str] = ("low", "high"),
    n: int | str = 0,
    n_resamples: int = 0,
) -> None:
    """One claim `prefix:key[:key...]` per row with the 95 % limits of two columns; n: requests, or the column that
    holds them.
    """
    for row in table.to_dict("records"):
        number, low, high = (None if (x := row.get(c)) is None or pd.isna(x) else float(x) for c in (value, *limits))
        method = (
            "bootstrap of requests"
            if None not in (low, high)
            else "undefined: no interval"
            if number is not None
            else "undefined: it has no value here"
        )
        count = int(row[n]) if isinstance(n, str) else n
        publish(
            ":".join([prefix, *(str(row[key]) for key in by)]),
            Estimate(
                number,
                *((low, high) if None not in (low, high) else (None, None)),
                0.95,
                count,
                method,
                n_resamples,
                None,
            ),
            label=label,
            unit=unit,
            function=function,
        )


def pick(claims: Claims, *patterns: str) -> list[Claim]:
    """Claims by name, in the order of the patterns: "skill" is one claim, "skill:*" all with one key,
    "mean_accepted:*:*" with two.
    """
    every = list(claims.claims.values() if isinstance(claims, Ledger) else claims)
    return [claim for pattern in patterns for claim in every if _matches(claim.name, pattern)]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split(":"), pattern.split(":")
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


def frame(claims: Claims, pattern: str, keys: Sequence[str]) -> pd.DataFrame:
    """Claims as a table for a chart: their keys, then the value under the name, low, high.

    frame(ledger, "block_efficiency:*:*", ["workload", "arm"]) has columns workload, arm, block_efficiency, low, high.
    """
    rows = [
        dict(zip(keys, claim.name.split(":")[1:], strict=True))
        | {claim.name.split(":")[0]: claim.value, "low": claim.low, "high": claim.high}
        for claim in pick(claims, pattern)
    ]
    return pd.DataFrame(rows, columns=[*keys, pattern.split(":")[0], "low", "high"])


def cells(claims: Claims, *patterns: str) -> dict[tuple[str, str], Claim]:
    """Claims by row and column: two keys are row and column, one key is the row and the name the column, no key is a
    row of its own.
    """
    found = {}
    for claim in pick(claims, *patterns):
        name, *keys = claim.name.split(":")
        row, column = (
            (name.replace("_", " "), "value")
            if not keys
            else (keys[0], keys[1] if len(keys) > 1 else name.replace("_", " "))
        )
        found[row, column] = claim
    return found


def rows_and_columns(found: dict[tuple[str, str], Claim], sort: str | None = None) -> tuple[list[str], list[str]]:
    """Names of the rows and columns of ``cells``, in their order there; rows by the values of a column ``sort``, those
    without one last."""
    rows, columns = (list(dict.fromkeys(at[i] for at in found)) for i in (0, 1))
    by = {row: claim.value for (row, column), claim in found.items() if column == sort}
    return sorted(rows, key=lambda row: (by.get(row) is None, by.get(row))), columns


@dataclass(frozen=True)
class Table:
    """Text in rows and columns that a notebook shows in full; the first column holds the row names."""

    frame: pd.DataFrame

    def _repr_html_(self) -> str:
        def cell(text: object, tag: str = "td") -> str:
            return f"<{tag}>{INTERVAL.sub(unbroken, html.escape(str(text)))}</{tag}>"

        def unbroken(match: re.Match[str]) -> str:
            return match.group(0).replace(" ", "\u00a0")

        head = "".join(cell(name, "th") for name in self.frame)
        body = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in self.frame.itertuples(index=False))
        return f'<table class="dataframe claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        return self.frame.to_string(index=False)


def grid(claims: Claims, *patterns: str, corner: str = "", sort: str | None = None) -> Table:
    """Claims as a table of text (see `cells`), their labels in the corner, sorted as `rows_and_columns` does."""
    found = cells(claims, *patterns)
    rows, columns = rows_and_columns(found, sort)
    labels = ", ".join(sorted({f"[{claim.label}]" for claim in found.values()}))
    text = {column: [_text(found.get((row, column))) for row in rows] for column in columns}
    return Table(pd.DataFrame({f"{corner} {labels}".strip(): rows} | text))


def _text(claim: Claim | None) -> str:
    return "" if claim is None else in_table(claim)


# ---- shapes for charts


def gains(claims: Claims, *names: str) -> pd.DataFrame:
    """Single claims as rows for a dot chart: name, value, low, high."""
    return pd.DataFrame(
        [
            {"name": c.name.replace("_", " "), "value": c.value, "low": c.low, "high": c.high}
            for c in pick(claims, *names)
        ],
        columns=["name", "value", "low", "high"],
    )


def side_by_side(claims: Claims, **patterns: str) -> pd.DataFrame:
    """Claims of one key seen in several ways, for a dot chart: name, view (the keyword), value, low, high."""
    rows = [
        (view, claim.name.partition(":")[2], claim)
        for view, pattern in patterns.items()
        for claim in pick(claims, pattern)
    ]
    keys = list(dict.fromkeys(key for _, key, _ in rows))
    return pd.DataFrame(
        [
            {"name": f"{key}, {view}", "view": view, "value": c.value, "low": c.low, "high": c.high}
            for view, key, c in sorted(rows, key=lambda row: keys.index(row[1]))
        ],
        columns=["name", "view", "value", "low", "high"],
    )


def name_policies(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `tuning.compare` with one name per row (policy, feedback, state) and its kind: hindsight, no
    context, context by workload, request or block.
    """

    def name(row: Mapping[str, str]) -> str:
        extra = [
            row["feedback"] if row["feedback"] in ("full", "delayed") else "",
            "state kept" if row["reset"] == "never" else "",
        ]
        return ", ".join([row["policy"].replace(":", " "), *filter(None, extra)])

    return table.assign(
        policy=[name(row) for row in table.to_dict("records")],
        kind=table["context"].replace({c: f"context by {c}" for c in ("workload", "request", "block")}),
    )


def honest(named: pd.DataFrame) -> pd.DataFrame:
    """One row per policy for a chart: counts as late as they really come, state reset at each request; best first."""
    late = named[(named["feedback"] != "full") & (named["reset"] != "never")]
    return late.sort_values(["fixed", "policy"], ascending=[False, True], kind="stable")


def decision_claims(decisions: pd.DataFrame, *, label: str, n: int, n_resamples: int) -> None:
    """Claims gain:POLICY, drafts_per_block:POLICY and, where timed, speed:POLICY and tokens_per_s:POLICY.

    From the table of `routing.decision_table`.
    """
    for name, unit in (
        ("block_efficiency", "tokens/block"),
        ("gain", "fraction"),
        ("speed", "ratio"),
        ("tokens_per_s", "tokens/s"),
        ("drafts_per_block", "ratio"),
    ):
        if name in decisions:
            publish_rows(
                name,
                decisions,
                by=["policy"],
                value=name,
                limits=(f"{name}_low", f"{name}_high"),
                unit=unit,
                label=label,
                function="decision_table",
                n=n,
                n_resamples=n_resamples,
            )


def break_even_inputs(claims: Claims, curve: pd.DataFrame) -> dict[str, Any]:
    """Arguments of `charts.break_even_chart` from the claims oracle_gap and break_even_rho and a frontier."""
    gap, rho = (pick(claims, name)[0] for name in ("oracle_gap", "break_even_rho"))
    pooled = curve[curve["scope"] == "all"].dropna(subset=["capture", "redraft_rate"])
    pooled = pooled[
        (20 * pooled["threshold"] % 1).round(6) % 1 == 0
    ]  # every twentieth: the page computes the speed of each point
    drawn = rho.low is not None and rho.low < 0.6  # inside the axis
    return {
        "gap": gap.value or 0.0,
        "captures": pooled["capture"].tolist(),
        "rates": pooled["redraft_rate"].tolist(),
        "gap_limits": None if gap.low is None else (gap.low, gap.high),
        "break_even": (rho.low, rho.high) if drawn else None,
    }


def comparison(rows: Sequence[tuple[Claim, Claim | None, str]]) -> Table:
    """Figures of two studies side by side as text: figure, reported, here, verdict."""
    lines = [
        (theirs.name.replace("_", " ").replace(":", ", "), _text(theirs), "" if ours is None else render(ours), verdict)
        for theirs, ours, verdict in rows
    ]
    return Table(pd.DataFrame(lines, columns=["figure", "there [REPORTED]", "here", "verdict"]))


def two_studies(rows: Sequence[tuple[Claim, Claim | None, str]], pattern: str) -> pd.DataFrame:
    """The numbers of one pattern from both studies, for a dot chart: name, study, value, low, high."""
    return pd.DataFrame(
        [
            {
                "name": f"{claim.name.partition(':')[2] or claim.name}, {study}",
                "study": study,
                "value": claim.value,
                "low": claim.low,
                "high": claim.high,
            }
            for theirs, ours, _ in rows
            if _matches(theirs.name, pattern)
            for study, claim in (("reported", theirs), ("here", ours))
            if claim
        ],
        columns=["name", "study", "value", "low", "high"],
    )
