"""Drafters: the incremental, the batched and the training path of each neural drafter are one computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EOS, VOCAB, make_dflash, make_eagle, prompts
from hypothesis import given
from hypothesis import strategies as st

from specsel.engine.data import Example
from specsel.engine.drafters.eagle import check_vocabulary
from specsel.engine.drafters.files import CheckpointError
from specsel.engine.drafters.ngram import Ngram, NgramConfig, suffix_match_lengths
from specsel.engine.losses import eagle_states


def sequence(features, n_prompt: int = 6, n_output: int = 12) -> tuple[list[int], torch.Tensor]:
    tokens = np.random.default_rng(5).integers(3, VOCAB, n_prompt + n_output).tolist()
    return tokens, features(torch.tensor(tokens[:-1]))[1]


@pytest.mark.parametrize("make", [make_eagle, make_dflash])
def test_incremental_drafts_equal_batched_drafts(target, features, make):
    """Feeding a request in random chunks and drafting at each anchor gives the drafts and statistics of the batched
    pass."""
    drafter, (tokens, taps) = make(target), sequence(features)
    batched = drafter.propose_all(tokens, 6, taps, 4)
    for stride in (1, 3):
        drafter.reset()
        end = 6
        drafter.extend(tokens[: end + 1], taps[:end])
        while end < len(tokens) - 1:
            one, row = drafter.propose(4), end - 6
            assert one.row(0) == batched.row(row)
            np.testing.assert_allclose(one.confidence[0], batched.confidence[row], atol=1e-5)
            np.testing.assert_allclose(one.entropy[0], batched.entropy[row], atol=1e-5)
            following = min(end + stride, len(tokens) - 1)
            drafter.extend(tokens[end + 1 : following + 1], taps[end:following])
            end = following


def test_eagle_training_states_equal_the_inference_chain_fed_with_true_tokens(target, features):
    """Training-time test: state of step j at anchor t == state of a chain of j steps from t whose tokens are the true
    ones."""
    drafter, (tokens, taps) = make_eagle(target), sequence(features)
    head, ids, steps = drafter.model, torch.tensor(tokens), 4
    example = Example(ids, 6, taps, None, None, torch.zeros(len(tokens) - 6))
    states = torch.stack(list(eagle_states(head, [example, example], drafter.embedding, steps)), 1)
    assert len(states) == 2 * (len(tokens) - 7)
    from specsel.engine.drafters.eagle import Segment

    for row, anchor in enumerate(range(6, len(tokens) - 1 - steps)):
        drafter.reset()
        drafter.extend(tokens[: anchor + 1], taps[:anchor])
        state, u, position = drafter.last
        segment = Segment(slice(0, 1), drafter.keys[0], drafter.values[0], torch.ones(1, anchor, dtype=torch.bool))
        for j in range(steps):
            state = head.layer(state, u, position + j, [segment], step=j > 0)
            for copy in (row, len(states) // 2 + row):
                torch.testing.assert_close(states[copy, j], state[0], rtol=1e-5, atol=1e-5)
            u = head.inputs(state, drafter._embed(ids[anchor + 1 + j : anchor + 2 + j]))


def test_dflash_block_sees_nothing_of_other_blocks_or_later_text(target, features):
    """Changing every token and feature from the anchor on leaves the draft from that anchor as it was, but for the
    anchor itself."""
    drafter, (tokens, taps) = make_dflash(target), sequence(features)
    before = drafter.propose_all(tokens, 6, taps, 4)
    changed = taps.clone()
    changed[9:] += 5.0
    after = drafter.propose_all(tokens[:10] + [7] * (len(tokens) - 10), 6, changed, 4)
    np.testing.assert_allclose(before.confidence[:4], after.confidence[:4], atol=1e-6)
    assert (before.tokens[:4] == after.tokens[:4]).all()
    assert not np.allclose(before.confidence[5], after.confidence[5])


def test_a_head_skips_anchors_outside_its_window(target, features):
    """Positions that would leave the window are 'not asked', which is not the same as a draft of nothing."""
    drafter, (tokens, taps) = make_eagle(target, window=12), sequence(features)
    drafts = drafter.propose_all(tokens, 6, taps, 4)
    assert drafts.proposed.tolist() == [4, 4, 4, 4] + [-1] * 7
    drafter.reset()
    drafter.extend(tokens[:15], taps[:14])
    assert drafter.propose(4).proposed.tolist() == [-1]


def brute_force(tokens: list[int], n_min: int, n_max: int, limit: int) -> list[int]:
    for n in range(min(n_max, len(tokens)), n_min - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return tokens[end : end + limit]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_lookup_equals_a_brute_force_search(tokens, n_min, more, limit):
    """Longest key first, then the most recent occurrence; never past the end of the text."""
    drafter = Ngram(NgramConfig(n_min, n_min + more))
    drafter.extend(tokens)
    assert drafter.propose(limit).row(0) == brute_force(tokens, n_min, n_min + more, limit)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 20))
def test_batched_lookup_equals_incremental_lookup(tokens, n_prompt):
    n_prompt = min(n_prompt, len(tokens) - 1)
    drafter = Ngram(NgramConfig(1, 4))
    batched = drafter.propose_all(tokens, n_prompt, None, 4)
    lengths = suffix_match_lengths(tokens, n_prompt)
    for row, end in enumerate(range(n_prompt + 1, len(tokens))):
        drafter.reset()
        drafter.extend(tokens[:end])
        assert drafter.propose(4).row(0) == batched.row(row)
        assert lengths[row] == drafter.index.match_length()


def test_nothing_after_an_end_token_is_proposed():
    drafter = Ngram(NgramConfig(2, 2), EOS)
    drafter.extend([1, 8, 2, 3, 1, 8])
    assert drafter.propose(3).row(0) == [2]


@pytest.mark.parametrize(
    "d2t, marked, reason",
    [
        ([0, 0, 0, 0], [0, 2, 3, 6], "does not agree"),
        ([0, 2, 3, 6], [0, 2, 3, 6], "does not agree"),
        ([0, 1, 1, 9], [0, 2, 3, 6], "outside"),
        ([3, 1, 1, 3], [2, 3, 6], "not increasing"),
        ([0, 1, 1, 3], [0, 2, 3], "marks 3 ids"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(d2t, marked, reason):
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[marked] = True
    with pytest.raises(CheckpointError, match=reason):
        check_vocabulary(torch.tensor(d2t), t2d, (6,))


def test_a_vocabulary_without_an_end_id_gives_a_warning():
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[0, 2, 3, 6]] = True
    assert "never propose the end" in check_vocabulary(torch.tensor([0, 1, 1, 3]), t2d, (9,))
    assert check_vocabulary(torch.tensor([0, 1, 1, 3]), t2d, (6,)) is None


def test_statistics_are_missing_where_there_is_no_distribution():
    drafter = Ngram(NgramConfig(1, 2))
    drafter.extend(prompts()[0] * 2)
    assert all(np.isnan(values).all() for values in drafter.propose(4).statistics().values())
