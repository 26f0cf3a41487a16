"""The collector: its log equals the live engine, resumes byte for byte, and refuses what it cannot do."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from conftest import make_dflash, make_eagle

from specsel import log as logs
from specsel.engine import harness
from specsel.engine.decode import Decoder, always
from specsel.engine.harness import CollectConfig, CollectError, collect
from specsel.engine.prompts import PromptError, encode, load_prompts


@pytest.fixture
def config(tmp_path) -> CollectConfig:
    """Two workloads of five prompts in files of the published form."""
    for seed, workload in enumerate(("alpha", "beta")):
        rng = np.random.default_rng(seed)
        rows = [
            {
                "id": f"{workload}/{i}",
                "messages": [{"role": "user", "content": "".join(map(chr, rng.integers(97, 104, 12)))}],
                "category": "real:x",
            }
            for i in range(5)
        ]
        (tmp_path / f"{workload}.eval.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return CollectConfig(requests=None, workloads=("alpha", "beta"), max_new=24, draft_len=4, prompts=tmp_path)


def hashes(folder) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "manifest.json"}


def test_the_log_equals_the_live_engine_block_by_block(target, features, pool, config, tmp_path):
    """For every fixed arm and request: positions and accepted counts of the engine's blocks are those of replay on the
    log."""
    log = logs.read_log(collect(target, pool, tmp_path / "run", config))
    assert log.complete and log.arms == tuple(pool)
    decoder = Decoder(features, pool, draft_len=4)
    prompts = {
        p.id: encode(target.tokenizer, p) for w in config.workloads for p in load_prompts(w, "eval", config.prompts)
    }
    for k, arm in enumerate(log.arms):
        for r, request in enumerate(log.requests):
            rows = np.arange(log.starts[r], log.starts[r + 1])
            trace = decoder.run(prompts[request], always(arm), max_new=24)
            p = 0
            for block in trace.blocks:
                assert block.position == p == log.position[rows[p]]
                assert block.accepted[arm] == log.accepted[rows[p], k]
                assert block.emitted == log.emitted[rows[p], k]
                p += block.emitted


def test_a_run_interrupted_at_any_request_resumes_to_the_same_bytes(target, pool, config, tmp_path, monkeypatch):
    """Stopping after n scored requests, for several n, and running the same command again gives the files of an
    uninterrupted run."""
    whole = hashes(collect(target, pool, tmp_path / "whole", config))
    for stop_after in (0, 1, 7):
        calls = iter(range(100))

        def score(*args, stop_after=stop_after, calls=calls, original=harness.score):
            if next(calls) == stop_after:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(harness, "score", score)
            collect(target, pool, tmp_path / f"cut{stop_after}", config)
        assert not (tmp_path / f"cut{stop_after}").exists()
        assert hashes(collect(target, pool, tmp_path / f"cut{stop_after}", config)) == whole


def test_a_complete_run_is_left_alone(target, pool, config, tmp_path):
    folder = collect(target, pool, tmp_path / "run", config)
    before = (folder / "manifest.json").read_bytes()
    assert collect(target, pool, folder, config) == folder
    assert (folder / "manifest.json").read_bytes() == before


def test_other_settings_do_not_resume(target, pool, config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness, "score", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        collect(target, pool, tmp_path / "run", config)
    from dataclasses import replace

    with pytest.raises(CollectError, match="another 'draft_len'"):
        collect(target, pool, tmp_path / "run", replace(config, draft_len=3))


def test_a_second_collector_on_one_folder_is_refused(target, pool, config, tmp_path):
    parts = tmp_path / ".run.parts"
    parts.mkdir()
    with (
        harness._only_writer(parts, tmp_path / "run"),
        pytest.raises(CollectError, match="another process is collecting"),
    ):
        collect(target, pool, tmp_path / "run", config)


def test_nan_logits_of_a_drafter_stop_with_its_name(target, pool, config, tmp_path):
    broken = make_eagle(target)
    broken.head.lm_head.weight = torch.nn.Parameter(
        torch.full_like(broken.head.lm_head.weight, float("nan")), requires_grad=False
    )
    with pytest.raises(CollectError, match="drafter 'eagle' gave NaN"):
        collect(target, pool | {"eagle": broken}, tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_a_prompt_beyond_the_window_is_counted_and_not_logged(target, pool, config, tmp_path):
    """The request stays in the request table with its reason; the other requests are logged."""
    path = tmp_path / "alpha.eval.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[0]["messages"][0]["content"] = "x" * 300
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    log = logs.read_log(collect(target, pool, tmp_path / "run", config))
    table = log.request_table.set_index("request")
    assert table.loc["alpha/0", "stop"] == "prompt too long"
    assert "alpha/0" not in log.requests


def test_an_arm_outside_its_window_is_not_asked(target, pool, config, tmp_path):
    """A head with few positions drafts at the start only; the log says null there, not 0."""
    narrow = pool | {"eagle": make_eagle(target, window=24), "dflash": make_dflash(target)}
    log = logs.read_log(collect(target, narrow, tmp_path / "run", config))
    eagle = log.proposed[:, log.arms.index("eagle")]
    assert (eagle == -1).any() and (eagle == 4).any()


def test_a_missing_or_changed_prompt_file_is_named(tmp_path):
    with pytest.raises(PromptError, match=r"gsm8k\.eval\.jsonl: no such prompt file"):
        load_prompts("gsm8k", "eval", tmp_path)
    (tmp_path / "gsm8k.eval.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(PromptError, match="sha256"):
        load_prompts("gsm8k", "eval", tmp_path)


def test_the_engine_check_finds_a_planted_difference(target, features, pool, config, tmp_path):
    """On a true log every request is equal for every arm; after one accepted count is changed, exactly that request is
    not."""
    from dataclasses import replace

    from specsel.engine.equality import check_engine, first_difference

    run = collect(target, pool, tmp_path / "run", config)
    found = check_engine(features, pool, run, arms=tuple(pool), prompts=config.prompts)
    assert all(c["requests"] == c["equal"] == 10 and c["blocks"] > 10 for c in found["arms"].values())
    log = logs.read_log(run)
    changed = log.accepted.copy()
    changed[log.starts[3], 0] += 1
    prompts = {
        p.id: encode(target.tokenizer, p) for w in config.workloads for p in load_prompts(w, "eval", config.prompts)
    }
    trace = Decoder(features, pool, draft_len=4).run(prompts[log.requests[3]], always(log.arms[0]), max_new=24)
    assert first_difference(log, 3, 0, trace) is None
    assert first_difference(replace(log, accepted=changed), 3, 0, trace) == 0


def test_the_race_records_every_policy_on_every_request_with_the_same_output(target, features, pool, config, tmp_path):
    from specsel.engine.races import RaceError, race

    run = collect(target, pool, tmp_path / "run", config)
    records = json.loads(race(features, pool, run, per_workload=2, prompts=config.prompts).read_text())["records"]
    assert len(records) == 4 * 6 and all(r["same_output"] and r["seconds"] > 0 for r in records)
    with pytest.raises(RaceError, match="'hedge' cannot run"):
        race(features, pool, run, policies=("hedge",), prompts=config.prompts)


def test_a_tie_elsewhere_does_not_explain_a_difference():
    """Margins 9, 0 (a tie), 9, 9, 9, 9 with draft length 2: the block at 1 emits tokens 2 to 4, whose margins are 9."""
    from specsel.engine.decode import Trace
    from specsel.engine.equality import margin_at

    trace = Trace([], "", margins=[9.0, 0.0, 9.0, 9.0, 9.0, 9.0])
    assert margin_at(trace, 1, 2) == 9.0
    assert margin_at(trace, 0, 2) == 0.0


def test_the_engine_check_of_another_log_is_dropped(target, features, pool, config, tmp_path):
    from specsel.engine.equality import FILE, check_engine

    run = collect(target, pool, tmp_path / "run", config)
    (run / FILE).write_text(json.dumps({"schema": 1, "log_sha256": "another", "arms": {"eagle": {"requests": 99}}}))
    found = check_engine(features, pool, run, arms=("ngram",), per_workload=1, prompts=config.prompts)
    assert set(found["arms"]) == {"ngram"}
