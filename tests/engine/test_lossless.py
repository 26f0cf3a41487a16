"""Losslessness: whatever drafts, the output is the target's own greedy output, token for token, in fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EOS, Scripted, prompts

from specsel.engine.decode import Decoder, accept, always, attention_mask, merge, plain
from specsel.engine.generate import Answers, BatchedTarget, choice_rule
from specsel.engine.target import TargetError, cache_length, keep

MAX_NEW = 40


def reference(target, prompt: list[int], max_new: int = MAX_NEW) -> list[int]:
    """Plain greedy decoding by the library."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("arm", ["dflash", "eagle", "ngram", "cascade"])
def test_every_drafter_leaves_the_greedy_output_unchanged(target, features, pool, arm):
    """For every request: tokens of the decoder with one fixed arm == tokens of plain decoding."""
    decoder = Decoder(features, pool, draft_len=4)
    for prompt in prompts():
        assert decoder.run(prompt, always(arm), max_new=MAX_NEW).output == reference(target, prompt)


def test_adversarial_drafters_leave_the_greedy_output_unchanged(target, features):
    """Perfect, useless, empty, end-of-sequence inside: the output never moves, and perfect drafts are all accepted."""
    for prompt in prompts():
        truth = reference(target, prompt)
        n = len(prompt)
        scripts = {
            "perfect": lambda seen, n=n, t=truth: t[len(seen) - n :],
            "useless": lambda seen: [96, 95, 94, 93],
            "empty": lambda seen: [],
            "eos_inside": lambda seen, n=n, t=truth: [*t[len(seen) - n : len(seen) - n + 1], EOS[0], 7, 7],
        }
        decoder = Decoder(features, {name: Scripted(name, script) for name, script in scripts.items()}, draft_len=4)
        for name in scripts:
            trace = decoder.run(prompt, always(name), max_new=MAX_NEW)
            assert trace.output == truth, name
            if name == "perfect":
                assert all(b.accepted[name] == b.proposed[name] for b in trace.blocks)


def test_switching_drafters_mid_request_changes_nothing(target, features, pool):
    """A policy that changes the arm at every block, and one that verifies all four and keeps the longest, both give the
    greedy output."""
    arms = list(pool)
    decoder = Decoder(features, pool, draft_len=4)
    for prompt in prompts():
        truth = reference(target, prompt)
        assert (
            decoder.run(
                prompt, lambda position, state: ([arms[position % 4]], arms[position % 4]), max_new=MAX_NEW
            ).output
            == truth
        )
        union = decoder.run(prompt, lambda position, state: (arms, None), max_new=MAX_NEW)
        assert union.output == truth
        assert all(b.accepted[b.arm] == max(b.accepted.values()) for b in union.blocks if b.arm)


@pytest.mark.parametrize("limit", range(1, 8))
def test_any_length_limit_gives_the_tokens_of_plain_decoding(target, features, pool, limit):
    decoder = Decoder(features, pool, draft_len=4)
    for prompt in prompts(3):
        trace = decoder.run(prompt, always("eagle"), max_new=limit)
        assert trace.output == reference(target, prompt, limit)
        assert sum(b.emitted for b in trace.blocks) == len(trace.output) - 1


def test_offline_scores_equal_live_scores(target, features, pool):
    """Accepted counts of the live engine, block by block and arm by arm, equal those of the batched drafts on the
    finished output."""
    decoder = Decoder(features, pool, draft_len=4)
    for prompt in prompts():
        trace = decoder.run(prompt, lambda position, state: (list(pool), "eagle"), max_new=MAX_NEW)
        tokens = prompt + trace.output
        if len(trace.output) < 2:
            continue
        taps = features(torch.tensor(tokens[:-1]))[1]
        for arm, drafter in pool.items():
            drafts = drafter.propose_all(tokens, len(prompt), taps, 4)
            offline = drafts.accepted(np.array(trace.output))
            for block in trace.blocks:
                assert block.accepted[arm] == offline[block.position], (arm, block)
                assert block.proposed[arm] == drafts.proposed[block.position]


def test_batched_generation_equals_plain_decoding_whatever_the_batch(target):
    """Continuous batching with any number of rows answers every request as the library does by itself."""
    queue = prompts(7)
    for batch in (1, 3, 7):
        bulk = BatchedTarget(target.model, target.taps)
        for answer in Answers(bulk, queue, max_new=MAX_NEW, eos_ids=EOS, batch=batch):
            assert answer.output == reference(target, queue[answer.index])


def test_batched_taps_equal_the_taps_of_a_single_pass(target, features):
    bulk = BatchedTarget(target.model, target.taps)
    for answer in Answers(bulk, prompts(4), max_new=12, eos_ids=EOS, batch=4):
        torch.testing.assert_close(answer.taps, features(answer.tokens[:-1])[1], rtol=1e-4, atol=1e-4)


def test_union_verification_gives_every_draft_the_logits_of_its_own_pass(target, features):
    """Row by row, the logits of the trie equal those of a plain pass over the node's path."""
    prompt, drafts = [5, 6, 7, 8], [[9, 10, 11], [9, 10, 12, 13], [14]]
    trie = merge(20, drafts)
    _, _, cache = features(torch.tensor(prompt))
    depths = torch.tensor(trie.depths)
    logits, _, _ = features(
        torch.tensor(trie.tokens), cache=cache, positions=len(prompt) + depths, mask=attention_mask(trie, len(prompt))
    )
    for draft, path in zip(drafts, trie.paths, strict=True):
        alone = features(torch.tensor([*prompt, 20, *draft]))[0]
        torch.testing.assert_close(logits[[0, *path]], alone[len(prompt) :], rtol=1e-4, atol=1e-4)


def test_a_rolled_back_cache_decodes_on_as_if_from_scratch(target, features):
    tokens = torch.tensor([5, 6, 7, 8, 9])
    for length in (3, 2, 1):
        _, _, cache = features(tokens)
        keep(cache, length)
        assert cache_length(cache) == length
        on, _, _ = features(tokens[length:], cache=cache)
        torch.testing.assert_close(on, features(tokens)[0][length:], rtol=1e-4, atol=1e-4)


def test_a_cache_that_cannot_be_cut_is_refused(features):
    _, _, cache = features(torch.tensor([5, 6]))
    with pytest.raises(TargetError, match="roll-back to 3"):
        keep(cache, 3)


def test_each_committed_token_is_the_argmax_of_its_verify_row(target, features, pool):
    """The margin of every committed token is that of the target's first choice in the row that verified it, hence never
    negative."""
    trace = Decoder(features, pool, draft_len=4).run(prompts()[0], always("eagle"), max_new=MAX_NEW)
    assert len(trace.margins) == len(trace.output)
    assert min(trace.margins) >= 0


def test_plain_decoding_through_the_engine_emits_one_token_a_block(target, features, pool):
    trace = Decoder(features, pool, draft_len=4).run(prompts()[1], plain, max_new=MAX_NEW)
    assert trace.output == reference(target, prompts()[1])
    assert all(b.emitted == 1 and b.rows == 1 for b in trace.blocks)


@pytest.mark.parametrize(
    "name, draft, choices, remaining, eos, expected",
    [
        ("a right draft keeps its bonus", [11, 12], [11, 12, 13], 50, (2,), (2, [11, 12, 13], None)),
        ("a match after a mismatch does not count", [11, 99, 13], [11, 12, 13, 14], 50, (2,), (1, [11, 12], None)),
        ("an end inside the draft stops there", [11, 2, 13], [11, 2, 13, 14], 50, (2,), (2, [11, 2], "eos")),
        ("the end can be the correction", [99], [2, 5], 50, (2,), (0, [2], "eos")),
        ("the budget cuts the block", [11, 12, 13], [11, 12, 13, 14], 2, (2,), (2, [11, 12], "length")),
        ("an end at the budget is an end", [11, 2, 13], [11, 2, 13, 14], 2, (2,), (2, [11, 2], "eos")),
    ],
)
def test_acceptance_rule(name, draft, choices, remaining, eos, expected):
    assert accept(draft, choices, remaining=remaining, eos_ids=eos) == expected, name


def test_with_shared_noise_every_arm_samples_the_same_tokens(target, features, pool):
    """One Gumbel stream per absolute position: fixed arms, the union and plain decoding give one and the same sampled
    output."""
    prompt = prompts()[2]
    decoder = Decoder(features, pool, draft_len=4, choose=choice_rule(0.7, 5, ["w/1"]))
    truth = decoder.run(prompt, plain, max_new=MAX_NEW).output
    assert truth != reference(target, prompt)
    for arm in pool:
        assert decoder.run(prompt, always(arm), max_new=MAX_NEW).output == truth
    bulk = BatchedTarget(target.model, target.taps)
    (answer,) = Answers(bulk, [prompt], max_new=MAX_NEW, eos_ids=EOS, choose=choice_rule(0.7, 5, ["w/1"]))
    assert answer.output == truth


def test_sampled_blocks_follow_the_enumerated_distribution(target, features):
    """Two-token outputs over a vocabulary of 6 (other logits at minus infinity), drafted by a drafter that always
    guesses: frequencies over 4,000 noise seeds agree with the enumerated product of softmaxes (chi-square with 35
    degrees of freedom, 99.9 % point 66.6)."""
    allowed = list(range(3, 9))

    def restrict(logits):
        return logits[..., allowed] * 0.05

    def exact(prompt):
        first = torch.softmax(restrict(features(torch.tensor(prompt), last_only=True)[0][0]) / 0.7, -1)
        second = [
            torch.softmax(restrict(features(torch.tensor([*prompt, a]), last_only=True)[0][0]) / 0.7, -1)
            for a in allowed
        ]
        return torch.stack([first[i] * second[i] for i in range(6)]).double().numpy()

    prompt, counts = [5, 6, 7], np.zeros((6, 6))
    logits = {(): features(torch.tensor(prompt), last_only=True)[0]} | {
        (a,): features(torch.tensor([*prompt, a]), last_only=True)[0] for a in allowed
    }
    for seed in range(4000):
        choose = choice_rule(0.7, seed, ["w/1"])
        first = int(choose(restrict(logits[()]), [0], [0]).argmax(-1))
        choices = [first, int(choose(restrict(logits[allowed[first],]), [0], [1]).argmax(-1))]
        accepted, emitted, _ = accept([0], choices, remaining=2, eos_ids=())
        emitted = emitted if accepted else [emitted[0], choices[1]]
        counts[emitted[0], emitted[1]] += 1
    expected = exact(prompt) * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 66.6
