"""Every chart describes itself, draws its intervals, names its parameters, and holds no missing value."""

import json
import re
from types import SimpleNamespace

import altair as alt
import numpy as np
import pandas as pd
import pytest

from specsel.paper import charts as ch
from specsel.stats import Resampling, by

ARMS, WORKLOADS = ("x", "y", "z"), ("a", "b")


def table(*keys, value="value", n=1.0):
    """Rows for every combination of (column, names), with a value and limits around it."""
    rows = [{}]
    for name, values in keys:
        rows = [{**row, name: v} for row in rows for v in values]
    return pd.DataFrame(
        [{**row, value: n + i / 10, "low": n + i / 10 - 0.05, "high": n + i / 10 + 0.05} for i, row in enumerate(rows)]
    )


CHARTS = {
    "dots": lambda: ch.dots(table(("name", ("dp", "workload")), n=0.1), label="name", title="D", axis="headroom"),
    "dots in groups": lambda: ch.dots(
        table(("workload", WORKLOADS), ("arm", ARMS)),
        label="workload",
        group="arm",
        order=ARMS,
        title="D",
        axis="tokens",
    ),
    "lines": lambda: ch.lines(
        table(("arm", ARMS), ("k", range(1, 5)), n=0.1),
        x="k",
        series="arm",
        order=ARMS,
        title="How far drafts survive",
        x_axis="drafted tokens accepted, at least",
        y_axis="share",
        reference=0.5,
    ),
    "heat map": lambda: ch.heat_map(
        table(("train", WORKLOADS), ("test", WORKLOADS)), x="test", y="train", title="T", x_axis="test", y_axis="train"
    ),
    "shares": lambda: ch.shares(
        table(("workload", WORKLOADS), ("best", ARMS), n=5), across="workload", part="best", title="C", axis="share"
    ),
}


def data_rows(spec):
    return sum(len(rows) for rows in spec.get("datasets", {}).values())


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_described_named_light_and_strict(name):
    spec = CHARTS[name]().to_dict()
    assert len(spec["description"]) > 40 and spec["width"] == "container" and spec["title"]
    assert 0 < data_rows(spec) < 5000
    json.dumps(spec, allow_nan=False)
    assert "null" not in json.dumps(spec["datasets"])
    assert all(
        not re.match(r"param_\d|view_\d", p["name"]) for p in spec.get("params", [])
    ) and "view_" not in json.dumps(spec)


@pytest.mark.parametrize("name", CHARTS)
def test_the_same_table_gives_the_same_chart(name):
    assert json.dumps(CHARTS[name]().to_dict()) == json.dumps(CHARTS[name]().to_dict())


@pytest.mark.parametrize("name", ["dots", "dots in groups", "lines"])
def test_intervals_are_drawn(name):
    spans = [layer for layer in CHARTS[name]().to_dict()["layer"] if {"x2", "y2"} & set(layer["encoding"])]
    assert spans, "no mark spans from low to high"


@pytest.mark.parametrize("name", ["dots in groups", "lines"])
def test_series_differ_by_shape_or_dash_and_not_by_colour_alone(name):
    channels = {channel for layer in CHARTS[name]().to_dict()["layer"] for channel in layer["encoding"]}
    assert "color" in channels and channels & {"shape", "strokeDash"}


@pytest.mark.parametrize("name", CHARTS)
def test_text_has_an_explicit_colour(name):
    for layer in CHARTS[name]().to_dict()["layer"]:
        if layer["mark"]["type"] == "text":
            assert "color" in layer["mark"] or "color" in layer["encoding"]


def test_missing_values_are_left_out_and_said_so():
    rows = table(("workload", WORKLOADS), ("arm", ARMS))
    rows.loc[1, "value"] = np.nan
    spec = ch.dots(rows, label="arm", group="workload", title="D", axis="a").to_dict()
    assert spec["title"]["subtitle"] == "1 of 6 without a value left out" and data_rows(spec) == 5
    nothing = pd.DataFrame({"name": ["dp"], "value": [None], "low": [None], "high": [None]})
    spec = ch.dots(nothing, label="name", title="D", axis="a").to_dict()
    assert "no values" in spec["description"] and "1 of 1" in spec["title"]["subtitle"]


def test_a_value_without_limits_is_still_drawn():
    rows = table(("name", ("dp", "workload")), n=0.1)
    rows["low"] = rows["low"].astype(object).where(rows.index != 0, None)
    spec = ch.dots(rows, label="name", title="D", axis="a").to_dict()
    json.dumps(spec, allow_nan=False)
    assert "dp: 0.1;" in spec["description"]


def test_an_arm_keeps_its_colour_shape_and_dash_whatever_is_drawn():
    """Also where only some arms are shown, and where there are more arms than colours."""
    for arms in (ARMS, tuple("abcdefghijkl")):
        scales = []
        for shown in (arms[1:], arms[::-1]):
            spec = ch.dots(table(("arm", shown)), label="arm", group="arm", order=arms, title="D", axis="a").to_dict()
            scales.append(spec["layer"][-1]["encoding"]["color"]["scale"])
        assert scales[0] == scales[1] == ch.arm_scale(arms).to_dict() and scales[0]["domain"] == list(arms)
    assert ch.arm_scale(SimpleNamespace(arms=ARMS)).to_dict()["domain"] == list(ARMS)


def test_a_chart_shows_the_figures_of_the_table():
    """Chart and table are made from the same Estimates: value, limits, and the unit of the quantity."""
    requests = pd.DataFrame({"workload": ["w"] * 20 + ["v"] * 20, "request": [*range(40)], "a": [*range(40)], "b": 50})
    figures = by(requests, {"capture": lambda s: s.a / s.b}, resampling=Resampling(99))
    spec = ch.dots(ch.named(figures, "workload"), label="workload", title="D", axis="capture").to_dict()
    drawn = next(iter(spec["datasets"].values()))
    assert [row["workload"] for row in drawn] == ["all", "w", "v"]
    for row, e in zip(drawn, figures["estimate"], strict=True):
        assert (row["value"], row["low"], row["high"]) == pytest.approx((e.value, e.low, e.high), abs=1e-6)
    assert spec["layer"][0]["encoding"]["x"]["axis"]["format"] == ".1%"


def test_the_archive_has_specification_svg_and_text_and_fixed_bytes():
    spec = CHARTS["dots"]().to_dict()
    one, two = ch.archive(spec), ch.archive(spec)
    assert one == two and set(one) == {ch.MIME, "image/svg+xml", "text/plain"}
    assert one["image/svg+xml"].startswith("<svg") and one[ch.MIME]["width"] == "container"
    assert one["text/plain"].startswith("Chart: D")


def test_a_live_chart_is_a_widget_of_a_fixed_width(monkeypatch):
    """JupyterLab gives a widget as much room as it asks for: a chart as wide as its container would have none."""
    made = []
    widget = alt.JupyterChart
    monkeypatch.setattr(
        ch.alt,
        "JupyterChart",
        type(
            "Noted",
            (widget,),
            {
                "__init__": lambda self, chart, **more: (
                    made.append(chart.to_dict()) or widget.__init__(self, chart, **more)
                )
            },
        ),
    )
    bundle = ch.live(CHARTS["dots"]().to_dict())
    assert "application/vnd.jupyter.widget-view+json" in json.dumps(bundle) and made[0]["width"] == ch.SVG_WIDTH


def test_use_chooses_the_renderer_and_import_chooses_none(monkeypatch):
    before = alt.renderers.active
    try:
        monkeypatch.setenv("SPECSEL_CHARTS", "archive")
        ch.use()
        assert alt.renderers.active == "specsel"
        assert alt.renderers.get() is ch.archive
        ch.use("live")
        assert alt.renderers.active == "specsel" and alt.renderers.get() is ch.live
    finally:
        alt.renderers.enable(before)
