"""What a training log says: its curve, its last third, its repetition."""

import json

import pytest

from specsel.logs import LogError
from specsel.stats import Resampling
from specsel.study import drafters

HOW = Resampling(500)


@pytest.fixture
def folder(tmp_path):
    points = [
        {"step": s, "tokens": 10 * s, "loss": 3.0, "first_token": 0.2, "block_efficiency": 100 / blocks}
        | {"answers": {"emitted": [60, 40], "blocks": [blocks - 30, 30]}}
        for s, blocks in ((1, 80), (2, 50))
    ]
    (tmp_path / "training.json").write_text(json.dumps({"kind": "eagle", "curve": points}))
    return tmp_path


def test_points_of_a_curve_are_compared_on_the_same_answers(folder):
    """100 tokens in 80 or 50 blocks: 1.25 against 2.0."""
    first, last = drafters.training_log(folder)["curve"]
    assert [drafters.held_out(p, resampling=HOW).value for p in (first, last)] == [1.25, 2.0]
    assert drafters.last_third([first, last]) == (first, last) and drafters.last_third([last]) == (last, last)
    found = drafters.change(first, last, resampling=HOW)
    assert found.value == pytest.approx(0.75) and found.low <= 0.75 <= found.high and found.n == 2
    assert drafters.still_rising(folder, resampling=HOW).startswith("eagle rises from 1.25 to 2.00 tokens per block")
    last["answers"]["emitted"] = [59, 41]
    with pytest.raises(LogError, match="different held-out answers"):
        drafters.change(first, last, resampling=HOW)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [((20, 30), "2.000 tokens per block, inside"), ((10, 10), "5.000 tokens per block, outside"), ((), "0 of 2")],
)
@pytest.mark.parametrize("seed", [0, 7])
def test_a_repetition_is_judged_by_the_interval_of_the_last_point(folder, blocks, words, seed):
    """60 and 40 tokens in 20 and 30 blocks: 2.0, resampled between 1.33 and 3."""
    log = drafters.training_log(folder) | {"data": [{"sha256": "1"}, {"sha256": "2"}], "recipe": {"seed": 0}}
    (folder / "training.json").write_text(json.dumps(log))
    point = log["curve"][1] | {"block_efficiency": 100 / sum(blocks or [1])}
    point |= {"answers": {"emitted": [60, 40], "blocks": blocks}}
    again = log | {"curve": [log["curve"][0], point] if blocks else [], "data": [{"sha256": "1"}]}
    (folder / "repeated").mkdir()
    (folder / "repeated" / "training.json").write_text(json.dumps(again | {"recipe": {"seed": seed}}))
    told = drafters.repetition(folder, folder / "repeated", resampling=HOW)
    assert words in told and (not blocks or told.endswith("1 of its 1 files of answers are the same bytes."))
    assert (", with seed 7 instead of 0, ends" in told) == bool(blocks and seed)


def test_settings_that_only_one_recipe_names_do_not_differ():
    recipe, other = {"loss": "lk", "steps": 9, "short_blocks": [3, 5], "new": 1}, {"loss": "soft", "steps": 8}
    found = drafters.differing(recipe, other | {"short_blocks": [5]}, ignore=("steps",))
    assert found == "loss lk instead of soft, short blocks 3 and 5 instead of 5"


def test_a_curve_goes_on_from_the_earlier_training(folder):
    log = drafters.training_log(folder)
    (folder / "training.json").write_text(json.dumps(log | {"earlier": log | {"earlier": log}}))
    assert drafters.training_log(folder)["curve"] == 3 * log["curve"]


def test_a_missing_or_broken_training_log_is_named(tmp_path):
    with pytest.raises(LogError, match="training.json"):
        drafters.training_log(tmp_path)
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(LogError, match="not JSON"):
        drafters.training_log(tmp_path)
