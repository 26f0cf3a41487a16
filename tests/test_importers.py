"""Other people's logs: a hand-made file of the same form always, the public one when it is there."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsel.logs import LogError, LogWarning, block_view, read_log, summary, validate, walk
from specsel.logs.importers import import_specdecode_bench, match_lengths, read_specdecode_bench

PUBLIC = Path(os.environ.get("SPECSEL_SPECDECODE_BENCH", "no folder was named"))


def request(name: str, ngram: list, eagle: list, output: list | None = None) -> str:
    output = output or list(range(100, 100 + max(len(ngram), len(eagle))))
    return (
        json.dumps(
            {
                "id": name,
                "prompt_token_ids": [1, 2, 3, 1],
                "generated_token_ids": output,
                "acc_ngram": {"acc_len": ngram},
                "acc_eagle": {"acc_len": eagle},
            }
        )
        + "\n"
    )


@given(st.lists(st.integers(0, 3), max_size=24))
def test_match_length_is_the_longest_suffix_seen_before(tokens):
    """Brute force: the last n tokens also end at some earlier place."""
    for end, found in enumerate(match_lengths(np.array(tokens, dtype=int))):
        prefix = tokens[:end]
        seen = [
            n for n in range(1, min(6, end) + 1) if any(prefix[i : i + n] == prefix[end - n :] for i in range(end - n))
        ]
        assert found == max(seen, default=0), (prefix, found)


def test_a_hand_made_file_becomes_a_run_folder(tmp_path):
    """Five emitted values against four: T = 4, remaining 4..1, accepted = value - 1, cut at the end (9 with 3 left)."""
    (tmp_path / "combined_tiny.jsonl").write_text(
        request("x", [1, 9, 1, 1, 1], [2, 1, 3, 1], [1, 2, 50, 60, 70])
        + request("empty", [], [1])
        + request("y", [1], [1, 1])
    )
    run = import_specdecode_bench(tmp_path, tmp_path / "run")
    log = read_log(run)
    assert (
        validate(run) == []
        and log.complete
        and (log.arms, log.draft_len, log.workloads) == (("ngram", "eagle"), 20, ("tiny",))
    )
    assert log.requests == ("tiny/0", "tiny/2") and log.remaining.tolist() == [4, 3, 2, 1, 1]
    assert log.accepted.tolist() == [[0, 1], [3, 0], [0, 2], [0, 0], [0, 0]]
    assert log.emitted.tolist() == [[1, 2], [3, 1], [1, 2], [1, 1], [1, 1]]
    assert log.context["match_length"].tolist() == [1, 2, 0, 0, 0]  # 1 2 3 1 [1]: "1" again; 1 2 3 1 [1 2]: "1 2" again
    assert np.isnan(log.stats["conf_mean"]).all() and block_view(log).path_arm == "ngram"
    assert log.request_table["source_id"].tolist() == ["x", "y"]


def test_a_doubled_begin_token_is_told(tmp_path):
    """One of two prompts begins with a token twice; a file without such a prompt says nothing."""
    path = tmp_path / "combined_tiny.jsonl"
    path.write_text(request("a", [1], [1]) + request("b", [1], [1]).replace("[1, 2, 3, 1]", "[1, 1, 2, 3, 1]"))
    with pytest.warns(LogWarning, match="1 of 2 prompts begin with one token twice"):
        log = read_specdecode_bench(path)
    assert log.request_table["doubled_begin"].tolist() == [False, True]
    path.write_text(request("a", [1], [1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_specdecode_bench(path)


@pytest.mark.parametrize(
    "line", ['{"id": "x"}', request("x", [0], [1]), request("x", [22], [1]), request("x", [1.5], [1]), "[1]", "{"]
)
def test_another_format_is_refused_by_line(tmp_path, line):
    path = tmp_path / "combined_tiny.jsonl"
    path.write_text(request("ok", [1], [1]) + line)
    with pytest.raises(LogError, match="line 2"):
        read_specdecode_bench(path)
    with pytest.raises(LogError, match="holds no .jsonl"):
        read_specdecode_bench(tmp_path / "..")


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="SPECSEL_SPECDECODE_BENCH names no folder (the log has no licence)")
def test_the_public_log_gives_the_published_tokens_per_block():
    """Fixed arms and match-length gates of policies.md, section 7."""
    with pytest.warns(LogWarning, match="prompts begin with one token twice"):
        log = read_specdecode_bench(PUBLIC)
    found = summary(log)["block_efficiency"]
    assert {w: [round(v[a], 3) for a in log.arms] for w, v in found.items()} == {
        "instructcoder": [2.662, 2.814],
        "sharegpt": [1.484, 2.658],
    }
    emitted = log.emitted
    for gate, expected in ((3, [5.013, 3.081]), (6, [5.081, 3.157])):
        rows = walk(log.starts, np.where(log.context["match_length"] >= gate, emitted[:, 0], emitted[:, 1]))
        blocks = np.bincount(log.workload[log.request_of[rows]])
        tokens = np.bincount(log.workload, weights=np.diff(log.starts))
        assert [round(x, 3) for x in tokens / blocks] == expected
