"""Rules with context against the hand-computed vectors of policies.md, section 9, and degenerate features."""

import warnings

import numpy as np
import pytest
from test_policies import EMITTED, feedback, view

from specsel.policies.contextual import (
    EXP4,
    Gate,
    HedgeOverExperts,
    LinTS,
    LinUCB,
    PerContext,
    Router,
    fit_classifier_router,
    fit_linear_router,
)
from specsel.policies.plain import Fixed, FollowTheLeader, GaussianThompson, Hedge
from specsel.replay.policy import Feedback, View

S = (0, 1, 0, 1, 0.5)


def test_contextual_hedge_matches_hand_computed_probabilities():
    """Contexts A, B, A, B, A (match length 0 and 1), rate 1."""
    policy = PerContext(Hedge(rate=1.0), edges=(1.0,))
    state, p = policy.start(1, 3), []
    for t, context in enumerate([0, 1, 0, 1, 0]):
        shown = view(t, match_length=context)
        slot = policy.context(shown)
        p.append(policy.inner.probabilities({k: v[[0], slot] for k, v in state.items()}, shown)[0])
        policy.update(state, feedback(t, match_length=context))
    expected = [[1 / 3] * 3] * 2 + [
        [0.419229, 0.254275, 0.326496],
        [0.291756, 0.481024, 0.227220],
        [0.662412, 0.147804, 0.189784],
    ]
    assert np.array(p) == pytest.approx(np.array(expected), abs=6e-7)
    assert state["loss"][0, 0] == pytest.approx([0.75, 2.75, 1.75])
    assert state["loss"][0, 1] == pytest.approx([1.75, 0.75, 1.75])


def test_a_context_without_enough_rounds_asks_the_learner_of_all_contexts():
    """Two rounds in context 0 favour arm 2; the new context 1 starts with arm 1, with back-off it follows arm 2."""
    for backoff, expected in ((0, 0), (2, 1)):
        policy = PerContext(FollowTheLeader(), edges=(1.0,), backoff=backoff)
        state = policy.start(1, 3)
        for _ in range(2):
            policy.update(state, feedback(1, match_length=0))
        assert policy.choose(state, view(2, match_length=1), None)[0] == expected
        assert policy.choose(state, view(2, match_length=0), None)[0] == 1


def test_a_missing_value_is_a_context_of_its_own():
    policy = PerContext(FollowTheLeader(), edges=(1.0, 2.0))
    assert policy.context(View(3, 4, np.zeros(4), {"match_length": np.array([0, 1, 7, np.nan])})).tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_lints_matches_hand_computed_posterior_with_full_information():
    policy = LinTS(("s",))
    state, rounds = policy.start(1, 3), []
    for t in range(5):
        policy.update(state, feedback(t, s=S[t]))
        covariance = state["inverse"][0, 0]
        rounds.append([*(covariance @ state["vector"][0, 0]), covariance[0, 0], covariance[0, 1], covariance[1, 1]])
    expected = [
        [0.4, 0, 0.2, 0, 1],
        [0.379310, -0.103448, 0.172414, -0.137931, 0.310345],
        [0.632653, -0.306122, 0.102041, -0.081633, 0.265306],
        [0.617978, -0.438202, 0.101124, -0.089888, 0.191011],
        [0.681818, -0.431818, 0.090909, -0.090909, 0.190909],
    ]
    assert np.array(rounds) == pytest.approx(np.array(expected), abs=6e-7)
    mean = (state["inverse"] @ state["vector"][..., None])[0, :, :, 0]
    assert mean == pytest.approx(
        np.array([[0.681818, -0.431818], [0.045455, 0.504545], [0.272727, 0.027273]]), abs=6e-7
    )


def forced(policy):
    state = policy.start(1, 3)
    for t, arm in enumerate([0, 1, 2, 0, 1]):
        policy.update(state, feedback(t, arm, s=S[t]))
    return state


def test_lints_matches_hand_computed_posterior_with_bandit_feedback():
    state = forced(LinTS(("s",)))
    mean = (state["inverse"] @ state["vector"][..., None])[0, :, :, 0]
    assert mean == pytest.approx(np.array([[0.344828, -0.275862], [0.166667, 0.416667], [0, 0]]), abs=6e-7)
    assert state["inverse"][0, 1] == pytest.approx(np.array([[0.333333, -0.333333], [-0.333333, 0.5]]), abs=6e-7)


def test_linucb_matches_hand_computed_indices():
    policy = LinUCB(("s",))
    state = forced(policy)
    for s, mean, width in (
        (1, [0.1, 0.458333, 0], [0.774597, 0.707107, 1.224745]),
        (0, [0.2, 0.208333, 0], [0.632456, 0.707107, 0.707107]),
    ):
        found, variance = policy.estimates(state, view(5, s=s))
        assert found[0] == pytest.approx(mean, abs=6e-7) and np.sqrt(variance[0]) == pytest.approx(width, abs=6e-7)
    assert policy.choose(state, view(5, s=1), None)[0] == 2


def test_one_normal_draw_per_arm_has_the_law_of_drawing_theta():
    """Frequencies of arms over 20,000 draws, against drawing theta from its normal distribution."""
    policy, rng = LinTS(("s",)), np.random.default_rng(1)
    state, n = forced(policy), 20_000
    many = {k: np.repeat(v, n, axis=0) for k, v in state.items()}
    arms = policy.choose(many, view(5, n=n, s=0.5), rng.random((n, 3)))
    mean = (state["inverse"] @ state["vector"][..., None])[0, :, :, 0]
    theta = np.stack([rng.multivariate_normal(mean[k], state["inverse"][0, k], size=n) for k in range(3)], axis=1)
    direct = (theta @ np.array([1, 0.5])).argmax(axis=1)
    gaps = np.bincount(arms, minlength=3) / n - np.bincount(direct, minlength=3) / n
    assert np.abs(gaps).max() < 4 * np.sqrt(0.5 / n)


def test_scores_are_finite_without_data_and_with_a_constant_feature():
    policy = LinUCB(("s",))
    state = policy.start(1, 3)
    for t in range(5):
        mean, variance = policy.estimates(state, view(t, s=1.0))
        assert np.isfinite(mean).all() and np.isfinite(variance).all() and (variance > 0).all()
        policy.update(state, feedback(t, 0, s=1.0))


def test_a_ridge_of_zero_is_refused():
    with pytest.raises(ValueError, match="ridge is 0.0"):
        LinTS(("s",), ridge=0.0).start(1, 3)


def test_exp4_matches_hand_computed_update():
    """Experts [.7, .2, .1] and [.1, .2, .7], explore .1, arm 1 drawn, reward .5 (emitted 3 of L = 4)."""

    class Advised(EXP4):
        __slots__ = ()

        def advice(self, shown):
            return np.array([[[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]])

    policy = Advised((Fixed(0), Fixed(1)), explore=0.1)
    state = policy.start(1, 3)
    assert policy.probabilities(state, view(0))[0] == pytest.approx([0.393333, 0.213333, 0.393333], abs=6e-7)
    policy.update(state, feedback(0, 0))
    q = np.exp(state["log_weight"][0]) / np.exp(state["log_weight"][0]).sum()
    assert q == pytest.approx([0.506356, 0.493644], abs=6e-7)


def test_hedge_over_experts_weighs_experts_by_the_reward_of_their_advice():
    """Rewards of round 3 are 1, 0, 0: the expert for arm 1 gains e^rate over the gate that plays arm 3."""
    policy = HedgeOverExperts((Fixed(0), Gate("match_length", 1, 2, 1)), rate=0.5)
    state = policy.start(1, 3)
    policy.update(state, feedback(2, match_length=4))
    assert np.exp(state["log_weight"][0, 0] - state["log_weight"][0, 1]) == pytest.approx(np.exp(0.5))


def test_a_gate_sends_missing_values_below():
    gate = Gate("match_length", 3, 1, 0)
    assert gate.choose({}, View(2, 4, np.zeros(4), {"match_length": np.array([2, 3, 9, np.nan])}), None).tolist() == [
        0,
        1,
        1,
        0,
    ]


def test_a_router_keeps_its_arm_until_the_next_decision():
    """Score of arm 2 is 2 x - 1 against 0: x = 1 picks arm 2, x = 0 arm 1. Decided at blocks 0, 2, 4, or only at 0."""
    for every, expected in ((2, [1, 1, 0, 0, 1]), (0, [1, 1, 1, 1, 1]), (1, [1, 0, 0, 1, 1])):
        router = Router(("s",), ((0.0, -1.0), (0.0, 2.0)), every)
        state = router.start(1, 2)
        assert [
            int(router.choose(state, view(t, n_arms=2, s=x), None)[0]) for t, x in enumerate((1, 0, 0, 1, 1))
        ] == expected


def test_fitted_routers_find_the_rule():
    rng = np.random.default_rng(3)
    x = np.column_stack([np.ones(400), rng.random(400)])
    emitted = np.column_stack([np.full(400, 2), np.where(x[:, 1] > 0.5, 4, 1), np.ones(400)])
    for router in (fit_linear_router(x, emitted, ("s",), every=1), fit_classifier_router(x, emitted, ("s",), every=1)):
        chosen = [int(router.choose(router.start(1, 3), view(0, s=s), None)[0]) for s in (0.1, 0.95)]
        assert chosen == [0, 1]


def test_a_classifier_with_one_class_and_a_constant_feature_still_routes():
    x = np.ones((30, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router = fit_classifier_router(x, np.tile([1, 3, 1], (30, 1)), ("s",), every=1)
        constant = fit_classifier_router(x, np.tile([[1, 3, 1], [4, 3, 1]], (15, 1)), ("s",), every=1)
    assert router.choose(router.start(1, 3), view(0, s=1), None)[0] == 1
    assert np.isfinite(constant.weights).all()


def test_contextual_thompson_by_workload_equals_separate_samplers():
    """The state of workload 1 is that of a sampler that saw the rounds of workload 1 only."""
    policy, alone = PerContext(GaussianThompson(), "workload", (0.5,)), GaussianThompson()
    state, single = policy.start(1, 3), alone.start(1, 3)
    for t in range(5):
        policy.update(state, feedback(t, t % 3, workload=t % 2))
        if t % 2:
            alone.update(single, feedback(t, t % 3))
    assert (
        state["sum"][0, 1] == pytest.approx(single["sum"][0])
        and state["pulls"][0, 1].tolist() == single["pulls"][0].tolist()
    )


def test_linear_rules_update_seen_arms_only():
    policy = LinTS(("s",))
    state = policy.start(1, 3)
    seen = np.array([[True, False, True]])
    policy.update(state, Feedback(view(0, s=1.0), np.array([0]), EMITTED[:1] * seen, seen))
    assert (state["inverse"][0, 1] == np.eye(2)).all() and not (state["inverse"][0, 2] == np.eye(2)).all()
