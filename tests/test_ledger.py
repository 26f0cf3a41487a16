"""What a chapter shows: every figure a claim, every claim from its estimate, every name whole."""

import json

import pandas as pd
import pytest

from specsel.paper.claims import ClaimError
from specsel.paper.ledger import listed, open_ledger, verdict
from specsel.stats import Estimate, Resampling, by

REQUESTS = pd.DataFrame(
    {"workload": ["a:b"] * 12 + ["<c>"] * 12, "request": [*range(24)], "own": range(1, 25), "blocks": [4] * 24}
)


def figures(names=("mean_accepted",), arms=(), groups=("all", "workload")):
    quantities = {(name, *([arm] if arm else [])): lambda s: s.own / s.blocks for name in names for arm in arms or [""]}
    return by(REQUESTS, quantities, resampling=Resampling(99), groups=groups)


@pytest.fixture
def ledger(tmp_path):
    return open_ledger("04_selector", run="demo", log_sha256="ab" * 32, label="SIM", folder=tmp_path)


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr("specsel.paper.ledger._display", found.append)
    return found


def cells(text):
    return [line.split() for line in text.splitlines()]


def test_a_claim_is_its_estimate(ledger):
    """Value, interval, method, resamples and seed reach the file as they were computed, in the order of publication."""
    table = figures(("mean_accepted", "capture"))
    ledger.table(table)
    stored = json.loads(ledger.path.read_text("utf-8"))
    assert [(c["quantity"], tuple(c["keys"])) for c in stored] == list(
        zip(table["quantity"], table["key"], strict=True)
    )
    for claim, estimate in zip(stored, table["estimate"], strict=True):
        for name in ("value", "low", "high", "level", "n", "method", "n_resamples", "seed"):
            assert claim[name] == pytest.approx(getattr(estimate, name)), name
        assert claim["label"] == "SIM" and claim["origin"]["run"] == "demo"
    assert {c["unit"] for c in stored} == {"tokens/block", "fraction"}


def test_a_table_has_a_row_for_every_workload_whatever_its_name(ledger, shown):
    ledger.table(figures(("mean_accepted", "capture")), corner="held out")
    ledger.table(figures(arms=("x", "y:z")), rows="arm", columns="workload")
    ledger.table(figures(("skill",), arms=("x", "y")).head(2))
    first, second, third = (cells(s.text) for s in shown)
    assert first[0][:5] == ["held", "out", "[SIM]", "mean", "accepted,"]
    assert [row[0] for row in first[1:]] == ["all", "a:b", "<c>"]
    assert [row[0] for row in second[1:]] == ["x", "y:z"] and {"all,", "a:b,", "<c>,"} <= {*second[0]}
    assert [row[0] for row in third[1:]] == ["x", "y"]
    ledger.table(figures(("capture", "skill"), groups=["all"]), rows="quantity")
    assert cells(shown[3].text)[0] == ["[SIM]", "value"] and "redraft_rate" not in shown[3].text
    assert "&lt;c&gt;" in shown[0].html and "<c>" not in shown[0].html
    assert 'data-claim="04_selector.mean_accepted:a:b"' in shown[0].html and "99 resamples, seed 7" in shown[0].html


def test_a_quantity_has_one_unit(ledger):
    with pytest.raises(ClaimError, match="'speeed' has no unit"):
        ledger.table(figures(("speeed",)))
    with pytest.raises(ClaimError, match="'skill' has the unit 'ratio' and now gets 'fraction'"):
        ledger.table(figures(("skill",)), units={"skill": "fraction"})
    ledger.table(figures(("new",)), units={"new": "ratio"})
    with pytest.raises(ClaimError, match="'new' has the unit 'ratio' and now gets 's'"):
        ledger.publish("new", 1.0, unit="s", reason="x")


def test_figures_that_would_share_a_cell_are_refused(ledger):
    with pytest.raises(ClaimError, match="two figures share a cell"):
        ledger.table(figures(arms=("x", "y")), rows="workload", columns="quantity")
    with pytest.raises(ClaimError, match="not by 'color'"):
        ledger.table(figures(("skill",)), rows="color")


def test_a_sentence_holds_claims_and_words(ledger, shown):
    """Markdown for a page with origin and name of each claim, and the same in plain text; names may hold anything."""
    ledger.table(figures(), show=False)
    ledger.publish("requests", 24)
    ledger.say("{mean_accepted:a:b} on **{requests|value}** of $x_{{1}}$; {who}.", who=listed(["a_b", "*c*"]))
    (said,) = shown
    assert "tokens/block [" in said.text and said.text.endswith("on **24** of $x_{1}$; a_b and *c*.")
    assert r"a\_b and \*c\*" in said.markdown and 'data-claim="04_selector.requests"' in said.markdown
    assert r"\[SIM\]" in said.markdown


@pytest.mark.parametrize("template", ["{capture}", "{requests|other}", "{rate}"])
def test_an_unknown_claim_and_a_number_without_origin_are_refused(ledger, template):
    ledger.publish("requests", 24)
    with pytest.raises(ClaimError):
        ledger.say(template, rate=0.5)


@pytest.mark.parametrize(
    ("value", "low", "high", "words"),
    [
        (None, None, None, "is undefined"),
        (1.2, None, None, "has no interval"),
        (1.2, 1.1, 1.3, "is larger"),
        (1.02, 1.01, 1.03, "is larger, but by too little to matter"),
        (1.2, 0.9, 1.3, "cannot be told apart from it"),
        (1.0, 1.0, 1.0, "cannot be told apart from it"),
        (0.8, 0.7, 0.9, "is smaller"),
    ],
)
def test_a_verdict_has_six_outcomes(value, low, high, words):
    assert verdict(Estimate(value, low, high, 0.95, 24, "BCa", 99, 7), 1.0, 0.05) == words
