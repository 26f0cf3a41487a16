"""The published break-even table, its identities, and measured costs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsel import costs as be

CASES = Path(__file__).parent / "cases"
fraction, cost = st.floats(0, 1), st.floats(0, 10)


def table_rows():
    return json.loads((CASES / "breakeven_table.json").read_text("utf-8"))["rows"]


def test_relative_speed_reproduces_the_acceptance_table():
    rows = table_rows()
    for row in rows:
        speed = be.relative_speed(row["G"], row["capture"], row["redraft_rate"], row["rho"], row["alpha"])
        assert speed == pytest.approx(row["speed"], abs=1e-6), row
    assert len(rows) == 35


def test_best_of_n_reproduces_the_reported_table():
    reported = {0.02: 1.111, 0.05: 1.081, 0.10: 1.038, 0.15: 1.002, 0.20: 0.971}
    for rho, speed in reported.items():
        assert be.best_of_n(0.133, rho) == pytest.approx(speed, abs=1e-3)


def test_break_even_rho_is_0_23():
    """S = 1: rho (r - c G) = c G, with c = 0.61, G = 0.133, r = 0.43: 0.08113 / 0.34887 = 0.2326."""
    assert be.break_even_rho(0.133, 0.61, 0.43) == pytest.approx(0.08113 / 0.34887)


def test_no_alpha_above_0_19_ever_pays():
    assert be.max_alpha(0.133, 0.61, 0.43) == pytest.approx(0.0811 / 0.43, abs=1e-3)
    for rho in np.linspace(0, 5, 50):
        assert be.relative_speed(0.133, 0.61, 0.43, rho, 0.25) < 1


@given(cost, cost)
def test_never_redrafting_has_speed_one(rho, alpha):
    assert be.relative_speed(0.133, 0.0, 0.0, rho, alpha) == 1.0


@given(cost, cost)
def test_best_of_n_is_the_case_capture_and_rate_one(rho, alpha):
    assert be.best_of_n(0.133, rho, alpha) == be.relative_speed(0.133, 1, 1, rho, alpha)


@given(st.floats(0.01, 1), fraction, st.floats(0.01, 1), st.floats(0, 5))
def test_the_slope_in_rho_depends_on_alpha_alone(gap, capture, rate, rho):
    speed = [[be.relative_speed(gap, capture, rate, r, alpha) for r in (rho, rho + 1)] for alpha in (0.5, 1.0, 2.0)]
    assert speed[0][1] < speed[0][0] and speed[1][1] == pytest.approx(speed[1][0]) and speed[2][1] > speed[2][0]


@given(st.floats(0.01, 1), fraction, st.floats(0.01, 1), st.floats(0, 0.9))
def test_speed_is_one_at_the_break_even_rho(gap, capture, rate, alpha):
    rho = be.break_even_rho(gap, capture, rate, alpha)
    if rho and math.isfinite(rho) and rho < 1e6:
        assert be.relative_speed(gap, capture, rate, rho, alpha) == pytest.approx(1.0)
    if rho == 0:
        assert be.relative_speed(gap, capture, rate, 0.0, alpha) <= 1.0 + 1e-12


def test_break_even_has_defined_results_at_its_edges():
    assert math.isnan(be.break_even_rho(0.1, 0.0, 0.0)) and math.isnan(be.max_alpha(0.1, 0.0, 0.0))
    assert be.break_even_rho(0.0, 0.0, 0.5) == 0.0 and be.max_alpha(0.0, 0.0, 0.5) == 0.0
    assert be.break_even_rho(2.0, 1.0, 0.5) == math.inf


@pytest.mark.parametrize(
    "wrong, word",
    [
        ({"rho": -0.1}, "rho"),
        ({"rho": "1e-2"}, "rho"),
        ({"rate": 1.2}, "redraft rate"),
        ({"capture": -0.1}, "capture"),
        ({"rho": None}, "no speed"),
        ({"gap": math.nan}, "gap"),
        ({"alpha": math.inf}, "alpha"),
        ({"rho": True}, "rho"),
    ],
)
def test_impossible_values_are_refused_with_a_sentence(wrong, word):
    with pytest.raises(be.CostError, match=word):
        be.relative_speed(**{"gap": 0.133, "capture": 0.61, "rate": 0.43, "rho": 0.1} | wrong)


def test_arrays_give_what_their_numbers_give_and_undefined_entries_stay_undefined():
    capture, rate = np.array([0.0, 0.61, 1.0, np.nan]), np.array([0.0, 0.43, 1.0, np.nan])
    for formula, last in ((be.relative_speed, (0.1, 0.02)), (be.break_even_rho, (0.02,)), (be.max_alpha, (0.1,))):
        alone = [formula(0.133, c, r, *last) for c, r in zip(capture[:3], rate[:3], strict=True)]
        assert formula(0.133, capture, rate, *last) == pytest.approx([*alone, np.nan], nan_ok=True)


def test_warm_up_calls_are_dropped_and_the_median_reported():
    values = json.loads((CASES / "timing_warmup.json").read_text("utf-8"))["values"]
    samples = [{"what": "overhead", "seconds": seconds} for seconds in values]
    row = be.read_costs({"warmup": 5, "samples": samples}).table.iloc[0]
    assert row.median_s == pytest.approx(20.117, abs=1e-9) and (row.n, row.dropped) == (26, 5)
    assert row.low_s < row.median_s < row.high_s < 21
    with pytest.raises(be.CostError, match="leave nothing"):
        be.read_costs({"warmup": 31, "samples": samples})


def timings(**change):
    samples = [
        {"what": "t_draft", "arm": "x", "context": c, "seconds": s}
        for c, s in [(100, 9.0), (100, 0.01), (300, 9.0), (300, 0.03)]
    ]
    samples += [
        {"what": "t_verify", "rows": r, "context": 100, "seconds": s}
        for r, s in [(1, 9.0), (1, 0.1), (11, 9.0), (11, 0.2)]
    ]
    samples += [{"what": "catch_up", "arm": "x", "context": 100, "seconds": s} for s in (9.0, 0.005)]
    samples += [{"what": "overhead", "seconds": s} for s in (9.0, 0.001)]
    return {"schema": 1, "hardware": {"cpu": "c"}, "warmup": 1, "samples": samples} | change


def test_costs_interpolate_over_context_and_rows_and_stay_constant_outside():
    costs = be.read_costs(timings())
    assert costs.draft_s("x", np.array([50, 200, 900])) == pytest.approx([0.01, 0.02, 0.03])
    assert costs.verify_s(np.array([1, 6, 40]), 100) == pytest.approx([0.1, 0.15, 0.2])
    assert costs.rho("x", 10, 100) == pytest.approx(0.05) and costs.alpha(5, 100) == pytest.approx(0.2 / 0.15 - 1)
    assert set(costs.table.dropped) == {1} and len(costs.table) == 6


def test_a_block_costs_its_drafts_one_verification_catch_up_and_overhead():
    """Verification of 1 + 10 rows 0.2 s, draft 0.01 s, catch-up 0.005 s, overhead 0.001 s."""
    costs, at = be.read_costs(timings()), np.array([100, 100, 100])
    ran = np.array([[True], [True], [False]])
    stale, rows = np.array([[False], [True], [True]]), np.where(ran[:, 0], 11, 1)
    seconds = costs.block_s(("x",), at, ran=ran, rows=rows, stale=stale)
    assert seconds == pytest.approx([0.211, 0.216, 0.101])


def test_an_unmeasured_part_gives_no_speed():
    with pytest.raises(be.CostError, match="no speed"):
        be.read_costs(timings()).draft_s("y", 100)
    with pytest.raises(be.CostError, match="no samples"):
        be.read_costs({"samples": []})
    with pytest.raises(be.CostError, match="sample 0"):
        be.read_costs({"samples": [{"what": "t_draft", "arm": "x", "context": 1, "seconds": None}]})
    with pytest.raises(be.CostError, match="negative"):
        be.read_costs({"samples": [{"what": "overhead", "seconds": -1.0}]})


def test_costs_are_read_from_a_run_folder_or_are_not_there(tmp_path):
    assert be.load_costs(tmp_path) is None
    (tmp_path / "timings.json").write_text(json.dumps(timings()))
    assert be.load_costs(tmp_path).arms == ("x",)
    for broken in ("[]", "no json", '{"samples": [1]}'):
        (tmp_path / "timings.json").write_text(broken)
        with pytest.raises(be.CostError, match="timings"):
            be.load_costs(tmp_path)
