"""Tuning, the policy table, curves and the workload-level prediction, on simulated logs and by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_replay import log_of

from specsel.policies.catalogue import GRIDS
from specsel.policies.plain import UCB1, Random
from specsel.replay import best_arms, fixed, oracle_dp, replay
from specsel.study.oldstats import Estimate
from specsel.study.policies import (
    arm_order,
    compare,
    evaluate,
    gain_over_best_fixed,
    sensitivity,
    split_requests,
    trials,
    tune,
    verdict,
    workload_hypothesis,
)
from specsel.study.simulation import Model, simulate_positions

FLIPPING = Model(
    requests_per_workload=15,
    output_len=(40, 60),
    logit=((1.5, -1.0, -1.6, 0.0), (-1.0, 1.5, -1.6, 0.0)) * 2,
    request_sd=0.2,
)


def _best_fixed(log):
    return fixed(log, best_arms(log, "log")[0])


def simulated(seed=1, **changes):
    return simulate_positions(replace(FLIPPING, **changes), rng=np.random.default_rng(seed))


def test_splits_are_disjoint_complete_and_stratified():
    log = simulated()
    train, test = split_requests(log, share=0.4, rng=np.random.default_rng(0))
    assert np.bincount(train.workload).tolist() == [6] * 4 and np.bincount(test.workload).tolist() == [9] * 4
    assert set(train.requests) | set(test.requests) == set(log.requests) and not set(train.requests) & set(
        test.requests
    )


def test_trials_are_the_grid_and_tuning_takes_the_best_of_them():
    log = simulated(requests_per_workload=4)
    table = trials(log, "ucb1")
    assert table["value"].tolist() == list(GRIDS["ucb1"][1]) and (table["parameter"] == "c").all()
    expected = [replay(log, UCB1(c=c)).block_efficiency for c in GRIDS["ucb1"][1]]
    assert table["block_efficiency"].tolist() == expected
    assert tune(log, "ucb1") == UCB1(c=GRIDS["ucb1"][1][int(np.argmax(expected))])


def test_a_policy_without_parameter_has_one_trial():
    assert len(trials(simulated(requests_per_workload=2), "hedgespec", seeds=[0])) == 1


def test_the_order_of_arms_matters_through_ties_only():
    """Arms a, b emit (1, 3) once, then (2, 2): listed, UCB1 starts with a (0 1 3 5 6), reversed with b (0 3 5 6)."""
    log = log_of([[[1, 3]] + [[2, 2]] * 5], draft_len=3)
    table = arm_order(log, ["ucb1", "match_gate"], rng=np.random.default_rng(0), n_resamples=9)
    assert table["policy"].tolist() == ["ucb1"]  # a gate needs a lookup arm
    assert table.loc[0, ["as_listed", "reversed", "value"]].tolist() == [6 / 4, 2.0, 0.5]


def test_sensitivity_shows_every_trial_as_a_difference_to_the_best_fixed_arm():
    log = simulated(requests_per_workload=4)
    table = sensitivity(log, rng=np.random.default_rng(0), names=["ucb1", "hedge", "match_gate_9"], n_resamples=50)
    assert table["place"].tolist() == [1, 2, 3, 4, 5, 6] * 2 and set(table["policy"]) == {"ucb1", "hedge"}
    expected = [replay(log, UCB1(c=c)).block_efficiency - _best_fixed(log).block_efficiency for c in GRIDS["ucb1"][1]]
    assert table["value"][:6].to_numpy() == pytest.approx(expected)
    assert table["setting"][6:].tolist() == list(GRIDS["hedge"][1]) and (table["low"] <= table["high"]).all()
    assert not len(sensitivity(log, rng=np.random.default_rng(0), names=[]))


def test_seeds_are_pooled_and_their_spread_is_shown():
    log = simulated(requests_per_workload=3)
    total, spread = evaluate(log, Random(), seeds=[0, 1, 2])
    runs = [replay(log, Random(), seed=s) for s in range(3)]
    assert (total.blocks == sum(r.blocks for r in runs)).all()
    assert spread == pytest.approx(np.std([r.block_efficiency for r in runs], ddof=1))
    assert evaluate(log, UCB1())[1] is None


@pytest.fixture(scope="module")
def table():
    log = simulated()
    train, test = split_requests(log, share=0.3, rng=np.random.default_rng(0))
    names = [
        "fixed:dflash",
        "best_fixed_workload",
        "oracle_dp",
        "random",
        "ucb1",
        "ftl",
        "contextual_thompson",
        "memspec",
    ]
    return test, compare(train, test, rng=np.random.default_rng(1), names=names, seeds=[0, 1], n_resamples=200)


def test_the_policy_table_has_a_row_for_every_setup(table):
    rows = list(table[1][["policy", "feedback", "reset"]].itertuples(index=False, name=None))
    assert rows == [
        ("fixed:dflash", "", ""),
        ("best_fixed_workload", "", ""),
        ("oracle_dp", "", ""),
        ("random", "", "request"),
        ("ucb1", "bandit", "request"),
        ("ucb1", "bandit", "never"),
        *(("ftl", f, r) for r in ("request", "never") for f in ("full", "delayed")),
        *(("contextual_thompson", f, r) for r in ("request", "never") for f in ("bandit", "full", "delayed")),
        ("memspec", "", "request"),
    ]


def test_differences_in_the_table_can_be_recomputed_from_its_columns(table):
    test, found = table
    best, exact = _best_fixed(test).block_efficiency, oracle_dp(test).block_efficiency
    assert found["fixed"].to_numpy() == pytest.approx((found["block_efficiency"] - best).to_numpy())
    assert found["dp"].to_numpy() == pytest.approx((found["block_efficiency"] - exact).to_numpy())
    assert found.filter(like="share:").sum(axis=1).to_numpy() == pytest.approx(np.ones(len(found)))
    inside = (found["fixed_low"] <= found["fixed"]) & (found["fixed"] <= found["fixed_high"])
    assert inside.all() and found["fixed_p"].between(0, 1).all()


def test_context_by_workload_pays_where_rankings_flip_between_workloads(table):
    found = table[1].set_index(["policy", "feedback", "reset"])["fixed_low"]
    assert found["best_fixed_workload", "", ""] > 0 and found["contextual_thompson", "full", "never"] > 0


def test_two_processes_give_the_same_table(table):
    log = simulated()
    train, test = split_requests(log, share=0.3, rng=np.random.default_rng(0))
    runs = [
        compare(
            train,
            test,
            rng=np.random.default_rng(1),
            names=["random", "ucb1", "ftl"],
            seeds=[0, 1],
            n_resamples=50,
            workers=w,
        )
        for w in (1, 2)
    ]
    pd.testing.assert_frame_equal(*runs)


def test_policies_that_the_log_does_not_allow_are_left_out():
    log = log_of([[[2, 1]] * 6] * 12, draft_len=3)
    found = compare(log, log, rng=np.random.default_rng(0), names=["match_gate", "lints", "ftl"], n_resamples=20)
    assert set(found["policy"]) == {"ftl"}


def test_prediction_is_falsified_where_rankings_do_not_flip():
    flat = simulated(2, logit=((1.5, -1.0, -1.6, 0.0),) * 4)
    found = workload_hypothesis(simulated(), flat, rng=np.random.default_rng(3), seeds=[0, 1], n_resamples=300)
    assert found.predicted.value > 0.05 and found.measured.value < 0.01 < found.predicted_headroom.low
    assert found.verdict.startswith("The prediction is falsified")


def test_verdicts_follow_the_intervals():
    def estimate(value, low=None, high=None):
        return Estimate(value, low, high, 0.95, 30, "BCa", 100, 1)

    assert (
        verdict(estimate(0.2), estimate(0.1, -0.1, 0.3))
        == "The prediction is confirmed: the log shows no measurable benefit."
    )
    assert verdict(estimate(0.5), estimate(0.1, 0.05, 0.3)) == "The prediction is falsified: the log shows a gain."
    assert verdict(estimate(0.5), estimate(-0.1, -0.2, -0.05)) == "The prediction is falsified: the log shows a loss."
    assert "too small" in verdict(estimate(0.5), estimate(0.1))


def test_the_best_fixed_arm_has_no_gain_over_itself():
    log = simulated(requests_per_workload=5)
    found = gain_over_best_fixed(log, _best_fixed(log), rng=np.random.default_rng(0), n_resamples=100)
    assert found.value == 0 and found.high <= 0
