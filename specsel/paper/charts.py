"""Charts: figures in, an Altair chart out.

Every chart has a description that says its values in words, axis titles with units, its intervals drawn, arms told
apart by shape or dash as well as colour, and no missing value in its data (what is left out is said in the subtitle).
Here are the kinds that several chapters use; a chart with one caller is Altair in its cell, with `arm_scale`, `data`
and `finish`. Nothing is computed here but positions on the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from specsel.paper.claims import UNITS

MIME = "application/vnd.vegalite.v6+json"
# readable on white and on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7F3C8D", "#767676")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 3), (4, 4), (1, 3), (10, 2, 2, 2))
INK = "#767676"  # text marks and reference lines; black would vanish on dark pages
SVG_WIDTH = 640
THEME = {
    "axis": {"labelLimit": 260, "titleFontWeight": "normal"},
    "legend": {"labelLimit": 320, "symbolOpacity": 1, "titleFontWeight": "normal"},
    "title": {"anchor": "start", "subtitleColor": INK},
}


# ---- the renderer


def use(mode: str | None = None) -> None:
    """Show charts as Vega-Lite 6 + SVG ("archive", the default of $SPECSEL_CHARTS) or as offline widgets ("live")."""
    wanted = mode or os.environ.get("SPECSEL_CHARTS", "archive")
    alt.renderers.register("specsel", live if wanted == "live" else archive)
    alt.renderers.enable("specsel")
    alt.theme.register("specsel", enable=True)(lambda: alt.theme.ThemeConfig({"config": THEME}))


def archive(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    """MIME bundle of a chart: specification for the book, SVG for readers without JavaScript, description as text."""
    import vl_convert

    return {
        MIME: spec,
        "image/svg+xml": vl_convert.vegalite_to_svg(json.dumps(fixed_width(spec))),
        "text/plain": f"Chart: {spec.get('description', '')}",
    }


def live(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    """MIME bundle of a chart as a widget that needs no network; JupyterLab gives a widget no width of its own."""
    alt.JupyterChart.enable_offline()
    return alt.JupyterChart(alt.Chart.from_dict(fixed_width(spec)))._repr_mimebundle_()


def fixed_width(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification with a width of its own instead of that of its container."""
    return {**spec, "width": SVG_WIDTH} if spec.get("width") == "container" else spec


# ---- parts


def named(figures: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Figures (see `stats.by`) with the parts of their keys as columns; over all requests the first part is "all".

    >>> named(pd.DataFrame({"key": [("x",), ("chat", "x")]}), "workload", "arm")[["workload", "arm"]].values.tolist()
    [['all', 'x'], ['chat', 'x']]
    """
    keys = [("all",) * (len(names) - len(key)) + tuple(map(str, key)) for key in figures["key"]]
    parts = pd.DataFrame(keys, columns=list(names), index=figures.index)
    return pd.concat([figures.drop(columns=["key", "estimate"], errors="ignore"), parts], axis=1)


def rows_of(table: pd.DataFrame, needed: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """The rows that have every needed value, to six decimals, and a sentence about the others ("" without others)."""
    kept = table.dropna(subset=list(needed)).reset_index(drop=True)
    numbers = {n: float for n in needed if all(isinstance(v, (int, float)) for v in kept[n])}
    missing = len(table) - len(kept)
    return kept.astype(numbers).round(6), f"{missing} of {len(table)} without a value left out" if missing else ""


def data(table: pd.DataFrame) -> alt.InlineData:
    """Rows as plain records; a missing value is an absent key, never NaN or null."""
    rows = table.drop(columns=["key", "estimate"], errors="ignore").to_dict("records")  # a page holds no Estimate
    return alt.InlineData(values=[{key: v for key, v in row.items() if v is not None and v == v} for row in rows])


def arm_scale(names: Any, values: Sequence[Any] = COLOURS) -> alt.Scale:
    """Colours (or SHAPES, or DASHES) of arms, the same in every chart; names: a log, or names in their order."""
    order = [str(name) for name in getattr(names, "arms", names)]
    enough = (tuple(values) * (1 + len(order) // len(values)))[: len(order)]
    return alt.Scale(domain=order, range=[list(v) if isinstance(v, tuple) else v for v in enough])


def looks(name: str, order: Any) -> tuple[Any, Any, Any]:
    """Colour, shape and dash of the series in a column; order: a log, or names, each of which keeps its looks."""
    names = list(getattr(order, "arms", order))
    return tuple(
        channel(f"{name}:N", sort=names, scale=arm_scale(names, values), title=name.replace("_", " "))
        for channel, values in ((alt.Color, COLOURS), (alt.Shape, SHAPES), (alt.StrokeDash, DASHES))
    )


def finish(chart: Any, title: str, description: str, note: str = "", height: int | None = None) -> Any:
    """A chart as wide as its page, with title, description and a note on what it leaves out."""
    heading = alt.TitleParams(title, subtitle=note) if note else title
    made = chart.properties(width="container", title=heading, description=description)
    return made.properties(height=height) if height else made


def say(
    table: pd.DataFrame, keys: Sequence[str], value: str, low: str = "low", high: str = "high", *, most: int = 16
) -> str:
    """The values of a table in words, for a chart's description.

    >>> say(pd.DataFrame({"arm": ["a"], "x": [1.234], "low": [1.0], "high": [1.5]}), ["arm"], "x")
    'a: 1.23 (1 to 1.5)'
    """
    parts = []
    for row in table.head(most).to_dict("records"):
        limits = f" ({row[low]:.3g} to {row[high]:.3g})" if pd.notna(row.get(low)) else ""
        parts.append(f"{', '.join(str(row[k]) for k in keys)}: {row[value]:.3g}{limits}")
    more = f"; and {len(table) - most} more" if len(table) > most else ""
    return "; ".join(parts) + more if parts else "no values"


def reference(rows: dict[str, Sequence[float]], **where: str) -> alt.Chart:
    """A dashed line: a rule where one place is given, else a line through the rows."""
    base = alt.Chart(data(pd.DataFrame(rows)))
    return (base.mark_rule if len(where) == 1 else base.mark_line)(strokeDash=[4, 4], color=INK).encode(**where)


_line = reference  # for functions that have a parameter of this name


def order_of(table: pd.DataFrame, name: str) -> list[str]:
    """The values of a column in their order."""
    return list(dict.fromkeys(table[name]))


def tips(names: Sequence[str], numbers: Sequence[str], form: str = ".3~f") -> list[alt.Tooltip]:
    """What a pointer shows: texts, then numbers."""
    return [*(alt.Tooltip(f"{n}:N") for n in names), *(alt.Tooltip(f"{n}:Q", format=form) for n in numbers)]


def _per_cent(table: pd.DataFrame, said: bool | None) -> bool:
    """Is the quantity of these figures a fraction?"""
    known = set(table["quantity"]) if said is None and "quantity" in table else set()
    return bool(said) or bool(known) and all(UNITS.get(q) == "fraction" for q in known)


# ---- the kinds


def dots(
    table: pd.DataFrame,
    *,
    label: str,
    title: str,
    axis: str,
    value: str = "value",
    low: str = "low",
    high: str = "high",
    group: str | None = None,
    order: Any = None,
    text: str | None = None,
    percent: bool | None = None,
    reference: float | None = None,
) -> alt.LayerChart:
    """A dot with its interval per row, in the order of the table.

    group: column that decides colour and shape, order: all of its names (or a log, for arms); text: column that is
    written beside the dot; reference: a dashed line.
    """
    percent = _per_cent(table, percent)
    table, note = rows_of(table, [value])
    form = ".1%" if percent else ".3~f"
    y = alt.Y(f"{label}:N", sort=order_of(table, label), title=None)
    x = alt.X(f"{low}:Q", title=axis, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(format=form))
    base, colour, shape = alt.Chart(data(table)).encode(y=y), alt.value(COLOURS[0]), alt.value("circle")
    if group:
        colour, shape, _ = looks(group, order_of(table, group) if order is None else order)
        if group != label and table.duplicated([label]).any():
            base = base.encode(yOffset=alt.YOffset(f"{group}:N", sort=order_of(table, group)))
    shown = tips([label, *([group] if group else [])], [c for c in (value, low, high) if c in table], form)
    layers = [_line({"at": [float(reference)]}, x="at:Q")] if reference is not None else []
    layers += [
        base.mark_rule(strokeWidth=2).encode(x=x, x2=f"{high}:Q", color=colour),
        base.mark_point(size=80, filled=True, opacity=1).encode(
            x=f"{value}:Q", color=colour, shape=shape, tooltip=shown
        ),
    ]
    if text:
        right = f"scale('x', datum['{value}']) > width / 2"
        side, gap = alt.expr(f"{right} ? 'right' : 'left'"), alt.expr(f"{right} ? -8 : 8")
        beside = base.mark_text(align=side, dx=gap, dy=-9, fontSize=11, color=INK)
        layers.append(beside.encode(x=f"{value}:Q", text=f"{text}:N"))
    keys = [label, *([group] if group and group != label else [])]
    words = f"{title}. {axis}, with intervals. {say(table, keys, value, low, high, most=30)}."
    height = max(80, 28 * table[label].nunique(), 14 * len(table) if group else 0)
    return finish(alt.layer(*layers), title, words, note, height)


def lines(
    table: pd.DataFrame,
    *,
    x: str,
    series: str,
    title: str,
    x_axis: str,
    y_axis: str,
    y: str = "value",
    order: Any = None,
    diagonal: bool = False,
    log_x: bool = False,
    percent: bool | None = None,
    whole_x: bool = False,
    reference: float | None = None,
) -> alt.LayerChart:
    """One line with a band per series; columns x, y, low, high, series.

    percent and diagonal fix the vertical range to 0..1; reference is a horizontal dashed line; order as in `dots`.
    """
    percent = _per_cent(table, percent)
    table, note = rows_of(table, [x, y])
    base = alt.Chart(data(table))
    colour, shape, dash = looks(series, order_of(table, series) if order is None else order)
    along = alt.Axis(tickMinStep=1) if whole_x else alt.Axis()
    across = alt.X(f"{x}:Q", title=x_axis, axis=along, scale=alt.Scale(type="log" if log_x else "linear", zero=False))
    scale = alt.Scale(domain=[0, 1]) if percent or diagonal else alt.Scale(zero=False)
    up = alt.Y("low:Q", title=y_axis, axis=alt.Axis(format=".0%" if percent else ".3~f"), scale=scale)
    shown = tips([series], [x, y, "low", "high"])
    layers = [
        base.mark_area(opacity=0.18).encode(x=across, y=up, y2="high:Q", color=colour),
        base.mark_line(strokeWidth=2).encode(x=across, y=f"{y}:Q", color=colour, strokeDash=dash),
        base.mark_point(size=45, filled=True, opacity=1).encode(
            x=across, y=f"{y}:Q", color=colour, shape=shape, tooltip=shown
        ),
    ]
    layers += [_line({"a": [0.0, 1.0], "b": [0.0, 1.0]}, x="a:Q", y="b:Q")] if diagonal else []
    layers += [_line({"at": [float(reference)]}, y="at:Q")] if reference is not None else []
    last = say(table.groupby(series, sort=False).tail(1), [series], y)
    words = f"{title}. {y_axis} against {x_axis}, with bands. Last points: {last}."
    return finish(alt.layer(*layers), title, words, note, 280)


def heat_map(
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    title: str,
    x_axis: str,
    y_axis: str,
    value: str = "value",
    percent: bool | None = None,
) -> alt.LayerChart:
    """A matrix with value and interval in each cell; columns x, y, value, low, high."""
    percent = _per_cent(table, percent)

    def form(v: float) -> str:
        return f"{100 * v:.0f}" if percent else f"{v:.2f}"

    kept, note = rows_of(table, [value])
    limits = zip(kept[value], kept["low"], kept["high"], strict=True)
    kept = kept.assign(words=[form(v) + (f" [{form(a)}, {form(b)}]" if pd.notna(a) else "") for v, a, b in limits])
    down, across = order_of(kept, y), order_of(kept, x)
    across = down if set(across) == set(down) else across
    base = alt.Chart(data(kept)).encode(
        x=alt.X(f"{x}:N", sort=across, title=x_axis, axis=alt.Axis(labelAngle=0)),
        y=alt.Y(f"{y}:N", sort=down, title=y_axis),
    )
    middle = float(kept[value].min() + kept[value].max()) / 2 if len(kept) else 0.0
    legend = alt.Legend(format=".0%" if percent else ".2f", title="per cent" if percent else None)
    shade = alt.Color(f"{value}:Q", scale=alt.Scale(scheme="blues"), legend=legend)
    ink = alt.condition(f"datum['{value}'] > {middle}", alt.value("#ffffff"), alt.value("#1a1a1a"))
    layers = (
        base.mark_rect().encode(color=shade, tooltip=tips([y, x, "words"], [])),
        base.mark_text(fontSize=11).encode(text="words:N", color=ink),
    )
    words = f"{title}. Rows: {y_axis}; columns: {x_axis}. {say(kept, [y, x], value)}."
    return finish(alt.layer(*layers), title, words, note, max(140, 44 * kept[y].nunique()))


def shares(
    table: pd.DataFrame, *, across: str, part: str, title: str, axis: str, value: str = "value", order: Any = None
) -> alt.LayerChart:
    """Stacked shares per group with the count written beside; columns across, part, value (counts)."""
    kept, note = rows_of(table, [value])
    parts = order_of(kept, part) if order is None else list(getattr(order, "arms", order))
    y, total = alt.Y(f"{across}:N", sort=order_of(kept, across), title=None), alt.X("at:Q", title=axis)
    bars = alt.Chart(data(kept)).mark_bar(stroke="#ffffff", strokeWidth=1)
    bars = bars.transform_calculate(rank=f"indexof({json.dumps(parts)}, datum['{part}'])").encode(
        y=y,
        x=alt.X(f"{value}:Q", stack="normalize", title=axis, axis=alt.Axis(format="%")),
        order="rank:Q",
        color=looks(part, parts)[0],
        tooltip=tips([across, part], [value], ","),
    )
    totals = kept.groupby(across, sort=False, as_index=False)[value].sum()
    totals = totals.assign(total=[f"n = {int(t):,}" for t in totals[value]], at=1.0)
    text = alt.Chart(data(totals)).mark_text(align="right", dx=-4, dy=-1, color="#1a1a1a", fontSize=11)
    words = f"{title}. {axis}. {say(kept, [across, part], value)}."
    chart = alt.layer(bars, text.encode(y=y, x=total, text="total:N"))
    return finish(chart, title, words, note, max(80, 34 * kept[across].nunique()))
