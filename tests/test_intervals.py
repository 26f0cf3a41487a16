"""Many intervals at once are the same intervals, paired, and say why one is missing."""
import numpy as np
import pytest

from specsel.intervals import bootstrap_many
from specsel.statistics import bootstrap_requests, ratio

WORKLOADS = np.arange(60) % 3


def first(s):
    return ratio(s[..., 0], s[..., 1])


def second(s):
    return ratio(s[..., 1], s[..., 0]) - 1


@pytest.fixture(scope="module")
def totals():
    return np.random.default_rng(0).integers(1, 20, size=(60, 2)).astype(float)


def many(statistics, totals, strata=WORKLOADS, **options):
    return bootstrap_many(statistics, totals, strata=strata, rng=np.random.default_rng(5),
                          **{"n_resamples": 500} | options)


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


def test_paired_statistics_move_together(totals):
    found = many({"gain": lambda s: ratio(s[..., 0], s[..., 1]) - 1},
                 np.stack([1.1 * totals[:, 0], totals[:, 0]], axis=1))["gain"]
    assert found.value == pytest.approx(0.1) and found.method == "degenerate" and found.low == found.high


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
