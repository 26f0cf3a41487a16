"""Training: losses see what they should, answers split cleanly, an interrupted training continues where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import EOS, VOCAB, prompts
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specsel.engine import data, losses, start, train
from specsel.engine.drafters.dflash import load_model
from specsel.engine.drafters.eagle import EagleConfig, EagleHead, check_vocabulary, load_head
from specsel.engine.drafters.files import read_folder
from specsel.engine.generate import Answers, BatchedTarget, distinct_share
from specsel.engine.prompts import Prompt
from specsel.engine.recipes import TrainConfig, TrainError, recipe, recipe_of, training_log
from specsel.engine.start import earlier_drafter, exchange_vocabulary
from specsel.engine.target import best_device, bf16_pays
from specsel.engine.train import repeat_training, split_of, train_drafter
from specsel.study import drafters

TINY = TrainConfig(
    steps=6,
    batch=2,
    rate=3e-3,
    draft_vocab=60,
    draft_len=4,
    draft_steps=3,
    layers=2,
    anchors=6,
    eval_every=2,
    held_out=2,
    counted="answered",
    split="answer",
)


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    """A data folder with one shard of the tiny target's own answers."""
    out = tmp_path_factory.mktemp("data")
    bulk = BatchedTarget(target.model, target.taps)
    queue = [prompt + [i % 5 + 3] for i, prompt in enumerate(prompts(12) * 2)]
    found = [None] * len(queue)
    for answer in Answers(bulk, queue, max_new=20, eos_ids=EOS, batch=8, keep_top=True):
        found[answer.index] = answer
    part = [(Prompt(str(i), "w", ({"role": "user", "content": "x"},)), ids) for i, ids in enumerate(queue)]
    data._write_shard(data.shard_path(out, 0), part, found, "float32", target.sha256)
    return out


def test_a_shard_gives_back_the_answers_without_loops(target, features, answers):
    """Every example: taps are those of its own tokens, soft targets are those of the target at its output positions."""
    counts = data.read_counts([data.shard_path(answers, 0)])
    found = list(data.examples(data.shard_path(answers, 0)))
    assert counts["requests"] == 24 and 0 < len(found) <= 24 - counts["looping"]
    for e in found[:5]:
        logits, taps, _ = features(e.tokens[:-1])
        torch.testing.assert_close(e.taps, taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(e.lse, logits[e.n_prompt - 1 :].logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert (e.top_ids[:, 0].long() == e.tokens[e.n_prompt :]).all()
        assert distinct_share(e.tokens[e.n_prompt :].tolist()) >= 0.5


def test_precision_counts_the_choices_that_the_full_precision_would_change(target, answers, monkeypatch):
    """Answers generated in fp32 are all confirmed; one last token overwritten is one changed choice."""
    report = data.precision(target, answers, answers=4)
    assert report["changed"] == 0 and report["positions"] > 4
    assert data.read_report(data.shards(answers))["requests"] == 24
    found = list(data.examples(data.shard_path(answers, 0)))
    found[0].tokens[-1] = (found[0].tokens[-1] + 1) % VOCAB
    monkeypatch.setattr(data, "examples", lambda path: iter(found))
    assert data.precision(target, answers, answers=4)["changed"] == 1


def test_the_draft_vocabulary_holds_the_end_and_is_sorted(answers):
    ids, coverage = train.draft_vocabulary(split_of(data.shards(answers), "answer"), 30, VOCAB, EOS)
    assert len(ids) == 30 and EOS[0] in ids.tolist() and (ids.diff() > 0).all()
    assert list(coverage) == ["generated", "held_out", "with_loops"]
    assert all(0 < share <= 1 for share in coverage.values())


def test_coverage_with_loops_counts_every_output_token(answers, tmp_path):
    """Counted by hand over a shard in which every second answer is called a loop."""
    path = shutil.copytree(answers, tmp_path / "data") / "shard_000.safetensors"
    shard, at, outputs = load_file(path), 0, []
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    shard["looping"][::2] = True
    save_file(shard, path, metadata)
    for n_prompt, n_output in zip(shard["n_prompt"].tolist(), shard["n_output"].tolist(), strict=True):
        outputs += shard["tokens"][at + n_prompt : at + n_prompt + n_output].tolist()
        at += n_prompt + n_output
    ids, coverage = train.draft_vocabulary(split_of([path], "answer"), 30, VOCAB, EOS)
    assert coverage["with_loops"] == pytest.approx(np.isin(outputs, ids).mean())
    assert coverage["with_loops"] < coverage["generated"]


@pytest.mark.parametrize("name", ["shard_000.safetensors", "data.json"])
def test_a_damaged_data_folder_is_told_in_one_sentence(target, answers, tmp_path, name):
    folder = shutil.copytree(answers, tmp_path / "data")
    (folder / name).write_bytes(b"\xff{" * 99)
    with pytest.raises(data.DataError, match=name):
        train_drafter("eagle", target, folder, tmp_path / "a", TINY, report=lambda point: None)
    assert not (tmp_path / "a").exists()


def test_prompts_without_an_answer_count_for_the_draft_vocabulary(target, answers, tmp_path):
    """An id that stands in many prompts and in no answer is chosen once they count; a data folder that does not tell
    them is refused, and a recipe from before counts the answered prompts alone."""
    folder = shutil.copytree(answers, tmp_path / "data")
    config = replace(TINY, counted="all", draft_vocab=30, steps=2)
    with pytest.raises(data.DataError, match="train data"):
        train_drafter("eagle", target, folder, tmp_path / "a", config, report=lambda point: None)
    ids, _ = train.draft_vocabulary(split_of(data.shards(answers), "answer"), 30, VOCAB, EOS)
    absent = min(set(range(VOCAB)) - set(ids.tolist()))
    data.write_prompt_counts(folder, [[absent] * 900, [absent]], VOCAB)
    assert data.read_prompt_counts(folder).nonzero().flatten().tolist() == [absent]
    log = train_drafter("eagle", target, folder, tmp_path / "a", config, report=lambda point: None)
    assert absent in earlier_drafter("eagle", tmp_path / "a")[1].tolist()
    old = {name: value for name, value in log["recipe"].items() if name not in ("counted", "vocabulary")}
    assert recipe_of(log).counted == "all" and recipe_of(log | {"recipe": old}).counted == "answered"


def test_the_last_shard_is_held_out(target, answers, tmp_path):
    """Its answers are judged and never trained on; one shard alone, or a shard that an earlier training learned, is
    refused by name."""
    folder = shutil.copytree(answers, tmp_path / "data")
    config = replace(TINY, split="shard", held_out=3)
    with pytest.raises(TrainError, match="one shard alone"):
        train_drafter("eagle", target, folder, tmp_path / "a", config, report=lambda point: None)
    shutil.copy(data.shard_path(folder, 0), data.shard_path(folder, 1))
    found = [e.tokens.tolist() for e in data.examples(data.shard_path(answers, 0))]
    split = split_of(data.shards(folder), "shard")
    assert [[path.name[:9] for path in part] for part in (split.training, split.test)] == [["shard_000"], ["shard_001"]]
    assert [e.tokens.tolist() for e in split.answers(split.training[0])] == found
    assert [e.tokens.tolist() for e in split.held_out(3)] == found[:3]
    log = train_drafter("eagle", target, folder, tmp_path / "a", config, report=lambda point: None)
    assert log["curve"][0]["answers"]["emitted"] == [len(e.lse) - 1 for e in split.held_out(3)]
    further = replace(config, start="earlier")
    train_drafter("eagle", target, folder, tmp_path / "b", further, after=tmp_path / "a", report=lambda point: None)
    train_drafter("eagle", target, folder, tmp_path / "c", replace(TINY, steps=2), report=lambda point: None)
    with pytest.raises(TrainError, match="an earlier training learned it"):
        train_drafter("eagle", target, folder, tmp_path / "d", further, after=tmp_path / "c", report=lambda point: None)


def test_a_training_takes_the_cuda_card_where_there_is_one(monkeypatch):
    """And bf16 on it, and on a processor with matrix tiles; elsewhere fp32."""
    for card in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda card=card: card)
        assert best_device() == ("cuda" if card else "cpu")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda card=card: {"amx_bf16": card})
        assert bf16_pays(torch.device("cpu")) is card and bf16_pays(torch.device("cuda"))


def test_the_log_tells_the_precision_of_the_products(target, answers, tmp_path, monkeypatch):
    """Both precisions train to the same curve within rounding; a training that changes it on the way says so."""
    curves = {}
    for low, told in ((True, "bf16 autocast"), (False, "float32")):
        monkeypatch.setattr(train, "bf16_pays", lambda device, low=low: low)
        log = train_drafter("dflash", target, answers, tmp_path / told, TINY, report=lambda point: None)
        curves[told] = [point["loss"] for point in log["curve"]]
        assert log["dtype"] == told
    assert np.allclose(*curves.values(), rtol=0.02) and not np.array_equal(*curves.values())
    monkeypatch.setattr(train, "bf16_pays", lambda device: True)
    log = train_drafter("dflash", target, answers, tmp_path / "float32", TINY, report=lambda point: None)
    assert log["dtype"] == "float32, then bf16 autocast"


def test_soft_targets_are_distributions_over_the_draft_vocabulary(answers):
    e = next(iter(data.examples(data.shard_path(answers, 0))))
    ids, _ = train.draft_vocabulary(split_of(data.shards(answers), "answer"), 30, VOCAB, EOS)
    draft_ids, p, mask = losses.soft_targets(e, start.inverse_vocabulary(ids, VOCAB))
    assert draft_ids.max() < 30 and torch.allclose(p.sum(-1)[mask], torch.ones(int(mask.sum())), atol=1e-5)
    assert (mask == torch.isin(e.tokens[e.n_prompt :], ids)).all()


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_training_lowers_the_loss_and_writes_a_loadable_drafter(target, answers, tmp_path, kind):
    """The written folder loads through the production loader; its curve shows a falling loss; held-out answers are not
    trained on."""
    log = train_drafter(kind, target, answers, tmp_path, TINY, report=lambda point: None)
    assert log["curve"][-1]["loss"] < log["curve"][0]["loss"]
    files = read_folder(tmp_path)
    if kind == "eagle":
        head = load_head(files)
        assert check_vocabulary(head.d2t, head.t2d, EOS) is None
    else:
        assert load_model(files).config.block_size == TINY.draft_len + 1
    assert json.loads((tmp_path / "training.json").read_text())["recipe"] == json.loads(json.dumps(asdict(TINY)))


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
@pytest.mark.parametrize("where", ["report", "state"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(target, answers, tmp_path, monkeypatch, kind, where):
    """Stop at the second evaluation, before anything of it is written or while the state is, and run the same command
    again: same curve, same weights."""
    train_drafter(kind, target, answers, tmp_path / "whole", TINY, report=lambda point: None)

    def stop(point: dict) -> None:
        if point["step"] == 6 and where == "report":
            raise KeyboardInterrupt

    def save(kept: dict, path: Path) -> None:
        if where == "state" and '"step": 6' in kept["log"]:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        write(kept, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        write = torch.save
        patch.setattr(torch, "save", save)
        train_drafter(kind, target, answers, tmp_path / "cut", TINY, report=stop)
    train_drafter(kind, target, answers, tmp_path / "cut", TINY, report=lambda point: None)
    for name in ("model.safetensors", "training.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name


def test_a_damaged_state_is_named_and_left(target, answers, tmp_path):
    (tmp_path / train.STATE).write_bytes(b"half")
    with pytest.raises(TrainError, match=train.STATE):
        train_drafter("eagle", target, answers, tmp_path, TINY, report=lambda point: None)
    assert (tmp_path / train.STATE).read_bytes() == b"half"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle", {"optimizer": "adamw"}),
        ("eagle", {"loss": "lk"}),
        ("eagle", {"start": "random"}),
        ("dflash", {"loss": "hard", "slots": "pace"}),
        ("dflash", {"start": "random"}),
        ("dflash", {"short_blocks": (2, 3)}),
    ],
)
def test_every_variant_of_the_recipe_learns(target, answers, tmp_path, kind, changes):
    config = replace(TINY, steps=24, eval_every=8, **changes)
    log = train_drafter(kind, target, answers, tmp_path, config, report=lambda point: None)
    assert log["curve"][-1]["loss"] < log["curve"][0]["loss"]


def test_kept_steps_are_drafters_of_their_own(target, answers, tmp_path):
    """A random drafter comes first, the last kept step has the final weights."""
    train_drafter("eagle", target, answers, tmp_path, replace(TINY, keep=(2, 6)), report=lambda point: None)
    names = ("random", "step_2", "step_6")
    start, middle, end = (load_head(read_folder(tmp_path / "checkpoints" / name)) for name in names)
    assert 0.018 < start.fc.weight.std() < 0.022 and not torch.equal(middle.fc.weight, end.fc.weight)
    last = torch.load(tmp_path / train.STATE, weights_only=True)["weights"]["fc.weight"].bfloat16()
    assert torch.equal(end.fc.weight.bfloat16(), last)


def test_training_stops_when_the_held_out_block_efficiency_stalls(target, answers, tmp_path):
    """At rate 0 nothing improves: two evaluations after the first one, patience 2 ends the training."""
    config = replace(TINY, rate=0.0, steps=20, patience=2)
    log = train_drafter("eagle", target, answers, tmp_path, config, report=lambda point: None)
    assert [point["step"] for point in log["curve"]] == [2, 4, 6]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_loss_and_its_gradients_are_those_of_a_log_softmax(kind):
    """Against the textbook formula in fp32; bf16 logits leave about three digits."""
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(150, 16, generator=generator), 0.3 * torch.randn(40, 16, generator=generator)
    ids, p = torch.rand(150, 40, generator=generator).argsort()[:, :5], torch.rand(150, 5, generator=generator)
    found, expected = [], []
    for results in (found, expected):
        s, h = states.clone().requires_grad_(), head.clone().requires_grad_()
        log_q = (s @ h.T).log_softmax(-1).gather(-1, ids)
        plain = -log_q[:, 0] if kind == "hard" else -(p * log_q).sum(-1)
        loss = plain if results is expected else losses.token_loss(s, h, ids, p, kind)
        (loss * torch.linspace(0.1, 1, 150)).sum().backward()
        results += [loss.detach(), s.grad, h.grad]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)


def test_unused_slots_weigh_nothing_and_pace_weights_are_the_gradient_of_the_accepted_length():
    """d/d log c_k of c1 + c1 c2 + c1 c2 c3, by automatic differentiation."""
    c = torch.tensor([0.9, 0.5, 0.2], requires_grad=True)
    (length,) = torch.autograd.grad(c.cumprod(0).sum(), c)
    used = torch.ones(1, 3, dtype=torch.bool)
    weights = losses.pace_weights(-c.detach().log(), used, smoothing=0.0)
    torch.testing.assert_close(weights[0], length * c.detach())
    used[0, 1] = False
    assert losses.pace_weights(torch.zeros(2), used, smoothing=0.1)[0].tolist() == [1.0, 0.0, 0.0]


def test_accepted_counts_are_common_prefixes_with_what_follows():
    """Drafts (5, 6), (6, 9), (9, 9) after outputs 4 | 5 | 6 of 4 5 6 7: prefixes with (5, 6), (6, 7), (7,)."""
    from specsel.engine.drafters.base import Drafts

    nothing = np.full((3, 2), np.nan)
    drafts = Drafts(np.array([[5, 6], [6, 9], [9, 9]]), np.array([2, 2, 2]), nothing, nothing)
    assert drafts.accepted(np.array([4, 5, 6, 7])).tolist() == [2, 1, 0]


def test_the_trainings_of_a_folder_are_repeated(target, answers, tmp_path):
    """The curves and the weights of the same recipes on the same data are the same, those of the earlier training
    included; data that came later is left alone; another kind's recipe is refused by name."""
    run = {"report": lambda point: None}
    train_drafter("eagle", target, answers, tmp_path / "a", TINY, **run)
    further = replace(TINY, start="earlier", rate=1e-3, steps=2)
    second = train_drafter("eagle", target, answers, tmp_path / "b", further, after=tmp_path / "a", **run)
    more = tmp_path / "data"
    shutil.copytree(answers, more)
    shutil.copy(data.shard_path(more, 0), data.shard_path(more, 1))
    told = training_log("eagle", tmp_path / "b")
    assert repeat_training("eagle", target, more, tmp_path / "c", told, **run) == second
    assert recipe_of(told) == further
    with pytest.raises(TrainError, match="not of 'dflash'"):
        training_log("dflash", tmp_path / "a")
    with pytest.raises(TrainError, match="training.json.*no such file"):
        training_log("dflash", tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_trained_drafter_is_trained_further(target, answers, tmp_path, kind):
    """Its weights and its draft vocabulary are the start, tokens are counted on, the earlier training stands in the
    log; at rate 0 it stays as it is."""
    first = train_drafter(kind, target, answers, tmp_path / "a", TINY, report=lambda point: None)
    config = recipe(kind, further=True, **{k: getattr(TINY, k) for k in ("batch", "draft_len", "layers", "held_out")})
    config = replace(config, rate=0.0, steps=2, eval_every=1, draft_vocab=7, vocabulary="kept", split="answer")
    log = train_drafter(kind, target, answers, tmp_path / "b", config, after=tmp_path / "a", report=lambda point: None)
    for name, tensor in load_file(tmp_path / "a" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")[name], tensor), name
    assert log["curve"][0]["tokens"] > first["curve"][-1]["tokens"] and log["coverage"] == first["coverage"]
    assert log["earlier"]["recipe"]["start"] == "target" and log["earlier"]["sha256"]
    told = drafters.training_log(tmp_path / "b")
    assert told["curve"] == first["curve"] + log["curve"]


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_further_training_may_choose_the_draft_vocabulary_anew(target, answers, tmp_path, kind):
    """At rate 0 the drafter differs in its vocabulary alone."""
    train_drafter(kind, target, answers, tmp_path / "a", TINY, report=lambda point: None)
    config = recipe(kind, further=True, **{k: getattr(TINY, k) for k in ("batch", "draft_len", "layers", "held_out")})
    config = replace(config, rate=0.0, steps=1, eval_every=1, draft_vocab=80, counted="answered", split="answer")
    log = train_drafter(kind, target, answers, tmp_path / "b", config, after=tmp_path / "a", report=lambda point: None)
    ids, coverage = train.draft_vocabulary(split_of(data.shards(answers), "answer"), 80, VOCAB, EOS)
    assert log["coverage"] == coverage and log["recipe"]["vocabulary"] == "chosen"
    old, new = (earlier_drafter(kind, tmp_path / name)[0].state_dict() for name in "ab")
    assert torch.equal(earlier_drafter(kind, tmp_path / "b")[1], ids)
    changed = {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}
    assert changed == ({"lm_head.weight", "d2t", "t2d"} if kind == "eagle" else {"head_ids"})


def test_rows_of_new_ids_follow_the_map_of_the_known_ones():
    """Known rows stay, whatever they are; where they are a linear map of the embedding, new ones follow it."""
    generator = torch.Generator().manual_seed(3)
    table, turn = (torch.randn(*shape, generator=generator) for shape in ((40, 8), (8, 8)))
    config = EagleConfig(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        vocab_size=40,
        draft_vocab_size=20,
    )
    head, known, ids = EagleHead(config), torch.arange(0, 40, 2), torch.arange(0, 40, 3)
    head.set_vocabulary(known)
    head.lm_head.weight.data = table[known] @ turn
    made = exchange_vocabulary(head, ids, table)
    torch.testing.assert_close(made.lm_head.weight.data, table[ids] @ turn, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.lm_head.weight.data[0], head.lm_head.weight.data[0])
    assert torch.equal(made.target_ids, ids) and made.config.draft_vocab_size == len(ids)
    assert torch.equal(made.fc.weight, head.fc.weight)


def test_a_further_training_needs_a_drafter_of_its_kind(target, answers, tmp_path):
    train_drafter("eagle", target, answers, tmp_path, TINY, report=lambda point: None)
    further = replace(TINY, start="earlier")
    with pytest.raises(TrainError, match="a training of 'eagle', not of 'dflash'"):
        train_drafter("dflash", target, answers, tmp_path / "x", further, after=tmp_path)
    with pytest.raises(TrainError, match="no such file"):
        train_drafter("eagle", target, answers, tmp_path / "x", further, after=tmp_path / "none")
    with pytest.raises(TrainError, match="start 'earlier'"):
        train_drafter("eagle", target, answers, tmp_path / "x", further)


def test_another_recipe_does_not_continue_a_training(target, answers, tmp_path):
    """A curve describes one training: other settings on the same folder are refused by name, and nothing is lost."""
    train_drafter("eagle", target, answers, tmp_path, TINY, report=lambda point: None)
    before = (tmp_path / "training.json").read_bytes()
    with pytest.raises(TrainError, match="another 'recipe'"):
        train_drafter("eagle", target, answers, tmp_path, replace(TINY, steps=8), report=lambda point: None)
    assert (tmp_path / "training.json").read_bytes() == before
