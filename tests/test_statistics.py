"""Intervals: equal to scipy's, calibrated on known truth, and never silently undefined."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specsel.logs import block_view, read_log
from specsel.study import oldstats as statistics
from specsel.study.oldstats import (
    bootstrap_many,
    bootstrap_requests,
    bootstrap_rows,
    holm,
    pooled_ratio,
    ratio,
    request_sums,
)

CASES = Path(__file__).parent / "cases"


def gap(sums):
    """(..., 2) sums of (best, dominant) counts -> oracle gap."""
    return ratio(sums[..., 0], sums[..., 1]) - 1


def rng(seed=7):
    return np.random.default_rng(seed)


@pytest.fixture
def totals():
    """(60, 2) emitted and blocks of requests of different length and speed, skewed."""
    draw = rng(11)
    blocks = draw.integers(5, 40, 60)
    return np.stack([draw.poisson(blocks * draw.lognormal(0.7, 0.4, 60)), blocks], axis=1).astype(float)


# ---- the same numbers as scipy


@pytest.mark.parametrize("method", ["BCa", "percentile"])
def test_limits_equal_those_of_scipy_draw_by_draw(totals, method):
    ours = bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=2000, method=method)
    theirs = stats.bootstrap(
        (totals[:, 0], totals[:, 1]),
        lambda x, y, axis: x.sum(axis) / y.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=2000,
        method=method,
        rng=rng(),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12) and ours.method == method


@pytest.mark.parametrize("method", ["BCa", "percentile"])
def test_strata_equal_the_independent_samples_of_scipy(method):
    """Two strata of 20 and 35 values; the statistic weighs the stratum means by their sizes."""
    first, second = rng(1).exponential(1.0, 20), rng(2).exponential(3.0, 35)
    ours = bootstrap_requests(
        lambda s: s[..., 0] / 55,
        np.concatenate([first, second])[:, None],
        strata=np.repeat(["a", "b"], [20, 35]),
        rng=rng(),
        n_resamples=2000,
        method=method,
    )
    theirs = stats.bootstrap(
        (first, second),
        lambda x, y, axis: (20 * x.mean(axis) + 35 * y.mean(axis)) / 55,
        vectorized=True,
        n_resamples=2000,
        method=method,
        rng=rng(),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_batches_change_nothing(totals, monkeypatch):
    whole = bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=500)
    monkeypatch.setattr(statistics, "BATCH", 7 * len(totals))
    assert bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=500) == whole


def test_very_many_requests_get_percentiles_that_agree_with_bca(totals, monkeypatch):
    """Where a jackknife would cost most it changes least; here forced on 60 requests, the limits move by a tenth."""
    bca = bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=2000)
    monkeypatch.setattr(statistics, "LARGEST_BCA", 50)
    plain = bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=2000)
    assert (bca.method, plain.method) == ("BCa", "percentile")
    assert (plain.low, plain.high) == pytest.approx((bca.low, bca.high), abs=0.15 * (bca.high - bca.low))


def test_equal_rows_drawn_together_have_the_same_distribution(totals):
    """Multinomial over distinct rows against row by row: limits within Monte Carlo error (0.05 widths)."""
    rows = np.round(totals[:, :1] / 20)
    together = bootstrap_rows(lambda s: s[..., 0], rows, strata=None, rng=rng(1), n_resamples=20_000)
    apart = bootstrap_requests(lambda s: s[..., 0], rows, strata=None, rng=rng(2), n_resamples=20_000)
    width = apart.high - apart.low
    assert (together.low, together.high) == pytest.approx((apart.low, apart.high), abs=0.05 * width)
    assert (together.value, together.n) == (apart.value, 60)


# ---- calibration


def test_clustered_requests_give_the_exact_interval_and_blocks_a_narrower_one():
    """All 4^4 resamples enumerated give [0, 1.7917]; values of expected.json (accepted counts, without the bonus)."""
    expected = json.loads((CASES / "expected.json").read_text())["clustered.jsonl"]
    view = block_view(read_log(CASES / "clustered.jsonl"))
    rows = np.stack([view.accepted.max(axis=1), view.accepted[:, 0]], axis=1)
    requests = bootstrap_requests(gap, request_sums(rows, view.request_of, 4), strata=None, rng=rng(), n_resamples=2000)
    blocks = bootstrap_rows(gap, rows, strata=None, rng=rng(), n_resamples=2000)
    assert requests.value == blocks.value == pytest.approx(expected["oracle_gap"], abs=1e-6)
    assert (requests.low, requests.high) == pytest.approx(expected["request_bootstrap_95_exact"], abs=0.03)
    assert (requests.n, blocks.n) == (4, 48)
    assert (requests.high - requests.low) / (blocks.high - blocks.low) == pytest.approx(
        expected["width_ratio_request_over_block"], rel=0.1
    )


def test_percentile_interval_equals_full_enumeration():
    """Four requests: all 256 ordered resamples are equally likely; their quantiles are the exact interval."""
    sums = np.array([[3.0, 2], [4, 1], [9, 3], [2, 2]])
    grid = np.stack(np.meshgrid(*[range(4)] * 4), axis=-1).reshape(-1, 4)
    exact = np.quantile(pooled_ratio(sums[grid].sum(axis=1)), [0.025, 0.975])
    found = bootstrap_requests(pooled_ratio, sums, strata=None, rng=rng(), n_resamples=20_000)
    assert (found.low, found.high) == pytest.approx(tuple(exact), abs=0.02) and found.method == "percentile"


# ---- seeds


def test_seed_actually_controls_the_draws(totals):
    first, again, other = (
        bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(s), n_resamples=300) for s in (3, 3, 4)
    )
    assert first == again and (first.low, first.high) != (other.low, other.high) and first.seed == 3


def test_two_seeds_agree_within_monte_carlo_error(totals):
    """Standard error of a 2.5 % limit with 10,000 draws is below 2 % of the width for a bell shape; 10 % allowed."""
    first, other = (bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(s)) for s in (3, 4))
    assert (first.low, first.high) == pytest.approx((other.low, other.high), abs=0.1 * (first.high - first.low))


def test_best_fixed_is_rechosen_in_every_resample():
    """Two nearly equal arms: some resamples must choose each of them; totals (R, K, 2)."""
    draw, chosen = rng(5), []
    sums = np.stack([draw.poisson(20, (30, 2)), np.full((30, 2), 10)], axis=2).astype(float)

    def best(s):
        efficiency = pooled_ratio(s)
        chosen.append(efficiency.argmax(axis=-1))
        return efficiency.max(axis=-1)

    found = bootstrap_requests(best, sums, strata=None, rng=rng(), n_resamples=400)
    assert set(np.concatenate([c.ravel() for c in chosen])) == {0, 1}
    assert found.value == pooled_ratio(sums.sum(axis=0)).max()


# ---- paired quantities


def paired(statistic, first, other, **options):
    """Two versions of the same requests, resampled together."""
    return bootstrap_many(
        {0: statistic}, np.stack([first, other], axis=1), strata=None, rng=rng(), null={0: 0.0}, **options
    )[0]


def difference(s):
    return pooled_ratio(s[..., 0, :]) - pooled_ratio(s[..., 1, :])


def test_paired_requests_are_resampled_together(totals):
    """A constant gain per block has no spread, whatever the requests are."""
    found = paired(difference, totals + totals[:, 1:] * [0.5, 0], totals, n_resamples=200)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5)) and found.method == "degenerate"


def test_p_value_is_small_for_a_real_difference_and_never_zero(totals):
    noise = rng(6).normal(0, 1, 60)
    real, none = (
        paired(difference, totals + np.stack([shift, 0 * noise], 1), totals)
        for shift in (totals[:, 1] + noise, noise - noise.mean())
    )
    assert 0 < real.p < 0.001 and none.p > 0.5 and none.low < 0 < none.high
    assert bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), n_resamples=50).p is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_helps_and_keeps_the_order(p):
    adjusted = holm(np.array(p))
    assert (adjusted >= np.array(p)).all() and (adjusted <= np.minimum(1, len(p) * np.array(p)) + 1e-15).all()
    assert all(adjusted[i] <= adjusted[j] for i in range(len(p)) for j in range(len(p)) if p[i] < p[j])


# ---- what is undefined says so


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("sums", "value", "method"),
    [
        ([[0, 0]] * 12, None, "undefined: the denominator is 0"),
        ([[2, 1]], 2.0, "undefined: one request has no spread"),
        ([[4, 4]] * 12, 1.0, "degenerate"),
        ([[4, 4]] * 2, 1.0, "degenerate"),
    ],
)
def test_undefined_and_degenerate_results_say_so(sums, value, method):
    found = bootstrap_requests(pooled_ratio, np.array(sums), strata=None, rng=rng(), n_resamples=100)
    assert (found.value, found.method) == (value, method) and found.n == len(sums)
    assert (found.low, found.high) == ((value, value) if method == "degenerate" else (None, None))
    assert found.defined == (method == "degenerate")


@pytest.mark.filterwarnings("error")
def test_a_log_without_requests_is_undefined():
    for bootstrap in (bootstrap_requests, bootstrap_rows):
        found = bootstrap(pooled_ratio, np.zeros((0, 2)), strata=None, rng=rng())
        assert found.value is None and found.n == 0 and found.method.startswith("undefined")


@pytest.mark.filterwarnings("error")
def test_resamples_without_a_value_are_dropped_and_counted():
    """One of twelve requests has the denominator: it is absent from (11/12)^12 = 35 % of the resamples."""
    sums = np.zeros((12, 2))
    sums[3], sums[:, 0] = (0, 1), np.arange(12)
    found = bootstrap_requests(pooled_ratio, sums, strata=None, rng=rng(), n_resamples=10_000)
    assert found.value == 66.0 and found.dropped == pytest.approx(3520, abs=250) and found.method == "percentile"
    assert found.low < found.value and np.isfinite(found.high)


@pytest.mark.filterwarnings("error")
def test_a_statistic_without_a_value_in_any_resample_has_no_interval():
    """A statistic that has a value on the data and none in any resample."""
    values = iter([1.0])
    found = bootstrap_requests(lambda s: next(values, np.nan), np.ones((12, 2)), strata=None, rng=rng(), n_resamples=50)
    assert (found.value, found.low, found.dropped) == (
        1.0,
        None,
        50,
    ) and found.method == "undefined: no resample has a value"


def test_a_stratum_of_one_request_adds_no_spread(totals):
    strata = np.array(["alone"] + ["rest"] * 59)
    found = bootstrap_requests(pooled_ratio, totals, strata=strata, rng=rng(), n_resamples=500)
    assert found.defined and found.method == "BCa"


def test_totals_with_nan_or_other_lengths_are_refused(totals):
    with pytest.raises(ValueError, match="nan or infinity"):
        bootstrap_requests(pooled_ratio, totals * np.nan, strata=None, rng=rng())
    with pytest.raises(ValueError, match="strata has 3 entries"):
        bootstrap_requests(pooled_ratio, totals, strata=np.zeros(3), rng=rng())
    with pytest.raises(ValueError, match="'BCa' or 'percentile'"):
        bootstrap_requests(pooled_ratio, totals, strata=None, rng=rng(), method="magic")


def test_ratio_of_nothing_is_missing_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(ratio(1.0, 0.0)) and np.isnan(pooled_ratio(np.zeros((3, 2)))).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=20))
def test_request_sums_equal_a_plain_loop(rows):
    request_of, values = (np.array([r[i] for r in rows], dtype=int) for i in (0, 1))
    loop = [sum(v for r, v in rows if r == k) for k in range(6)]
    assert request_sums(values, request_of, 6).tolist() == loop
    assert request_sums(np.stack([values, values], axis=1), request_of, 6)[:, 1].tolist() == loop


# ---- many statistics from one set of resamples

WORKLOADS = np.arange(60) % 3


def first(s):
    return ratio(s[..., 0], s[..., 1])


def second(s):
    return ratio(s[..., 1], s[..., 0]) - 1


def many(named, totals, strata=WORKLOADS, **options):
    return bootstrap_many(named, totals, strata=strata, rng=np.random.default_rng(5), **{"n_resamples": 500} | options)


def limits(estimate):
    return estimate.value, estimate.low, estimate.high, estimate.method, estimate.n


def test_many_intervals_at_once_equal_the_same_intervals_one_by_one(totals):
    for strata in (WORKLOADS, None):
        found = many({"first": first, "second": second}, totals, strata)
        for name, statistic in (("first", first), ("second", second)):
            one = bootstrap_requests(statistic, totals, strata=strata, rng=np.random.default_rng(5), n_resamples=500)
            assert limits(found[name]) == pytest.approx(limits(one))


def test_a_statistic_may_look_at_its_own_columns_only(totals):
    wide = np.stack([totals, 2 * totals], axis=1)
    found = many({"a": first, "b": first}, wide, columns={"a": 0, "b": (1, slice(None))})
    alone = limits(many({"a": first}, totals)["a"])
    assert limits(found["a"]) == pytest.approx(alone) and limits(found["b"]) == pytest.approx(alone)


def test_a_statistic_within_one_stratum_is_about_its_requests_only(totals):
    other = totals.copy()
    other[WORKLOADS != 1] += 7
    here, there = (many({"one": first}, t, within={"one": [1]})["one"] for t in (totals, other))
    assert here == there and here.n == 20 and here.value == pytest.approx(first(totals[WORKLOADS == 1].sum(axis=0)))


def test_a_split_statistic_sees_every_stratum(totals):
    best = many({"best": lambda s: first(s).max(axis=-1)}, totals, split=["best"])["best"]
    parts = [first(totals[WORKLOADS == w].sum(axis=0)) for w in range(3)]
    assert best.value == pytest.approx(max(parts)) and best.low <= best.value <= best.high
    total = many({"all": lambda s: first(s.sum(axis=-2))}, totals, split=["all"])["all"]
    assert limits(total) == pytest.approx(limits(many({"all": first}, totals)["all"]))


def test_a_null_value_gives_a_p_value(totals):
    found = many({"far": first, "at": first}, totals, null={"far": 50.0, "at": first(totals.sum(axis=0))})
    assert found["far"].p == pytest.approx(2 / 501) and found["at"].p > 0.5
    assert many({"none": first}, totals)["none"].p is None


def test_no_requests_one_request_and_one_request_per_stratum_are_defined():
    none = many({"a": first}, np.zeros((0, 2)), None)["a"]
    one = many({"a": first}, np.ones((1, 2)), None)["a"]
    assert none.value is None and "denominator" in none.method and one.value == 1 and "one request" in one.method
    each = many({"all": first, "w": first}, np.array([[1.0, 1], [1, 1]]), np.array([0, 1]), within={"w": [1]})
    assert (each["all"].low, each["all"].high) == (1, 1)
    assert each["all"].method == "degenerate, strata of one request merged"
    assert each["w"].low is None and "one request" in each["w"].method


def test_resamples_without_a_value_are_counted():
    totals = np.array([[1.0, 0], [1, 1], [1, 0], [1, 1]])
    found = many({"a": first}, totals, None, n_resamples=2000)["a"]
    assert 0 < found.dropped < 400 and found.low is not None  # (1/2)^4 of the resamples have no denominator
