"""Single lines of a log: what is refused, and that the writer never writes what the reader would refuse."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsel.logs import STATS, LogError, encode_rows, file_entry, gzip_bytes, read_text, write_bytes_atomically
from specsel.logs.read import Lines, line_faults

DFLASH = {"proposed": 7, "accepted": 3, "conf_mean": 0.6, "conf_min": 0.4, "conf_first": 0.7, "ent_mean": 1.1}
NGRAM = {"proposed": 0, "accepted": 0} | dict.fromkeys(STATS) | {"match_length": 0}


def record() -> dict:
    """A legal record of a request with ten tokens to go."""
    return {
        "schema": 1,
        "workload": "code",
        "request": "code/0",
        "position": 2,
        "remaining": 10,
        "on_path": True,
        "context": {"match_length": 0, "target_entropy": 1.9, "target_confidence": 0.4},
        "arms": {"dflash": DFLASH | {"match_length": None, "source": None}, "ngram": dict(NGRAM)},
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


def faults(data: object) -> list:
    """What is wrong with a record, as (field, message)."""
    return [(f.field, f.message) for f in line_faults(json.dumps(data) + "\n")]


BROKEN = {
    "schema": [2, True, "1"],
    "workload": ["", 3, "DELETE"],
    "request": [None, "a\ud800", "a\nb", "DELETE"],
    "position": [-1, 1.5, True, "2", 10**30, "DELETE"],
    "remaining": [0, None, "DELETE"],
    "on_path": [1, None, "DELETE"],
    "context": [[], "x"],
    "context.match_length": [1.5, -1, False],
    "context.target_entropy": [-0.1, "high"],
    "context.target_confidence": [1.2],
    "arms": [{}, [], None, "DELETE"],
    "arms.dflash": [None, []],
    "arms.dflash.proposed": [-1, 2.5, True, 100_000, "DELETE", 2],
    "arms.dflash.accepted": [8, -1, 2.5, True, "3", None, "DELETE"],
    "arms.dflash.conf_mean": [1.7, 0.1, "0.5"],
    "arms.dflash.conf_min": [0.65, -0.1],
    "arms.dflash.conf_first": [0.3, True],
    "arms.dflash.ent_mean": [-1, [1], float("nan"), float("inf")],
    "arms.dflash.match_length": [0.5],
    "arms.dflash.source": ["nobody", 1],
}
LEGAL = {
    "schema": ["DELETE", 1.0],
    "request": ["a\u200db", "a\u2028b", "mt_bench:writing/1", "../.."],
    "context": ["DELETE", None, {}],
    "arms.dflash.accepted": [3.0],
    "arms.dflash.conf_mean": [None],
    "arms.dflash.ent_mean": ["DELETE"],
    "arms.ngram": [{"proposed": None}, {"proposed": None, "accepted": None}, {"proposed": None, "accepted": 0}],
    "arms.dflash.source": ["ngram"],
    "extra": [7, {"a": {"b": 1}}],
    "arms.dflash.conf_p90": [0.5],
    "position": [2.0],
}
NUMBERS = st.one_of(st.integers(-2, 12), st.floats(-1, 12), st.sampled_from([1e400, -1e400, 10**25, 5e9]))
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "ngram", "nan"]), st.builds(list), st.builds(dict)
)
FIELDS = sorted({*BROKEN, *(f"arms.ngram.{f}" for f in ("proposed", "accepted", *STATS, "match_length", "source"))})


def pairs(table: dict) -> list[tuple]:
    return [(path, value) for path, values in table.items() for value in values]


@pytest.mark.parametrize(("path", "value"), pairs(BROKEN), ids=str)
def test_every_field_that_is_broken_is_named(path, value):
    """The fault names the broken field or its neighbour (proposed 2 contradicts accepted 3)."""
    found = faults(put(record(), path, value))
    assert found, f"{path} = {value!r} was accepted"
    assert any((f or path).startswith(path.rsplit(".", 1)[0]) for f, _ in found), found


@pytest.mark.parametrize(("path", "value"), [("schema", 1), *pairs(LEGAL)], ids=str)
def test_missing_is_legal_where_the_schema_allows_it(path, value):
    assert faults(put(record(), path, value)) == []


@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.one_of(VALUES, st.just("DELETE"))), min_size=1, max_size=3))
def test_a_record_is_refused_by_field_or_its_columns_hold_its_values(changes):
    changed = record()
    for path, value in changes:
        try:
            put(changed, path, value)
        except (KeyError, TypeError):
            return
    found = faults(changed)
    assert all(field and message for field, message in found)
    if not found:
        lines = Lines()
        lines.read(json.dumps(changed), "log")
        for k, draft in enumerate(changed["arms"].values()):
            for name, value in draft.items():
                kept = lines.parts[0][name][0, k]
                assert name == "source" or kept == value or (value is None and np.isnan(kept))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a":1}{"b":2}', "more than one object"),
        ('{"a":', "not a complete JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_is_exactly_one_json_value(text, part):
    assert part in line_faults(text)[0].message


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"accepted": 3', '"accepted": 3, "accepted": 4', "arms.dflash.accepted"),
        ('"ngram": {', '"dflash": {"proposed": 1, "accepted": 0}, "ngram": {', "arms.dflash"),
        ('"position": 2', '"position" : 2, "position": 2', "position"),
    ],
)
def test_a_key_that_stands_twice_in_one_object_is_a_fault(old, new, field):
    text = json.dumps(record())
    assert old in text
    (fault,) = line_faults(text.replace(old, new, 1))
    assert (fault.field, fault.line) == (field, 1) and "twice" in fault.message


def test_a_written_row_is_strict_json_and_reads_back():
    """Missing values become null, never 0; floats keep six significant digits."""
    data = put(record(), "arms.dflash.conf_min", float("nan"))
    data["arms"]["dflash"]["ent_mean"] = np.float32(1 / 3)
    data["remaining"] = np.int64(10)
    back = json.loads(encode_rows([data]), parse_constant=lambda name: pytest.fail(f"{name} was written"))
    assert back["arms"]["dflash"]["conf_min"] is None and back["arms"]["dflash"]["ent_mean"] == 0.333333
    assert back["arms"]["ngram"]["conf_mean"] is None and back["remaining"] == 10
    assert faults(back) == [] and encode_rows([]) == b""


def test_equal_rows_have_equal_bytes_whatever_the_order_of_their_keys():
    data = record()
    turned = dict(reversed(data.items())) | {"arms": {n: dict(reversed(a.items())) for n, a in data["arms"].items()}}
    assert encode_rows([turned]) == encode_rows([data])


@pytest.mark.parametrize(
    ("path", "value"),
    [("arms.dflash.accepted", 9), ("arms.dflash.ent_mean", float("inf")), ("arms.dflash.conf_mean", 2.0)],
)
def test_the_writer_refuses_what_the_reader_would_refuse(path, value):
    with pytest.raises(LogError, match=f"code/0, position 2: .*{path}.*nothing was written"):
        encode_rows([record(), put(record(), path, value)])


def test_gzip_bytes_depend_on_the_content_only(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip_bytes(b"x\ny"))
    assert gzip_bytes(b"x\ny") == gzip_bytes(b"x\ny") and read_text(tmp_path / "a.gz") == "x\ny"
    assert file_entry(tmp_path / "a.gz")["lines"] == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, error):
    """A full disk is told with the name of the file."""
    path = tmp_path / "file"
    write_bytes_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises((KeyboardInterrupt, OSError)) as caught:
        write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    assert getattr(caught.value, "filename", None) in (None, str(path)) and (
        error is KeyboardInterrupt or str(path) in str(caught.value)
    )


def test_text_that_is_not_utf8_is_named_by_line(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"{}\n\xff\n")
    with pytest.raises(LogError, match="line 2: is not UTF-8"):
        read_text(tmp_path / "log.jsonl")
