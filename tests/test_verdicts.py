"""Verdict sentences follow the table that they judge."""

from __future__ import annotations

import pandas as pd

from specsel import verdicts


def policies(p: float, least_p: float) -> pd.DataFrame:
    """A learner that reads no context and the exact oracle, with a given corrected p-value of the learner's gain."""
    rows = [{"policy": "hedge", "sees": "every arm", "setting": "", "block_efficiency": 2.2, "fixed": 0.2,
             "fixed_low": 0.1, "fixed_p": p},
            {"policy": "oracle_dp", "sees": "hindsight", "setting": "", "block_efficiency": 2.4, "fixed": 0.4,
             "fixed_low": 0.3, "fixed_p": p}]
    table = pd.DataFrame(rows)
    table.attrs["least_p"] = least_p
    return table


def test_a_gain_beyond_chance_is_said_and_a_gain_within_chance_is_not():
    assert "1 of the 1 policies without context beats" in verdicts.learners(policies(0.01, 0.001))["without_context"]
    assert "None of the 1 policies" in verdicts.learners(policies(0.2, 0.001))["without_context"]


def test_too_few_resamples_are_not_taken_for_an_absence_of_gains():
    """With 2 rows and 50 resamples the smallest corrected p-value is 4/51: nothing can be told, that is said."""
    assert "so few resamples" in verdicts.learners(policies(0.078, 4 / 51))["without_context"]


def test_a_difference_of_rounding_is_no_gain():
    """Margins of one machine epsilon do not make "choosing beats redrafting always"."""
    from specsel.claims import make_claim
    from specsel.statistics import Estimate

    def claim(name: str, value: float):
        estimate = Estimate(value, value, value, 0.95, 9, "degenerate", 100, 0)
        return make_claim(name, estimate, label="SIM", unit="ratio")

    claims = [claim("break_even_rho", 0.5), claim("margin:0.15", 2.2e-16)]
    assert "at none of the tabled prices" in verdicts.price(claims)
    assert "beats redrafting always at rho = 0.15" in verdicts.price([claims[0], claim("margin:0.15", 0.01)])


def test_plain_decoding_is_named_when_it_is_faster():
    rows = pd.DataFrame([{"policy": "plain decoding", "speed": 1.2, "speed_low": 1.1},
                         {"policy": "redraft", "speed": 0.9, "speed_low": 0.8}])
    assert "plain decoding among them" in verdicts.speed(rows)
    assert "nothing is faster" in verdicts.speed(rows[1:])


def test_coverage_is_judged_per_unit_and_size():
    rows = [("gap", "requests", 40, 0.92), ("gap", "blocks", 40, 0.8), ("gap", "requests", 300, 0.935)]
    study = pd.DataFrame(rows, columns=["quantity", "unit", "requests", "coverage"])
    first, second, third = verdicts.coverage(study).split("; ")
    assert first == "With 40 requests per workload, resampling requests misses the truth too often (gap)"
    assert second.startswith("with 40 requests per workload, resampling blocks misses")
    assert "as often as it says" in third
