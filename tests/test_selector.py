"""The redraft selector is judged on workloads that neither its model nor its threshold has seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsel.logs.log import block_view, read_log
from specsel.selection import selector as sl
from specsel.selection.redraft import dominant_blocks, gains, redraft_sums
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
MODEL = Model(requests_per_workload=24, output_len=(40, 80), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def log():
    return simulate_positions(MODEL, rng=np.random.default_rng(3))


@pytest.fixture(scope="module")
def blocks(log):
    return dominant_blocks(log)


@pytest.fixture(scope="module")
def table(blocks):
    return lowo(blocks)


def lowo(blocks, **options):
    return sl.leave_one_workload_out(blocks, rng=np.random.default_rng(4), **{"n_resamples": 500} | options)


def overwritten(blocks, w):
    """The same blocks with other outcomes in workload w: every other arm suddenly emits the most."""
    accepted, emitted = blocks.accepted.copy(), blocks.emitted.copy()
    at = blocks.workload_of == w
    emitted[at] = emitted[at][:, ::-1] + 3
    accepted[at] = accepted[at][:, ::-1] + 3
    return replace(blocks, accepted=accepted, emitted=emitted)


def leaky(blocks, w):
    """A planted leak: the threshold is chosen on the held-out workload itself."""
    selector = sl.fit_selector(blocks, blocks.workload_of != w)
    held, gain = blocks.workload_of == w, gains(blocks)
    probability = selector.probability({n: v[held] for n, v in blocks.stats.items()})
    heights = [gain[held] @ (probability >= t) / gain[held].sum() - (probability >= t).mean() for t in sl.THRESHOLDS]
    return replace(selector, threshold=sl.THRESHOLDS[int(np.argmax(heights))])


def sees_the_held_out_workload(fit, blocks) -> bool:
    """Does overwriting the outcomes of the held-out workload move its selector?"""
    return any(fit(blocks, w) != fit(overwritten(blocks, w), w) for w in range(len(blocks.workloads)))


def test_threshold_and_model_ignore_the_held_out_workload(blocks):
    assert not sees_the_held_out_workload(lambda b, w: sl.fit_selector(b, b.workload_of != w), blocks)
    assert (
        lowo(blocks, n_resamples=10).rows[1].selector == lowo(overwritten(blocks, 1), n_resamples=10).rows[1].selector
    )


def test_a_planted_leak_is_detected(blocks):
    assert sees_the_held_out_workload(leaky, blocks)


def test_a_signal_beats_random_on_every_workload(table):
    assert [row.verdict for row in table.rows] == ["beats random"] * 4
    assert all(row.estimates["skill"].low > 1 and row.p_holm <= 0.05 for row in table.rows)


def shuffled(blocks, seed):
    """Outcomes drawn anew for every block from all blocks: confidence knows nothing about them."""
    order = np.random.default_rng(seed).permutation(blocks.n_blocks)
    return replace(blocks, accepted=blocks.accepted[order], emitted=blocks.emitted[order])


def covers_one(blocks, seed, n_resamples=400):
    found = lowo(shuffled(blocks, seed), n_resamples=n_resamples).pooled["skill"]
    return found.low is None or found.low <= 1 <= found.high


def test_selector_finds_no_skill_in_shuffled_labels(blocks):
    assert sum(covers_one(blocks, seed) for seed in range(8)) >= 6


@pytest.mark.slow
def test_shuffled_labels_give_skill_one_in_93_of_100_seeds():
    """Nominal 95 %; the band was fixed before the first run.

    With 24 requests per workload and 400 resamples a first version held 1 in 91 seeds: intervals from few requests are
    a little too narrow. At 100 requests and 1,000 resamples, a third of a full campaign, the demand holds.
    """
    blocks = dominant_blocks(
        simulate_positions(replace(MODEL, requests_per_workload=100), rng=np.random.default_rng(3))
    )
    assert sum(covers_one(blocks, seed, n_resamples=1000) for seed in range(100)) >= 93


def test_threshold_is_the_highest_point_above_random_on_the_training_workloads(table):
    for row in table.rows:
        best = max(score for _, score in row.selector.search)
        assert row.selector.threshold == max(t for t, score in row.selector.search if score == best)
        assert (
            row.workload not in row.selector.trained_on["workloads"] and len(row.selector.trained_on["workloads"]) == 3
        )


def test_the_pooled_sums_are_those_of_the_decisions(blocks, table):
    assert np.array_equal(table.sums, redraft_sums(blocks, table.redraft))
    assert table.pooled["redraft_rate"].value == pytest.approx(table.redraft.mean())
    assert table.fitted.all() and np.isfinite(table.probability).all()


def test_decisions_at_every_position_agree_with_those_at_block_starts(log, blocks, table):
    assert np.array_equal(table.redraft_at(log)[blocks.rows], table.redraft)


def test_one_class_in_training_is_reported_and_the_other_folds_go_on():
    """Only 'copy' has gains: held out, its training label has one class; the others have nothing to capture."""
    rows = {row.workload: row for row in lowo(block_view(read_log(CASES / "single_class_fold.jsonl"), 0)).rows}
    assert rows["copy"].verdict.startswith("not fitted: one class") and rows["copy"].estimates["skill"].value is None
    for name in ("chat", "code", "gsm8k"):
        assert rows[name].selector is not None and rows[name].estimates["capture"].value is None
        assert rows[name].estimates["skill"].value is None and rows[name].verdict == "undefined: no block has a gain"


@pytest.mark.filterwarnings("error")
def test_a_constant_feature_gives_no_warning_and_no_measurable_benefit():
    view = block_view(read_log(CASES / "constant_feature.jsonl"), 0)
    rows = {row.workload: row for row in lowo(view).rows}
    assert rows["copy"].verdict == "no measurable benefit"
    assert rows["copy"].estimates["redraft_rate"].value in (0.0, 1.0)
    assert rows["copy"].estimates["skill"].value in (None, 1.0)


def test_all_ties_and_one_workload_give_a_reason():
    tied = lowo(dominant_blocks(read_log(CASES / "all_tied.jsonl")))
    assert all("one class" in row.verdict for row in tied.rows) and tied.pooled["capture"].value is None
    alone = lowo(block_view(read_log(CASES / "clustered.jsonl"), 0))
    assert alone.rows[0].verdict == "not fitted: no other workload to train on"
    assert alone.rows[0].estimates["oracle_gap"].value is not None


@pytest.mark.parametrize("workloads, arms", [(2, 2), (3, 3), (5, 6)])
def test_any_number_of_arms_and_workloads_works(workloads, arms):
    names = tuple(f"arm{k}" for k in range(arms))
    odds = tuple(tuple(0.5 - 0.2 * k for k in range(arms)) for _ in range(workloads))
    model = Model(
        arms=names,
        workloads=tuple(f"w{i}" for i in range(workloads)),
        logit=odds,
        passage=((0.0,) * arms, (-1.5,) + (1.0,) * (arms - 1)),
        no_draft=(0.0,) * arms,
        silent=(),
        requests_per_workload=10,
        output_len=(30, 50),
        draft_len=5,
    )
    found = lowo(dominant_blocks(simulate_positions(model, rng=np.random.default_rng(0))))
    assert len(found.rows) == workloads and all(row.selector for row in found.rows)


def test_missing_values_are_filled_from_the_training_workloads_only(blocks):
    stats = {n: v.copy() for n, v in blocks.stats.items()}
    d, at = blocks.arms.index(blocks.path_arm), blocks.workload_of == 0
    stats["conf_min"][at, d] = np.nan
    gone = replace(blocks, stats=stats)
    assert np.isfinite(lowo(gone).probability).all()
    kept = sl.fit_selector(blocks, ~at)
    assert sl.fit_selector(gone, ~at) == kept


def test_an_arm_without_statistics_is_not_fitted_for_a_stated_reason(blocks):
    stats = {n: np.full_like(v, np.nan) for n, v in blocks.stats.items()}
    found = lowo(replace(blocks, stats=stats))
    assert all("has no value of conf_mean" in row.reason for row in found.rows)
    absent = lowo(replace(blocks, stats={"match_length": stats["conf_mean"]}))
    assert all("has no value of conf_mean" in row.reason for row in absent.rows)


def test_the_frontier_runs_from_everything_to_nothing_and_passes_the_operating_points(blocks, table):
    found = sl.frontier(blocks, table.probability, rng=np.random.default_rng(0), n_resamples=200)
    assert set(found["scope"]) == {"all", *blocks.workloads}
    for _, rows in found.groupby("scope", sort=False):
        assert rows["capture"].iloc[0] == rows["redraft_rate"].iloc[0] == 1 and rows["capture"].iloc[-1] == 0
        assert (rows["capture"].diff().dropna() <= 1e-12).all() and (rows["low"] <= rows["capture"] + 1e-9).all()
    row = table.rows[1]
    here = found[(found["scope"] == row.workload) & np.isclose(found["threshold"], row.selector.threshold)].iloc[0]
    assert here["capture"] == pytest.approx(row.estimates["capture"].value)
    assert here["redraft_rate"] == pytest.approx(row.estimates["redraft_rate"].value)


def test_operating_points_are_those_of_the_table(table):
    points = table.operating_points().set_index("scope")
    assert points.loc["all", "capture"] == table.pooled["capture"].value
    assert points.loc["code", "redraft_rate"] == table.rows[1].estimates["redraft_rate"].value


def test_a_frontier_without_any_gain_is_empty():
    view = dominant_blocks(read_log(CASES / "all_tied.jsonl"))
    assert sl.frontier(view, np.full(view.n_blocks, 0.5), rng=np.random.default_rng(0)).empty


def test_same_seed_same_table_another_seed_other_limits(blocks, table):
    assert lowo(blocks).pooled == table.pooled
    other = sl.leave_one_workload_out(blocks, rng=np.random.default_rng(9), n_resamples=500).pooled["skill"]
    assert other.value == table.pooled["skill"].value and other.low != table.pooled["skill"].low
