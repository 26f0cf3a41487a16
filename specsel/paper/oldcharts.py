"""Charts with one caller, until their callers draw them in view."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt
import pandas as pd

from specsel.paper.charts import (
    COLOURS,
    INK,
    _dashed,
    _finish,
    _looks,
    _order,
    _tips,
    data,
    dots,
    heat_map,
    lines,
    rows_of,
    say,
)

# ---- the charts of the book


def efficiency_bars(
    table: pd.DataFrame,
    *,
    value: str = "block_efficiency",
    axis: str = "tokens per block",
    title: str = "Block efficiency by workload and arm",
) -> alt.LayerChart:
    """Bars per workload and arm with intervals; columns workload, arm, <value>, low, high."""
    table, note = rows_of(table, [value])
    arms, base = _order(table, "arm"), alt.Chart(data(table))
    colour, shape, _ = _looks("arm", arms)
    where = {
        "x": alt.X("workload:N", sort=_order(table, "workload"), title=None, axis=alt.Axis(labelAngle=0)),
        "xOffset": alt.XOffset("arm:N", sort=arms),
    }
    up, tips = alt.Y(f"{value}:Q", title=axis), _tips(["workload", "arm"], [value, "low", "high"])
    layers = (
        base.mark_bar(opacity=0.75).encode(**where, y=up, color=colour, tooltip=tips),
        base.mark_rule(strokeWidth=2, color=INK).encode(**where, y="low:Q", y2="high:Q"),
        base.mark_point(size=50, filled=True, color=INK).encode(**where, y=f"{value}:Q", shape=shape),
    )
    words = f"{title}, {axis}, with 95 % intervals. {say(table, ['workload', 'arm'], value)}."
    return _finish(alt.layer(*layers), title, words, note, 260)


def survival_curves(table: pd.DataFrame, *, of: str = "blocks") -> alt.LayerChart:
    """Share of blocks (or ``of`` "positions") that accept at least k drafted tokens; columns arm, k, share, low,
    high."""
    return lines(
        table,
        x="k",
        y="share",
        series="arm",
        title="How far drafts survive",
        whole_x=True,
        percent=True,
        x_axis="drafted tokens accepted, at least",
        y_axis=f"share of {of}",
    )


def reliability_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Confidence against acceptance per arm with the diagonal; the table of `diagnostics.reliability`."""
    outcome = str(table["outcome"].iloc[0]) if len(table) else "acceptance"
    return lines(
        table,
        x="confidence",
        y="acceptance",
        series="arm",
        title="Does confidence mean what it says?",
        x_axis="stated confidence",
        y_axis=outcome,
        diagonal=True,
    )


def learning_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Skill on held-out workloads against training blocks; the table of `diagnostics.learning_curve`."""
    return lines(
        table.assign(series="selector"),
        x="blocks",
        y="skill",
        series="series",
        log_x=True,
        reference=1.0,
        title="How many logged blocks are enough?",
        x_axis="training blocks (log scale)",
        y_axis="skill on held-out workloads (random = 1)",
    )


def skill_forest(table: pd.DataFrame) -> alt.LayerChart:
    """Skill per held-out workload against random = 1, with verdicts; `LowoTable.frame()`."""
    known = zip(table["verdict"], table["threshold"], strict=True)
    notes = [f"{v} (threshold {t:.2f})" if t is not None and t == t else v for v, t in known]
    return dots(
        table.assign(note=notes),
        label="workload",
        value="skill",
        low="skill_low",
        high="skill_high",
        title="Skill on each held-out workload",
        axis="skill (random redrafting = 1)",
        reference=1.0,
        text="note",
    )


def regret_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Tokens lost over the blocks of a request; `curves.Curves.regret`."""
    return lines(
        table,
        x="block",
        y="regret",
        series="series",
        title="Regret within a request",
        reference=0.0,
        x_axis="block of the request",
        y_axis="tokens behind, so far",
        whole_x=True,
    )


def pull_shares(table: pd.DataFrame) -> alt.LayerChart:
    """Share of blocks per arm, so far, of one policy; `curves.Curves.shares` or `log_shares`."""
    x = "block" if "block" in table else "request"
    return lines(
        table,
        x=x,
        y="share",
        series="series",
        title=f"Arms that {table['policy'].iloc[0]} chooses",
        x_axis="block of the request" if x == "block" else "request",
        y_axis="share of blocks, so far",
        percent=True,
        whole_x=True,
    )


def extra_blocks(table: pd.DataFrame) -> alt.LayerChart:
    """Blocks beyond those of the best fixed arm over the requests of the log; `curves.Curves.extra`."""
    return lines(
        table,
        x="request",
        y="extra",
        series="series",
        title="Blocks against the best fixed arm",
        x_axis="request",
        y_axis="extra blocks so far, relative",
        whole_x=True,
        reference=0.0,
    )


def sensitivity_map(table: pd.DataFrame) -> alt.LayerChart:
    """Difference to the best fixed arm at every trial of every policy; `tuning.sensitivity`."""
    ends = table.groupby("policy", sort=False)["setting"].agg(["first", "last"])
    names = {
        p: f"{p}, {parameter} {ends['first'][p]:g} to {ends['last'][p]:g}"
        for p, parameter in zip(table["policy"], table["parameter"], strict=True)
    }
    return heat_map(
        table.assign(policy=table["policy"].map(names), place=table["place"].astype(str)),
        x="place",
        y="policy",
        value="value",
        title="Every trial against the best fixed arm, tokens per block",
        x_axis="setting of the main parameter, first to last",
        y_axis="policy",
    )


def headroom_dots(table: pd.DataFrame) -> alt.LayerChart:
    """Headroom of each oracle over best fixed; columns name, value, low, high (fractions)."""
    return dots(
        table,
        label="name",
        value="value",
        title="What choosing could gain at most",
        axis="gain over the best fixed arm",
        reference=0.0,
        percent=True,
    )


def interval_comparison(table: pd.DataFrame) -> alt.LayerChart:
    """The same quantity with requests and with blocks resampled; columns name (says which), unit, value, low, high."""
    return dots(
        table,
        label="name",
        value="value",
        group="unit",
        title="Resampling blocks pretends to know more",
        axis="oracle gap",
        percent=True,
    )


def spread_chart(table: pd.DataFrame) -> alt.LayerChart:
    """Quantiles of each feature per workload: 5 to 95 %, 25 to 75 %, median; table of `diagnostics.feature_spread`."""
    quantiles = ["p05", "p25", "p50", "p75", "p95"]
    kept, note = rows_of(table, quantiles)
    kept = kept.assign(row=kept["feature"] + " · " + kept["workload"])
    kept = kept.sort_values(["feature", "workload"], kind="stable")
    colour, shape, _ = _looks("workload", _order(kept, "workload"))
    y = alt.Y("row:N", sort=_order(kept, "row"), title=None, axis=alt.Axis(labelLimit=240))
    x = alt.X("p05:Q", title="value of the feature (confidence 0..1, entropy in nats)")
    base = alt.Chart(data(kept)).encode(y=y, color=colour)
    layers = (
        base.mark_rule().encode(x=x, x2="p95:Q"),
        base.mark_rule(strokeWidth=7, opacity=0.5).encode(x="p25:Q", x2="p75:Q"),
        base.mark_point(size=60, filled=True).encode(x="p50:Q", shape=shape, tooltip=_tips(["row"], quantiles)),
    )
    middle = say(kept, ["row"], "p50", "p25", "p75")
    words = f"Spread of each feature per workload. Medians with 25 to 75 % quantiles: {middle}."
    title = "Where a feature hardly varies it can tell nothing apart"
    return _finish(alt.layer(*layers), title, words, note, max(120, 18 * len(kept)))


READOUT = "'capture ' + format(datum.capture, '.1%') + ' at redraft rate ' + format(datum.redraft_rate, '.1%')"


def frontier_chart(
    table: pd.DataFrame, *, threshold: float = 0.5, scope: str = "all", operating: pd.DataFrame | None = None
) -> alt.LayerChart:
    """Capture against redraft rate with band (of one scope), diagonal and a threshold slider; `selector.frontier`.

    operating: the points at the thresholds chosen without the workload; columns scope, redraft_rate, capture.
    """
    kept, note = rows_of(table, ["redraft_rate", "capture"])
    order = _order(kept, "scope")
    colour, shape, dash = _looks("scope", order)
    tau = alt.param(name="tau", value=threshold, bind=alt.binding_range(min=0, max=1, step=0.01, name="threshold "))
    share = {"scale": alt.Scale(domain=[0, 1]), "axis": alt.Axis(format="%")}
    x = alt.X("redraft_rate:Q", title="redraft rate (share of blocks)", **share)
    y, band = (alt.Y(f"{n}:Q", title="capture (share of the available gain)", **share) for n in ("capture", "low"))
    base, mine = alt.Chart(data(kept)), f"datum.scope === {json.dumps(scope)}"
    here = base.transform_filter("abs(datum.threshold - tau) < 0.0051")
    fill = COLOURS[order.index(scope) % len(COLOURS)] if scope in order else INK
    tips = _tips(["scope"], ["threshold", "redraft_rate", "capture", "low", "high", "skill"], ".2f")
    readout = here.transform_filter(mine).transform_calculate(words=READOUT)
    layers = (
        base.transform_filter(mine).mark_area(fillOpacity=0.2, color=fill).encode(x=x, y=band, y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, order="threshold:Q"),
        _dashed({"a": [0.0, 1.0]}, x="a:Q", y="a:Q"),
        here.mark_point(size=90, filled=True).encode(x=x, y=y, color=colour, shape=shape, tooltip=tips),
        readout.mark_text(align="left", baseline="top", color=INK, fontSize=12).encode(
            x=alt.value(8), y=alt.value(8), text="words:N"
        ),
    )
    chosen = ""
    if operating is not None:
        points, _ = rows_of(operating, ["redraft_rate", "capture"])
        layers += (
            alt.Chart(data(points))
            .mark_point(size=260, shape="cross", strokeWidth=2.5)
            .encode(x=x, y=y, color=colour, tooltip=_tips(["scope"], ["redraft_rate", "capture"])),
        )
        chosen = f" Large crosses mark the operating points: {say(points, ['scope'], 'capture')}."
    at = say(kept[(kept["threshold"] - threshold).abs() < 0.0051], ["scope"], "capture")
    words = (
        "Capture against redraft rate over all thresholds; the dashed diagonal is random redrafting. "
        f"At threshold {threshold:.2f}, capture by scope: {at}.{chosen}"
    )
    return _finish(alt.layer(*layers).add_params(tau), "The threshold frontier", words, note, 320)


SPEED = "(1 + datum.capture * datum.gap) * (1 + datum.rho) / (1 + datum.rho + datum.rate * (datum.rho + alpha))"
RHO_GRID = tuple(round(0.01 * i, 2) for i in range(61))


def break_even_chart(
    gap: float,
    captures: Sequence[float],
    rates: Sequence[float],
    *,
    rho: float = 0.1,
    alpha: float = 0.0,
    break_even: tuple[float, float] | None = None,
    gap_limits: tuple[float, float] | None = None,
) -> alt.LayerChart:
    """Modelled speed against rho: best-of-N, and the best threshold of a frontier; sliders for rho and alpha.

    captures and rates are the points of the frontier; break_even are the limits of the break-even rho (drawn at speed
    1), gap_limits those of the gap (band of best-of-N). The formula in the page is `SPEED`; the tests hold it to
    `breakeven.relative_speed`.
    """
    points = [("best-of-N", 1.0, 1.0), *(("best selector", c, r) for c, r in zip(captures, rates, strict=True))]
    table = pd.DataFrame(
        [
            {
                "what": what,
                "capture": round(float(c), 6),
                "rate": round(float(r), 6),
                "gap": round(float(gap), 6),
                "rho": x,
            }
            for what, c, r in points
            for x in RHO_GRID
        ]
    )
    params = [
        alt.param(name=name, value=value, bind=alt.binding_range(min=0, max=top, step=0.01, name=f"{name} "))
        for name, value, top in (("rho", rho, 0.6), ("alpha", alpha, 1.0))
    ]
    colour, shape, dash = _looks("what", ["best-of-N", "best selector"])
    x = alt.X("rho:Q", title="rho: one draft, in verifications")
    y = alt.Y("speed:Q", title="modelled speed (always the dominant arm = 1)", scale=alt.Scale(zero=False))
    best = (
        alt.Chart(data(table))
        .transform_calculate(speed=SPEED)
        .transform_aggregate(speed="max(speed)", groupby=["what", "rho"])
    )
    here = best.transform_filter("abs(datum.rho - rho) < 0.0051")
    here = here.transform_calculate(words="format(datum.speed, '.3f')")
    layers = [
        best.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        _dashed({"one": [1.0]}, y="one:Q"),
        here.mark_point(size=80, filled=True, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, tooltip=_tips(["what"], ["rho", "speed"])
        ),
        here.mark_text(align="left", dx=9, color=INK, fontSize=12).encode(x=x, y=y, text="words:N"),
    ]
    if gap_limits:
        layers.insert(0, _gap_band(gap_limits, x))
    if break_even:
        span = pd.DataFrame({"from": [float(break_even[0])], "to": [float(min(break_even[1], 0.6))], "at": [1.0]})
        mark = alt.Chart(data(span)).mark_rule(strokeWidth=5, opacity=0.6, color=COLOURS[1])
        layers.append(mark.encode(x="from:Q", x2="to:Q", y="at:Q"))
    speed = (1 + gap) * (1 + rho) / (1 + 2 * rho + alpha)
    words = (
        f"Modelled speed of best-of-N and of the best selector against rho, for an oracle gap of {gap:.3g}. "
        f"Sliders change rho and alpha. At rho {rho:.2f} and alpha {alpha:.2f} best-of-N has speed {speed:.3f}."
    )
    title = "When drafts cost time: where choosing still pays"
    return _finish(alt.layer(*layers).add_params(*params), title, words, "", 300)


def _gap_band(limits: tuple[float, float], x: alt.X) -> alt.Chart:
    """Best-of-N between the limits of the oracle gap."""
    rows = [
        {"capture": 1.0, "rate": 1.0, "low_gap": float(limits[0]), "high_gap": float(limits[1]), "rho": r}
        for r in RHO_GRID
    ]
    speeds = {side: SPEED.replace("datum.gap", f"datum.{side}_gap") for side in ("low", "high")}
    band = alt.Chart(data(pd.DataFrame(rows))).transform_calculate(**speeds)
    return band.mark_area(opacity=0.15, color=COLOURS[0]).encode(x=x, y="low:Q", y2="high:Q")
