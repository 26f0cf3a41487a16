"""Every chart describes itself, draws its intervals, names its parameters, and holds no missing value."""

import json
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest

from specsel.costs import relative_speed
from specsel.paper import charts as ch

ARMS, WORKLOADS = ("x", "y", "z"), ("a", "b")


def table(*keys, value="value", n=1.0):
    """Rows for every combination of (column, names), with a value and limits around it."""
    rows = [{}]
    for name, values in keys:
        rows = [{**row, name: v} for row in rows for v in values]
    return pd.DataFrame(
        [{**row, value: n + i / 10, "low": n + i / 10 - 0.05, "high": n + i / 10 + 0.05} for i, row in enumerate(rows)]
    )


def frontier_table():
    rows = [
        {
            "scope": s,
            "threshold": round(t, 2),
            "redraft_rate": 1 - t,
            "capture": 1 - t**2,
            "low": 0.9 * (1 - t**2),
            "high": 1 - t**3,
            "skill": 1 + t,
            "token_gain": 0.1,
        }
        for s in ("all", *WORKLOADS)
        for t in np.arange(0, 1.001, 0.01)
    ]
    return pd.DataFrame(rows)


def forest_table():
    made = table(("workload", WORKLOADS), value="skill").rename(columns={"low": "skill_low", "high": "skill_high"})
    return made.assign(threshold=[0.3, None], verdict=["beats random", "not fitted: one class"])


def reliability_table():
    made = table(("arm", ARMS), ("bin", range(4)), value="acceptance", n=0.1)
    return made.assign(confidence=made["bin"] / 4 + 0.1, outcome="first token accepted")


def spread_table():
    return pd.DataFrame(
        [
            {"workload": w, "feature": f, "p05": 0.1, "p25": 0.2, "p50": 0.3, "p75": 0.4, "p95": 0.5}
            for w in WORKLOADS
            for f in ("conf_min", "ent_mean")
        ]
    )


CHARTS = {
    "efficiency": lambda: ch.efficiency_bars(table(("workload", WORKLOADS), ("arm", ARMS), value="block_efficiency")),
    "survival": lambda: ch.survival_curves(table(("arm", ARMS), ("k", range(1, 5)), value="share", n=0.1)),
    "reliability": lambda: ch.reliability_chart(reliability_table()),
    "learning": lambda: ch.learning_chart(table(("blocks", (10.0, 100.0, 1000.0)), value="skill")),
    "forest": lambda: ch.skill_forest(forest_table()),
    "regret": lambda: ch.regret_chart(table(("series", ("p", "q")), ("block", (1, 2, 3)), value="regret")),
    "pulls": lambda: ch.pull_shares(
        table(("series", ARMS), ("block", (1, 2)), value="share", n=0.1).assign(policy="p")
    ),
    "pulls over the log": lambda: ch.pull_shares(
        table(("series", ARMS), ("request", (1, 2)), value="share", n=0.1).assign(policy="p")
    ),
    "extra": lambda: ch.extra_blocks(table(("series", ("p",)), ("request", (1, 2, 3)), value="extra")),
    "sensitivity": lambda: ch.sensitivity_map(
        table(("policy", ("p", "q")), ("place", (1, 2, 3))).assign(parameter="c", setting=0.5)
    ),
    "headroom": lambda: ch.headroom_dots(table(("name", ("dp", "workload")), n=0.1)),
    "intervals": lambda: ch.interval_comparison(table(("name", ("requests", "blocks")), ("unit", ("gap",)), n=0.1)),
    "transfer": lambda: ch.heat_map(
        table(("train", WORKLOADS), ("test", WORKLOADS), value="skill"),
        x="test",
        y="train",
        value="skill",
        title="T",
        x_axis="test",
        y_axis="train",
    ),
    "composition": lambda: ch.composition(
        table(("workload", WORKLOADS), ("best", ARMS), value="blocks", n=5),
        across="workload",
        part="best",
        value="blocks",
        title="C",
        axis="share",
    ),
    "spread": lambda: ch.spread_chart(spread_table()),
    "frontier": lambda: ch.frontier_chart(frontier_table(), threshold=0.4),
    "breakeven": lambda: ch.break_even_chart(
        0.133, [0.0, 0.61], [0.0, 0.43], break_even=(0.1, 0.3), gap_limits=(0.12, 0.14)
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


@pytest.mark.parametrize("name", [n for n in CHARTS if n not in ("composition", "transfer", "spread", "sensitivity")])
def test_intervals_are_drawn(name):
    spans = [layer for layer in CHARTS[name]().to_dict()["layer"] if {"x2", "y2"} & set(layer["encoding"])]
    assert spans, "no mark spans from low to high"


@pytest.mark.parametrize("name", ["efficiency", "survival", "reliability", "regret", "frontier"])
def test_series_differ_by_shape_or_dash_and_not_by_colour_alone(name):
    channels = {channel for layer in CHARTS[name]().to_dict()["layer"] for channel in layer["encoding"]}
    assert "color" in channels and channels & {"shape", "strokeDash"}


@pytest.mark.parametrize("name", CHARTS)
def test_text_has_an_explicit_colour(name):
    for layer in CHARTS[name]().to_dict()["layer"]:
        if layer["mark"]["type"] == "text":
            assert "color" in layer["mark"] or "color" in layer["encoding"]


def test_operating_points_are_marked_on_the_frontier():
    points = pd.DataFrame({"scope": ["all", "a"], "redraft_rate": [0.3, None], "capture": [0.5, None]})
    spec = ch.frontier_chart(frontier_table(), operating=points).to_dict()
    assert any(rows == [{"scope": "all", "redraft_rate": 0.3, "capture": 0.5}] for rows in spec["datasets"].values())
    assert "operating points: all: 0.5" in spec["description"]


def test_missing_values_are_left_out_and_said_so():
    rows = table(("workload", WORKLOADS), ("arm", ARMS), value="block_efficiency")
    rows.loc[1, "block_efficiency"] = np.nan
    spec = ch.efficiency_bars(rows).to_dict()
    assert spec["title"]["subtitle"] == "1 of 6 without a value left out" and data_rows(spec) == 5
    nothing = ch.headroom_dots(pd.DataFrame({"name": ["dp"], "value": [None], "low": [None], "high": [None]})).to_dict()
    assert "no values" in nothing["description"] and "1 of 1" in nothing["title"]["subtitle"]


def test_a_value_without_limits_is_still_drawn():
    rows = table(("name", ("dp", "workload")), n=0.1)
    rows["low"] = rows["low"].astype(object).where(rows.index != 0, None)
    spec = ch.headroom_dots(rows).to_dict()
    json.dumps(spec, allow_nan=False)
    assert "dp: 0.1;" in spec["description"]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_the_formula_in_the_page_is_the_formula_in_python(alpha):
    for capture, rate, gap, rho in [(0.61, 0.43, 0.133, 0.1), (1.0, 1.0, 0.133, 0.2), (0.0, 0.0, 0.5, 0.3)]:
        expression = ch.SPEED
        for word, value in (
            ("datum.capture", capture),
            ("datum.rate", rate),
            ("datum.gap", gap),
            ("datum.rho", rho),
            ("alpha", alpha),
        ):
            expression = expression.replace(word, repr(value))
        assert eval(expression) == pytest.approx(relative_speed(gap, capture, rate, rho, alpha))  # arithmetic only


def test_the_archive_has_specification_svg_and_text_and_fixed_bytes():
    spec = CHARTS["forest"]().to_dict()
    one, two = ch.archive(spec), ch.archive(spec)
    assert one == two and set(one) == {ch.MIME, "image/svg+xml", "text/plain"}
    assert one["image/svg+xml"].startswith("<svg") and one[ch.MIME]["width"] == "container"
    assert one["text/plain"].startswith("Chart: Skill")


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
    bundle = ch.live(CHARTS["forest"]().to_dict())
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
