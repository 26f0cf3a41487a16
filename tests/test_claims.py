"""A number reaches the book with label, interval and origin, or it does not reach it."""

import json
import math

import numpy as np
import pytest

from specsel.paper.claims import (
    Claim,
    ClaimError,
    Label,
    cite,
    format_value,
    make_claim,
    read_claims,
    render,
)
from specsel.paper.ledger import open_ledger
from specsel.stats import Estimate

ESTIMATE = Estimate(0.133, 0.123, 0.142, 0.95, 128, "BCa", 10_000, 1)
UNDEFINED = Estimate(None, None, None, 0.95, 2, "undefined: no gain anywhere", 10_000, 1)


@pytest.fixture
def ledger(tmp_path):
    return open_ledger("03_replay", run="tiny", log_sha256="abc", folder=tmp_path)


def test_a_claim_carries_label_interval_n_method_and_origin(ledger):
    claim = ledger.publish("gap", ESTIMATE, label=Label.MEASURED, unit="fraction", function="oracle_gap", headline=True)
    assert (claim.value, claim.low, claim.high, claim.level, claim.n, claim.method) == (
        0.133,
        0.123,
        0.142,
        0.95,
        128,
        "BCa",
    )
    assert claim.origin == {"notebook": "03_replay", "run": "tiny", "log_sha256": "abc", "function": "oracle_gap"}
    assert render(claim, counts=True) == "13.3 % [12.3, 14.2] [MEASURED], n = 128"


def test_a_headline_without_interval_cannot_be_built(ledger):
    with pytest.raises(ClaimError, match="headline claim 'gap' has no interval"):
        ledger.publish("gap", 0.133, unit="fraction", headline=True)
    assert json.loads(ledger.path.read_text()) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.float64("nan"), np.array([1.0, 2.0]).tolist()])
def test_nan_infinity_and_lists_are_refused(ledger, bad):
    with pytest.raises(ClaimError, match="claim 'x'"):
        ledger.publish("x", bad, unit="ratio")


def test_an_undefined_number_needs_a_reason(ledger):
    with pytest.raises(ClaimError, match="without a reason"):
        ledger.publish("x", None, unit="ratio")
    claim = ledger.publish("capture", UNDEFINED, headline=True)
    assert render(claim) == "undefined (no gain anywhere) [MEASURED]"


def test_a_reported_figure_names_its_source(ledger):
    with pytest.raises(ClaimError, match="names no source"):
        ledger.publish("x", 0.133, unit="ratio", label="REPORTED")
    claim = ledger.publish("x", 0.133, unit="ratio", label="REPORTED", source="the original study, section 3")
    assert claim.origin == {"source": "the original study, section 3"}


def test_numpy_scalars_become_python_scalars(ledger):
    values = [
        ledger.publish(str(i), x, label="SIM", unit="ratio").value
        for i, x in enumerate([np.float64(0.5), np.int64(3), np.bool_(True)])
    ]
    assert values == [0.5, 3, True] and [type(v) for v in values] == [float, int, bool]
    assert "np." not in ledger.path.read_text()


def test_a_name_put_twice_with_another_value_is_refused(ledger):
    ledger.publish("x", 1.0, unit="ratio")
    ledger.publish("x", 1.0, unit="ratio")
    with pytest.raises(ClaimError, match="already published"):
        ledger.publish("x", 2.0, unit="ratio")


def test_the_same_claims_give_the_same_bytes_in_the_order_of_publication(tmp_path):
    """Pages take the order of rows and columns from the file: "k 2" stands before "k 10"."""
    for folder in "ab":
        ledger = open_ledger("n", run="r", folder=tmp_path / folder)
        for name in ("k 2", "k 10", "a"):
            ledger.publish(name, 1 / 3, label="SIM", unit="ratio")
    assert list(read_claims(tmp_path / "a")["n"]) == ["k 2", "k 10", "a"]
    assert (tmp_path / "a/n.json").read_bytes() == (tmp_path / "b/n.json").read_bytes()


def test_opening_a_ledger_forgets_the_numbers_of_the_last_run(ledger, tmp_path):
    ledger.publish("old", 1.0, unit="ratio")
    open_ledger("03_replay", folder=tmp_path)
    assert read_claims(tmp_path) == {"03_replay": {}}


def test_what_was_written_reads_back_equal(ledger, tmp_path):
    claims = [
        make_claim("gap", ESTIMATE, label="MEASURED", unit="fraction", headline=True),
        make_claim("v", "beats", label="SIM"),
    ]
    for claim in claims:
        ledger.add(claim)
    ledger.write()
    assert list(read_claims(tmp_path)["03_replay"].values()) == claims


def test_references_find_names_with_colons_and_take_formats_and_variants():
    claims = {
        "h": {
            "skill": Claim("skill", 9.0, "", Label.SIM),
            "skill:code": Claim("skill:code", 2.0613, "ratio", Label.MEASURED, 1.54, 2.62, 0.95, 9, "BCa"),
        }
    }
    assert cite(claims, "h.skill:code")[1] == "2.061 [1.540, 2.620] [MEASURED]"
    assert cite(claims, "h.skill:code:.1f")[1] == "2.1 [1.5, 2.6] [MEASURED]"
    assert cite(claims, "h.skill:code|value")[1] == "2.061"
    assert cite(claims, "h.skill:.2f|value")[1] == "9.00"
    for wrong in ("h.speed", "x.skill", "h.skill|unit", "h.skil"):
        with pytest.raises(KeyError):
            cite(claims, wrong)


def test_one_formatter_prints_every_number():
    assert format_value(-1e-9, "ratio") == "0.000"
    assert format_value(0.5) == "0.500" and format_value(12345.6) == "12,346"
    assert format_value(2e-5, "s") == "20.0 µs" and format_value(90.0, "s") == "90.00 s"
    assert format_value(1.25, "tokens/block") == "1.250 tokens/block"
    assert format_value(None) == "undefined" and format_value(True) == "yes" and format_value("text") == "text"


def test_a_sentence_is_cited_as_it_stands():
    verdict = make_claim("verdict", "beats random", label="MEASURED")
    assert render(verdict) == "beats random"
