"""Simulated logs obey the log's rules, and what is said to be true of the model is true."""

from dataclasses import replace

import numpy as np
import pytest

from specsel.logs import LogError, block_view, read_log, summary, validate, write_log
from specsel.study.simulation import (
    Model,
    acceptance_distribution,
    expected_over_blocks,
    simulate_positions,
    true_oracle_gap,
)

FLIPPING = Model(passage=((0.7, -0.7, 0.0, 0.5), (-0.8, 0.8, 0.3, -0.6)), output_len=(20, 40))


def test_a_simulated_log_is_a_legal_log(tmp_path):
    log = simulate_positions(replace(FLIPPING, requests_per_workload=2), rng=np.random.default_rng(1))
    run = write_log(tmp_path / "run", log)
    assert validate(run) == []
    back = read_log(run)
    assert back.label == "SIM" and back.complete and np.array_equal(back.accepted, log.accepted)
    assert np.allclose(back.stats["conf_min"], log.stats["conf_min"], rtol=1e-5, equal_nan=True)
    assert np.isnan(back.stats["conf_mean"][:, log.arms.index("ngram")]).all()


def test_same_seed_same_log_and_another_seed_another():
    small = replace(FLIPPING, requests_per_workload=3)
    first, again, other = (simulate_positions(small, rng=np.random.default_rng(s)) for s in (5, 5, 6))
    assert np.array_equal(first.accepted, again.accepted) and first.stats["ent_mean"] == pytest.approx(
        again.stats["ent_mean"], nan_ok=True
    )
    assert first.n_positions != other.n_positions or not np.array_equal(first.accepted, other.accepted)


def test_acceptance_probabilities_sum_to_one():
    chance = acceptance_distribution(np.array([[-2.0, 0.0, 3.0]]), 9, np.array([0.0, 0.3, 1.0]))
    assert chance.sum(axis=-1) == pytest.approx(np.ones((1, 3)))
    assert chance[0, 2, 0] == 1.0


def test_expected_blocks_of_a_hand_computed_request():
    """One arm accepts each token with probability 1/2, L = 1, two tokens to emit, no request effect: from position 0
    one block (accepted) or two: 1 + 1/2 = 1.5."""
    model = Model(
        arms=("a",),
        workloads=("w",),
        logit=((0.0,),),
        passage=((0.0,),),
        request_sd=0.0,
        no_draft=(0.0,),
        silent=(),
        output_len=(2, 2),
        draft_len=1,
    )
    assert expected_over_blocks(model, 0) == pytest.approx([1.5])
    assert true_oracle_gap(model, 0) == pytest.approx(0.0)


def test_the_stated_truth_is_the_limit_of_large_logs():
    """4 x 6000 requests: block efficiencies within 4 standard errors, estimated from the requests themselves."""
    model = replace(FLIPPING, requests_per_workload=6000)
    log = simulate_positions(model, rng=np.random.default_rng(2), with_stats=False)
    tokens = np.diff(log.starts)
    for k in range(log.n_arms):
        truth = 4 * sum(model.output_len) / 2 / expected_over_blocks(model, k).sum()
        blocks = np.bincount(block_view(log, k).request_of, minlength=log.n_requests)
        found = tokens.sum() / blocks.sum()
        error = np.sqrt(np.sum((tokens - found * blocks) ** 2)) / blocks.sum()
        assert abs(found - truth) < 4 * error, (log.arms[k], found, truth, error)
    view = block_view(log, 1)
    sums = np.stack([np.bincount(view.request_of, weights=x) for x in (view.emitted.max(axis=1), view.emitted[:, 1])])
    gap = sums[0].sum() / sums[1].sum() - 1
    error = np.sqrt(np.sum((sums[0] - (gap + 1) * sums[1]) ** 2)) / sums[1].sum()
    assert abs(gap - true_oracle_gap(model, 1)) < 4 * error


def test_blocks_of_one_request_are_correlated():
    """With a request effect the variance of request means exceeds what independent blocks would give."""

    def excess(sd):
        log = simulate_positions(replace(FLIPPING, request_sd=sd, passage=((0.0,) * 4,)), rng=np.random.default_rng(3))
        view = block_view(log)
        emitted = view.emitted[:, 0].astype(float)
        n = np.bincount(view.request_of)
        means = np.bincount(view.request_of, weights=emitted) / n
        return np.var(means) / np.mean(emitted.var() / n)

    assert excess(0.0) < 1.3 < 2.0 < excess(0.8)


def test_confidence_tells_as_much_as_the_model_says():
    def rank_correlation(signal):
        log = simulate_positions(replace(FLIPPING, signal=signal), rng=np.random.default_rng(4))
        return np.corrcoef(log.stats["conf_mean"][:, 0], log.accepted[:, 0])[0, 1]

    assert abs(rank_correlation(0.0)) < 0.03 < 0.3 < rank_correlation(1.0)


def test_any_number_of_arms_and_workloads():
    model = Model(
        arms=tuple("abcdefghij"),
        workloads=("only",),
        logit=((0.1,) * 10,),
        passage=((0.0,) * 10,),
        no_draft=(0.0,) * 10,
        silent=(),
        draft_len=20,
        requests_per_workload=2,
    )
    log = simulate_positions(model, rng=np.random.default_rng(0))
    assert log.n_arms == 10 and summary(log)["requests"] == {"only": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit", ((0.0,),)),
        ("passage", ()),
        ("no_draft", (2.0, 0, 0, 0)),
        ("signal", 1.5),
        ("silent", ("nobody",)),
        ("output_len", (9, 3)),
        ("passage_len", 0.5),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(LogError, match=field):
        replace(Model(), **{field: value})
