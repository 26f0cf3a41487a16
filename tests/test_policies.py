"""Context-free rules against the hand-computed vectors of policies.md, section 9, and against their own formulas.

K = 3 arms, T = 5 rounds, L = 4; emitted tokens per round below, r = (emitted - 1) / 4. Vectors list arms 1, 2, 3.
"""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import numpy as np
import pytest

from specsel.policies import contextual
from specsel.policies import plain as policies
from specsel.policies.plain import (
    EXP3,
    UCB1,
    BetaThompson,
    DiscountedUCB,
    EMAPerCost,
    EXP3Spec,
    Fixed,
    FixedShare,
    FollowTheLeader,
    GaussianThompson,
    Hedge,
    MetaSDUCB,
    NormalHedge,
    SlidingWindowUCB,
    UCBSpecPaper,
    UCBSpecReleased,
)
from specsel.replay.policy import Feedback, Policy, View, inverse_cdf, softmax

EMITTED = np.array([[3, 1, 2], [2, 4, 1], [5, 1, 1], [1, 3, 2], [4, 2, 5]])


def view(t, n=1, n_arms=3, draft_len=4, **features):
    return View(n_arms, draft_len, np.full(n, t), {k: np.full(n, v, dtype=float) for k, v in features.items()})


def feedback(t, arm=None, emitted=EMITTED, **features):
    """All counts of round t, or those of one arm only."""
    n_arms = emitted.shape[1]
    seen = np.ones((1, n_arms), dtype=bool) if arm is None else np.arange(n_arms)[None] == arm
    shown = view(t, n_arms=n_arms, **features)
    return Feedback(shown, np.array([arm or 0]), np.where(seen, emitted[t], 0), seen)


def distributions(policy, forced=None):
    """p@1 .. p@6 when all counts are shown, or those of the forced arms (1-based)."""
    state, found = policy.start(1, 3), []
    for t in range(6):
        found.append(policy.probabilities(state, view(t))[0])
        if t < 5:
            policy.update(state, feedback(t, None if forced is None else forced[t] - 1))
    return np.array(found), state


def played(policy):
    """(arms played 1-based, indices before each choice) over six rounds."""
    state, arms, indices = policy.start(1, 3), [], []
    for t in range(6):
        arm = int(policy.choose(state, view(t), None)[0])
        indices.append(policy.index(state, view(t))[0])
        arms.append(arm + 1)
        if t < 5:
            policy.update(state, feedback(t, arm))
    return arms, np.array(indices)


@pytest.mark.parametrize("policy", [UCB1(), MetaSDUCB()])
def test_ucb1_matches_hand_computed_indices(policy):
    arms, index = played(policy)
    assert arms == [1, 2, 3, 2, 1, 1]  # the last one is a tie: lowest index
    expected = [[1.982304, 2.232304, 1.482304], [2.165109, 1.802410, 1.665109], [1.893636, 1.893636, 1.794123]]
    assert index[3:] == pytest.approx(np.array(expected), abs=6e-7)
    assert np.isinf(index[0]).all() and np.isinf(index[2, 2])


def test_ucbspec_matches_hand_computed_indices():
    arms, index = played(UCBSpecPaper(delta=0.5))
    assert arms == [1, 2, 3, 2, 1, 3]
    expected = [[11.795961, 12.795961, 9.795961], [12.304555, 9.303613, 10.304555], [9.529896, 9.529896, 10.680668]]
    assert index[3:] == pytest.approx(np.array(expected), abs=6e-7)


def test_released_ucbspec_is_greedy_on_the_mean_after_two_passes():
    """Six rounds are the two passes; means are then 2, 3 and 3 (from 3,1 / 4,2 / 1,5): tie, lowest index, arm 2."""
    emitted = np.array([[3, 9, 9], [9, 4, 9], [9, 9, 1], [1, 9, 9], [9, 2, 9], [9, 9, 5]])
    policy, arms = UCBSpecReleased(), []
    state = policy.start(1, 3)
    for t in range(6):
        arms.append(int(policy.choose(state, view(t), None)[0]) + 1)
        policy.update(state, feedback(t, arms[-1] - 1, emitted))
    assert arms == [1, 2, 3, 1, 2, 3] and policy.choose(state, view(6), None)[0] + 1 == 2


def test_hedge_matches_hand_computed_probabilities():
    p, _ = distributions(Hedge(horizon=5))
    expected = [
        [1 / 3] * 3,
        [0.447782, 0.230765, 0.321453],
        [0.397559, 0.397559, 0.204882],
        [0.713034, 0.189373, 0.097593],
        [0.586163, 0.302080, 0.111758],
        [0.653094, 0.173453, 0.173453],
    ]
    assert p == pytest.approx(np.array(expected), abs=6e-7)
    losses = (p[:5] * (1 - (EMITTED - 1) / 4)).sum(axis=1)
    assert losses == pytest.approx([0.75, 0.714981, 0.602441, 0.880915, 0.373100], abs=6e-7)
    assert losses.sum() - 2.5 == pytest.approx(0.821438, abs=1e-6)


def test_anytime_hedge_matches_hand_computed_probabilities():
    p, _ = distributions(Hedge())
    expected = [
        [0.514750, 0.180465, 0.304785],
        [0.412381, 0.412381, 0.175237],
        [0.748868, 0.170078, 0.081053],
        [0.586163, 0.302080, 0.111758],
        [0.626481, 0.186760, 0.186760],
    ]
    assert p[1:] == pytest.approx(np.array(expected), abs=6e-7)


def test_normal_hedge_matches_hand_computed_probabilities():
    class PlainLoss(NormalHedge):  # the vector uses 1 - r; the factor L / (L + 1) scales the regrets only
        __slots__ = ()
        with_bonus = False

    p, state = distributions(PlainLoss())
    expected = [[1 / 3] * 3, [1, 0, 0], [0.5, 0.5, 0], [1, 0, 0], [0.935942, 0.064058, 0], [1, 0, 0]]
    assert p == pytest.approx(np.array(expected), abs=6e-7)
    assert state["regret"][0] == pytest.approx([0.782029, -0.217971, -0.217971], abs=6e-7)
    assert distributions(NormalHedge())[0] == pytest.approx(p, abs=1e-12)


def test_normal_hedge_scale_makes_the_mean_potential_equal_e():
    """c of the vectors: .017196 .024517 .154768 .157914 .168269, from the regrets printed there."""
    regrets = np.array(
        [
            [0.25, -0.25, 0],
            [0.25, 0.25, -0.25],
            [0.75, -0.25, -0.75],
            [0.75, 0.25, -0.5],
            [0.782029, -0.217971, -0.217971],
        ]
    )
    positive = np.maximum(regrets, 0)
    top = positive.max(axis=1, keepdims=True)
    c = top**2 / (2 * policies.potential_rate(positive / top))
    assert c[:, 0] == pytest.approx([0.017196, 0.024517, 0.154768, 0.157914, 0.168269], abs=6e-7)
    assert np.exp(positive**2 / (2 * c)).mean(axis=1) == pytest.approx(np.full(5, np.e))


def test_exp3spec_matches_hand_computed_probabilities():
    p, state = distributions(EXP3Spec(), forced=[2, 1, 3, 1, 1])
    expected = [
        [1 / 3] * 3,
        [0.439173, 0.121654, 0.439173],
        [0.289627, 0.184400, 0.525974],
        [0.381749, 0.258208, 0.360043],
        [0.229340, 0.328458, 0.442202],
        [0.192280, 0.349380, 0.458340],
    ]
    assert p == pytest.approx(np.array(expected), abs=6e-7)
    assert state["loss"][0] == pytest.approx([5.417357, 3.0, 1.901235], abs=6e-7)


def test_exp3_matches_hand_computed_probabilities():
    p, state = distributions(EXP3(explore=0.1), forced=[2, 1, 3, 1, 1])
    assert p[2] == pytest.approx([0.338354, 0.330823, 0.330823], abs=6e-7)
    assert p[5] == pytest.approx([0.353426, 0.323287, 0.323287], abs=6e-7)
    assert np.exp(state["log_weight"][0, 0] - state["log_weight"][0, 1]) == pytest.approx(1.103942, abs=6e-7)


def after_forced(policy, forced):
    state = policy.start(1, 3)
    for t, arm in enumerate(forced):
        policy.update(state, feedback(t, arm - 1))
    return state


def test_gaussian_thompson_matches_hand_computed_posterior():
    policy = GaussianThompson()
    mean, variance = policy.posterior(after_forced(policy, [1, 2, 3, 1, 2]))
    assert mean[0] == pytest.approx([0.277778, 0.5, 0.1], abs=6e-7)
    assert variance[0] == pytest.approx([0.111111, 0.111111, 0.2], abs=6e-7)


def test_discounted_ucb_matches_hand_computed_index():
    policy = DiscountedUCB(discount=0.9, xi=0.6)
    state = after_forced(policy, [1, 2, 3, 1, 2])
    assert state["pulls"][0] == pytest.approx([1.5561, 1.729, 0.81])
    assert policy.mean(state, view(5))[0] == pytest.approx([0.210816, 0.460816, 0], abs=6e-7)
    assert policy.index(state, view(5))[0] == pytest.approx([1.685382, 1.859712, 2.043810], abs=6e-7)


def test_sliding_window_ucb_counts_the_window_only():
    """Window 2 after arms 1, 2, 3, 1, 2: arms 1 (r = 0) and 2 (r = .25) remain; bonus sqrt(.6 ln 2 / 1) = .644894."""
    policy = SlidingWindowUCB(window=2)
    state = after_forced(policy, [1, 2, 3, 1, 2])
    assert policy.index(state, view(5))[0] == pytest.approx([0.644894, 0.894894, np.inf], abs=6e-7)


def test_fixed_share_moves_weight_back():
    """One round, rate 1, share .3: v ~ exp(r) with r = .5, 0, .25, then .7 v + .1."""
    p, _ = distributions(FixedShare(rate=1.0, share=0.3))
    v = np.exp([0.5, 0, 0.25]) / np.exp([0.5, 0, 0.25]).sum()
    assert p[1] == pytest.approx(0.7 * v + 0.1)


def test_beta_thompson_counts_accepted_and_one_rejection():
    """Emitted 5 of L = 4 has 4 accepted and no rejection; emitted 2 has 1 accepted and 1 rejected."""
    policy = BetaThompson()
    state = policy.start(1, 3)
    policy.update(state, feedback(0, 0, np.array([[5, 1, 1]])))
    policy.update(state, feedback(0, 0, np.array([[2, 1, 1]])))
    assert state["accepted"][0].tolist() == [6, 1, 1] and state["rejected"][0].tolist() == [2, 1, 1]
    assert policy.choose(state, view(1), np.array([[0.5, 0.5, 0.5]]))[0] == 0


def test_moving_average_per_cost():
    """Arm 1 emits 3 then 2: 3 + .1 (2 - 3) = 2.9; arms 2 and 3 emit 4 and 1; costs 1, 2, 1: indices 2.9, 2, 1."""
    policy = EMAPerCost(rate=0.1, costs=(1.0, 2.0, 1.0))
    state = policy.start(1, 3)
    for t, arm in ((0, 0), (1, 1), (2, 2), (1, 0)):
        policy.update(state, feedback(t, arm))
    assert policy.index(state, view(4))[0] == pytest.approx([2.9, 2.0, 1.0])


def test_follow_the_leader_forgets_as_told():
    """Sums after two rounds: 5 5 3 (tie); last winner: round 2, arm 2; discount .5: 3.5 4.5 2."""
    for policy, expected in (
        (FollowTheLeader(), 0),
        (FollowTheLeader(prefer=1), 1),
        (FollowTheLeader(prefer=2), 0),
        (FollowTheLeader(discount=0.0), 1),
        (FollowTheLeader(discount=0.5), 1),
    ):
        state = policy.start(1, 3)
        for t in range(2):
            policy.update(state, feedback(t))
        assert policy.choose(state, view(2), None)[0] == expected, policy


def test_ucb_index_equals_the_printed_formula_after_every_decision():
    """Eight rounds on real counts with L = 7, from pulls and sums kept by this test."""
    emitted = np.array(
        [[2, 4, 1, 3], [1, 2, 1, 4], [2, 4, 1, 1], [4, 4, 5, 1], [1, 1, 1, 1], [1, 2, 1, 1], [4, 2, 1, 2], [2, 1, 1, 3]]
    )
    policy, pulls, sums = UCB1(c=0.5), np.zeros(4), np.zeros(4)
    state = policy.start(1, 4)
    for t in range(8):
        shown = view(t, n_arms=4, draft_len=7)
        with np.errstate(all="ignore"):
            formula = np.where(pulls > 0, sums / 7 / pulls + np.sqrt(0.5 * np.log(pulls.sum()) / pulls), np.inf)
        assert policy.index(state, shown)[0] == pytest.approx(formula)
        arm = int(policy.choose(state, shown, None)[0])
        assert arm == int(np.argmax(formula))
        seen = np.arange(4)[None] == arm
        policy.update(state, Feedback(shown, np.array([arm]), emitted[t] * seen, seen))
        pulls[arm] += 1
        sums[arm] += emitted[t, arm] - 1


ONE_SIDED = [
    Hedge(rate=10.0),
    Hedge(),
    NormalHedge(),
    FixedShare(rate=10.0, share=0.001),
    EXP3(explore=1.0),
    EXP3(explore=0.1),
    EXP3Spec(scale=10.0),
    contextual.EXP4((Fixed(0), Fixed(1)), explore=0.5),
]


@pytest.mark.parametrize("policy", ONE_SIDED, ids=lambda p: type(p).__name__)
def test_probabilities_stay_finite_after_20000_one_sided_rounds(policy):
    emitted = np.array([[5, 1, 1]])
    state = policy.start(1, 3)
    for t in range(20_000):
        policy.update(state, feedback(0, None if policy.sees == "every arm" else t % 3, emitted))
    p = policy.probabilities(state, view(0))
    assert np.isfinite(p).all() and p.sum() == pytest.approx(1)


def test_softmax_survives_huge_gaps():
    assert softmax(np.array([[0.0, -1e308], [1e308, 1e308]])).tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_arms_without_probability_are_never_drawn():
    p = np.tile([0.0, 0.5, 0.0, 0.5, 0.0], (4, 1))
    assert inverse_cdf(p, np.array([0.0, 0.499, 0.5, np.nextafter(1, 0)])).tolist() == [1, 1, 3, 3]


def test_two_streams_learn_apart():
    """Two streams in one state equal two states with one stream each."""
    policy, pair = UCB1(), UCB1().start(2, 3)
    alone = [policy.start(1, 3), policy.start(1, 3)]
    for t in range(5):
        arms = policy.choose(pair, view(t, n=2), None)
        rows = [t, (t + 2) % 5]
        seen = np.arange(3) == arms[:, None]
        policy.update(pair, Feedback(view(t, n=2), arms, EMITTED[rows] * seen, seen))
        for i in range(2):
            assert policy.choose(alone[i], view(t), None)[0] == arms[i]
            policy.update(alone[i], feedback(rows[i], arms[i]))


ALL = [
    c
    for module in (policies, contextual)
    for c in vars(module).values()
    if isinstance(c, type) and issubclass(c, Policy) and is_dataclass(c)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda c: c.__name__)
def test_settings_are_immutable_and_every_rule_says_what_it_sees(kind):
    assert kind.__doc__ and isinstance(kind.sees, (str, property))
    settings = {f.name: () for f in fields(kind) if f.default is f.default_factory}
    policy = kind(**settings)
    for name in settings:
        with pytest.raises(FrozenInstanceError):
            setattr(policy, name, 1)


def test_hedgespec_length_estimator_on_probabilities():
    """Depth 3, acceptance .9 .8 .5: 1 + .9 + .72 + .36 = 2.98, loss 1 - 2.98 / 4 = .255; for 0/1 it is emitted."""
    gamma = np.array([0.9, 0.8, 0.5])
    assert 1 + np.cumprod(gamma).sum() == pytest.approx(2.98)
    policy = Hedge(with_bonus=True)
    chains = Feedback(view(0, draft_len=3), np.array([0]), np.array([[4, 2, 1]]), np.ones((1, 3), dtype=bool))
    assert policy.losses(chains)[0] == pytest.approx(1 - np.array([4, 2, 1]) / 4)
    assert 1 - 2.98 / 4 == pytest.approx(0.255)
