"""The coverage study counts correctly; its verdict on the intervals is tested in full in test_statistics."""

import numpy as np
import pytest

from specsel import coverage
from specsel.claims import make_claim
from specsel.statistics import Estimate


@pytest.fixture(scope="module")
def study():
    return coverage.coverage_study(rng=np.random.default_rng(0), corpora=12, n_resamples=200)


def test_shares_and_limits_follow_from_the_counts(study):
    assert (study["coverage"] == study["held"] / 12).all()
    assert ((study["low"] <= study["coverage"]) & (study["coverage"] <= study["high"])).all()
    assert sorted(set(study["unit"])) == ["blocks", "requests"] and len(study) == 4


def test_request_intervals_are_wider_on_correlated_blocks(study):
    """The model shares an effect within each request, so blocks are not independent."""
    width = study.set_index(["quantity", "unit"])["width"]
    for quantity in ("block efficiency", "oracle gap"):
        assert width[quantity, "requests"] > width[quantity, "blocks"]


def interval(low, high):
    return make_claim("x", Estimate((low + high) / 2, low, high, 0.95, 9, "BCa", 10, 0), label="SIM")


def test_widths_and_shifts_are_compared():
    """[0, 4] is twice as wide as [1, 3]; its limits differ by at most 1, a quarter of 4."""
    assert coverage.width_ratio(interval(0, 4), interval(1, 3)) == 2
    assert coverage.seed_shift(interval(0, 4), interval(1, 3)) == 0.25
    assert coverage.width_ratio(interval(0, 4), interval(2, 2)) is None
    assert coverage.seed_shift(interval(2, 2), interval(2, 2)) is None
