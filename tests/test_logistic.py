"""The logistic selector: the model is the library's, the threshold follows its rule, the file holds everything."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from specsel.logs.log import STATS, SpecselError
from specsel.selection import logistic as lg
from specsel.selection.redraft import dominant_blocks, gains
from specsel.study.simulation import Model, simulate_positions

MODEL = Model(requests_per_workload=15, output_len=(40, 80), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def blocks():
    return dominant_blocks(simulate_positions(MODEL, rng=np.random.default_rng(3)))


def test_probabilities_are_those_of_scaler_and_logistic_regression(blocks):
    x, label = lg.feature_matrix(blocks.stats, blocks.arms.index(blocks.path_arm), STATS), gains(blocks) > 0
    library = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x, label)
    mine = lg.fit_selector(blocks).probability(blocks.stats)
    assert mine == pytest.approx(library.predict_proba(x)[:, 1], abs=1e-6)


def test_a_missing_value_counts_as_the_training_mean_plus_an_indicator(blocks):
    d = blocks.arms.index(blocks.path_arm)
    stats = {n: v.copy() for n, v in blocks.stats.items()}
    stats["conf_min"][::3, d] = np.nan
    selector = lg.fit_selector(replace(blocks, stats=stats))
    at = STATS.index("conf_min")
    assert selector.fill[at] == pytest.approx(np.nanmean(stats["conf_min"][:, d]))
    assert selector.center[len(STATS) + at] == pytest.approx(np.isnan(stats["conf_min"][:, d]).mean())
    assert np.isfinite(selector.probability(stats)).all()


def test_more_blocks_than_the_cap_are_thinned_evenly(blocks, monkeypatch):
    monkeypatch.setattr(lg, "MAX_ROWS", 200)
    thinned = lg.fit_model(blocks, np.ones(blocks.n_blocks, dtype=bool), STATS)
    step = -(-blocks.n_blocks // 200)
    train = np.arange(blocks.n_blocks) % step == 0
    monkeypatch.undo()
    assert thinned == lg.fit_model(blocks, train, STATS)


def test_a_saved_selector_decides_the_same_and_is_readable(blocks, tmp_path):
    selector = lg.fit_selector(blocks, trained_on={"log_sha256": "abc"})
    selector.save(tmp_path / "s.json")
    loaded = lg.Selector.load(tmp_path / "s.json", arms=blocks.arms, draft_len=9, features=STATS)
    assert loaded == selector and np.array_equal(loaded.redraft(blocks.stats), selector.redraft(blocks.stats))
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["trained_on"]["log_sha256"] == "abc" and written["criterion"] == lg.CRITERION


@pytest.mark.parametrize(
    "wrong, words",
    [({"arms": ("a", "b")}, "arms"), ({"draft_len": 5}, "draft_len 9"), ({"features": ("conf_min",)}, "features")],
)
def test_another_pool_or_feature_set_is_refused_by_name(blocks, tmp_path, wrong, words):
    lg.fit_selector(blocks).save(tmp_path / "s.json")
    with pytest.raises(SpecselError, match=words):
        lg.Selector.load(tmp_path / "s.json", **wrong)


def test_a_file_that_is_no_selector_is_refused(tmp_path):
    for text in ("{}", "[1]", "no json", '{"kind": "redraft selector", "schema": 2}'):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(SpecselError, match="specsel selector fit"):
            lg.Selector.load(tmp_path / "s.json")
