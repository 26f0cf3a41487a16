"""Charts: a table of results in, an Altair chart out.

Every chart has a description that says its values in words, axis titles with units, its intervals drawn, arms told apart by shape or
dash as well as colour, and no missing value in its data (what is left out is said in the subtitle). Nothing is computed here but
positions on the page. `use` registers the renderer that keeps notebooks readable without a network.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

MIME = "application/vnd.vegalite.v6+json"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7F3C8D", "#767676")  # readable on white and on black
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 3), (4, 4), (1, 3), (10, 2, 2, 2))
INK = "#767676"  # text marks and reference lines; black would vanish on dark pages
SVG_WIDTH = 640


# ---- the renderer


def use(mode: str | None = None) -> None:
    """Show charts as Vega-Lite 6 + SVG ("archive", the default of $SPECSEL_CHARTS) or as live widgets without a network ("live")."""
    alt.renderers.register("specsel", archive)
    if (mode or os.environ.get("SPECSEL_CHARTS", "archive")) == "live":
        alt.renderers.enable("jupyter", offline=True)
    else:
        alt.renderers.enable("specsel")


def archive(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    """MIME bundle of a chart: the specification for the book, an SVG for readers without JavaScript, the description as text."""
    import vl_convert

    still = {**spec, "width": SVG_WIDTH} if spec.get("width") == "container" else spec
    return {MIME: spec, "image/svg+xml": vl_convert.vegalite_to_svg(json.dumps(still)), "text/plain": f"Chart: {spec.get('description', '')}"}


# ---- parts


def rows_of(table: pd.DataFrame, needed: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """The rows that have every needed value, rounded to six decimals, and a sentence about the others ("" when there are none)."""
    kept = table.dropna(subset=list(needed)).reset_index(drop=True)
    kept = kept.astype({name: float for name in needed if name in kept and kept[name].dtype.kind in "Oif" and _numeric(kept[name])})
    missing = len(table) - len(kept)
    return kept.round(6), f"{missing} of {len(table)} without a value left out" if missing else ""


def data(table: pd.DataFrame) -> alt.InlineData:
    """Rows as plain records; a missing value is an absent key, never NaN or null."""
    plain = [{key: getattr(v, "item", lambda v=v: v)() for key, v in row.items()} for row in table.to_dict("records")]
    return alt.InlineData(values=[{key: v for key, v in row.items() if v is not None and v == v} for row in plain])


def _numeric(column: pd.Series) -> bool:
    return not len(column) or all(isinstance(x, (int, float)) for x in column)


def _finish(chart: alt.Chart | alt.LayerChart, title: str, description: str, note: str = "", height: int | None = None) -> Any:
    heading = alt.TitleParams(title, subtitle=note) if note else title
    made = chart.properties(width="container", title=heading, description=description)
    return made.properties(height=height) if height else made


def say(table: pd.DataFrame, keys: Sequence[str], value: str, low: str = "low", high: str = "high", *, most: int = 16) -> str:
    """The values of a table in words, for a chart's description.

    >>> say(pd.DataFrame({"arm": ["a"], "x": [1.234], "low": [1.0], "high": [1.5]}), ["arm"], "x")
    'a: 1.23 (1 to 1.5)'
    """
    parts = []
    for row in table.head(most).to_dict("records"):
        limits = f" ({row[low]:.3g} to {row[high]:.3g})" if low in row and row[low] is not None and row[low] == row[low] else ""
        parts.append(f"{', '.join(str(row[k]) for k in keys)}: {row[value]:.3g}{limits}")
    more = f"; and {len(table) - most} more" if len(table) > most else ""
    return "; ".join(parts) + more if parts else "no values"


def _series(name: str, order: Sequence[str], channel: type, values: Sequence[Any]) -> Any:
    """A nominal encoding with a fixed order, so that an arm keeps its colour, shape and dash in every chart."""
    scale = alt.Scale(domain=list(order), range=[list(v) if isinstance(v, tuple) else v for v in (values * (1 + len(order) // len(values)))[:len(order)]])
    return channel(f"{name}:N", sort=list(order), scale=scale, title=name, legend=alt.Legend(symbolOpacity=1))


def _order(table: pd.DataFrame, name: str) -> list[str]:
    return list(dict.fromkeys(table[name]))


def dots(table: pd.DataFrame, *, label: str, value: str, title: str, axis: str, reference: float | None = None, group: str | None = None,
         text: str | None = None, low: str = "low", high: str = "high", percent: bool = False) -> alt.LayerChart:
    """A dot with its interval per row, in the order of the table: forest plots, policy tables, headrooms, coefficients."""
    table, note = rows_of(table, [value])
    order, form = _order(table, label), ".1%" if percent else ".3~f"
    base = alt.Chart(data(table)).encode(y=alt.Y(f"{label}:N", sort=order, title=None, axis=alt.Axis(labelLimit=260)))
    tips = [alt.Tooltip(f"{label}:N"), *(alt.Tooltip(f"{c}:Q", format=form) for c in (value, low, high) if c in table)]
    point = {"color": _series(group, _order(table, group), alt.Color, COLOURS), "shape": _series(group, _order(table, group), alt.Shape, SHAPES)} if group else {"color": alt.value(COLOURS[0])}
    layers = [base.mark_rule(strokeWidth=2).encode(x=alt.X(f"{low}:Q", title=axis, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(format=form)), x2=f"{high}:Q",
                                                   **{k: v for k, v in point.items() if k == "color"}),
              base.mark_point(size=80, filled=True, opacity=1).encode(x=f"{value}:Q", tooltip=tips, **point)]
    if reference is not None:
        layers.insert(0, alt.Chart(data(pd.DataFrame({"at": [float(reference)]}))).mark_rule(strokeDash=[4, 4], color=INK).encode(x="at:Q"))
    if text:
        layers.append(base.mark_text(align="left", dx=8, dy=-9, fontSize=11, color=INK).encode(x=f"{value}:Q", text=f"{text}:N"))
    words = f"{title}. {axis}, with 95 % intervals. {say(table, [label], value, low, high, most=30)}."
    return _finish(alt.layer(*layers), title, words, note, height=max(80, 28 * len(order)))


# ---- the charts of the book


def efficiency_bars(table: pd.DataFrame, *, value: str = "block_efficiency", title: str = "Block efficiency by workload and arm",
                    axis: str = "tokens per block") -> alt.LayerChart:
    """Bars per workload and arm with intervals; columns workload, arm, <value>, low, high."""
    table, note = rows_of(table, [value])
    arms, base = _order(table, "arm"), alt.Chart(data(table))
    where = {"x": alt.X("workload:N", sort=_order(table, "workload"), title=None, axis=alt.Axis(labelAngle=0)), "xOffset": alt.XOffset("arm:N", sort=arms)}
    bars = base.mark_bar(opacity=0.75).encode(**where, y=alt.Y(f"{value}:Q", title=axis), color=_series("arm", arms, alt.Color, COLOURS),
                                              tooltip=["workload:N", "arm:N", *(alt.Tooltip(f"{c}:Q", format=".3f") for c in (value, "low", "high"))])
    limits = base.mark_rule(strokeWidth=2, color=INK).encode(**where, y="low:Q", y2="high:Q")
    marks = base.mark_point(size=50, filled=True, color=INK).encode(**where, y=f"{value}:Q", shape=_series("arm", arms, alt.Shape, SHAPES))
    return _finish(alt.layer(bars, limits, marks), title, f"{title}, {axis}, with 95 % intervals. {say(table, ['workload', 'arm'], value)}.", note, 260)


def lines(table: pd.DataFrame, *, x: str, y: str, series: str, title: str, x_axis: str, y_axis: str, diagonal: bool = False,
          log_x: bool = False, percent: bool = False, whole_x: bool = False, reference: float | None = None) -> alt.LayerChart:
    """One line with a band per series: survival, reliability, learning curves; columns x, y, low, high, series."""
    table, note = rows_of(table, [x, y])
    order, base, form = _order(table, series), alt.Chart(data(table)), ".0%" if percent else ".3~f"
    across = alt.X(f"{x}:Q", title=x_axis, scale=alt.Scale(type="log" if log_x else "linear", zero=False, nice=not log_x),
                   axis=alt.Axis(tickMinStep=1) if whole_x else alt.Axis())
    up = alt.Y("low:Q", title=y_axis, axis=alt.Axis(format=form), scale=alt.Scale(domain=[0, 1]) if percent or diagonal else alt.Scale(zero=False))
    colour = _series(series, order, alt.Color, COLOURS)
    layers = [base.mark_area(opacity=0.18).encode(x=across, y=up, y2="high:Q", color=colour),
              base.mark_line(strokeWidth=2).encode(x=across, y=f"{y}:Q", color=colour, strokeDash=_series(series, order, alt.StrokeDash, DASHES)),
              base.mark_point(size=45, filled=True, opacity=1).encode(x=across, y=f"{y}:Q", color=colour, shape=_series(series, order, alt.Shape, SHAPES),
                                                           tooltip=[f"{series}:N", *(alt.Tooltip(f"{c}:Q", format=".3~f") for c in (x, y, "low", "high"))])]
    if diagonal or reference is not None:
        ends = (0.0, 1.0) if diagonal else (float(table[x].min()), float(table[x].max())) if len(table) else (0.0, 1.0)
        line = pd.DataFrame({"a": ends, "b": ends if diagonal else [float(reference)] * 2})
        layers.append(alt.Chart(data(line)).mark_line(strokeDash=[4, 4], color=INK).encode(x="a:Q", y="b:Q"))
    words = f"{title}. {y_axis} against {x_axis}, with 95 % bands. Last points: {say(table.groupby(series, sort=False).tail(1), [series], y)}."
    return _finish(alt.layer(*layers), title, words, note, 280)


def survival_curves(table: pd.DataFrame) -> alt.LayerChart:
    """Share of blocks that accept at least k drafted tokens; columns arm, k, share, low, high."""
    return lines(table, x="k", y="share", series="arm", title="How far drafts survive", x_axis="drafted tokens accepted, at least", y_axis="share of blocks", percent=True, whole_x=True)


def reliability_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Confidence against acceptance per arm with the diagonal; the table of `diagnostics.reliability`."""
    outcome = table["outcome"].iloc[0] if len(table) else "acceptance"
    return lines(table, x="confidence", y="acceptance", series="arm", title="Does confidence mean what it says?", x_axis="stated confidence", y_axis=str(outcome), diagonal=True)


def learning_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Skill on held-out workloads against training blocks; the table of `diagnostics.learning_curve`."""
    return lines(table.assign(series="selector"), x="blocks", y="skill", series="series", title="How many logged blocks are enough?",
                 x_axis="training blocks (log scale)", y_axis="skill on held-out workloads (random = 1)", log_x=True, reference=1.0)


def skill_forest(table: pd.DataFrame) -> alt.LayerChart:
    """Skill per held-out workload against random = 1, with verdicts; `LowoTable.frame()`."""
    text = table.assign(note=[f"{v} (threshold {t:.2f})" if t == t and t is not None else v for v, t in zip(table["verdict"], table["threshold"], strict=True)])
    return dots(text, label="workload", value="skill", low="skill_low", high="skill_high", title="Skill on each held-out workload",
                axis="skill (random redrafting = 1)", reference=1.0, text="note")


def policy_dots(table: pd.DataFrame, *, best_fixed: float | None = None) -> alt.LayerChart:
    """Block efficiency of every policy and oracle, sorted, against best fixed; columns policy, kind, block_efficiency, low, high."""
    ordered = table.sort_values(["block_efficiency", "policy"], ascending=[False, True], kind="stable")
    return dots(ordered, label="policy", value="block_efficiency", group="kind", title="Policies and oracles under exact replay", axis="block efficiency, tokens per block", reference=best_fixed)


def headroom_dots(table: pd.DataFrame) -> alt.LayerChart:
    """Headroom of each oracle over best fixed; columns name, value, low, high (fractions)."""
    return dots(table, label="name", value="value", title="What choosing could gain at most", axis="gain over the best fixed arm", reference=0.0, percent=True)


def interval_comparison(table: pd.DataFrame) -> alt.LayerChart:
    """The same quantity with requests and with blocks resampled; columns name (says which), unit, value, low, high."""
    return dots(table, label="name", value="value", group="unit", title="Resampling blocks pretends to know more", axis="oracle gap", percent=True)


def heat_map(table: pd.DataFrame, *, x: str, y: str, value: str, title: str, x_axis: str, y_axis: str, percent: bool = False) -> alt.LayerChart:
    """A matrix with value and interval written into each cell: arm agreement, transfer; columns x, y, value, low, high."""
    form = (lambda v: f"{100 * v:.0f}") if percent else (lambda v: f"{v:.2f}")
    kept, note = rows_of(table, [value])
    kept = kept.assign(words=[form(v) + (f" [{form(a)}, {form(b)}]" if a is not None and a == a else "") for v, a, b in zip(kept[value], kept["low"], kept["high"], strict=True)])
    down, across = _order(table, y), _order(table, x)
    across = down if set(across) == set(down) else across
    base = alt.Chart(data(kept)).encode(x=alt.X(f"{x}:N", sort=across, title=x_axis, axis=alt.Axis(labelAngle=0)), y=alt.Y(f"{y}:N", sort=down, title=y_axis))
    middle = float(kept[value].min() + kept[value].max()) / 2 if len(kept) else 0.0
    cells = base.mark_rect().encode(color=alt.Color(f"{value}:Q", scale=alt.Scale(scheme="blues"), title="per cent" if percent else value, legend=alt.Legend(format=".0%" if percent else ".2f")),
                                    tooltip=[f"{y}:N", f"{x}:N", "words:N"])
    words = base.mark_text(fontSize=11).encode(text="words:N", color=alt.condition(f"datum['{value}'] > {middle}", alt.value("#ffffff"), alt.value("#1a1a1a")))
    return _finish(alt.layer(cells, words), title, f"{title}. Rows: {y_axis}; columns: {x_axis}. {say(kept, [y, x], value)}.", note, max(140, 44 * kept[y].nunique()))


def composition(table: pd.DataFrame, *, across: str, part: str, value: str, title: str, axis: str) -> alt.LayerChart:
    """Stacked shares per group with the count written beside; columns across, part, value (counts)."""
    kept, note = rows_of(table, [value])
    order = _order(kept, part)
    bars = alt.Chart(data(kept)).mark_bar(stroke="#ffffff", strokeWidth=1).encode(
        y=alt.Y(f"{across}:N", sort=_order(kept, across), title=None), x=alt.X(f"{value}:Q", stack="normalize", title=axis, axis=alt.Axis(format="%")),
        color=_series(part, order, alt.Color, COLOURS), order=alt.Order("rank:Q"), tooltip=[f"{across}:N", f"{part}:N", f"{value}:Q"]).transform_calculate(
        rank=f"indexof({json.dumps(order)}, datum['{part}'])")
    totals = kept.groupby(across, sort=False, as_index=False)[value].sum()
    text = alt.Chart(data(totals.assign(total=[f"n = {int(t):,}" for t in totals[value]], at=1.0))).mark_text(align="right", dx=-4, dy=-1, color="#1a1a1a", fontSize=11).encode(
        y=alt.Y(f"{across}:N", sort=_order(kept, across)), x=alt.X("at:Q", title=axis), text="total:N")
    return _finish(alt.layer(bars, text), title, f"{title}. {axis}. {say(kept, [across, part], value)}.", note, max(80, 34 * kept[across].nunique()))


def spread_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Quantiles of each feature per workload: 5 to 95 %, 25 to 75 %, median; the table of `diagnostics.feature_spread`."""
    kept, note = rows_of(table, ["p05", "p25", "p50", "p75", "p95"])
    kept = kept.assign(row=kept["feature"] + " · " + kept["workload"]).sort_values(["feature", "workload"], kind="stable")
    names = _order(kept, "workload")
    base = alt.Chart(data(kept)).encode(y=alt.Y("row:N", sort=_order(kept, "row"), title=None, axis=alt.Axis(labelLimit=240)), color=_series("workload", names, alt.Color, COLOURS))
    layers = (base.mark_rule().encode(x=alt.X("p05:Q", title="value of the feature (confidence 0..1, entropy in nats)"), x2="p95:Q"),
              base.mark_rule(strokeWidth=7, opacity=0.5).encode(x="p25:Q", x2="p75:Q"),
              base.mark_point(size=60, filled=True).encode(x="p50:Q", shape=_series("workload", names, alt.Shape, SHAPES), tooltip=["row:N", "p05:Q", "p25:Q", "p50:Q", "p75:Q", "p95:Q"]))
    words = f"Spread of each feature per workload. Medians with 25 to 75 % quantiles: {say(kept, ['row'], 'p50', 'p25', 'p75')}."
    return _finish(alt.layer(*layers), "Where a feature hardly varies it can tell nothing apart", words, note, max(120, 18 * len(kept)))


def frontier_chart(table: pd.DataFrame, *, threshold: float = 0.5, scope: str = "all") -> alt.LayerChart:
    """Capture against redraft rate with band, diagonal and a threshold slider; the table of `selector.frontier`."""
    kept, note = rows_of(table, ["redraft_rate", "capture"])
    order = _order(kept, "scope")
    tau = alt.param(name="tau", value=threshold, bind=alt.binding_range(min=0, max=1, step=0.01, name="threshold "))
    base = alt.Chart(data(kept))
    x = alt.X("redraft_rate:Q", title="redraft rate (share of blocks)", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    y = alt.Y("capture:Q", title="capture (share of the available gain)", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    colour, mine = _series("scope", order, alt.Color, COLOURS), f"datum.scope === {json.dumps(scope)}"
    here = base.transform_filter("abs(datum.threshold - tau) < 0.0051")
    band = alt.Y("low:Q", title="capture (share of the available gain)", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    layers = (base.transform_filter(mine).mark_area(fillOpacity=0.2, color=COLOURS[order.index(scope)] if scope in order else INK).encode(x=x, y=band, y2="high:Q"),
              base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=_series("scope", order, alt.StrokeDash, DASHES), order="threshold:Q"),
              alt.Chart(data(pd.DataFrame({"a": [0.0, 1.0]}))).mark_line(strokeDash=[4, 4], color=INK).encode(x="a:Q", y="a:Q"),
              here.mark_point(size=90, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=_series("scope", order, alt.Shape, SHAPES),
                                                           tooltip=["scope:N", *(alt.Tooltip(f"{c}:Q", format=".2f") for c in ("threshold", "redraft_rate", "capture", "low", "high", "skill"))]),
              here.transform_filter(mine).transform_calculate(words="'capture ' + format(datum.capture, '.1%') + ' at redraft rate ' + format(datum.redraft_rate, '.1%')")
              .mark_text(align="left", baseline="top", color=INK, fontSize=12).encode(x=alt.value(8), y=alt.value(8), text="words:N"))
    at = kept[(kept["threshold"] - threshold).abs() < 0.0051]
    words = f"Capture against redraft rate over all thresholds; the dashed diagonal is random redrafting. At threshold {threshold:.2f}, capture by scope: {say(at, ['scope'], 'capture')}."
    return _finish(alt.layer(*layers).add_params(tau), "The threshold frontier", words, note, 320)


SPEED = "(1 + datum.capture * datum.gap) * (1 + datum.rho) / (1 + datum.rho + datum.rate * (datum.rho + alpha))"


def break_even_chart(gap: float, captures: Sequence[float], rates: Sequence[float], *, break_even: tuple[float, float] | None = None,
                     rho: float = 0.1, alpha: float = 0.0, gap_limits: tuple[float, float] | None = None) -> alt.LayerChart:
    """Modelled speed against rho: best-of-N, and the best threshold of a frontier; sliders for rho and alpha.

    captures and rates are the points of the frontier; break_even are the limits of the break-even rho (drawn at speed 1), gap_limits
    those of the gap (band of best-of-N). The formula in the page is `SPEED`; the tests hold it to `breakeven.relative_speed`.
    """
    grid = [round(0.01 * i, 2) for i in range(61)]
    points = [("best-of-N", 1.0, 1.0, gap), *(("best selector", c, r, gap) for c, r in zip(captures, rates, strict=True))]
    table = pd.DataFrame([{"what": what, "capture": float(c), "rate": float(r), "gap": float(g), "rho": x} for what, c, r, g in points for x in grid])
    params = [alt.param(name=n, value=v, bind=alt.binding_range(min=0, max=top, step=0.01, name=f"{n} ")) for n, v, top in (("rho", rho, 0.6), ("alpha", alpha, 1.0))]
    order = ["best-of-N", "best selector"]
    best = alt.Chart(data(table)).transform_calculate(speed=SPEED).transform_aggregate(speed="max(speed)", groupby=["what", "rho"])
    x = alt.X("rho:Q", title="rho: one draft, in verifications")
    y = alt.Y("speed:Q", title="modelled speed (always the dominant arm = 1)", scale=alt.Scale(zero=False))
    colour = _series("what", order, alt.Color, COLOURS)
    layers = [best.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=_series("what", order, alt.StrokeDash, DASHES)),
              alt.Chart(data(pd.DataFrame({"one": [1.0]}))).mark_rule(strokeDash=[4, 4], color=INK).encode(y="one:Q"),
              best.transform_filter("abs(datum.rho - rho) < 0.0051").transform_calculate(words="format(datum.speed, '.3f')").mark_point(size=80, filled=True, opacity=1)
              .encode(x=x, y=y, color=colour, shape=_series("what", order, alt.Shape, SHAPES), tooltip=["what:N", "rho:Q", alt.Tooltip("speed:Q", format=".3f")]),
              best.transform_filter("abs(datum.rho - rho) < 0.0051").transform_calculate(words="format(datum.speed, '.3f')")
              .mark_text(align="left", dx=9, color=INK, fontSize=12).encode(x=x, y=y, text="words:N")]
    if gap_limits:
        band = pd.DataFrame([{"capture": 1.0, "rate": 1.0, "low_gap": float(gap_limits[0]), "high_gap": float(gap_limits[1]), "rho": r} for r in grid])
        low, high = (SPEED.replace("datum.gap", f"datum.{side}_gap") for side in ("low", "high"))
        layers.insert(0, alt.Chart(data(band)).transform_calculate(low=low, high=high).mark_area(opacity=0.15, color=COLOURS[0]).encode(x=x, y="low:Q", y2="high:Q"))
    if break_even:
        span = pd.DataFrame({"from": [float(break_even[0])], "to": [float(min(break_even[1], 0.6))], "at": [1.0]})
        layers.append(alt.Chart(data(span)).mark_rule(strokeWidth=5, opacity=0.6, color=COLOURS[1]).encode(x="from:Q", x2="to:Q", y="at:Q"))
    words = (f"Modelled speed of best-of-N and of the best selector against rho, for an oracle gap of {gap:.3g}. Sliders change rho and alpha. "
             f"At rho {rho:.2f} and alpha {alpha:.2f} best-of-N has speed {(1 + gap) * (1 + rho) / (1 + 2 * rho + alpha):.3f}.")
    return _finish(alt.layer(*layers).add_params(*params), "When drafts cost time: where choosing still pays", words, "", 300)
