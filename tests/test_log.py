"""Reading and writing position logs: what is accepted, what is refused, and that every fault is named."""

import gzip
import json
import shutil
import warnings
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsel.logs import (
    LogError,
    LogWarning,
    SpecselError,
    block_rows,
    block_view,
    cache,
    convert,
    encode_rows,
    grouped,
    gzip_bytes,
    read,
    read_log,
    require_complete,
    summary,
    validate,
    write_log,
)
from specsel.logs.checks import natural

CASES = Path(__file__).parent / "cases"
GOLDEN = CASES / "golden_small.jsonl"
EXPECTED = json.loads((CASES / "expected.json").read_text())
RECORDS = [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def lines(records) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def same(a, b) -> bool:
    """Do two logs hold the same rows (names of run and files aside)?"""

    def equal(x, y):
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(equal(x[k], y[k]) for k in x)
        if isinstance(x, np.ndarray):
            return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        return x == y

    apart = ("run", "sha256", "request_table", "manifest")
    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name not in apart)


def changed(number: int, path: str, value) -> list[dict]:
    """The golden records with one field of line ``number`` set."""
    records = json.loads(json.dumps(RECORDS))
    *folders, last = path.split(".")
    inner = records[number - 1]
    for name in folders:
        inner = inner[name]
    inner[last] = value
    return records


@pytest.fixture
def golden():
    return read_log(GOLDEN)


@pytest.fixture
def run(tmp_path, golden):
    """A run folder with the golden log and a request table."""
    table = pd.DataFrame(
        {
            "workload": ["chat", "code"],
            "request": ["chat/0", "code/0"],
            "category": ["real:a", "task:b"],
            "looping": [True, False],
        }
    )
    return write_log(tmp_path / "run", replace(golden, request_table=table), {"target": {"name": "tiny"}})


# ---- what is read


def test_golden_log_gives_the_counts_derived_by_hand(golden):
    """11, 12, 13 and 17 blocks: the table of expected.json, which can be checked on paper."""
    expected = EXPECTED["golden_small.jsonl"]
    assert (golden.n_positions, golden.n_requests, golden.n_arms, golden.draft_len) == (21, 2, 4, 7)
    assert {a: block_view(golden, k).n_positions for k, a in enumerate(golden.arms)} == expected["blocks_fixed"]
    assert golden.complete and golden.path_arm == "dflash" and golden.on_path.sum() == expected["on_path_blocks"]
    assert np.array_equal(np.flatnonzero(golden.on_path), block_rows(golden))
    run = expected["dflash_run"]
    assert block_view(golden).accepted[:, 0].sum() == run["sum_accepted"]


def test_emitted_counts_the_bonus_and_stops_at_the_end(golden):
    """accepted + 1, but never more than what is left; summed along an arm's blocks it is every token."""
    assert (golden.emitted <= golden.remaining[:, None]).all() and golden.emitted.min() == 1
    for k in range(golden.n_arms):
        assert block_view(golden, k).emitted[:, k].sum() == EXPECTED["golden_small.jsonl"]["tokens"]


@pytest.mark.parametrize("name", ["no_final_newline.jsonl", "bom_crlf.jsonl", "two_members.jsonl.gz"])
def test_the_form_of_a_file_does_not_matter(name, golden):
    assert validate(CASES / name) == [] and same(read_log(CASES / name), golden)


@given(st.permutations(range(21)))
def test_any_line_order_gives_the_same_log(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("order") / "log.jsonl"
    path.write_bytes(lines(RECORDS[i] for i in order))
    assert same(read_log(path), read_log(GOLDEN))


def test_several_files_are_one_log(tmp_path, golden):
    """Shards of one request may lie in different files; the workload of the first file comes first."""
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS[::2]))
    (tmp_path / "b.jsonl").write_bytes(lines(RECORDS[1::2]))
    log = read_log([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert same(log, golden)
    with pytest.raises(LogError, match="missing"):
        read_log(tmp_path / "a.jsonl")


def test_one_request_name_in_two_workloads_is_two_requests(tmp_path):
    records = RECORDS[:12] + [r | {"workload": "chat", "request": "code/0"} for r in RECORDS[12:]]
    (tmp_path / "log.jsonl").write_bytes(lines(records))
    log = read_log(tmp_path / "log.jsonl")
    assert log.requests == ("code/0", "code/0") and log.workloads == ("chat", "code") and log.complete


def test_identical_repeats_are_read_once_and_told(golden):
    path = CASES / "duplicates_identical.jsonl"
    assert [f.line for f in validate(path)] == [6, 23, 24, 25]
    with pytest.warns(LogWarning, match="4 identical repeats"):
        assert same(read_log(path), golden)


def test_unknown_fields_are_ignored_and_told(tmp_path, golden):
    (tmp_path / "log.jsonl").write_bytes(lines([r | {"t_verify_ms": 12.5} for r in RECORDS]))
    with pytest.warns(LogWarning, match="unknown field 't_verify_ms'"):
        assert same(read_log(tmp_path / "log.jsonl"), golden)


@pytest.mark.parametrize(("path", "field"), [("context", "context.topic"), ("arms.dflash", "arms.*.topic")])
def test_unknown_fields_are_told_wherever_they_are(tmp_path, path, field):
    records = changed(1, "context", {})
    (records[0][path] if path == "context" else records[0]["arms"]["dflash"])["topic"] = 1
    (tmp_path / "log.jsonl").write_bytes(lines(records))
    with pytest.warns(LogWarning, match=f"unknown field '{field}'".replace("*", "[*]")):
        assert validate(tmp_path / "log.jsonl") == []


def test_a_clean_log_is_read_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_log(GOLDEN)


def test_missing_statistics_are_missing_and_not_zero(golden):
    assert np.isnan(golden.stats["conf_mean"][:, golden.arms.index("ngram")]).all()
    assert np.isfinite(golden.stats["conf_mean"][:, 0]).all() and golden.context == {}
    assert np.isnan(golden.stats["match_length"]).all() and golden.source is None


def test_not_asked_is_not_the_same_as_no_draft(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(lines(changed(3, "arms.ngram", {"proposed": None, "accepted": None})))
    log = read_log(tmp_path / "log.jsonl")
    k, row = log.arms.index("ngram"), 9 + 2  # chat/0 has nine positions and comes first
    assert log.proposed[row, k] == -1 and log.accepted[row, k] == 0 and (np.delete(log.proposed[:, k], row) >= 0).all()
    assert (
        json.loads(encode_rows([next(r for r in _rows(log) if r["position"] == 2)]))["arms"]["ngram"]["proposed"]
        is None
    )


def _rows(log):
    from specsel.logs import log_rows

    return list(log_rows(log, log.workloads.index("code")))


def test_the_arm_behind_a_composite_draft_is_kept(tmp_path):
    records = json.loads(json.dumps(RECORDS))
    for r in records:
        r["arms"]["cascade"]["source"] = "dflash" if r["position"] % 2 else "ngram"
    (tmp_path / "log.jsonl").write_bytes(lines(records))
    log = read_log(tmp_path / "log.jsonl")
    cascade = log.arms.index("cascade")
    assert np.array_equal(log.source[:, cascade], np.where(log.position % 2, 0, log.arms.index("ngram")))
    assert (np.delete(log.source, cascade, axis=1) == -1).all()
    assert same(log, read_log(convert(tmp_path / "log.jsonl", tmp_path / "copy.jsonl.gz")))


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("truncated_last_line.jsonl", {20, 21}),
        ("resume_gap.jsonl", {16}),
        ("nan_infinity.jsonl", {1, 2, 3, 4}),
        ("interleaved_writers.jsonl", {3, 4, 6, 7}),
        ("mixed_schema.jsonl", set(range(1, 22))),
        ("truncated.jsonl.gz", {None}),
    ],
)
def test_damaged_files_are_refused_with_file_and_line(name, where):
    """Line numbers from expected.json; line 20, 16 and 3 are the last records before a gap."""
    faults = validate(CASES / name)
    assert {f.line for f in faults} == where and all(name in f.file for f in faults)
    with pytest.raises(LogError, match=name) as caught:
        read_log(CASES / name)
    assert "\n" not in str(caught.value)


def test_faults_say_what_is_lost():
    assert "is cut short" in validate(CASES / "truncated_last_line.jsonl")[1].message
    assert "'chat/0' are missing" in validate(CASES / "truncated_last_line.jsonl")[0].message
    assert "cut short" in validate(CASES / "truncated.jsonl.gz")[0].message
    found = {(f.field, f.message[:12]) for f in validate(CASES / "mixed_schema.jsonl")}
    assert ("schema_version", "is 99, but t") in found and any(f == "on_path" for f, _ in found)
    assert [f.field for f in validate(CASES / "nan_infinity.jsonl")] == [
        "arms.ngram.conf_mean",
        "arms.eagle.ent_mean",
        "arms.eagle.conf_min",
        "arms.dflash.conf_first",
    ]


@pytest.mark.parametrize("case", json.loads((CASES / "bad_counts.json").read_text()), ids=lambda c: c["name"])
def test_impossible_counts_are_refused_where_they_stand(case, tmp_path):
    """Each record takes the place of its position in the golden log; the fault is on that line or it is legal."""
    records = list(RECORDS)
    position = case["record"]["position"] if isinstance(case["record"], dict) else 2
    records[position] = case["record"]
    (tmp_path / "log.jsonl").write_bytes(lines(records))
    faults = validate(tmp_path / "log.jsonl")
    assert (faults == []) == case["legal"], [str(f) for f in faults]
    assert case["legal"] or position + 1 in {f.line for f in faults}


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("arms.dflash.accepted", 9, "above proposed"),
        ("remaining", 9, "ends 12 tokens after its start"),
        ("position", 20, "ends 12 tokens"),
        ("arms", {"dflash": {"proposed": 1, "accepted": 0}}, "is missing"),
        ("arms.medusa", {"proposed": 1, "accepted": 0}, "unknown arm"),
        ("schema", 2, "reads schema 1 only"),
        ("workload", None, "expected a name"),
    ],
)
def test_one_broken_field_in_a_log_is_named_by_line_and_field(path, value, part, tmp_path):
    (tmp_path / "log.jsonl").write_bytes(lines(changed(3, path, value)))
    faults = validate(tmp_path / "log.jsonl")
    assert any(f.line == 3 and part in f.message for f in faults), [str(f) for f in faults]


def test_contradicting_repeats_are_refused(tmp_path):
    other = changed(5, "arms.dflash.accepted", 1)[4]
    (tmp_path / "log.jsonl").write_bytes(lines([*RECORDS, other]))
    (fault,) = validate(tmp_path / "log.jsonl")
    assert fault.line == 22 and "contradicts line 5" in fault.message
    with pytest.raises(LogError, match="contradicts"):
        read_log(tmp_path / "log.jsonl")


def test_all_faults_are_named_and_not_only_the_first(tmp_path):
    records = changed(3, "arms.eagle.accepted", -1)
    records[6]["on_path"], records[8]["remaining"], records[10]["request"] = 1, 2, ""
    (tmp_path / "log.jsonl").write_bytes(lines(records) + b'{"torn":')
    assert {f.line for f in validate(tmp_path / "log.jsonl")} >= {3, 7, 9, 11, 22}


@pytest.mark.parametrize("data", [b"", b"\n\n", gzip_bytes(b"")])
def test_an_empty_file_is_an_error_and_not_an_empty_result(tmp_path, data):
    (tmp_path / "log.jsonl").write_bytes(data)
    assert "is empty" in validate(tmp_path / "log.jsonl")[0].message
    with pytest.raises(LogError, match="is empty"):
        read_log(tmp_path / "log.jsonl")


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(LogError, match="nowhere.jsonl"):
        read_log(tmp_path / "nowhere.jsonl")
    assert "nowhere" in str(validate(tmp_path / "nowhere")[0])


@given(st.sets(st.integers(0, 20), min_size=1, max_size=8))
def test_a_gap_is_never_read_as_a_shorter_request(tmp_path_factory, lost):
    """Whatever lines are lost, the log is refused, unless whole requests or exactly the off-path rows are gone."""
    kept = [r for i, r in enumerate(RECORDS) if i not in lost]
    path = tmp_path_factory.mktemp("gap") / "log.jsonl"
    path.write_bytes(lines(kept))
    whole = all(sum(r["request"] == name for r in kept) in (0, size) for name, size in (("code/0", 12), ("chat/0", 9)))
    anchored = {i for i, r in enumerate(RECORDS) if not r["on_path"]} == lost
    assert bool(validate(path)) != (whole or anchored)


# ---- block-anchored logs


def test_block_anchored_logs_allow_gaps_and_refuse_replay():
    log = read_log(CASES / "anchored_only.jsonl")
    assert not log.complete and log.path_arm == "dflash"
    blocks = block_view(log)
    assert blocks.n_positions == 11
    gap = blocks.accepted.max(axis=1).sum() / blocks.accepted[:, 0].sum() - 1
    assert gap == pytest.approx(EXPECTED["anchored_only.jsonl"]["oracle_gap_on_path"])
    with pytest.raises(LogError, match="block-anchored"):
        require_complete(log)
    with pytest.raises(LogError, match="block-anchored"):
        block_view(log, 1)
    assert set(summary(log)["block_efficiency"]["code"].values()) == {None}


def test_a_block_anchored_log_equals_the_block_view_of_the_complete_one(golden):
    anchored, complete = block_view(read_log(CASES / "anchored_only.jsonl")), block_view(golden)
    for name in ("accepted", "emitted", "proposed", "request_of"):
        assert np.array_equal(getattr(anchored, name), getattr(complete, name)), name


def test_an_anchored_log_with_a_lost_block_is_refused(tmp_path):
    rows = (CASES / "anchored_only.jsonl").read_text().splitlines()
    for lost in range(len(rows)):
        (tmp_path / "log.jsonl").write_text("\n".join(rows[:lost] + rows[lost + 1 :]))
        assert validate(tmp_path / "log.jsonl"), f"block {lost} is lost and nobody notices"


# ---- run folders


def test_a_run_folder_reads_back_as_it_was_written(run, golden):
    log = read_log(run)
    assert same(log, golden) and log.manifest["target"] == {"name": "tiny"} and len(log.sha256) == 64
    assert log.looping.tolist() == [True, False] and log.request_column("category").tolist() == ["real:a", "task:b"]
    assert golden.looping is None and log.request_column("nothing") is None


def test_equal_logs_give_equal_bytes(run, tmp_path):
    other = write_log(tmp_path / "other", read_log(run))
    assert {p.name: p.read_bytes() for p in run.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


def test_every_shipped_line_is_strict_json(run):
    def refuse(word):
        raise AssertionError(word)

    for path in run.glob("*.jsonl.gz"):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("name", ["blocks_chat.jsonl.gz", "blocks_code.jsonl.gz", "requests.jsonl.gz"])
def test_one_changed_byte_or_a_deleted_file_is_named(run, name):
    data = bytearray((run / name).read_bytes())
    data[len(data) // 2] ^= 1
    (run / name).write_bytes(bytes(data))
    with pytest.raises(LogError, match=f"{name}.*manifest.json says"):
        read_log(run)
    (run / name).unlink()
    with pytest.raises(LogError, match=f"{name}: is missing"):
        read_log(run)


def rewrite(run, records, name="blocks_code.jsonl.gz", **manifest):
    """Replace a log file and bring the manifest's hashes up to date."""
    from specsel.logs import file_entry

    (run / name).write_bytes(gzip_bytes(lines(records)))
    old = json.loads((run / "manifest.json").read_text())
    old["files"] = [file_entry(run / f["name"]) for f in old["files"]]
    (run / "manifest.json").write_text(json.dumps(old | manifest))


@pytest.mark.parametrize(
    ("path", "value", "field", "part"),
    [
        ("workload", "chat", "workload", "in the file of workload 'code'"),
        ("on_path", False, "on_path", "but a block of dflash"),
        ("arms.dflash.proposed", 8, "arms.dflash.proposed", "above the draft length 7"),
    ],
)
def test_records_must_fit_the_manifest(run, path, value, field, part):
    rewrite(run, changed(1, path, value)[:12])
    faults = validate(run)
    assert any(f.field == field and part in f.message and f.line == 1 for f in faults), [str(f) for f in faults]


def test_arms_must_be_those_of_the_manifest(run):
    rewrite(run, RECORDS[:12], arms=["dflash", "eagle", "cascade", "medusa"])
    assert {f.field for f in validate(run)} >= {"arms.ngram", "arms.medusa"}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"schema": 2}, "'schema'"),
        ({"label": "REPORTED"}, "'label'"),
        ({"files": None}, "'files'"),
        ({"arms": ["a", "a"]}, "'arms'"),
        ({"arms": []}, "'arms'"),
        ({"arms": [1]}, "'arms.0'"),
        ({"path_arm": "x"}, "'path_arm'"),
        ({"draft_len": 0}, "'draft_len'"),
        ({"files": ["blocks_code.jsonl.gz"]}, "'files.0'"),
        ({"files": [{"name": "../x", "sha256": "", "lines": 1}]}, "'files.0.name'"),
    ],
)
def test_another_manifest_is_refused(run, change, part):
    rewrite(run, RECORDS[:12], **change)
    with pytest.raises(LogError, match=part):
        read_log(run)


@pytest.mark.parametrize("text", ["[1]", '{"request":"code/0"}', "{", '{"workload":"a","request":"b"}\n' * 2])
def test_a_request_table_that_is_none_is_refused(run, text):
    (run / "requests.jsonl.gz").write_bytes(gzip_bytes(text.encode()))
    with pytest.raises(LogError, match="requests.jsonl.gz: is not a table of requests"):
        read_log(run, verify=False)
    rewrite(run, RECORDS[:12])
    assert "requests.jsonl.gz" in validate(run)[0].file


def test_line_counts_are_checked(run):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"][0]["lines"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert [f.field for f in validate(run)] == ["lines"]


def test_a_folder_without_manifest_or_with_extra_logs_is_refused(run, tmp_path):
    shutil.copy(run / "blocks_chat.jsonl.gz", run / "blocks_extra.jsonl.gz")
    with pytest.raises(LogError, match="blocks_extra.*not listed"):
        read_log(run)
    (run / "manifest.json").unlink()
    with pytest.raises(LogError, match="manifest.json: is missing"):
        read_log(run)
    (run / "manifest.json").write_text("{")
    assert "is not a complete JSON" in validate(run)[0].message
    (run / "manifest.json").write_text("[1]")
    with pytest.raises(LogError, match="holds .1., expected an object"):
        read_log(run)


def test_hashes_can_be_skipped_but_faults_cannot(run):
    (run / "blocks_code.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS[:12]), 1))
    assert same(read_log(run, verify=False), read_log(GOLDEN))
    (run / "blocks_code.jsonl.gz").write_bytes(gzip_bytes(lines(changed(2, "arms.eagle.accepted", -3)[:12])))
    with pytest.raises(LogError, match="line 2"):
        read_log(run, verify=False)


# ---- what is read again


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A home for columns, however short the log."""
    monkeypatch.setenv("SPECSEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache, "WORTH", 0)
    return tmp_path / "home" / "logs"


def test_a_log_is_read_again_from_its_columns(run, kept, monkeypatch):
    first = read_log(run)
    monkeypatch.setattr(read.Lines, "read", lambda *_, **__: pytest.fail("the lines were read again"))
    again = read_log(run)
    assert len(list(kept.iterdir())) == 1 and same(again, first)
    assert (again.sha256, again.manifest, again.run) == (first.sha256, first.manifest, first.run)
    assert all(
        getattr(again, f.name).dtype == v.dtype for f in fields(first) if hasattr(v := getattr(first, f.name), "dtype")
    )


def test_a_changed_log_is_checked_again(run, kept):
    read_log(run)
    rewrite(run, changed(3, "arms.dflash.accepted", 9)[:12])
    for _ in range(2):
        with pytest.raises(LogError, match="above proposed = 7"):
            read_log(run)


def test_warnings_come_again_from_the_columns(tmp_path, kept):
    (tmp_path / "log.jsonl").write_bytes(
        lines([r | {"topic": 1} for r in RECORDS]) + lines([RECORDS[4] | {"topic": 1}])
    )
    for _ in range(2):
        with pytest.warns(LogWarning) as told:
            read_log(tmp_path / "log.jsonl")
        assert ["'topic'" in str(told[0].message), "1 identical repeat" in str(told[1].message)] == [True, True]
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize("at", [0, 0.3, 0.6, 0.999])
def test_damaged_columns_are_not_used(run, kept, golden, at):
    read_log(run)
    (path,) = kept.iterdir()
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 255
    path.write_bytes(data)
    assert same(read_log(run), golden)
    path.write_bytes(data[: int(at * len(data))])
    assert same(read_log(run), golden)


def test_a_home_that_cannot_be_written_costs_nothing_but_time(run, golden, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSEL_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "WORTH", 0)
    assert same(read_log(run), golden)
    monkeypatch.setenv("SPECSEL_HOME", "~unknown/home")  # no user is known
    assert same(read_log(run), golden) and not Path("~unknown").exists()


def test_only_the_latest_columns_are_kept(run, kept, monkeypatch):
    monkeypatch.setattr(cache, "LARGEST", 1)
    read_log(run)
    assert list(kept.iterdir()) == []


# ---- conversions


NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)


@settings(max_examples=20)
@given(names=st.lists(NAMES, min_size=2, max_size=2, unique=True), label=st.sampled_from(["SIM", "MEASURED"]))
def test_any_names_and_every_fact_survive_each_form(tmp_path_factory, names, label):
    """Names of workloads and requests are data: they choose no path. A plain file carries all else."""
    tmp, names = tmp_path_factory.mktemp("names"), sorted(names, key=natural)
    table = pd.DataFrame({"workload": names, "request": names[::-1], "looping": [True, False]})
    facts = {"label": label, "draft_len": 9, "workloads": tuple(names), "requests": tuple(names[::-1]), "run": "a run"}
    log = replace(read_log(GOLDEN), **facts, request_table=table, manifest={"target": {"name": "tiny"}})
    runs = [write_log(tmp / "in" / "run", log)]
    assert validate(runs[0]) == [] and {p.name for p in (tmp / "in").iterdir()} == {"run"}
    for name in ("plain.jsonl", "plain.jsonl.gz", "again"):
        runs.append(convert(runs[-1], tmp / "in" / name))
    for found in map(read_log, runs):
        assert same(found, log) and (found.run, found.manifest["target"]) == ("a run", {"name": "tiny"})
        assert found.looping.tolist() == [True, False]
    first, last = ({p.name: p.read_bytes() for p in runs[k].iterdir()} for k in (0, -1))
    assert first == last


def test_a_line_separator_inside_a_name_of_the_request_table_ends_no_line(golden, tmp_path):
    table = pd.DataFrame({"workload": ["chat", "code"], "request": ["a\u2028b", "c"], "looping": [True, False]})
    run = write_log(tmp_path / "run", replace(golden, requests=("a\u2028b", "c"), request_table=table))
    back = read_log(convert(run, tmp_path / "plain.jsonl"))
    assert back.requests == ("a\u2028b", "c") and back.looping.tolist() == [True, False]


def test_a_file_without_label_is_unlabelled_and_stays_so(golden, tmp_path):
    assert golden.label == "UNLABELLED" and read_log(write_log(tmp_path / "run", golden)).label == "UNLABELLED"


def test_parts_say_what_was_taken(run, tmp_path):
    log = read_log(run)
    part = log.pool(["eagle", "dflash"]).cap(3).only(["code"])
    assert part.manifest["selection"] == [
        {"arms": ["eagle", "dflash"]},
        {"draft_len": 3},
        {"workloads": ["code"]},
    ]
    back = read_log(write_log(tmp_path / "part", part))
    assert back.manifest["selection"] == part.manifest["selection"] and "selection" not in log.manifest
    assert (back.label, back.draft_len, back.arms) == (part.label, 3, part.arms) and same(back, part)


def test_a_head_of_another_log_is_refused(run, tmp_path):
    a, b = convert(run, tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    b.write_text(a.read_text("utf-8").replace('"UNLABELLED"', '"SIM"', 1), "utf-8")
    assert any(f.field == "label" and "equal settings" in f.message for f in validate([a, b]))
    b.write_text('{"manifest":{"schema":1}}', "utf-8")
    assert {f.field for f in validate(b)} >= {"manifest.label", "manifest.arms"}
    b.write_text(a.read_text("utf-8").replace('"path_arm":"', '"path_arm":"x', 1), "utf-8")
    assert [f.field for f in validate(b)][0] == "manifest.path_arm" and "one of the arms" in str(validate(b)[0])


@pytest.mark.parametrize("arms", [["eagle", "dflash"], ["dflash", "eagle", "cascade", "ngram"]])
def test_a_file_that_says_nothing_does_not_borrow_a_label(run, tmp_path, arms):
    """Beside one that does; whichever comes first, and whatever their arms."""
    other = write_log(tmp_path / "other", read_log(run).only(["chat"]).pool(arms))
    one, bare = convert(other, tmp_path / "one.jsonl"), tmp_path / "bare.jsonl"
    bare.write_bytes(lines(RECORDS[:12]))
    for order in ([one, bare], [bare, one]):
        assert any(f.field == "label" and f.file == str(bare) for f in validate(order))


def test_equal_faults_are_told_once(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(lines([{n: v for n, v in r.items() if n != "on_path"} for r in RECORDS]))
    faults = validate(tmp_path / "log.jsonl")
    (sentence,) = grouped(faults)
    assert (
        len(faults) == 21
        and "line 1: field 'on_path' is missing" in sentence
        and "20 more lines, to line 21" in sentence
    )


# ---- the rest


def test_conversions_lose_nothing(run, tmp_path, golden):
    for name in ("copy.jsonl", "copy.jsonl.gz", "folder"):
        assert same(read_log(convert(run, tmp_path / name)), golden)
        with pytest.raises(LogError, match="exists already"):
            convert(run, tmp_path / name)
    with pytest.raises(LogError):
        convert(CASES / "resume_gap.jsonl", tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("target", ["plain.jsonl", "packed.jsonl.gz", "folder"])
def test_label_and_settings_survive_every_form(tmp_path, golden, target):
    """A simulated log of draft length 9 stays one; a file that says nothing about itself is unlabelled."""
    assert golden.label == "UNLABELLED"
    source = write_log(tmp_path / "run", replace(golden, label="SIM", draft_len=9))
    first = read_log(convert(source, tmp_path / target))
    again = read_log(convert(tmp_path / target, tmp_path / "again"))
    for log in (first, again, first.pool(["eagle"]), first.cap(2), first.only(["chat"])):
        assert (log.label, log.run) == ("SIM", golden.run)
    assert first.draft_len == again.draft_len == 9 and same(first, again)


@pytest.mark.parametrize("name", ["a:b", "a/b", "../../x", "a b%", "Ümläut", "w" * 5000])
def test_a_workload_of_any_name_reads_back_and_chooses_no_path(tmp_path, golden, name):
    log = replace(golden, workloads=(name, "code"))
    folder = write_log(tmp_path / "out" / "run", log)
    assert read_log(folder).workloads[1:] == ("code",) and set(read_log(folder).workloads) == {name, "code"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and validate(folder) == []


def test_run_folders_are_merged_where_their_settings_agree(tmp_path, golden):
    parts = [write_log(tmp_path / w, golden.only([w])) for w in golden.workloads]
    merged = read_log(convert(parts, tmp_path / "both"))
    assert merged.workloads == golden.workloads and np.array_equal(merged.accepted, golden.accepted)
    other = write_log(tmp_path / "other", replace(golden.only(["chat"]), draft_len=9))
    with pytest.raises(LogError, match="field .draft_len. is 9, but 7 in"):
        read_log([parts[1], other])


def test_select_keeps_whole_requests(golden):
    chat, both = golden.select(np.array([True, False])), golden.select(np.array([1, 0]))
    assert chat.requests == ("chat/0",) and chat.n_positions == 9 and chat.starts.tolist() == [0, 9]
    assert both.requests == ("code/0", "chat/0") and both.starts.tolist() == [0, 12, 21]
    assert np.array_equal(both.accepted[12:], golden.accepted[:9]) and both.request_of[12] == 1
    assert same(both.select(np.array([1, 0])), golden)
    assert block_view(both).n_positions == 11


# ---- parts of a log


@pytest.fixture
def composite(tmp_path):
    """The golden log, whose cascade names its sources: dflash at odd positions, ngram at even ones."""
    records = [json.loads(line) for line in (CASES / "golden_small.jsonl").read_text("utf-8").splitlines()]
    for r in records:
        r["arms"]["cascade"]["source"] = "dflash" if r["position"] % 2 else "ngram"
    (tmp_path / "c.jsonl").write_bytes(lines(records))
    return read_log(tmp_path / "c.jsonl")


def test_a_pool_is_the_log_of_its_arms_in_the_order_given(composite):
    pool = composite.pool(["ngram", "cascade"])
    for j, name in enumerate(pool.arms):
        k = composite.arms.index(name)
        assert np.array_equal(pool.accepted[:, j], composite.accepted[:, k])
        assert np.array_equal(pool.stats["conf_mean"][:, j], composite.stats["conf_mean"][:, k], equal_nan=True)
    assert pool.arms == ("ngram", "cascade") and pool.composites == composite.composites == ("cascade",)
    assert np.array_equal(pool.source[:, 1], np.where(pool.position % 2, -2, 0))  # dflash has left, ngram is the first
    assert composite.pool(["dflash", "eagle"]).source is None and pool.path_arm is None
    assert pool.label == composite.label and pool.sha256 == composite.sha256
    assert same(composite.pool(composite.arms), composite)


def test_a_capped_log_has_shorter_drafts_and_forgets_what_depends_on_the_rest(golden):
    capped = golden.cap(2)
    assert np.array_equal(capped.accepted, np.minimum(golden.accepted, 2)) and capped.draft_len == 2
    assert capped.proposed.max() == 2 and np.array_equal(capped.proposed < 0, golden.proposed < 0)
    cut = golden.proposed > 2
    assert cut.any() and np.isnan(capped.stats["conf_mean"][cut]).all()
    assert np.array_equal(capped.stats["conf_mean"][~cut], golden.stats["conf_mean"][~cut], equal_nan=True)
    assert np.array_equal(capped.stats["conf_first"], golden.stats["conf_first"], equal_nan=True)
    assert np.array_equal(block_rows(capped), np.flatnonzero(capped.on_path))


def test_some_workloads_are_a_log_of_their_own(golden):
    code = golden.only(["code"])
    assert code.workloads == ("code",) and set(code.workload) == {0} and code.n_positions == 12
    assert golden.table.columns.tolist()[:2] == ["workload", "request"] and len(code.table) == code.n_requests


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda log: log.pool([]), "one or more"),
        (lambda log: log.pool(["eagle", "eagle"]), "one or more different arms"),
        (lambda log: log.pool(["medusa"]), "no arm 'medusa'; it has dflash"),
        (lambda log: log.only(["poems"]), "no workload 'poems'; it has chat"),
        (lambda log: log.cap(0), "draft length of 0 is not in 1 to"),
        (lambda log: log.cap(99), "draft length of 99"),
    ],
)
def test_a_part_that_is_not_there_is_refused(golden, part, said):
    with pytest.raises(SpecselError, match=said):
        part(golden)


def test_summary_recomputes_from_its_columns(golden):
    """Ratios of sums: block efficiency times blocks is the number of tokens."""
    found = summary(golden)
    assert found["requests"] == {"chat": 1, "code": 1} and found["positions"] == {"chat": 9, "code": 12}
    assert list(found) == [
        "run",
        "label",
        "arms",
        "draft_len",
        "requests",
        "positions",
        "mean_accepted",
        "block_efficiency",
    ]
    blocks = {
        a: sum(found["positions"][w] / found["block_efficiency"][w][a] for w in golden.workloads) for a in golden.arms
    }
    assert blocks == pytest.approx(EXPECTED["golden_small.jsonl"]["blocks_fixed"])
    assert sum(found["mean_accepted"][w]["dflash"] * n for w, n in (("chat", 4), ("code", 7))) == pytest.approx(10)
    json.dumps(found, allow_nan=False)


def test_requests_that_ended_at_once_are_still_counted(run, golden, tmp_path):
    """A request of one token has no position; it stays in the request count through the request table."""
    table = read_log(run).request_table
    ended = pd.concat([table, table.iloc[[0]].assign(request="chat/1")])
    log = read_log(write_log(tmp_path / "more", replace(golden, request_table=ended)))
    assert summary(log)["requests"] == {"chat": 2, "code": 1} and log.n_requests == 2


# ---- a corpus of broken logs

BROKEN_FIELDS = {  # name: (line, field to set, value, field of the fault, part of its message)
    "accepted above proposed": (3, "arms.dflash.accepted", 9, "arms.dflash.accepted", "above proposed = 7"),
    "accepted below zero": (3, "arms.eagle.accepted", -1, "arms.eagle.accepted", "expected 0 or more"),
    "accepted above remaining": (12, "arms.dflash.accepted", 2, "arms.dflash.accepted", "above remaining = 1"),
    "accepted without a draft": (3, "arms.dflash.proposed", None, "arms.dflash.accepted", "proposed is null"),
    "half a token": (3, "arms.dflash.proposed", 2.5, "arms.dflash.proposed", "expected a whole number"),
    "true as a number": (3, "arms.dflash.proposed", True, "arms.dflash.proposed", "is true, expected a number"),
    "too many proposed": (3, "arms.dflash.proposed", 99_999, "arms.dflash.proposed", "32766 or less"),
    "probability above one": (4, "arms.dflash.conf_mean", 1.7, "arms.dflash.conf_mean", "is 1.7, expected 1 or less"),
    "statistic as text": (4, "arms.dflash.conf_min", "0.5", "arms.dflash.conf_min", "expected a number"),
    "bare NaN": (
        4,
        "arms.eagle.conf_mean",
        float("nan"),
        "arms.eagle.conf_mean",
        "is NaN, expected a finite number (write null",
    ),
    "bare Infinity": (4, "arms.eagle.ent_mean", float("inf"), "arms.eagle.ent_mean", "is Infinity, expected a finite"),
    "negative entropy": (4, "arms.eagle.ent_mean", -0.1, "arms.eagle.ent_mean", "expected 0 or more"),
    "minimum above the first": (4, "arms.eagle.conf_min", 0.99, "arms.eagle.conf_min", "above conf_first"),
    "half a match": (5, "arms.ngram.match_length", 1.5, "arms.ngram.match_length", "expected a whole number"),
    "source that is no arm": (5, "arms.cascade.source", "medusa", "arms.cascade.source", "expected one of the arms"),
    "arm as a list": (5, "arms.ngram", [0, 0], "arms.ngram", "expected an object"),
    "arm without counts": (5, "arms.ngram", {}, "arms.ngram.proposed", "is missing"),
    "unknown arm": (5, "arms.medusa", {"proposed": 1, "accepted": 0}, "arms.medusa", "unknown arm"),
    "missing arm": (5, "arms", {"dflash": {"proposed": 1, "accepted": 0}}, "arms.eagle", "is missing"),
    "no arms": (5, "arms", {}, "arms", "expected one entry or more"),
    "another schema": (6, "schema", 2, "schema", "reads schema 1 only"),
    "no workload": (6, "workload", None, "workload", "expected a name"),
    "nameless request": (6, "request", "", "request", "expected a name"),
    "negative position": (6, "position", -1, "position", "expected 0 or more"),
    "nothing remaining": (6, "remaining", 0, "remaining", "expected 1 or more"),
    "another end": (6, "remaining", 99, "remaining", "ends 12 tokens after its start"),
    "path as text": (6, "on_path", "yes", "on_path", "expected true or false"),
    "context as a list": (7, "context", [1], "context", "expected an object"),
    "context out of range": (7, "context", {"target_confidence": 2}, "context.target_confidence", "1 or less"),
}


def planted(faults, line, field, part) -> bool:
    return any((f.line, f.field) == (line, field) and part in f"{f}" for f in faults)


@pytest.mark.parametrize("name", BROKEN_FIELDS)
def test_every_planted_field_is_found_where_it_stands(name, tmp_path):
    line, path, value, field, part = BROKEN_FIELDS[name]
    (tmp_path / "log.jsonl").write_bytes(lines(changed(line, path, value)))
    faults = validate(tmp_path / "log.jsonl")
    assert planted(faults, line, field, part), [str(f) for f in faults]
    assert all(f.file == str(tmp_path / "log.jsonl") for f in faults)


def test_all_planted_fields_of_one_file_are_found_at_once(tmp_path):
    """One fault per line, on lines 3 to 7 and 12, all of them named by one call."""
    records, chosen = json.loads(json.dumps(RECORDS)), {}
    for name, (line, *_) in BROKEN_FIELDS.items():
        chosen.setdefault(line, name)
    for line, name in chosen.items():
        records[line - 1] = changed(line, *BROKEN_FIELDS[name][1:3])[line - 1]
    (tmp_path / "log.jsonl").write_bytes(lines(records))
    faults = validate(tmp_path / "log.jsonl")
    assert len(chosen) == 6
    assert all(planted(faults, line, *BROKEN_FIELDS[name][3:]) for line, name in chosen.items())


GOOD = lines(RECORDS)
BROKEN_BYTES = {  # name: (bytes of the file, line, field, part of the message)
    "empty file": (b"", None, None, "is empty"),
    "cut in the last line": (GOOD[:-30], len(RECORDS), None, "is not a complete JSON object"),
    "no object": (GOOD + b"[1, 2]\n", len(RECORDS) + 1, None, "holds [1, 2], expected an object"),
    "two objects on a line": (GOOD.replace(b"}\n{", b"} {", 1), 1, None, "more than one object"),
    "not text": (GOOD[:5] + b"\xff" + GOOD[5:], 1, None, "is not UTF-8 text"),
    "half a gzip": (gzip_bytes(GOOD)[:-40], None, None, "cut short or damaged"),
    "a position twice": (
        GOOD + lines(changed(5, "arms.dflash.accepted", 1)[4:5]),
        len(RECORDS) + 1,
        "position",
        "contradicts line 5",
    ),
    "a gap": (lines(RECORDS[:4] + RECORDS[5:]), 4, "position", "positions 4 to 4"),
    "no start": (lines(RECORDS[2:]), 1, "position", "positions 0 to 1"),
}


@pytest.mark.parametrize("name", BROKEN_BYTES)
def test_every_broken_file_is_found(name, tmp_path):
    data, line, field, part = BROKEN_BYTES[name]
    (tmp_path / "log.jsonl").write_bytes(data)
    faults = validate(tmp_path / "log.jsonl")
    assert planted(faults, line, field, part), [str(f) for f in faults]


def edited(name: str, old: str, new: str):
    """Replaces text in a file of the run folder."""

    def plant(run: Path) -> None:
        text = (run / name).read_text("utf-8")
        assert old in text
        (run / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return plant


BROKEN_FOLDERS = {  # name: (what is done to a run folder, file, field, part of the message)
    "changed log": (
        lambda run: (run / "blocks_chat.jsonl.gz").write_bytes(gzip_bytes(GOOD)),
        "blocks_chat.jsonl.gz",
        "sha256",
        "changed after collection",
    ),
    "lost log": (lambda run: (run / "blocks_chat.jsonl.gz").unlink(), "blocks_chat.jsonl.gz", None, "is missing"),
    "log from elsewhere": (
        lambda run: (run / "blocks_new.jsonl").write_bytes(GOOD),
        "blocks_new.jsonl",
        None,
        "not listed in manifest.json",
    ),
    "changed table": (
        lambda run: (run / "requests.jsonl.gz").write_bytes(gzip_bytes(b"{}\n")),
        "requests.jsonl.gz",
        "sha256",
        "changed after collection",
    ),
    "wrong number of lines": (
        edited("manifest.json", '"lines": 12', '"lines": 13'),
        "blocks_code.jsonl.gz",
        "lines",
        "but the file has 12",
    ),
    "lost manifest": (lambda run: (run / "manifest.json").unlink(), "manifest.json", None, "no finished run"),
    "half a manifest": (
        lambda run: (run / "manifest.json").write_text("{", "utf-8"),
        "manifest.json",
        None,
        "is not a complete JSON",
    ),
    "manifest of another schema": (
        edited("manifest.json", '"schema": 1', '"schema": 7'),
        "manifest.json",
        "schema",
        "field 'schema'",
    ),
    "no label": (edited("manifest.json", '"UNLABELLED"', '"GUESSED"'), "manifest.json", "label", "field 'label'"),
    "path of no arm": (
        edited("manifest.json", '"path_arm": "', '"path_arm": "x'),
        "manifest.json",
        "path_arm",
        "field 'path_arm'",
    ),
    "path of another arm": (
        edited("manifest.json", '"path_arm": "dflash"', '"path_arm": "ngram"'),
        "blocks_",
        "on_path",
        "path_arm of the manifest",
    ),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_every_broken_run_folder_is_found(name, run):
    plant, file, field, part = BROKEN_FOLDERS[name]
    assert validate(run) == []
    plant(run)
    faults = validate(run)
    assert any(file in f.file and f.field == field and part in str(f) for f in faults), [str(f) for f in faults]
