"""The chapter on the selector, executed on a log in which one feature says everything."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from specsel.logs import STATS, write_log
from specsel.paper.build import kernel_environment, run_notebook
from specsel.selection.blocks import blocks as blocks_of
from specsel.study.simulation import Model, simulate_positions

ROOT = Path(__file__).parent.parent
MODEL = Model(requests_per_workload=12, output_len=(30, 60), passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planted():
    """Noise in every feature of the first arm but the entropy, which says whether another arm emits more."""
    log, draws = simulate_positions(MODEL, rng=np.random.default_rng(3)), np.random.default_rng(1)
    k = log.arms.index(blocks_of(log).attrs["dominant"])
    stats = {name: values.copy() for name, values in log.stats.items()}
    for name in STATS:
        stats[name][:, k] = draws.random(log.n_positions) / 2 + (0.5 if name in ("conf_mean", "conf_first") else 0)
    stats["ent_mean"][:, k] += (log.emitted.max(axis=1) > log.emitted[:, k]) / 2
    return replace(log, stats=stats)


@pytest.fixture(scope="module")
def claims(planted, tmp_path_factory):
    work = tmp_path_factory.mktemp("planted")
    given = {"run": str(write_log(work / "log", planted)), "n_resamples": 1000}
    with kernel_environment(work):
        run_notebook(ROOT / "notebooks/04_selector.ipynb", work / "out.ipynb", given, ROOT)
    return {c["name"]: c for c in json.loads((work / "values/04_selector.json").read_text("utf-8"))}


def test_the_informative_feature_has_the_coefficient_and_the_importance(claims, planted):
    other = [name for name in STATS if name != "ent_mean"]
    assert claims["coefficient:ent_mean"]["low"] > 1
    assert all(abs(claims[f"coefficient:{name}"]["value"]) < 0.5 for name in other)
    for w in planted.workloads:
        assert claims[f"importance:{w}:ent_mean"]["low"] > 0.1
        assert all(abs(claims[f"importance:{w}:{name}"]["value"]) < 0.05 for name in other)


def test_a_selector_that_knows_everything_captures_nearly_all_and_transfers(claims, planted):
    """Skill is one over the share of blocks that are worth a redraft, wherever the selector was trained."""
    rate = claims["redraft_rate"]["value"]
    assert claims["capture"]["value"] > 0.97 and claims["skill"]["value"] == pytest.approx(1 / rate, rel=0.05)
    assert {claims[f"verdict:{w}"]["value"] for w in planted.workloads} == {"beats random"}
    assert all(claims[f"transfer:{a}:{b}"]["low"] > 1 for a in planted.workloads for b in planted.workloads)


def test_one_newton_step_per_resample_gives_the_limits_of_refits(claims, planted):
    """The requests are drawn within their workloads 200 times and the model is fitted anew on the first scale."""
    blocks = blocks_of(planted)
    x, label = blocks[list(STATS)].to_numpy(), (blocks.best > blocks.own).to_numpy()
    z, number = (x - x.mean(axis=0)) / x.std(axis=0), blocks.number.to_numpy()
    drawn, draws = [], np.random.default_rng(0)
    for _ in range(200):
        kept = [draws.choice(np.flatnonzero(planted.workload == w), 12) for w in range(len(planted.workloads))]
        weight = np.bincount(np.concatenate(kept), minlength=planted.n_requests)[number].astype(float)
        drawn.append(LogisticRegression(max_iter=1000).fit(z, label, sample_weight=weight).coef_[0])
    for name, column in zip(STATS, np.array(drawn).T, strict=True):
        found, (low, high) = claims[f"coefficient:{name}"], np.quantile(column, (0.025, 0.975))
        assert (found["low"], found["high"]) == pytest.approx((low, high), abs=0.25 * (high - low)), name
