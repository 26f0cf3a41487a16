"""The tables that explain the selector agree with second routes and say when they are undefined."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from specsel.logs import STATS, block_view, read_log
from specsel.study import diagnostics as dg
from specsel.study.oldredraft import dominant_blocks, gains
from specsel.study.oldselector import fit_selector, leave_one_workload_out
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
MODEL = Model(requests_per_workload=15, output_len=(40, 80), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def blocks():
    return dominant_blocks(simulate_positions(MODEL, rng=np.random.default_rng(3)))


def rng():
    return np.random.default_rng(0)


def planted(blocks, informative="conf_min"):
    """Noise in every feature of the dominant arm but one, which says whether another arm emits more."""
    d, draws = blocks.arms.index(blocks.path_arm), np.random.default_rng(1)
    stats = {name: values.copy() for name, values in blocks.stats.items()}
    for name in STATS:
        stats[name][:, d] = draws.random(blocks.n_blocks)
    stats[informative][:, d] = (gains(blocks) > 0) + draws.random(blocks.n_blocks)
    return replace(blocks, stats=stats)


def test_auc_of_one_class_is_undefined():
    assert np.isnan(dg.auc(np.arange(9.0), np.zeros(9, dtype=bool)))
    assert dg.auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True])) == 0.875


def test_one_newton_step_per_resample_gives_the_limits_of_refits(blocks):
    """60 requests are drawn within their workloads 300 times and the model is fitted anew on the scale of the first."""
    x, label = blocks.stats["conf_mean"][:, 0][:, None], gains(blocks) > 0
    one = replace(blocks, stats={"conf_mean": np.repeat(x, 4, axis=1)})
    found = dg.coefficients(one, rng=rng(), n_resamples=4000, features=("conf_mean",)).iloc[0]
    z, drawn, draws = (x - x.mean()) / x.std(), [], rng()
    for _ in range(300):
        kept = np.concatenate([draws.choice(np.flatnonzero(blocks.workload == w), 15) for w in range(4)])
        weight = np.bincount(kept, minlength=60)[blocks.request_of].astype(float)
        drawn.append(LogisticRegression(max_iter=1000).fit(z, label, sample_weight=weight).coef_[0, 0])
    width = found["high"] - found["low"]
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.15 * width)


def test_the_informative_feature_has_the_coefficient_and_the_importance(blocks):
    known = planted(blocks)
    found = dg.coefficients(known, rng=rng(), n_resamples=1000).set_index("feature")
    assert (
        found["low"]["conf_min"] > 0
        and (found["low"] <= found["coefficient"]).all()
        and (found["coefficient"] <= found["high"]).all()
    )
    assert found["coefficient"].tolist() == pytest.approx(list(fit_selector(known).weights[:4]))
    table = leave_one_workload_out(known, rng=rng(), n_resamples=200)
    drops = dg.importance(known, table, rng=rng(), n_repeats=5)
    assert (drops.groupby("workload")["drop"].idxmax().map(drops["feature"]) == "conf_min").all()
    assert drops[drops["feature"] == "conf_min"]["drop"].min() > 0.2


def test_a_calibrated_arm_lies_on_the_diagonal(blocks):
    """First tokens accepted with exactly the stated probability."""
    draws, n = np.random.default_rng(5), 40_000
    confidence = draws.random((n, 4))
    accepted = (draws.random((n, 4)) < confidence).astype(int)
    made = replace(
        blocks,
        accepted=accepted,
        proposed=np.full((n, 4), 9),
        stats={"conf_first": confidence},
        position=np.arange(n),
        remaining=np.full(n, 100),
        starts=np.linspace(0, n, len(blocks.requests) + 1).astype(int),
    )
    found = dg.reliability(made, rng=rng(), n_resamples=200)
    assert len(found) == 40 and (abs(found["acceptance"] - found["confidence"]) < 0.05).all()
    assert ((found["low"] <= found["confidence"] + 0.02) & (found["confidence"] - 0.02 <= found["high"])).mean() > 0.9


def test_reliability_leaves_out_what_has_no_draft_or_no_confidence(blocks):
    found = dg.reliability(blocks, rng=rng(), n_resamples=50)
    assert "ngram" not in set(found["arm"])  # the lookup arm of the simulation states no confidence
    counts = found.groupby("arm")["blocks"].sum()
    for arm in counts.index:
        k = blocks.arms.index(arm)
        assert counts[arm] == (np.isfinite(blocks.stats["conf_first"][:, k]) & (blocks.proposed[:, k] > 0)).sum()


def test_spread_shows_a_constant_feature_as_constant():
    found = dg.feature_spread(block_view(read_log(CASES / "constant_feature.jsonl"), 0)).set_index(
        ["workload", "feature"]
    )
    copy = found.loc[("copy", "conf_mean")]
    assert copy["p95"] == copy["p05"] and copy["auc"] == 0.5
    assert found.loc[("chat", "conf_mean"), "p95"] > found.loc[("chat", "conf_mean"), "p05"]


def test_spread_of_an_arm_without_statistics_is_all_missing(blocks):
    bare = replace(blocks, stats={name: np.full_like(values, np.nan) for name, values in blocks.stats.items()})
    found = dg.feature_spread(bare)
    assert (found["missing"] == 1).all() and found["p50"].isna().all() and found["auc"].isna().all()


def test_the_learning_curve_ends_at_the_selector_trained_on_everything(blocks):
    found = dg.learning_curve(blocks, rng=rng(), shares=(0.1, 1.0), n_repeats=2, n_resamples=100)
    whole = leave_one_workload_out(blocks, rng=rng(), n_resamples=100).pooled
    assert found["skill"].iloc[-1] == pytest.approx(whole["skill"].value)
    assert found["capture"].iloc[-1] == pytest.approx(whole["capture"].value)
    assert found["blocks"].is_monotonic_increasing and found["fitted"].iloc[-1] == 1


def test_transfer_has_every_pair_and_a_reason_for_every_hole(blocks):
    found = dg.transfer(blocks, rng=rng(), n_resamples=100)
    assert len(found) == 16 and (found["reason"] == "").all() and found["skill"].notna().all()
    single = dg.transfer(block_view(read_log(CASES / "single_class_fold.jsonl"), 0), rng=rng(), n_resamples=50)
    assert (single["skill"].notna() == (single["reason"] == "")).all() and (single["reason"] != "").any()


def test_tables_of_a_degenerate_log_are_empty_or_undefined_but_there():
    tied = dominant_blocks(read_log(CASES / "all_tied.jsonl"))
    table = leave_one_workload_out(tied, rng=rng(), n_resamples=20)
    assert dg.importance(tied, table, rng=rng()).empty
    curve = dg.learning_curve(tied, rng=rng(), shares=(1.0,), n_resamples=20)
    assert curve["fitted"].tolist() == [0.0] and curve["skill"].tolist() == [None]
