"""Families of rules on logs written out by hand; a rule is chosen without the workload that it is judged on."""

from dataclasses import replace

import numpy as np
import pytest
from test_replay import log_of

from specsel.replay import Plan, fixed, follow
from specsel.study.rules import chosen_elsewhere, families


def lookup_log():
    """Two workloads of two requests: lookup emits 4 where the text repeats itself, the model 2 everywhere."""
    repeating, fresh = [[4, 2]] * 12, [[1, 2]] * 12
    counts, match = [repeating + fresh, fresh + repeating] * 2, [[6] * 12 + [0] * 12, [0] * 12 + [6] * 12] * 2
    return replace(log_of(counts, draft_len=4, match=match, workload=[0, 0, 1, 1]), arms=("ngram", "model"))


def test_families_hold_every_gate_list_and_union_of_a_pool():
    found = {family: [plan.name for plan in plans] for family, plans in families(lookup_log()).items()}
    assert found["fixed arm"] == ["fixed:ngram", "fixed:model"] and found["union of two"] == ["union:ngram+model"]
    assert found["gate"] == [f"gate:{m}:model" for m in (1, 2, 3, 4, 5, 6)]
    assert "priority:ngram@3>model" in found["priority list"] and "priority:model" in found["priority list"]
    assert "most confident" not in found and "union of all" not in found  # nobody states a confidence; two arms only
    cut = families(lookup_log(), lengths=(1,))
    assert {"model@1", "gate:3:model@1", "union:ngram@1+model@1"} <= {p.name for plans in cut.values() for p in plans}


def test_without_a_lookup_arm_there_are_no_gates():
    log = log_of([[[2, 1]] * 6] * 2, draft_len=3)
    assert set(families(log)) == {"fixed arm", "priority list", "union of two"}


def test_a_rule_is_chosen_on_the_other_workloads():
    """Arm a is best on the first workload and b on the second, so each is judged by the arm that is bad there."""
    good_a, good_b = [[3, 1]] * 12, [[1, 3]] * 12
    log = log_of([good_a, good_b], draft_len=3, workload=[0, 1])
    plan, names = chosen_elsewhere(log, families(log)["fixed arm"])
    assert names == {"w0": "fixed:b", "w1": "fixed:a"}
    assert follow(log, plan).blocks.tolist() == [fixed(log, 1).blocks[0], fixed(log, 0).blocks[1]]


def test_caps_of_a_chosen_rule_are_kept():
    log = lookup_log()
    short = families(log, lengths=(1,))["fixed arm"]
    only = [plan for plan in short if plan.name == "model@1"]
    plan, names = chosen_elsewhere(log, only)
    assert set(names.values()) == {"model@1"} and (follow(log, plan).blocks == fixed(log.cap(1), 1).blocks).all()
    whole, _ = chosen_elsewhere(log, [Plan.one("x", log, 1)])
    assert whole.longest is None and follow(log, whole).blocks.sum() == fixed(log, 1).blocks.sum()


def test_the_most_confident_draft_is_verified_alone():
    log = log_of([[[3, 1], [1, 2], [1, 1]]], draft_len=3)
    sure = np.array([[0.2, 0.6], [np.nan, 0.1], [0.9, np.nan]])
    log = replace(log, stats={**log.stats, "conf_mean": sure})
    (plan,) = families(log)["most confident"]
    assert plan.name == "most confident: a + b" and plan.arms.argmax(axis=1).tolist() == [1, 1, 0]
    assert plan.arms.sum(axis=1).tolist() == pytest.approx([1, 1, 1])
