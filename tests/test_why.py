"""Sentences about the selector follow from their tables, and change with them."""

import pandas as pd
import pytest

from specsel.paper.claims import make_claim
from specsel.study import why


def spread(widths, feature="conf_min", auc=0.8):
    """Middle halves of one feature per workload, and a second feature that ranks worse."""
    rows = [
        {"workload": w, "feature": f, "p25": 0.5, "p75": 0.5 + width, "auc": a}
        for w, width in widths.items()
        for f, a in ((feature, auc), ("ent_mean", 0.5))
    ]
    return pd.DataFrame(rows)


def skills(**values):
    return [make_claim(f"skill:{w}", v, label="SIM", reason="undefined: nothing") for w, v in values.items()]


@pytest.mark.parametrize(
    "widths, words",
    [
        ({"code": 0.3, "chat": 0.4, "copy": 0.01}, "holds here: on copy, where the skill is lowest, conf_min"),
        ({"code": 0.3, "chat": 0.4, "copy": 0.2}, "holds in part here: on copy"),
        ({"code": 0.1, "chat": 0.4, "copy": 0.2}, "does not hold here: the skill is lowest on copy, but conf_min"),
    ],
)
def test_the_explanation_of_the_original_is_examined(widths, words):
    assert words in why.explanation(spread(widths), skills(code=2.0, chat=1.5, copy=0.6))


def test_the_explanation_needs_two_skills():
    assert "cannot be examined" in why.explanation(spread({"code": 0.3, "copy": 0.1}), skills(code=2.0, copy=None))


def test_the_feature_that_matters_most_is_named_per_workload():
    rows = [("a", "x", 0.2, 0.1), ("a", "y", 0.1, 0.05), ("b", "y", 0.3, 0.2), ("c", "x", 0.01, -0.1)]
    table = pd.DataFrame(rows, columns=["workload", "feature", "drop", "low"])
    assert why.importance(table) == "On a the selector leans most on x; on b the selector leans most on y."
    assert why.importance(table[table["workload"] == "c"]).startswith("No feature")
    assert why.importance(table[:0]).startswith("No feature")


def test_confidence_is_called_too_high_too_low_or_kept():
    rows = [("over", 0.9, 0.5), ("under", 0.3, 0.5), ("fair", 0.5, 0.5)]
    table = pd.DataFrame([{"arm": a, "confidence": c, "acceptance": x, "blocks": 10} for a, c, x in rows])
    said = why.calibration(table)
    assert said.startswith("The confidence of over promises more") and "under promises less" in said
    assert "fair keeps" in said and why.calibration(table[:0]).startswith("No arm")


def test_enough_is_the_first_size_from_which_all_larger_ones_do():
    """100 blocks beat random by luck, 200 do not, 400 and 800 do; the last interval [1.5, 2.5] holds 1.6 and 2."""
    curve = pd.DataFrame(
        {
            "blocks": [100.0, 200, 400, 800],
            "skill": [1.2, 0.9, 1.6, 2.0],
            "low": [1.1, 0.5, 1.2, 1.5],
            "high": [1.3, 1.2, 2.0, 2.5],
        }
    )
    assert why.enough(curve).count("about 400") == 2
    assert "does not beat random" in why.enough(curve[:2])
    assert why.enough(curve.assign(skill=None)).startswith("No number")


def test_transfer_counts_pairs_of_different_workloads():
    rows = [("a", "a", 5.0, 6.0), ("a", "b", 1.2, 2.0), ("b", "a", 0.2, 0.8)]
    table = pd.DataFrame(rows, columns=["train", "test", "low", "high"]).assign(skill=1.0)
    said = why.transfers(table)
    assert "in 1 of 2 pairs" in said and "worse than random in 1" in said and said.endswith("none beats random on a.")
    assert why.transfers(table[:1]).startswith("No workload")


def decisions(gain, low, high, **more):
    rows = [
        {"policy": p, "gain": g, "gain_low": a, "gain_high": b, "drafts_per_block": d}
        for p, g, a, b, d in (
            ("redraft", 0.0, 0.0, 0.0, 1.5),
            ("route (logistic)", gain, low, high, 1.0),
            ("route (logistic) + redraft", 0.2, 0.1, 0.3, 1.3),
        )
    ]
    return pd.DataFrame(rows).assign(**more)


def test_before_or_after_follows_the_paired_interval():
    assert "route (logistic) beats redrafting, with 1.00 drafts" in why.before_or_after(decisions(0.1, 0.05, 0.2))
    assert "route (logistic) loses to redrafting" in why.before_or_after(decisions(-0.1, -0.2, -0.05))
    said = why.before_or_after(decisions(0.0, -0.1, 0.1, speed=1.2, speed_low=1.1, speed_high=1.3))
    assert "cannot be told from redrafting" in said and "doing both beats redrafting alone" in said
    assert said.endswith("in modelled time, route (logistic) beats redrafting.")
    assert "cannot be compared" in why.before_or_after(decisions(0, 0, 0)[:1])
