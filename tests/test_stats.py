"""Intervals: equal to scipy's, calibrated on known truth, paired by one set of draws, and never silently undefined."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from specsel import stats
from specsel.logs import block_view, read_log
from specsel.stats import Resampling, by, by_rows, estimate, holm, ratio, request_sums

CASES = Path(__file__).parent / "cases"
WORKLOADS = np.arange(60) % 3


def quotient(s):
    """(n, ..., 2) -> (n, ...)."""
    return ratio(s[..., 0], s[..., 1])


def efficiency(s):
    return ratio(s.emitted, s.blocks)


def interval(totals, statistic=quotient, workload=None, null=None, split=False, **how):
    totals = np.asarray(totals, dtype=float)
    workload = np.zeros(len(totals)) if workload is None else workload
    how = Resampling(**{"n_resamples": 500} | how)
    return estimate(statistic, totals, workload=workload, resampling=how, null=null, split=split)


def limits(e):
    return e.value, e.low, e.high, e.n


@pytest.fixture
def totals():
    """(60, 2) emitted and blocks of requests of different length and speed, skewed."""
    draw = np.random.default_rng(11)
    blocks = draw.integers(5, 40, 60)
    return np.stack([draw.poisson(blocks * draw.lognormal(0.7, 0.4, 60)), blocks], axis=1).astype(float)


@pytest.fixture
def table(totals):
    found = pd.DataFrame(totals, columns=["emitted", "blocks"])
    return found.assign(workload=WORKLOADS.astype(str), request=np.arange(60), tier=np.where(WORKLOADS, "a", "b"))


# ---- the same numbers as scipy, and as full enumeration


@pytest.mark.parametrize("method", ["BCa", "percentile"])
@pytest.mark.parametrize("sizes", [(60,), (20, 40)])
def test_limits_equal_those_of_scipy_draw_by_draw(totals, method, sizes):
    """Several workloads are scipy's several samples; sums of a sample are its mean times its size."""
    ends = np.cumsum(sizes)
    parts = [part[:, i] for part in np.split(totals, ends[:-1]) for i in (0, 1)] if len(sizes) == 1 else None
    ours = interval(
        totals if parts else totals[:, :1],
        quotient if parts else lambda s: s[:, 0],
        workload=np.repeat(np.arange(len(sizes)), sizes),
        n_resamples=2000,
        method=method,
    )
    theirs = scipy_stats.bootstrap(
        parts or np.split(totals[:, 0], ends[:-1]),
        (lambda x, y, axis: x.sum(axis) / y.sum(axis))
        if parts
        else lambda x, y, axis: sizes[0] * x.mean(axis) + sizes[1] * y.mean(axis),
        paired=bool(parts),
        vectorized=True,
        n_resamples=2000,
        method=method,
        rng=np.random.default_rng(7),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12) and ours.method == method


def test_percentile_interval_equals_full_enumeration():
    """Four requests: all 256 ordered resamples are equally likely; their quantiles are the exact interval."""
    sums = np.array([[3.0, 2], [4, 1], [9, 3], [2, 2]])
    grid = np.stack(np.meshgrid(*[range(4)] * 4), axis=-1).reshape(-1, 4)
    exact = np.quantile(quotient(sums[grid].sum(axis=1)), [0.025, 0.975])
    found = interval(sums, n_resamples=20_000)
    assert (found.low, found.high) == pytest.approx(tuple(exact), abs=0.02) and found.method == "percentile"


def test_clustered_requests_give_the_exact_interval_and_blocks_a_narrower_one():
    """All 4^4 resamples enumerated give [0, 1.7917]; values of expected.json (accepted counts, without the bonus)."""
    expected = json.loads((CASES / "expected.json").read_text("utf-8"))["clustered.jsonl"]
    view = block_view(read_log(CASES / "clustered.jsonl"))
    rows = np.stack([view.accepted.max(axis=1), view.accepted[:, 0]], axis=1)
    requests = interval(request_sums(rows, view.request_of, 4), lambda s: quotient(s) - 1, n_resamples=2000)
    how = Resampling(2000)
    blocks = by_rows(lambda s: quotient(s) - 1, rows, workload=np.zeros(len(rows)), resampling=how)
    assert requests.value == blocks.value == pytest.approx(expected["oracle_gap"], abs=1e-6)
    assert (requests.low, requests.high) == pytest.approx(expected["request_bootstrap_95_exact"], abs=0.03)
    assert (requests.n, blocks.n) == (4, 48)
    ratio_of_widths = (requests.high - requests.low) / (blocks.high - blocks.low)
    assert ratio_of_widths == pytest.approx(expected["width_ratio_request_over_block"], rel=0.1)


def test_equal_rows_drawn_together_have_the_same_distribution(totals):
    """Multinomial over distinct rows against row by row: limits within Monte Carlo error (0.05 widths)."""
    rows = np.round(totals[:, :1] / 20)
    together = by_rows(lambda s: s[..., 0], rows, workload=np.zeros(60), resampling=Resampling(20_000, seed=1))
    apart = interval(rows, lambda s: s[..., 0], n_resamples=20_000)
    width = apart.high - apart.low
    assert (together.low, together.high) == pytest.approx((apart.low, apart.high), abs=0.05 * width)
    assert (together.value, together.n) == (apart.value, 60)


# ---- draws


def test_memory_limits_change_nothing(totals, monkeypatch):
    whole = interval(totals, workload=WORKLOADS)
    monkeypatch.setattr(stats, "CHUNK", 700)
    monkeypatch.setattr(stats, "KEPT", 0)
    assert limits(interval(totals, workload=WORKLOADS)) == pytest.approx(limits(whole), rel=1e-12)


def test_very_many_requests_get_percentiles_that_agree_with_bca(totals, monkeypatch):
    """Where a jackknife would cost most it changes least; here forced on 60 requests, the limits move by a tenth."""
    bca = interval(totals, n_resamples=2000)
    monkeypatch.setattr(stats, "LARGEST_BCA", 50)
    plain = interval(totals, n_resamples=2000)
    assert (bca.method, plain.method) == ("BCa", "percentile")
    assert (plain.low, plain.high) == pytest.approx((bca.low, bca.high), abs=0.15 * (bca.high - bca.low))


def test_the_seed_controls_the_draws_and_is_told(totals):
    one, again, other = (interval(totals, seed=s, n_resamples=10_000) for s in (3, 3, 4))
    assert one == again and (one.low, one.high) != (other.low, other.high) and one.seed == 3
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.1 * (one.high - one.low))


def test_the_best_arm_is_chosen_anew_in_every_resample():
    """Two nearly equal arms: some resamples must choose each of them."""
    draw, chosen = np.random.default_rng(5), []
    sums = np.stack([draw.poisson(20, (30, 2)), np.full((30, 2), 10)], axis=2)

    def best(s):
        chosen.append(quotient(s).argmax(axis=-1))
        return quotient(s).max(axis=-1)

    found = interval(sums, best)
    assert set(np.concatenate([c.ravel() for c in chosen])) == {0, 1}
    assert found.value == quotient(sums.sum(axis=0)).max()


def difference(s):
    return quotient(s[..., 0, :]) - quotient(s[..., 1, :])


def test_paired_requests_are_resampled_together(totals):
    """A constant gain per block has no spread, whatever the requests are."""
    found = interval(np.stack([totals + totals[:, 1:] * [0.5, 0], totals], axis=1), difference)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5)) and found.method == "degenerate"


def test_p_value_is_small_for_a_real_difference_and_never_zero(totals):
    noise = np.random.default_rng(6).normal(0, 1, 60)
    real, none = (
        interval(np.stack([totals + np.stack([shift, 0 * noise], 1), totals], axis=1), difference, null=0.0)
        for shift in (totals[:, 1] + noise, noise - noise.mean())
    )
    assert real.p == pytest.approx(2 / 501) and none.p > 0.5 and none.low < 0 < none.high
    assert interval(totals).p is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_helps_and_keeps_the_order(p):
    adjusted = holm(np.array(p))
    assert (adjusted >= np.array(p)).all() and (adjusted <= np.minimum(1, len(p) * np.array(p)) + 1e-15).all()
    assert all(adjusted[i] <= adjusted[j] for i in range(len(p)) for j in range(len(p)) if p[i] < p[j])


# ---- what is undefined says so


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("sums", "workload", "value", "method"),
    [
        (np.zeros((0, 2)), None, None, "undefined: the denominator is 0"),
        ([[0, 0]] * 12, None, None, "undefined: the denominator is 0"),
        ([[2, 1]], None, 2.0, "undefined: one request has no spread"),
        ([[4, 4]] * 12, None, 1.0, "degenerate"),
        ([[1, 1]] * 2, [0, 1], 1.0, "degenerate, workloads of one request merged"),
    ],
)
def test_undefined_and_degenerate_results_say_so(sums, workload, value, method):
    found = interval(sums, workload=workload)
    assert (found.value, found.method, found.n) == (value, method, len(sums))
    assert (found.low, found.high) == ((value, value) if found.defined else (None, None))
    assert found.defined == method.startswith("degenerate")


@pytest.mark.filterwarnings("error")
def test_resamples_without_a_value_are_dropped_and_counted():
    """One of twelve requests has the denominator: it is absent from (11/12)^12 = 35 % of the resamples."""
    sums = np.zeros((12, 2))
    sums[3], sums[:, 0] = (0, 1), np.arange(12)
    found = interval(sums, n_resamples=10_000)
    assert found.value == 66.0 and found.dropped == pytest.approx(3520, abs=250) and found.method == "percentile"
    values = iter([1.0])
    never = interval(np.ones((12, 2)), lambda s: next(values, np.nan), n_resamples=50)
    assert (never.value, never.low, never.dropped) == (1.0, None, 50) and "no resample has a value" in never.method


def test_a_workload_of_one_request_adds_no_spread(totals):
    found = interval(totals, workload=np.array(["alone"] + ["rest"] * 59))
    assert found.defined and found.method == "BCa"
    assert by(
        pd.DataFrame({"workload": ["a", "b", "b"], "request": [1, 2, 3], "emitted": [1, 2, 3], "blocks": 1}),
        {"e": efficiency},
        resampling=Resampling(50),
    ).method.tolist() == ["percentile", "undefined: one request has no spread", "percentile"]


def test_what_has_no_meaning_is_refused(totals):
    with pytest.raises(ValueError, match="nan or infinity"):
        interval(totals * np.nan)
    with pytest.raises(ValueError, match="3 workloads for 60 requests"):
        interval(totals, workload=np.zeros(3))
    for wrong in ({"method": "magic"}, {"level": 1.0}, {"n_resamples": 0}):
        with pytest.raises(ValueError, match="'BCa' or 'percentile'"):
            Resampling(**wrong)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=20))
def test_request_sums_equal_a_plain_loop(rows):
    request_of, values = (np.array([r[i] for r in rows], dtype=int) for i in (0, 1))
    loop = [sum(v for r, v in rows if r == k) for k in range(6)]
    assert request_sums(values, request_of, 6).tolist() == loop
    assert request_sums(np.stack([values, values], axis=1), request_of, 6)[:, 1].tolist() == loop


# ---- figures: quantities by group


def test_one_set_of_draws_serves_every_quantity_and_every_call(table, totals):
    how = Resampling(500)
    both = by(table, {"efficiency": efficiency, "cost": lambda s: ratio(s.blocks, s.emitted)}, resampling=how)
    alone = by(table, {"efficiency": efficiency}, resampling=how)
    whole = both[(both.quantity == "efficiency") & (both.key == ())].estimate.iloc[0]
    assert whole == alone.estimate[0]
    assert limits(whole) == pytest.approx(limits(interval(totals, workload=WORKLOADS)), rel=1e-12)


def test_a_group_is_about_its_requests_only(table, totals):
    other = table.assign(emitted=table.emitted + 7 * (WORKLOADS != 1))
    here, there = (
        by(t, {"e": efficiency}, resampling=Resampling(500)).set_index("key").estimate for t in (table, other)
    )
    assert here[("1",)] == there[("1",)] and here[("1",)].n == 20 and here[()] != there[()]
    assert here[("1",)].value == pytest.approx(quotient(totals[WORKLOADS == 1].sum(axis=0)))
    tiers = by(table, {"e": efficiency}, groups=["tier"], resampling=Resampling(500)).set_index("key").estimate
    assert tiers[("b",)].value == pytest.approx(quotient(totals[WORKLOADS == 0].sum(axis=0))) and tiers[("a",)].n == 40


def test_columns_are_named_one_by_one_and_together(table):
    wide = table.assign(**{"blocks": 2 * table.blocks}).rename(columns={"blocks": ("b", "x"), "emitted": ("b", "y")})
    quantities = {
        ("r", "x"): lambda s: ratio(s["b", "y"], s["b", "x"]),
        "top": lambda s: s.b.max(axis=1),
        "top each": lambda s: s.b.max(axis=1).sum(axis=-1),
    }
    figures = by(wide, quantities, resampling=Resampling(50), split=["top each"], null={"top": 0.0})
    assert figures.key.tolist()[:4] == [("x",), (), (), ("0", "x")] and figures.p.notna().sum() == 4
    sums = wide.groupby("workload")[[("b", "x"), ("b", "y")]].sum()
    assert figures.value[1] == sums.sum().max() and figures.value[2] == sums.max(axis=1).sum()
    with pytest.raises(AttributeError, match="no column 'nothing'"):
        by(wide, {"q": lambda s: s.nothing}, resampling=Resampling(50))
