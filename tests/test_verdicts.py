"""Verdict sentences follow the table that they judge."""

from __future__ import annotations

import pandas as pd

from specsel.costs import Costs
from specsel.paper import words as verdicts


def policies(p: float, least_p: float) -> pd.DataFrame:
    """A learner that reads no context and the exact oracle, with a given corrected p-value of the learner's gain."""
    rows = [
        {
            "policy": "hedge",
            "sees": "every arm",
            "context": "no context",
            "feedback": "delayed",
            "source": "arXiv",
            "block_efficiency": 2.2,
            "fixed": 0.2,
            "fixed_low": 0.1,
            "fixed_p": p,
        },
        {
            "policy": "oracle_dp",
            "sees": "hindsight",
            "context": "hindsight",
            "feedback": "",
            "source": "",
            "block_efficiency": 2.4,
            "fixed": 0.4,
            "fixed_low": 0.3,
            "fixed_p": p,
        },
    ]
    table = pd.DataFrame(rows)
    table.attrs["least_p"] = least_p
    return table


def test_a_gain_beyond_chance_is_said_and_a_gain_within_chance_is_not():
    assert "policies without context (1), one beats" in verdicts.learners(policies(0.01, 0.001))["without_context"]
    assert "(1), none beats" in verdicts.learners(policies(0.2, 0.001))["without_context"]


def test_too_few_resamples_are_not_taken_for_an_absence_of_gains():
    """With 2 rows and 50 resamples the smallest corrected p-value is 4/51: nothing can be told, that is said."""
    assert "so few resamples" in verdicts.learners(policies(0.078, 4 / 51))["without_context"]


def test_context_is_judged_by_workload_by_request_and_by_block():
    """Immediate counts of every arm do not count; a kind that the log does not allow is said to be missing."""
    found = policies(0.01, 0.001)
    rows = [("linucb", "block", "delayed", 0.3), ("ts", "workload", "bandit", -0.1), ("ftl", "block", "full", 1.0)]
    extra = pd.DataFrame(
        [
            {
                "policy": name,
                "sees": "either",
                "context": context,
                "feedback": feedback,
                "source": "",
                "block_efficiency": 2 + gain,
                "fixed": gain,
                "fixed_low": gain - 0.1,
                "fixed_p": 0.01,
            }
            for name, context, feedback, gain in rows
        ]
    )
    words = verdicts.learners(pd.concat([found, extra], ignore_index=True))
    beats = "the best fixed arm beyond chance"
    assert words["by_block"] == f"Of the policies that read context at every block (1), one beats {beats}: linucb."
    assert words["by_workload"] == f"Of the policies that know the workload only (1), none beats {beats}."
    assert words["by_request"] == "This log allows no policies that choose once per request."
    assert words["published"].endswith("hedge.") and "policies with context (2), one beats" in words["with_context"]
    assert "linucb, reaches 75 % of what the exact oracle gains over the best fixed arm" in words["left"]


def test_what_is_left_is_said_where_nothing_is_gained():
    found = policies(0.5, 0.001)
    assert "all of the exact headroom is left" in verdicts.learners(found.assign(fixed=[-0.1, 0.4]))["left"]
    assert "nothing to choose" in verdicts.learners(found.assign(fixed=[0.0, 0.0]))["left"]


def test_the_end_of_a_regret_curve_says_who_is_ahead():
    rows = [
        ("p against the best fixed arm", -1.0, 1.0),
        ("p against the best fixed arm", 1.0, 3.0),
        ("q against p", -3.0, -1.0),
        ("q against q", -1.0, 1.0),
    ]
    words = verdicts.on_the_way(pd.DataFrame(rows, columns=["series", "low", "high"]))
    assert words == "On the way, p is behind the best fixed arm; q is ahead of p and not told apart from q."
    alike = [("p against x", 1.0, 3.0), ("p against y", 1.0, 3.0), ("q against x", 1.0, 3.0), ("q against y", 1.0, 3.0)]
    words = verdicts.on_the_way(pd.DataFrame(alike, columns=["series", "low", "high"]))
    assert words == "On the way, p and q are behind x and y."


def test_sensitivity_names_the_extremes_and_counts_settings_above_the_best_fixed_arm():
    rows = [("a", 0.0, -0.1), ("a", 0.5, 0.1), ("b", 0.2, 0.1), ("b", 0.3, 0.2), ("c", -0.1, -0.2), ("c", -0.1, -0.2)]
    words = verdicts.sensitivity(pd.DataFrame(rows, columns=["policy", "value", "low"]))
    assert "most for a, where it moves 0.50" in words and "least for c, where it moves 0.00" in words
    assert "2 of 3 policies are above the best fixed arm at some setting, 1 at every setting" in words


def test_the_order_of_arms_is_said_to_matter_beyond_chance_only():
    table = pd.DataFrame([("ftl", 0.1, 0.2), ("ucb1", -0.1, 0.1)], columns=["policy", "low", "high"])
    assert verdicts.order(table) == "The order of the arms, which settles ties, changes ftl beyond chance."
    assert "changes no policy" in verdicts.order(table[1:])


def test_a_difference_of_rounding_is_no_gain():
    """Margins of one machine epsilon do not make "choosing beats redrafting always"."""
    from specsel.paper.claims import make_claim
    from specsel.study.oldstats import Estimate

    def claim(name: str, value: float):
        estimate = Estimate(value, value, value, 0.95, 9, "degenerate", 100, 0)
        return make_claim(name, estimate, label="SIM", unit="ratio")

    claims = [claim("break_even_rho", 0.5), claim("margin:0.15", 2.2e-16)]
    assert "at none of the tabled prices" in verdicts.price(claims)
    assert "beats redrafting always at rho = 0.15" in verdicts.price([claims[0], claim("margin:0.15", 0.01)])


def test_plain_decoding_is_named_when_it_is_faster_and_the_machine_always():
    costs = Costs({}, {"cpu": "some processor", "threads": 3})
    rows = pd.DataFrame(
        [
            {"policy": "plain decoding", "speed": 1.2, "speed_low": 1.1},
            {"policy": "redraft", "speed": 0.9, "speed_low": 0.8},
        ]
    )
    machine = "At the prices measured on some processor, 3 threads, "
    assert verdicts.speed(rows, costs).startswith(f"{machine}plain decoding is faster")
    assert "plain decoding among them" in verdicts.speed(rows, costs)
    assert verdicts.speed(rows[1:], costs).startswith(f"{machine}nothing is faster")
    assert "Without timings" in verdicts.speed(rows, None)


def test_coverage_is_judged_per_unit_and_size():
    rows = [("gap", "requests", 40, 0.92), ("gap", "blocks", 40, 0.8), ("gap", "requests", 300, 0.935)]
    study = pd.DataFrame(rows, columns=["quantity", "unit", "requests", "coverage"])
    first, second, third = verdicts.coverage(study).split("; ")
    assert first == "With 40 requests per workload, resampling requests misses the truth too often (gap)"
    assert second.startswith("with 40 requests per workload, resampling blocks misses")
    assert "as often as it says" in third
