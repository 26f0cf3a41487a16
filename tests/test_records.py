"""One record: what is refused, and what our writer never writes."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsel.logs.columns import _columns
from specsel.logs.records import (
    STATS,
    LogError,
    encode_row,
    file_entry,
    gzip_bytes,
    parse_line,
    read_text,
    record_faults,
    write_bytes_atomically,
)

ARMS = ("dflash", "ngram")


def record() -> dict:
    """A legal record of a request with ten tokens to go."""
    dflash = {
        "proposed": 7,
        "accepted": 3,
        "conf_mean": 0.6,
        "conf_min": 0.4,
        "conf_first": 0.7,
        "ent_mean": 1.1,
        "match_length": None,
        "source": None,
    }
    ngram = {
        "proposed": 0,
        "accepted": 0,
        "conf_mean": None,
        "conf_min": None,
        "conf_first": None,
        "ent_mean": None,
        "match_length": 0,
    }
    return {
        "schema": 1,
        "workload": "code",
        "request": "code/0",
        "position": 2,
        "remaining": 10,
        "on_path": True,
        "context": {"match_length": 0, "target_entropy": 1.9, "target_confidence": 0.4},
        "arms": {"dflash": dflash, "ngram": ngram},
    }


def put(data: dict, path: str, value: object) -> dict:
    """Set (or with value DELETE, remove) a dotted field."""
    *folders, last = path.split(".")
    inner = data
    for name in folders:
        inner = inner[name]
    if value == "DELETE":
        del inner[last]
    else:
        inner[last] = value
    return data


BROKEN = [
    ("schema", 2),
    ("schema", True),
    ("schema", "1"),
    ("workload", ""),
    ("workload", 3),
    ("workload", "DELETE"),
    ("request", None),
    ("request", "a\ud800"),
    ("request", "a\nb"),
    ("request", "DELETE"),
    ("position", -1),
    ("position", 1.5),
    ("position", True),
    ("position", "2"),
    ("position", 10**30),
    ("position", "DELETE"),
    ("remaining", 0),
    ("remaining", None),
    ("remaining", "DELETE"),
    ("on_path", 1),
    ("on_path", None),
    ("on_path", "DELETE"),
    ("context", []),
    ("context", "x"),
    ("context.match_length", 1.5),
    ("context.match_length", -1),
    ("context.match_length", False),
    ("context.target_entropy", -0.1),
    ("context.target_entropy", "high"),
    ("context.target_confidence", 1.2),
    ("arms", {}),
    ("arms", []),
    ("arms", None),
    ("arms", "DELETE"),
    ("arms.dflash", None),
    ("arms.dflash", []),
    ("arms.dflash.proposed", -1),
    ("arms.dflash.proposed", 2.5),
    ("arms.dflash.proposed", True),
    ("arms.dflash.proposed", 100_000),
    ("arms.dflash.proposed", "DELETE"),
    ("arms.dflash.proposed", 2),
    ("arms.dflash.accepted", 8),
    ("arms.dflash.accepted", -1),
    ("arms.dflash.accepted", 2.5),
    ("arms.dflash.accepted", True),
    ("arms.dflash.accepted", "3"),
    ("arms.dflash.accepted", None),
    ("arms.dflash.accepted", "DELETE"),
    ("arms.dflash.conf_mean", 1.7),
    ("arms.dflash.conf_mean", 0.1),
    ("arms.dflash.conf_mean", "0.5"),
    ("arms.dflash.conf_min", 0.65),
    ("arms.dflash.conf_min", -0.1),
    ("arms.dflash.conf_first", 0.3),
    ("arms.dflash.conf_first", True),
    ("arms.dflash.ent_mean", -1),
    ("arms.dflash.ent_mean", [1]),
    ("arms.dflash.match_length", 0.5),
    ("arms.dflash.source", "nobody"),
    ("arms.dflash.source", 1),
]
NUMBERS = st.one_of(st.integers(-2, 12), st.floats(-1, 12), st.sampled_from([1e400, -1e400, 10**25, 5e9]))
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "ngram", "nan"]), st.builds(list), st.builds(dict)
)
FIELDS = sorted(
    {path for path, _ in BROKEN}
    | {f"arms.ngram.{f}" for f in ("proposed", "accepted", *STATS, "match_length", "source")}
)


def test_a_legal_record_has_no_fault():
    assert record_faults(record(), ARMS, 7) == []


@pytest.mark.parametrize(("path", "value"), BROKEN, ids=str)
def test_every_field_that_is_broken_is_named(path, value):
    """The fault names the broken field or its neighbour (proposed 2 contradicts accepted 3)."""
    faults = record_faults(put(record(), path, value), ARMS, 7)
    assert faults, f"{path} = {value!r} was accepted"
    assert any(f.startswith(path.rsplit(".", 1)[0]) for f, _ in faults), faults


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "DELETE"),
        ("schema", 1.0),
        ("context", "DELETE"),
        ("context", None),
        ("context", {}),
        ("arms.dflash.accepted", 3.0),
        ("arms.dflash.conf_mean", None),
        ("arms.dflash.ent_mean", "DELETE"),
        ("arms.ngram", {"proposed": None}),
        ("arms.ngram", {"proposed": None, "accepted": None}),
        ("arms.ngram", {"proposed": None, "accepted": 0}),
        ("arms.dflash.source", "ngram"),
        ("extra", 7),
        ("arms.dflash.conf_p90", 0.5),
        ("position", 2.0),
    ],
    ids=str,
)
def test_missing_is_legal_where_the_schema_allows_it(path, value):
    assert record_faults(put(record(), path, value), ARMS, 7) == []


@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.one_of(VALUES, st.just("DELETE"))), min_size=1, max_size=3))
def test_columns_and_single_records_are_judged_alike(changes):
    """The fast path (columns of a chunk) takes a record exactly when the slow path finds nothing wrong with it."""
    changed = record()
    for path, value in changes:
        try:
            put(changed, path, value)
        except (KeyError, TypeError):
            return
    try:
        taken = _columns([changed], ARMS, 7) is not None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        taken = False
    faults = record_faults(changed, ARMS, 7)
    assert not (taken and faults), f"the fast path lets {changed} pass: {faults}"
    assert taken or faults, f"the fast path refuses {changed} without a reason"


def test_a_bare_nan_is_not_a_number():
    ((field, message),) = record_faults(parse_line(json.dumps(put(record(), "arms.dflash.ent_mean", float("nan")))))
    assert field == "arms.dflash.ent_mean" and "bare word NaN" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a":1}{"b":2}', "more than one object"),
        ('{"a":', "not a complete JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_is_exactly_one_json_value(text, part):
    with pytest.raises(ValueError, match=part):
        parse_line(text)


def test_a_written_row_is_strict_json_and_reads_back():
    """Missing values become null, never 0; floats keep six significant digits."""
    data = put(record(), "arms.dflash.conf_min", float("nan"))
    data["arms"]["dflash"]["ent_mean"] = np.float32(1 / 3)
    data["remaining"] = np.int64(10)
    back = json.loads(encode_row(data), parse_constant=lambda name: pytest.fail(f"{name} was written"))
    assert back["arms"]["dflash"]["conf_min"] is None and back["arms"]["dflash"]["ent_mean"] == 0.333333
    assert back["arms"]["ngram"]["conf_mean"] is None and back["remaining"] == 10
    assert record_faults(back, ARMS, 7) == []


def test_equal_rows_have_equal_bytes_whatever_the_order_of_their_keys():
    data = record()
    turned = dict(reversed(data.items())) | {"arms": {n: dict(reversed(a.items())) for n, a in data["arms"].items()}}
    assert encode_row(turned) == encode_row(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [("arms.dflash.accepted", 9), ("arms.dflash.ent_mean", float("inf")), ("arms.dflash.conf_mean", 2.0)],
)
def test_the_writer_refuses_what_the_reader_would_refuse(path, value):
    with pytest.raises(LogError, match=path.rsplit(".", 1)[1]):
        encode_row(put(record(), path, value))


def test_gzip_bytes_depend_on_the_content_only(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip_bytes(b"x\ny"))
    assert gzip_bytes(b"x\ny") == gzip_bytes(b"x\ny") and read_text(tmp_path / "a.gz") == "x\ny"
    assert file_entry(tmp_path / "a.gz")["lines"] == 2


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_text_that_is_not_utf8_is_named_by_line(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"{}\n\xff\n")
    with pytest.raises(LogError, match="line 2: is not UTF-8"):
        read_text(tmp_path / "log.jsonl")
