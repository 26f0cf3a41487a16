"""The collector: its log equals the live engine, resumes byte for byte, and refuses what it cannot do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import time
from dataclasses import replace

import conftest
import numpy as np
import pytest
import torch
from conftest import VOCAB, make_dflash, make_eagle

from specsel import logs
from specsel.engine import harness
from specsel.engine.decode import Decoder, always
from specsel.engine.harness import CollectConfig, CollectError, collect
from specsel.engine.live import RunError, check_engine, first_difference
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
    with pytest.raises(CollectError, match="unfinished run was started with another 'draft_len'"):
        collect(target, pool, tmp_path / "run", replace(config, draft_len=3))
    collect(target, pool, tmp_path / "run", config)
    with pytest.raises(CollectError, match="complete, and was collected with another 'max_new_tokens'"):
        collect(target, pool, tmp_path / "run", replace(config, max_new=20))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(target, pool, config, tmp_path, monkeypatch):
    """Twenty-four times kill -9 at a random moment, over as many runs as that takes: every run ends as the one that was
    left alone."""
    monkeypatch.setattr(harness, "GROUP", 2)
    config = replace(config, workloads=("alpha",), max_new=10)
    started = time.monotonic()
    whole = hashes(collect(target, pool, tmp_path / "whole", config))
    seconds = time.monotonic() - started
    rng, kills, runs = random.Random(1), 0, 1
    while kills < 24:
        run = tmp_path / f"run{runs}"
        child = os.fork()
        if not child:
            collect(target, pool, run, config)
            os._exit(0)
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if (run / "manifest.json").is_file():
            assert hashes(run) == whole
            runs += 1
    assert hashes(collect(target, pool, run, config)) == whole
    assert logs.validate(run) == []


def test_a_full_disk_is_one_sentence_and_loses_nothing(target, pool, config, tmp_path, monkeypatch):
    """The fifth write finds no space: the parts before it are whole, and the next run ends with the usual bytes."""
    whole = hashes(collect(target, pool, tmp_path / "whole", config))
    writes = iter(range(99))

    def fsync(handle):
        if next(writes) >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CollectError, match="No space left on device.*make room"):
        patch.setattr(os, "fsync", fsync)
        collect(target, pool, tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    assert len(list((tmp_path / ".run.parts").glob("0*.jsonl"))) == 3
    assert not list((tmp_path / ".run.parts").glob("*.part"))
    assert hashes(collect(target, pool, tmp_path / "run", config)) == whole


def test_a_drafter_that_raises_is_named_and_finished_requests_are_kept(target, pool, config, tmp_path):
    class Failing(type(pool["eagle"])):
        calls = 0

        def propose_all(self, *args):
            Failing.calls += 1
            if Failing.calls == 4:
                raise RuntimeError("shape mismatch")
            return super().propose_all(*args)

    failing = Failing(pool["eagle"].model, pool["eagle"].embedding)
    with pytest.raises(CollectError, match=r"drafter 'eagle' failed \(RuntimeError: shape mismatch\)") as caught:
        collect(target, pool | {"eagle": failing}, tmp_path / "run", config)
    assert "\n" not in str(caught.value)
    assert len(list((tmp_path / ".run.parts").glob("0*.jsonl"))) == 3
    whole = hashes(collect(target, pool, tmp_path / "whole", config))
    assert hashes(collect(target, pool, tmp_path / "run", config)) == whole


def test_a_prompt_of_one_token_and_an_answer_that_ends_at_once(target, features, pool, config, tmp_path):
    """One token is enough to draft from; an answer of one token is in the request table and has no position."""
    path = tmp_path / "alpha.eval.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[0]["messages"][0]["content"] = "x"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    second = load_prompts("alpha", "eval", tmp_path)[1]
    first = int(features(torch.tensor(encode(target.tokenizer, second)))[0][-1].argmax())
    log = logs.read_log(collect(replace(target, eos_ids=(first,)), pool, tmp_path / "run", config))
    table = log.request_table.set_index("request")
    assert table.loc["alpha/0", "prompt_tokens"] == 1 and "alpha/0" in log.requests
    assert (table.loc["alpha/1", "output_tokens"], table.loc["alpha/1", "stop"]) == (1, "eos")
    assert "alpha/1" not in log.requests and log.complete


def test_a_run_in_which_every_answer_ends_at_once_says_so(target, pool, config, tmp_path):
    with pytest.raises(CollectError, match="nothing to log"):
        collect(replace(target, eos_ids=tuple(range(VOCAB))), pool, tmp_path / "run", config)


def test_the_request_table_and_the_records_hold_what_the_schema_promises(target, pool, config, tmp_path):
    """Category, loops and ties per request; context and all four statistics wherever a neural arm drafted."""
    from specsel.engine.generate import is_looping

    log = logs.read_log(collect(target, pool, tmp_path / "run", replace(config, max_new=60)))
    table = log.request_table
    assert set(table["category"]) == {"real:x"} and (table["ties"] >= 0).all() and len(table) == 10
    assert set(log.context) == set(logs.CONTEXT) and not any(np.isnan(v).any() for v in log.context.values())
    for arm in ("dflash", "eagle"):
        k = log.arms.index(arm)
        assert (log.proposed[:, k] > 0).all()
        assert all((log.stats[name][:, k] > 0).all() for name in logs.STATS)
    collector = harness.Collector(target, pool, replace(config, max_new=60), tmp_path)
    for i, answer in collector.answers(collector.queue):
        row = table[table["request"] == collector.queue[i].id].iloc[0]
        assert row["looping"] == is_looping(answer.output) and row["output_tokens"] == len(answer.output)
    assert is_looping([7, 8] * 20) and not is_looping(list(range(40)))


def test_a_sampled_run_is_what_the_engine_does_with_the_same_noise(target, features, pool, config, tmp_path):
    """At temperature 0.7 every fixed arm makes the blocks of replay, and the output is not the greedy one."""
    sampled = replace(config, temperature=0.7, seed=3)
    run = collect(target, pool, tmp_path / "run", sampled)
    assert json.loads((run / "manifest.json").read_text())["decoding"] == {
        "mode": "sampled",
        "temperature": 0.7,
        "seed": 3,
    }
    found = check_engine(features, pool, run, prompts=config.prompts)
    assert set(found["arms"]) == set(pool)
    assert all(c["requests"] == c["equal"] == 10 for c in found["arms"].values())
    greedy = collect(target, pool, tmp_path / "greedy", config)
    assert hashes(run)["blocks_alpha.jsonl.gz"] != hashes(greedy)["blocks_alpha.jsonl.gz"]


@pytest.mark.slow
def test_two_ray_workers_write_the_bytes_of_one_process(target, pool, config, tmp_path, monkeypatch):
    """Ten requests in groups of four over two actors; an actor's error arrives as one sentence, and the run resumes."""
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    ray.cloudpickle.register_pickle_by_value(conftest)
    monkeypatch.setattr(harness, "GROUP", 4)
    whole = hashes(collect(target, pool, tmp_path / "whole", config))
    broken = make_eagle(target)
    broken.model.lm_head.weight = torch.nn.Parameter(
        torch.full_like(broken.model.lm_head.weight, float("nan")), requires_grad=False
    )
    with pytest.raises(CollectError, match="drafter 'eagle' gave NaN"):
        collect(target, pool | {"eagle": broken}, tmp_path / "run", config, executor="ray", workers=2)
    assert hashes(collect(target, pool, tmp_path / "run", config, executor="ray", workers=2)) == whole


def test_an_unknown_executor_is_refused(target, pool, config, tmp_path):
    with pytest.raises(CollectError, match="choose local or ray"):
        collect(target, pool, tmp_path / "run", config, executor="slurm")


def test_the_manifest_tells_step_and_checkpoint_of_a_drafter(tmp_path):
    from specsel.engine.drafters.files import checkpoint_of

    folder = tmp_path / "step_400"
    folder.mkdir()
    assert checkpoint_of(folder) == {"step": 400, "checkpoint": "step_400"}
    (folder / "training.json").write_text('{"best_step": 320}', encoding="utf-8")
    assert checkpoint_of(folder, "final") == {"step": 320, "checkpoint": "final"}
    (folder / "training.json").write_text('{"best_step": 20, "earlier": {"best_step": 320}}', encoding="utf-8")
    assert checkpoint_of(folder)["step"] == 340
    (folder / "checkpoint.json").write_text('{"step": 40, "name": "early"}', encoding="utf-8")
    assert checkpoint_of(folder) == {"step": 40, "checkpoint": "early"}
    (tmp_path / "random").mkdir()
    assert checkpoint_of(tmp_path / "random") == {"step": 0, "checkpoint": "random"}


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
    broken.model.lm_head.weight = torch.nn.Parameter(
        torch.full_like(broken.model.lm_head.weight, float("nan")), requires_grad=False
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


def test_a_group_of_prompts_beyond_the_window_is_passed_over(target, pool, config, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "GROUP", 1)
    path = tmp_path / "alpha.eval.jsonl"
    row = {"id": "alpha/0", "messages": [{"role": "user", "content": "x" * 300}]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    log = logs.read_log(collect(target, pool, tmp_path / "run", config))
    assert log.workloads == ("beta",) and len(log.request_table) == 6


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
    run = collect(target, pool, tmp_path / "run", config)
    found = check_engine(features, pool, run, arms=tuple(pool), prompts=config.prompts)
    assert all(c["requests"] == c["equal"] == 10 and c["blocks"] > 10 for c in found["arms"].values())
    assert all(c["same_output"] == 10 and c["output_differences"] == [] for c in found["arms"].values())
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
    from specsel.engine.live import RaceError, race

    run = collect(target, pool, tmp_path / "run", config)
    records = json.loads(race(features, pool, run, per_workload=2, prompts=config.prompts).read_text())["records"]
    assert len(records) == 4 * 6 and all(r["same_output"] and r["seconds"] > 0 for r in records)
    with pytest.raises(RaceError, match="'hedge' cannot run"):
        race(features, pool, run, policies=("hedge",), prompts=config.prompts)
    path = config.prompts / "beta.eval.jsonl"
    path.write_text(path.read_text().replace('"content": "', '"content": "another '))
    with pytest.raises(RunError, match="prompt beta/beta/0 .*another text"):
        race(features, pool, run, prompts=config.prompts)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "decoding"}))
    with pytest.raises(RunError, match="does not tell decoding"):
        race(features, pool, run, prompts=config.prompts)


def test_a_run_tells_its_prompts_apart(target, pool, config, tmp_path, monkeypatch):
    """Two runs of the same prompts, one of them with a doubled begin token: the manifests differ in the first prompt's
    ids, and the doubled one is warned about."""
    plain = json.loads((collect(target, pool, tmp_path / "plain", config) / "manifest.json").read_text())
    make = type(target.tokenizer).apply_chat_template
    monkeypatch.setattr(type(target.tokenizer), "bos_token_id", 5, raising=False)
    monkeypatch.setattr(type(target.tokenizer), "apply_chat_template", lambda *args, **o: [5, 5, *make(*args, **o)])
    with pytest.warns(UserWarning, match=r"begin token \(5\) twice"):
        doubled = json.loads((collect(target, pool, tmp_path / "doubled", config) / "manifest.json").read_text())
    first, second = plain["first_prompt"], doubled["first_prompt"]
    assert second["first_ids"] == [5, 5, *first["first_ids"][:6]] and second["last_ids"] == first["last_ids"]


def test_a_sampled_run_is_raced_with_its_own_noise(target, features, pool, config, tmp_path):
    """Every policy gives the answers of the run, whose lengths are known."""
    from specsel.engine.live import race

    run = collect(target, pool, tmp_path / "run", replace(config, temperature=0.7, seed=3))
    records = json.loads(race(features, pool, run, per_workload=5, prompts=config.prompts).read_text())["records"]
    log = logs.read_log(run)
    tokens = dict(zip(log.requests, (np.diff(log.starts) + 1).tolist(), strict=True))
    assert len(records) == 6 * len(tokens) and all(r["tokens"] == tokens[r["request"]] for r in records)
    assert all(r["same_output"] for r in records)


def test_an_answer_is_compared_with_plain_decoding_to_its_last_token():
    """The first other token, with the margin of plain decoding there; one that ends early, and one that goes on."""
    from specsel.engine.decode import Trace
    from specsel.engine.live import parting

    truth = Trace([5, 6, 7], "eos", margins=[0.5, 0.25, 2.0])
    assert parting(Trace([5, 6, 7], "eos"), truth) is None
    assert parting(Trace([5, 9, 7], "eos"), truth) == (1, 0.25)
    assert parting(Trace([5, 6], "eos"), truth) == (2, 2.0)
    assert parting(Trace([5, 6, 7, 8], "length"), truth) == (3, 2.0)


def test_a_tie_elsewhere_does_not_explain_a_difference():
    """Margins 9, 0 (a tie), 9, 9, 9, 9 with draft length 2: the block at 1 emits tokens 2 to 4, whose margins are 9."""
    from specsel.engine.decode import Trace
    from specsel.engine.live import margin_at

    trace = Trace([], "", margins=[9.0, 0.0, 9.0, 9.0, 9.0, 9.0])
    assert margin_at(trace, 1, 2) == 9.0
    assert margin_at(trace, 0, 2) == 0.0


def test_the_engine_check_of_another_log_is_dropped(target, features, pool, config, tmp_path):
    from specsel.engine.live import CHECK_FILE, check_engine

    run = collect(target, pool, tmp_path / "run", config)
    (run / CHECK_FILE).write_text(
        json.dumps({"schema": 1, "log_sha256": "another", "arms": {"eagle": {"requests": 99}}})
    )
    found = check_engine(features, pool, run, arms=("ngram",), per_workload=1, prompts=config.prompts)
    assert set(found["arms"]) == {"ngram"}
