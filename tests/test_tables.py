"""A number is shown only after it has become a claim; tables hold what claims say."""

import pandas as pd
import pytest

from specsel.paper import tables
from specsel.paper.claims import ClaimError, make_claim
from specsel.paper.ledger import open_ledger
from specsel.study.oldstats import Estimate


@pytest.fixture
def ledger(tmp_path):
    return open_ledger("notebook", run="demo", folder=tmp_path)


def estimate(value, low, high):
    return Estimate(value, low, high, 0.95, 12, "BCa", 100, 0)


def test_rows_become_claims_with_their_limits(ledger):
    """Keys in the name, limits and sample in the claim; a row without a value says that it has none."""
    rows = pd.DataFrame(
        {"arm": ["a", "b"], "gain": [0.1, None], "low": [0.05, None], "high": [0.2, None], "n": [12, 12]}
    )
    tables.publish_rows("gain", rows, by=["arm"], value="gain", label="SIM", function="f", unit="fraction", n="n")
    first, second = ledger.claims["gain:a"], ledger.claims["gain:b"]
    assert (first.value, first.low, first.high, first.n) == (0.1, 0.05, 0.2, 12)
    assert second.value is None and "undefined" in second.reason


def test_a_count_that_was_not_recorded_says_so(ledger):
    tables.publish_counts(pd.DataFrame({"w": ["code"], "loops": [None]}), by="w", label="SIM", function="f")
    assert ledger.claims["loops:code"].value is None and ledger.claims["loops:code"].reason == "not recorded"


def test_nothing_is_published_without_a_ledger(monkeypatch):
    monkeypatch.setattr("specsel.paper.ledger._ledgers", [])
    with pytest.raises(ClaimError, match="open_ledger"):
        tables.publish_words("SIM", verdict="yes")


def test_patterns_choose_by_number_of_keys():
    """A bare name is one claim; each star is one key."""
    claims = [make_claim(name, 1, label="SIM") for name in ("skill", "skill:code", "skill:code:a")]
    chosen = {pattern: [c.name for c in tables.pick(claims, pattern)] for pattern in ("skill", "skill:*", "skill:*:*")}
    assert chosen == {"skill": ["skill"], "skill:*": ["skill:code"], "skill:*:*": ["skill:code:a"]}


def test_two_keys_are_row_and_column():
    claims = [make_claim(f"e:{w}:{a}", estimate(1.5, 1.0, 2.0), label="SIM", unit="ratio") for w in "uv" for a in "xy"]
    shown = tables.grid(claims, "e:*:*", corner="workload").frame
    assert list(shown.columns) == ["workload [SIM]", "x", "y"]
    assert shown.iloc[1].tolist() == ["v", "1.500 [1.000, 2.000]", "1.500 [1.000, 2.000]"]


def test_two_views_of_one_figure_stand_beside_each_other():
    claims = [make_claim(f"{what}:{w}", estimate(1.5, 1.0, 2.0), label="SIM") for what in ("g", "r") for w in "uv"]
    rows = tables.side_by_side(claims, blocks="g:*", exact="r:*")
    assert rows["name"].tolist() == ["u, blocks", "u, exact", "v, blocks", "v, exact"] and (rows["low"] == 1).all()


def test_a_table_shows_all_of_its_text():
    """Long sentences are not cut, an interval is not broken over two lines, markup in text is text."""
    sentence = "word " * 40 + "<end>"
    claims = [make_claim("verdict", sentence, label="SIM"), make_claim("gap", estimate(0.5, 0.1, 0.9), label="SIM")]
    page = tables.grid(claims, "verdict", "gap")._repr_html_()
    assert "word " * 40 + "&lt;end&gt;" in page
    assert "[0.100,\u00a00.900]" in page


def test_the_honest_rows_of_the_policy_table_come_late_and_start_anew():
    """Immediate feedback and kept states are in the table, not in the chart."""
    rows = [("ftl", "every arm", feedback, reset) for feedback in ("full", "delayed") for reset in ("request", "never")]
    table = pd.DataFrame(rows, columns=["policy", "sees", "feedback", "reset"]).assign(context="no context", fixed=0.1)
    named = tables.name_policies(table)
    assert named["policy"].tolist() == [
        "ftl, full",
        "ftl, full, state kept",
        "ftl, delayed",
        "ftl, delayed, state kept",
    ]
    assert tables.honest(named)["policy"].tolist() == ["ftl, delayed"]
