"""Drafter quality: acceptance at every position, learning curves and variants, from logs and training files."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

from specsel.logs import LogError, drafter_sha256
from specsel.study import drafters
from specsel.study.simulation import Model, simulate_positions


@pytest.fixture(scope="module")
def log():
    return simulate_positions(Model(requests_per_workload=6, output_len=(20, 40)), rng=np.random.default_rng(3))


@pytest.fixture
def folder(tmp_path):
    points = [
        {"step": s, "tokens": 10 * s, "loss": 3.0, "first_token": 0.2, "block_efficiency": 100 / blocks}
        | {"answers": {"emitted": [60, 40], "blocks": [blocks - 30, 30]}}
        for s, blocks in ((1, 80), (2, 50))
    ]
    (tmp_path / "training.json").write_text(json.dumps({"kind": "eagle", "curve": points}))
    return tmp_path


def test_acceptance_is_the_share_of_positions_and_falls_with_k(log):
    table = drafters.acceptance(log, rng=np.random.default_rng(0), n_resamples=200)
    assert set(table["workload"]) == {"all", *log.workloads} and len(table) == 5 * log.n_arms * log.draft_len
    for (workload, arm), rows in table.groupby(["workload", "arm"]):
        k = log.arms.index(arm)
        mine = np.full(log.n_positions, True)
        if workload != "all":
            mine = log.workload[log.request_of] == log.workloads.index(workload)
        expected = [(log.accepted[mine, k] >= step).mean() for step in range(1, log.draft_len + 1)]
        assert np.allclose(rows["share"], expected) and (np.diff(rows["share"]) <= 0).all()
        assert (rows["low"] <= rows["share"]).all() and (rows["share"] <= rows["high"]).all()


def test_the_acceptance_of_the_first_token_is_k_equal_to_one(log):
    table = drafters.acceptance(log, rng=np.random.default_rng(0), n_resamples=50)
    first = table[(table["workload"] == "all") & (table["k"] == 1)].set_index("arm")["share"]
    assert np.allclose(first, (log.accepted > 0).mean(0))


def test_a_learning_curve_has_an_interval_per_point(folder):
    curve = drafters.learning_curves([folder], rng=np.random.default_rng(0))
    assert curve["block_efficiency"].tolist() == [1.25, 2.0] and curve["tokens"].tolist() == [10, 20]
    assert (curve["low"] <= curve["block_efficiency"]).all() and (curve["high"] >= curve["block_efficiency"]).all()
    words = drafters.still_rising([folder], rng=np.random.default_rng(0))
    assert words.startswith("eagle rises from 1.25 to 2.00 tokens per block, and the last third of its training")


def test_variants_are_compared_on_the_same_answers(folder):
    """100 tokens in 80 or 50 blocks: 1.25 against 2.0."""
    curve = drafters.training_log(folder)["curve"]
    path = folder / "variants.json"
    recipes = ({"loss": loss, "steps": n, "short_blocks": [3]} for loss, n in (("lk", 9), ("soft", 8)))
    tried, other = ({"recipe": r, "point": p} for r, p in zip(recipes, (curve[1], curve[0]), strict=True))
    pair = {"arm": "eagle", "tried": tried, "instead_of": other}
    path.write_text(json.dumps([pair]))
    table = drafters.variants(path, rng=np.random.default_rng(0))
    assert table.loc[0, "difference"] == pytest.approx(0.75) and table.loc[0, "variant"] == "loss lk instead of soft"
    curve[1]["answers"]["emitted"] = [59, 41]
    path.write_text(json.dumps([pair]))
    with pytest.raises(LogError, match="different held-out answers"):
        drafters.variants(path, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [((20, 30), "2.000 tokens per block, inside"), ((10, 10), "5.000 tokens per block, outside"), ((), "0 of 2")],
)
def test_a_repetition_is_judged_by_the_interval_of_the_last_point(folder, blocks, words):
    """60 and 40 tokens in 20 and 30 blocks: 2.0, resampled between 1.33 and 3."""
    log = drafters.training_log(folder) | {"data": [{"shard": "a", "sha256": "1"}, {"shard": "b", "sha256": "2"}]}
    log |= {"recipe": {"seed": 0}}
    (folder / "training.json").write_text(json.dumps(log))
    nothing = drafters.repetitions([folder], rng=np.random.default_rng(0))
    assert nothing == "No repetition of eagle's training is recorded."
    answers = {"emitted": [60, 40], "blocks": blocks}
    point = log["curve"][1] | {"block_efficiency": 100 / sum(blocks or [1]), "answers": answers}
    again = log | {"curve": [log["curve"][0], point] if blocks else [], "data": [{"shard": "a", "sha256": "1"}]}
    (folder / "repeated").mkdir()
    (folder / "repeated" / "training.json").write_text(json.dumps(again))
    told = drafters.repetitions([folder], rng=np.random.default_rng(0))
    assert words in told and (not blocks or told.endswith("1 of its 1 files of answers are the same bytes."))
    assert "instead of" not in told
    (folder / "repeated" / "training.json").write_text(json.dumps(again | {"recipe": {"seed": 7}}))
    told = drafters.repetitions([folder], rng=np.random.default_rng(0))
    assert (", with seed 7 instead of 0, ends" in told) == bool(blocks)


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0.1, 0.2, "Better"), (-0.2, -0.1, "Worse"), (-0.1, 0.1, "No difference")]
)
def test_the_sentence_on_variants_follows_their_intervals(low, high, words):
    table = pd.DataFrame([{"arm": "eagle", "variant": "lk", "low": low, "high": high}])
    assert drafters.what_helped(table).startswith(words) and "eagle with lk" in drafters.what_helped(table)


def test_the_facts_of_a_training_are_told(folder):
    log = drafters.training_log(folder)
    counts = {"output_tokens": 1200, "kept_tokens": 1000, "requests": 10, "looping": 2}
    recipe = {"draft_vocab": 60, "batch": 8, "optimizer": "muon", "loss": "soft", "start": "target", "rate": 4e-3}
    log |= {"recipe": recipe, "data_report": counts, "best_step": 2, "dtype": "float32"}
    log["earlier"] = log | {"best_step": 9, "earlier": log | {"best_step": 7}}
    log |= {"coverage": {"generated": 0.996, "held_out": 0.981}}
    (folder / "training.json").write_text(json.dumps(log))
    facts = drafters.training_facts([folder]).set_index("fact")["eagle"]
    assert facts["training tokens in it"] == "99.60%" and facts["greedy choices that it changed"] == "not measured"
    assert facts["held-out answers"] == "every 64th"
    assert facts["goes on from"] == ", then ".join(f"{n} steps on 1,200 generated tokens at 0.004" for n in (7, 9))
    assert len(drafters.training_log(folder)["curve"]) == 3 * len(log["curve"])


def test_the_sentence_on_overlap_counts_what_was_found(tmp_path):
    rows = [
        {"workload": w, "prompts": 10, "training_prompts": 90, "exact": 0, "near": 0, "largest_share": 0.2}
        for w in "ab"
    ]
    (tmp_path / "overlap.json").write_text(json.dumps({"workloads": rows}))
    assert drafters.told(drafters.overlap(tmp_path / "overlap.json")).startswith("None of the 20 evaluation prompts")
    rows[0] |= {"exact": 1, "near": 3}
    (tmp_path / "overlap.json").write_text(json.dumps({"workloads": rows}))
    assert "1 stand among" in drafters.told(drafters.overlap(tmp_path / "overlap.json"))


def test_weights_of_the_log_are_told_from_others(log, folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    entry = {"eagle": {"sha256": drafter_sha256(folder)}}
    same = dataclasses.replace(log, manifest={"drafters": entry})
    assert drafters.same_weights(same, [folder]).startswith("The log was collected with the weights")
    weights.write_bytes(b"others")
    assert f"other weights than those of {folder.name}" in drafters.same_weights(same, [folder])
    assert "other weights" in drafters.same_weights(log, [folder])


def test_a_missing_or_broken_training_log_is_named(tmp_path):
    with pytest.raises(LogError, match="training.json"):
        drafters.training_log(tmp_path)
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(LogError, match="not JSON"):
        drafters.training_log(tmp_path)
