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
