"""The redraft selector is judged on workloads that neither its model nor its threshold has seen; its file decides the
same.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from specsel.logs import STATS, SpecselError, read_log
from specsel.selection import redraft as rd
from specsel.selection.blocks import blocks
from specsel.selection.selector import Selector, fit_selector
from specsel.stats import Resampling, by
from specsel.study.simulation import Model, simulate_positions

CASES = Path(__file__).parent / "cases"
MODEL = Model(requests_per_workload=24, output_len=(40, 80), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)), signal=0.9)


@pytest.fixture(scope="module")
def log():
    return simulate_positions(MODEL, rng=np.random.default_rng(3))


@pytest.fixture(scope="module")
def table(log):
    return blocks(log)


@pytest.fixture(scope="module")
def decided(table):
    return rd.leave_one_workload_out(table)


def skills(table, n_resamples=500, groups=("workload",), **options):
    """Figures of the skill, and the decisions behind them."""
    decided = rd.leave_one_workload_out(table, **options)
    requests = rd.requests(table, decided.redraft)
    return by(requests, {"skill": rd.skill}, groups=groups, resampling=Resampling(n_resamples), null={"skill": 1})


def overwritten(table, workload):
    """The same blocks with other outcomes in one workload: another arm suddenly emits more everywhere."""
    return table.assign(best=table.best.where(table.workload != workload, table.own + 3))


def facts(train, table, workload):
    """What is learned without a workload: threshold and coefficients."""
    model, threshold, search = train(table, workload)
    return threshold, search, model[-1].coef_.tolist()


def train_without(table, workload):
    return rd.train(table[table.workload != workload])


def leaky(table, workload):
    """A planted leak: the threshold is chosen on the held-out workload itself."""
    model, _, _ = train_without(table, workload)
    held = table[table.workload == workload]
    redraft = model.predict_proba(held[list(STATS)])[:, [1]] >= np.array(rd.THRESHOLDS)
    gain = (held.best - held.own).to_numpy()
    return model, rd.THRESHOLDS[int((gain @ redraft / gain.sum() - redraft.mean(axis=0)).argmax())], []


@pytest.mark.parametrize("train, leaks", [(train_without, False), (leaky, True)])
def test_a_threshold_or_model_that_sees_the_held_out_workload_is_noticed(table, train, leaks):
    names = table.workload.unique()
    assert leaks == any(facts(train, table, w) != facts(train, overwritten(table, w), w) for w in names)


def test_a_signal_beats_random_on_every_workload(table):
    found = skills(table)
    assert (found.low > 1).all() and (found.p <= 0.05).all()


def covers_one(table, seed, n_resamples=400):
    """Outcomes drawn anew for every block from all blocks: confidence knows nothing about them."""
    order = np.random.default_rng(seed).permutation(len(table))
    outcomes = ["own", "best", "own_accepted", "best_accepted"]
    found = skills(table.assign(**{c: table[c].to_numpy()[order] for c in outcomes}), n_resamples, groups=["all"])
    return found.low.isna()[0] or found.low[0] <= 1 <= found.high[0]


def test_selector_finds_no_skill_in_shuffled_labels(table):
    assert sum(covers_one(table, seed) for seed in range(8)) >= 6


@pytest.mark.slow
def test_shuffled_labels_give_skill_one_in_93_of_100_seeds():
    """Nominal 95 %; the band was fixed before the first run.

    With 24 requests per workload and 400 resamples a first version held 1 in 91 seeds: intervals from few requests are
    a little too narrow. At 100 requests and 1,000 resamples, a third of a full campaign, the demand holds.
    """
    many = blocks(simulate_positions(replace(MODEL, requests_per_workload=100), rng=np.random.default_rng(3)))
    assert sum(covers_one(many, seed, n_resamples=1000) for seed in range(100)) >= 93


def test_threshold_is_the_highest_point_above_random_on_the_training_workloads(table, decided):
    for workload, threshold in decided.threshold.items():
        _, _, search = train_without(table, workload)
        best = max(score for _, score in search)
        assert threshold == max(t for t, score in search if score == best)


def test_a_stated_threshold_is_taken_and_the_model_stays(table, decided):
    found = rd.leave_one_workload_out(table, threshold=0.2)
    assert set(found.threshold.values()) == {0.2} and np.array_equal(found.redraft, found.probability >= 0.2)
    assert np.array_equal(found.probability, decided.probability)
    few = rd.leave_one_workload_out(table, thresholds=(0.1, 0.9), features=("conf_mean",))
    assert set(few.threshold.values()) <= {0.1, 0.9} and not np.array_equal(few.probability, decided.probability)


def test_decisions_at_every_position_agree_with_those_at_block_starts(log, table, decided):
    assert np.array_equal(decided.everywhere(log)[table.row], decided.redraft)
    early = rd.leave_one_workload_out(table, features=("match_length", "conf_mean"))
    assert np.array_equal(early.everywhere(log)[table.row], early.redraft)


@pytest.mark.parametrize(
    "case, arm, reasons",
    [
        # only 'copy' has gains: held out, its training label has one class; the others have nothing to capture
        ("single_class_fold", "dflash", {"copy": "one class", "chat": "", "code": "", "gsm8k": ""}),
        ("all_tied", None, dict.fromkeys(("copy", "chat"), "one class")),
        ("clustered", "dflash", {"chat": "no other workload"}),
    ],
)
def test_what_cannot_be_fitted_says_why_and_the_other_folds_go_on(case, arm, reasons):
    table = blocks(read_log(CASES / f"{case}.jsonl"), arm)
    found = rd.leave_one_workload_out(table)
    for workload, reason in found.reason.items():
        assert reasons.get(workload, "one class") in reason and (reason != "") == (found.threshold[workload] is None)
        assert not reason or not found.redraft[table.workload == workload].any()
    assert found.fitted(table.workload).tolist() == np.isfinite(found.probability).tolist()


@pytest.mark.filterwarnings("error")
def test_a_constant_feature_gives_no_warning_and_all_or_nothing():
    table = blocks(read_log(CASES / "constant_feature.jsonl"), "dflash")
    assert rd.leave_one_workload_out(table).redraft[table.workload == "copy"].mean() in (0, 1)


@pytest.mark.parametrize("workloads, arms", [(2, 2), (3, 3), (5, 6)])
def test_any_number_of_arms_and_workloads_works(workloads, arms):
    model = Model(
        arms=tuple(f"arm{k}" for k in range(arms)),
        workloads=tuple(f"w{i}" for i in range(workloads)),
        logit=(tuple(0.5 - 0.2 * k for k in range(arms)),) * workloads,
        passage=((0.0,) * arms, (-1.5,) + (1.0,) * (arms - 1)),
        no_draft=(0.0,) * arms,
        silent=(),
        requests_per_workload=10,
        output_len=(30, 50),
        draft_len=5,
    )
    found = rd.leave_one_workload_out(blocks(simulate_positions(model, rng=np.random.default_rng(0))))
    assert len(found.model) == workloads


def test_missing_values_are_filled_from_the_training_workloads_only(table):
    gone = table.assign(conf_min=table.conf_min.where(table.workload != "chat"))
    assert np.isfinite(rd.leave_one_workload_out(gone).probability).all()
    assert facts(train_without, gone, "chat") == facts(train_without, table, "chat")


def test_an_arm_without_statistics_is_not_fitted_for_a_stated_reason(table):
    found = rd.leave_one_workload_out(table.assign(**dict.fromkeys(STATS, np.nan)))
    assert all("has no value of conf_mean" in reason for reason in found.reason.values())


def test_more_blocks_than_the_cap_are_thinned_evenly(table, monkeypatch):
    monkeypatch.setattr(rd, "MAX_ROWS", 200)
    thinned = rd.train(table)
    monkeypatch.undo()
    assert thinned[1:] == rd.train(table.iloc[:: -(-len(table) // 200)])[1:]


# ---- the file


@pytest.fixture(scope="module")
def gappy(log):
    """A log with missing values, so that the indicators matter."""
    stats = {n: v.copy() for n, v in log.stats.items()}
    stats["conf_min"][::3] = np.nan
    return replace(log, stats=stats)


def test_probabilities_are_those_of_scaler_and_logistic_regression(log, table):
    x, label = table[list(STATS)].to_numpy(), table.best > table.own
    library = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(x, label)
    mine = fit_selector(table).probability(log.stats)[table.row]
    assert mine == pytest.approx(library.predict_proba(x)[:, 1], abs=1e-9)


def test_a_missing_value_counts_as_the_training_mean_plus_an_indicator(gappy):
    """Pipeline and file agree where values are missing, and where a feature never had one."""
    table = blocks(gappy).assign(conf_first=np.nan)
    selector, at = fit_selector(table), STATS.index("conf_min")
    assert selector.fill[at] == pytest.approx(table.conf_min.mean()) and selector.fill[STATS.index("conf_first")] == 0
    assert selector.center[len(STATS) + at] == pytest.approx(table.conf_min.isna().mean())
    stats = {n: v[table.row] for n, v in gappy.stats.items() if n != "conf_first"}
    model, threshold, _ = rd.train(table)
    assert selector.probability(stats) == pytest.approx(model.predict_proba(table[list(STATS)])[:, 1])
    assert selector.threshold == threshold


def test_a_saved_selector_decides_the_same_and_is_readable(gappy, tmp_path):
    table = blocks(gappy)
    selector = fit_selector(table, trained_on={"log_sha256": "abc"})
    selector.save(tmp_path / "s.json")
    loaded = Selector.load(tmp_path / "s.json", arms=gappy.arms, draft_len=9, features=STATS)
    assert loaded == selector and np.array_equal(loaded.redraft(gappy.stats), selector.redraft(gappy.stats))
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["trained_on"]["log_sha256"] == "abc" and written["criterion"] == rd.CRITERION
    assert written["trained_on"]["blocks"] == len(table) and written["trained_on"]["requests"] == gappy.n_requests


@pytest.mark.parametrize(
    "wrong, words",
    [({"arms": ("a", "b")}, "arms"), ({"draft_len": 5}, "draft_len 9"), ({"features": ("conf_min",)}, "features")],
)
def test_another_pool_or_feature_set_is_refused_by_name(table, tmp_path, wrong, words):
    fit_selector(table).save(tmp_path / "s.json")
    with pytest.raises(SpecselError, match=words):
        Selector.load(tmp_path / "s.json", **wrong)


def test_a_file_that_is_no_selector_is_refused(tmp_path):
    for text in ("{}", "[1]", "no json", '{"kind": "redraft selector", "schema": 2}'):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(SpecselError, match="specsel selector fit"):
            Selector.load(tmp_path / "s.json")
