"""The redraft selector: after the first arm has drafted, do its confidences say that another arm would emit more?

A logistic regression on statistics of that draft, judged on workloads that neither its weights nor its threshold have
seen. Figures are ratios of sums over requests (equations in the chapter on the selector). Not handled here: intervals,
routing before drafting (`specsel.selection.route`), the file of a selector (`specsel.selection.selector`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from specsel.logs import STATS, PositionLog, SpecselError
from specsel.selection.blocks import known
from specsel.stats import Estimate, Sums, holm, ratio

MAX_ROWS = 100_000  # blocks for one fit or one threshold, thinned evenly; the learning curve is flat long before
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
CRITERION = (
    "highest mean of capture - redraft rate (height above random redrafting) over the training workloads, "
    "each judged by a model that has not seen it; ties go to the highest threshold"
)


class NotFitted(SpecselError):
    """A selector that these blocks cannot give; the message starts with 'not fitted:' and says why."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What leave-one-workload-out decides at every block (B), and the models that decided."""

    probability: np.ndarray  # (B,) that another arm emits more; nan where not fitted
    redraft: np.ndarray  # (B,) bool: probability >= threshold; False where not fitted
    threshold: dict[str, float | None]  # workload -> threshold of the model that has not seen it; None: not fitted
    reason: dict[str, str]  # workload -> "", or why it has no model, in one sentence
    model: dict[str, Pipeline]  # workload -> the model, where there is one
    features: tuple[str, ...]
    dominant: str  # the arm that drafts first

    def fitted(self, workload: pd.Series) -> np.ndarray:
        """(n,) bool: do these workloads have a model?"""
        return np.isin(workload, list(self.model))

    def everywhere(self, log: PositionLog) -> np.ndarray:
        """(N,) bool: the decision at every position of the log, by the model that has not seen its workload."""
        arm, found = log.arms.index(self.dominant), np.zeros(log.n_positions, dtype=bool)
        x = pd.DataFrame({name: known(log, name, arm) for name in self.features})
        workload = np.array(log.workloads, dtype=object)[log.workload[log.request_of]]
        for name, model in self.model.items():
            at = workload == name
            if at.any():
                found[at] = model.predict_proba(x[at])[:, 1] >= self.threshold[name]
        return found


def leave_one_workload_out(
    blocks: pd.DataFrame,
    *,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = THRESHOLDS,
    threshold: float | None = None,
) -> Decided:
    """Each workload of ``blocks`` (see `blocks`) decided by a model of the others, threshold included.

    ``threshold`` None: chosen among ``thresholds`` inside the training workloads by `CRITERION`. Which arm drafts first
    was taken over all workloads, as in the original study: this choice sees the held-out one. A workload that cannot be
    fitted says why in ``reason``, and the others go on.
    """
    probability, redraft = np.full(len(blocks), np.nan), np.zeros(len(blocks), dtype=bool)
    names = blocks.workload.unique().tolist()
    chosen, reason, models = dict.fromkeys(names), dict.fromkeys(names, ""), {}
    for name in names:
        held = (blocks.workload == name).to_numpy()
        try:
            model, limit, _ = train(blocks[~held], features=features, thresholds=thresholds, threshold=threshold)
        except NotFitted as why:
            reason[name] = str(why)
            continue
        models[name], chosen[name] = model, limit
        probability[held] = model.predict_proba(blocks.loc[held, list(features)])[:, 1]
        redraft[held] = probability[held] >= limit
    return Decided(probability, redraft, chosen, reason, models, tuple(features), blocks.attrs["dominant"])


@threadpool_limits.wrap(limits=1)  # small fits: with a thread per core most of the time is waiting
def train(
    blocks: pd.DataFrame,
    *,
    features: Sequence[str] = STATS,
    thresholds: Sequence[float] = THRESHOLDS,
    threshold: float | None = None,
) -> tuple[Pipeline, float, list[tuple[float, float]]]:
    """Model and threshold from these blocks and nothing else, and the search: (threshold, criterion) of each.

    Raises NotFitted when the blocks hold one class, no value of any feature, or no fold that can judge a threshold.
    """
    blocks = blocks.iloc[:: max(1, -(-len(blocks) // MAX_ROWS))]
    model = fit(blocks, features)
    if threshold is not None:
        return model, threshold, []
    search = _search(blocks, features, thresholds)
    best = max(search, key=lambda found: found[::-1])
    return model, best[0], search


def fit(blocks: pd.DataFrame, features: Sequence[str] = STATS) -> Pipeline:
    """Does another arm emit more? Raises NotFitted."""
    x, label = blocks[list(features)], (blocks.best > blocks.own).to_numpy()
    if not len(blocks):
        raise NotFitted("not fitted: no other workload to train on")
    if label.all() or not label.any():
        share = "all" if label.any() else "never"
        raise NotFitted(f"not fitted: one class (the training blocks are {share} worth a redraft)")
    if x.isna().all(axis=None):
        dominant = blocks.attrs.get("dominant", "the first arm")
        raise NotFitted(f"not fitted: '{dominant}' has no value of {', '.join(features)} in the training blocks")
    return unfitted().fit(x, label)


def unfitted() -> Pipeline:
    """Missing values become means plus an indicator; then a logistic regression."""
    imputer = SimpleImputer(add_indicator=True, keep_empty_features=True)
    steps = {"impute": imputer, "scale": StandardScaler(), "logistic": LogisticRegression(max_iter=1000)}
    return Pipeline(list(steps.items()))


def coefficients(model: Pipeline) -> tuple[np.ndarray, ...]:
    """Means that replace missing values (F,), center, scale and weights of the features and of their missing indicators
    (2F,), intercept: what `chance` asks for. A feature without missing values has no indicator, hence weight 0.
    """
    imputer, scaler, logistic = (step for _, step in model.steps)
    n = len(imputer.statistics_)
    at = [*range(n), *(n + imputer.indicator_.features_)]
    center, scale, weights = np.zeros(2 * n), np.ones(2 * n), np.zeros(2 * n)
    center[at], scale[at], weights[at] = scaler.mean_, scaler.scale_, logistic.coef_[0]
    return imputer.statistics_, center, scale, weights, logistic.intercept_[0]


def chance(x: np.ndarray, fill, center, scale, weights, intercept) -> np.ndarray:
    """(n,) probability by a model with these `coefficients`, from features x (n, F); in few rows far quicker than the
    pipeline itself."""
    missing = np.isnan(x)
    design = np.concatenate([np.where(missing, fill, x), missing], axis=1)
    return expit((design - center) / scale @ np.asarray(weights) + intercept)


def _search(blocks: pd.DataFrame, features: Sequence[str], thresholds: Sequence[float]) -> list[tuple[float, float]]:
    """(threshold, mean over inner folds of capture - redraft rate): by workload, or by request into five folds where
    one workload, or none that can judge, is left.
    """
    for groups in (blocks.workload, blocks.number % 5):
        heights = []
        for rows, held in LeaveOneGroupOut().split(blocks, groups=groups) if groups.nunique() > 1 else ():
            gain = (blocks.best - blocks.own).to_numpy()[held]
            try:
                model = fit(blocks.iloc[rows], features) if gain.any() else None
            except NotFitted:
                model = None
            if model is not None:
                redraft = model.predict_proba(blocks.iloc[held][list(features)])[:, [1]] >= np.array(thresholds)
                heights.append(gain @ redraft / gain.sum() - redraft.sum(axis=0) / len(held))
        if heights:
            return list(zip(map(float, thresholds), np.mean(heights, axis=0).tolist(), strict=True))
    raise NotFitted("not fitted: no fold of the training blocks can judge a threshold (no gain, or one class)")


# ---- figures: functions of the sums of a table of requests


def requests(blocks: pd.DataFrame, redraft: np.ndarray) -> pd.DataFrame:
    """One row per request: own (tokens of the first arm), gain (what the best arm has more), taken (gain on redrafted
    blocks), redrafted, blocks; and own_accepted, gain_accepted, taken_accepted without the bonus.
    """
    rows = blocks[["workload", "request", "own", "own_accepted"]].assign(
        gain=blocks.best - blocks.own,
        gain_accepted=blocks.best_accepted - blocks.own_accepted,
        redrafted=np.asarray(redraft, dtype=int),
        blocks=1,
    )
    rows = rows.assign(taken=rows.gain * rows.redrafted, taken_accepted=rows.gain_accepted * rows.redrafted)
    return rows.groupby(["workload", "request"], sort=False).sum().reset_index()


def oracle_gap(s: Sums) -> np.ndarray:
    """G: gain available over the tokens of the first arm."""
    return ratio(s.gain, s.own)


def capture(s: Sums) -> np.ndarray:
    """c: gain on redrafted blocks over the gain on all blocks; nan where there is no gain."""
    return ratio(s.taken, s.gain)


def redraft_rate(s: Sums) -> np.ndarray:
    """r: redrafted blocks over blocks."""
    return ratio(s.redrafted, s.blocks)


def skill(s: Sums) -> np.ndarray:
    """c / r: redrafting at random has skill 1; nan where nothing is redrafted or nothing can be gained."""
    return ratio(s.taken * s.blocks, s.gain * s.redrafted)


def token_gain(s: Sums) -> np.ndarray:
    """c G: gain taken over the tokens of the first arm."""
    return ratio(s.taken, s.own)


QUANTITIES: Mapping[str, Callable[[Sums], np.ndarray]] = {
    f.__name__: f for f in (oracle_gap, capture, redraft_rate, skill, token_gain)
}


def skill_verdicts(skills: Mapping[str, Estimate]) -> dict[str, str]:
    """Workload -> "beats random", "no measurable benefit" or "worse than random", from the skill with null value 1.

    Its interval must exclude 1, and its p-value, adjusted for the number of workloads by Holm's method, must be at most
    1 - level. Where there is no skill the verdict says why.
    """
    tested = [name for name, skill in skills.items() if skill.defined]
    adjusted = dict(zip(tested, holm(np.array([skills[name].p for name in tested])), strict=True))
    found = {}
    for name, skill in skills.items():
        if not skill.defined:
            found[name] = skill.method
        elif skill.low <= 1 <= skill.high or adjusted[name] > 1 - skill.level:
            found[name] = "no measurable benefit"
        else:
            found[name] = "beats random" if skill.low > 1 else "worse than random"
    return found
