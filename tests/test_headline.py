"""Every figure of the study as a claim: right values on small logs, intervals wherever there can be one, reasons
elsewhere.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from specsel.costs import break_even_rho, read_costs, relative_speed
from specsel.logs import read_log
from specsel.replay import best_arms, fixed, follow, oracle_block, oracle_dp, oracle_plan
from specsel.selection import redraft
from specsel.selection.blocks import blocks
from specsel.selection.route import redrafting
from specsel.stats import Resampling
from specsel.study.headline import headline, to_json
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
CONTRACT = (
    "workload_headroom",
    "oracle_gap",
    "oracle_dp_headroom",
    "capture",
    "redraft_rate",
    "token_gain",
    "break_even_rho",
)
MODEL = Model(requests_per_workload=12, output_len=(40, 60), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


def claims_of(log, n_resamples=400, **options):
    return {c.name: c for c in headline(log, resampling=Resampling(n_resamples, seed=1), **options)}


@pytest.fixture(scope="module")
def log():
    return simulate_positions(MODEL, rng=np.random.default_rng(3))


@pytest.fixture(scope="module")
def found(log):
    return claims_of(log)


def test_the_golden_log_gives_the_expected_figures():
    """expected.json: 11 blocks best fixed, 10 per request, 9 greedy, 7 dynamic programming; gap 0.6 less the bonus."""
    found = claims_of(read_log(CASES / "golden_small.jsonl"))
    value = {name: claim.value for name, claim in found.items()}
    assert value["dominant"] == "dflash" and value["oracle_gap_accepted"] == pytest.approx(0.6)
    assert value["oracle_request_headroom"] == pytest.approx(0.1) and value["oracle_block_headroom"] == pytest.approx(
        11 / 9 - 1
    )
    assert value["oracle_dp_headroom"] == pytest.approx(11 / 7 - 1) and value[
        "block_efficiency:eagle"
    ] == pytest.approx(1.75)
    assert value["mean_accepted:code:dflash"] == pytest.approx(5 / 7) and value["workload_headroom"] == pytest.approx(
        0.1
    )


def test_the_names_of_the_contract_are_there_for_every_log(log, found):
    logs = [read_log(CASES / f"{name}.jsonl") for name in ("anchored_only", "all_tied", "single_class_fold")]
    for one, claims in [(log, found), *((one, claims_of(one)) for one in logs)]:
        wanted = [*CONTRACT, *(f"{what}:{w}" for what in ("skill", "threshold", "verdict") for w in one.workloads)]
        assert set(wanted) <= set(claims)


def test_every_headline_number_has_an_interval_around_it_and_every_other_a_reason(found):
    for claim in found.values():
        if claim.headline:
            assert claim.low - 1e-12 <= claim.value <= claim.high + 1e-12 or claim.method == "BCa", claim
            assert claim.n and claim.level == 0.95 and claim.method
        else:
            assert isinstance(claim.value, str) or claim.reason or claim.name == "oracle_gap_by_blocks", claim
    numbers = [
        c
        for c in found.values()
        if not isinstance(c.value, str) and not c.name.startswith(("threshold", "oracle_gap_by"))
    ]
    assert all(c.headline for c in numbers)


def test_headrooms_agree_with_the_replays(log, found):
    best = fixed(log, best_arms(log, "log")[0]).blocks.sum()
    for name, run in (
        ("oracle_dp_headroom", oracle_dp(log)),
        ("oracle_block_headroom", oracle_block(log)),
        ("oracle_request_headroom", follow(log, oracle_plan(log, "best_fixed_request"))),
        ("workload_headroom", follow(log, oracle_plan(log, "best_fixed_workload"))),
    ):
        assert found[name].value == pytest.approx(best / run.blocks.sum() - 1), name
    assert found["best_fixed_efficiency"].value == pytest.approx(log.n_positions / best)
    for k, arm in enumerate(log.arms):
        assert found[f"block_efficiency:{arm}"].value == pytest.approx(fixed(log, k).block_efficiency)


def test_selector_figures_are_those_of_held_out_decisions(log, found):
    """Sums over blocks by hand; and the redrafts as a policy, on each workload alone, over the dominant arm."""
    table = blocks(log)
    decided = redraft.leave_one_workload_out(table)
    gain, arm = (table.best - table.own).to_numpy(), log.arms.index(decided.dominant)
    run = follow(log, redrafting(log, decided))
    for scope, at in [("", table.own > 0), *((f":{w}", table.workload == w) for w in log.workloads)]:
        capture = gain[at & decided.redraft].sum() / gain[at].sum()
        rate = decided.redraft[at].mean()
        assert found[f"capture{scope}"].value == pytest.approx(capture)
        assert found[f"redraft_rate{scope}"].value == pytest.approx(rate)
        assert found[f"skill{scope}"].value == pytest.approx(capture / rate)
        assert found[f"token_gain{scope}"].value == pytest.approx(capture * gain[at].sum() / table.own[at].sum())
    for w, name in enumerate(log.workloads):
        mine = log.workload == w
        exact = fixed(log, arm).blocks[mine].sum() / run.blocks[mine].sum() - 1
        assert found[f"redraft_replay_gain:{name}"].value == pytest.approx(exact)
        assert found[f"threshold:{name}"].value == decided.threshold[name]


def test_a_threshold_that_is_given_is_used_everywhere(log):
    """At 0 every block is redrafted: capture, rate and skill are 1, and the token gain is the gap."""
    found = claims_of(log, threshold=0.0)
    assert found["threshold:code"].value == 0 and found["redraft_rate"].value == found["skill"].value == 1
    assert found["token_gain"].value == pytest.approx(found["oracle_gap"].value)


def test_break_even_figures_follow_from_gap_capture_and_rate(log, found):
    gap, c, r = (found[name].value for name in ("oracle_gap", "capture", "redraft_rate"))
    assert found["break_even_rho"].value == pytest.approx(break_even_rho(gap, c, r))
    assert found["best_of_n:0.1"].value == pytest.approx(relative_speed(gap, 1, 1, 0.1))
    table = blocks(log)
    probability, gain = redraft.leave_one_workload_out(table).probability, (table.best - table.own).to_numpy()
    thresholds = np.round(np.arange(0, 1.05, 0.05), 2)
    taken = [(gain[probability >= t].sum() / gain.sum(), (probability >= t).mean()) for t in thresholds]
    best = max(1.0, *(relative_speed(gap, c, r, 0.2) for c, r in taken))
    assert found["best_selector:0.2"].value == pytest.approx(best)
    assert found["margin:0.2"].value == pytest.approx(best / found["best_of_n:0.2"].value - 1)


def test_best_fixed_is_rechosen_in_every_resample():
    """Two workloads, two arms, each best on one by the same margin: the headroom of a resample is against its own best
    arm.
    """
    log = simulate_positions(
        Model(
            arms=("a", "b"),
            workloads=("x", "y"),
            logit=((1.0, 0.0), (0.0, 1.0)),
            passage=((0.0, 0.0),),
            no_draft=(0.0, 0.0),
            silent=(),
            requests_per_workload=10,
            output_len=(30, 40),
        ),
        rng=np.random.default_rng(0),
    )
    blocks = np.stack([fixed(log, k).blocks for k in range(2)], axis=1)
    rng, drawn = np.random.default_rng(2), []
    for _ in range(2000):
        rows = np.concatenate([rng.choice(np.flatnonzero(log.workload == w), 10) for w in range(2)])
        per = np.stack([blocks[rows[log.workload[rows] == w]].sum(axis=0) for w in range(2)])
        drawn.append(per.sum(axis=0).min() / per.min(axis=1).sum() - 1)
    claim = claims_of(log, n_resamples=2000)["workload_headroom"]
    assert claim.low == pytest.approx(np.quantile(drawn, 0.025), abs=0.03) and claim.high == pytest.approx(
        np.quantile(drawn, 0.975), abs=0.03
    )


def test_the_request_interval_is_wider_than_the_block_interval_on_clustered_blocks():
    """README of the cases, gap without the bonus of dflash: requests [0.00, 1.79], blocks about [0.48, 1.00]."""
    found = claims_of(read_log(CASES / "clustered.jsonl"), dominant="dflash", n_resamples=4000)
    assert found["oracle_gap_accepted"].value == pytest.approx(0.716667, abs=1e-6)
    assert (found["oracle_gap_accepted"].low, found["oracle_gap_accepted"].high) == pytest.approx(
        (0.0, 1.7917), abs=0.03
    )
    by_blocks, by_requests = found["oracle_gap_by_blocks"], found["oracle_gap"]
    assert by_blocks.value == pytest.approx(by_requests.value)
    assert by_blocks.high - by_blocks.low < 0.5 * (by_requests.high - by_requests.low)


def test_an_anchored_log_gives_gap_and_selector_and_refuses_replay_figures():
    found = claims_of(read_log(CASES / "anchored_only.jsonl"))
    assert found["oracle_gap_accepted"].value == pytest.approx(0.6)
    for name in ("workload_headroom", "oracle_dp_headroom"):
        assert found[name].value is None and "block-anchored" in found[name].reason
    assert not any(name.startswith("block_efficiency") for name in found)


@pytest.mark.filterwarnings("error")
def test_all_ties_are_degenerate_and_undefined_never_nan():
    found = claims_of(read_log(CASES / "all_tied.jsonl"))
    assert (found["oracle_gap"].value, found["oracle_gap"].low, found["oracle_gap"].high) == (0, 0, 0)
    assert (
        found["oracle_gap"].method.startswith("degenerate")
        and found["capture"].value is None
        and found["skill"].value is None
    )
    json.dumps(to_json(found.values()), allow_nan=False)


def test_the_json_is_the_contract_and_the_same_for_the_same_seed(log, found):
    made = to_json(found.values())
    keys = {"name", "value", "unit", "label", "low", "high", "level", "n", "method"}
    assert all(set(claim) == keys and claim["method"] for claim in made["claims"])
    assert {claim["label"] for claim in made["claims"]} == {"SIM"}
    assert json.dumps(made) == json.dumps(to_json(claims_of(log).values()))


def test_the_dominant_arm_can_be_stated(log):
    found = claims_of(log, dominant="dflash", n_resamples=50)
    assert found["dominant"].value == "dflash"
    assert found["mean_dominant"].value == pytest.approx(blocks(log, "dflash").own.mean())


def test_costs_add_measured_rho_and_modelled_speeds(log):
    """Every draft 0.01 s, every verification 0.1 s: rho is 0.1, and speed is the ratio of blocks where one arm runs."""
    samples = [{"what": "t_draft", "arm": arm, "context": 50, "seconds": 0.01} for arm in log.arms]
    costs = read_costs(
        {"samples": [*samples, *({"what": "t_verify", "rows": r, "context": 50, "seconds": 0.1} for r in (1, 40))]}
    )
    found = claims_of(log, costs=costs, n_resamples=200)
    assert found["rho:eagle"].value == pytest.approx(0.1) and found["alpha_union"].value == pytest.approx(0.0)
    base = fixed(log, log.arms.index(found["dominant"].value)).blocks.sum()
    assert found["speed:always dflash"].value == pytest.approx(base / fixed(log, 0).blocks.sum())
    assert found["redraft_speed"].value == found["speed:redraft"].value and found["redraft_speed:code"].headline
    assert found["speed:plain decoding"].value == pytest.approx(0.11 * base / (0.1 * log.n_positions))
    assert (
        found[f"speed:always {found['dominant'].value}"].value == 1
        and found["speed:redraft"].low < found["speed:redraft"].high
    )
