"""How good the drafters are and how they became so: acceptance at every position, learning curves, variants of the
training recipe.

Reads a position log and the `training.json` files beside the weights. Not handled here: training itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specsel.logs import LogError, PositionLog, drafter_sha256, readable
from specsel.study.oldstats import Estimate, bootstrap_many, bootstrap_requests, pooled_ratio, ratio, request_sums

HELD_OUT = {"shard": "the last shard's", "answer": "every 64th"}
"""Held-out answers by the split that a recipe names; recipes from before there was a choice hold out every 64th."""

LENGTH = ("steps", "eval_every")
"""Settings that say how long a training is, not how: trainings are compared at the same number of tokens seen."""


def acceptance(log: PositionLog, *, rng: np.random.Generator, n_resamples: int = 2_000) -> pd.DataFrame:
    """Share of all positions at which at least k drafted tokens are accepted, k = 1..L, per workload and over all of
    them ("all"): workload, arm, k, share, low, high, requests.

    Positions where an arm was not asked count as accepting nothing.
    """
    steps = np.arange(1, log.draft_len + 1)
    reached = (log.accepted[:, :, None] >= steps).reshape(log.n_positions, -1)
    sums = request_sums(np.column_stack([reached, np.ones(log.n_positions)]), log.request_of, log.n_requests)
    keys = [(arm, int(k)) for arm in log.arms for k in steps]
    rows = []
    for name in ("all", *log.workloads):
        mine = np.full(log.n_requests, True) if name == "all" else log.workload == log.workloads.index(name)
        statistics = {key: lambda s, i=i: ratio(s[..., i], s[..., -1]) for i, key in enumerate(keys)}
        found = bootstrap_many(statistics, sums[mine], strata=log.workload[mine], rng=rng, n_resamples=n_resamples)
        rows += [
            {"workload": name, "arm": arm, "k": k, "share": e.value, "low": e.low, "high": e.high, "requests": e.n}
            for (arm, k), e in found.items()
        ]
    return pd.DataFrame(rows)


def learning_curves(
    folders: Iterable[str | Path], *, rng: np.random.Generator, n_resamples: int = 2_000
) -> pd.DataFrame:
    """Learning curves of drafter folders on held-out answers: arm, step, tokens, loss, first_token, block_efficiency,
    low, high, answers (these are resampled)."""
    rows = []
    for folder in folders:
        log = training_log(folder)
        for point in log["curve"]:
            sums = np.column_stack([point["answers"]["emitted"], point["answers"]["blocks"]]).astype(float)
            found = bootstrap_requests(pooled_ratio, sums, strata=None, rng=rng, n_resamples=n_resamples)
            shown = {name: point[name] for name in ("step", "tokens", "loss", "first_token")}
            interval = {"block_efficiency": found.value, "low": found.low, "high": found.high, "answers": found.n}
            rows.append({"arm": log["kind"]} | shown | interval)
    return pd.DataFrame(rows)


def still_rising(folders: Iterable[str | Path], *, rng: np.random.Generator, n_resamples: int = 2_000) -> str:
    """One sentence per drafter: how far its curve rose, and whether its last third still added anything (paired over
    answers)."""
    words = []
    for folder in folders:
        log = training_log(folder)
        curve = log["curve"]
        last, before = (
            curve[-1],
            next(p for p in reversed(curve) if 3 * p["tokens"] <= 2 * curve[-1]["tokens"] or p is curve[0]),
        )
        change = _compare(before, last, rng=rng, n_resamples=n_resamples)
        start, end = (point["block_efficiency"] for point in (curve[0], last))
        rise = f"{log['kind']} rises from {start:.2f} to {end:.2f} tokens per block"
        words.append(f"{rise}, and the last third of its training {_moved(change)}.")
    return " ".join(words)


def repetition(folder: str | Path, again: str | Path, *, rng: np.random.Generator, n_resamples: int = 2_000) -> str:
    """One sentence: does the training of the folder ``again`` end where that of ``folder`` ended? It does when its last
    point lies in the interval of the other's; settings in which the two differ are named."""
    told, repeated = training_log(folder), training_log(again)
    n, of = len(repeated["curve"]), len(told["curve"])
    if n != of:
        return f"The repetition of {told['kind']}'s training has {n} of {of} points."
    end = learning_curves([folder], rng=rng, n_resamples=n_resamples).astype({"low": float, "high": float}).iloc[-1]
    value, files = repeated["curve"][-1]["block_efficiency"], {entry["sha256"] for entry in told["data"]}
    same = sum(entry["sha256"] in files for entry in repeated["data"])
    other = _differing(repeated["recipe"], told["recipe"])
    return (
        f"The repetition of {told['kind']}'s training{other and f', with {other},'} ends at {value:.3f} tokens per "
        f"block, {'inside' if end.low <= value <= end.high else 'outside'} the interval of the training itself "
        f"({end.block_efficiency:.3f} [{end.low:.3f}, {end.high:.3f}]); {same} of its {len(repeated['data'])} files of "
        "answers are the same bytes."
    )


def repetitions(folders: Iterable[str | Path], *, rng: np.random.Generator, n_resamples: int = 2_000) -> str:
    """A sentence per drafter folder on the repetition of its training that its folder "repeated" tells, if one does."""
    return " ".join(
        repetition(folder, again, rng=rng, n_resamples=n_resamples)
        if (again := Path(folder) / "repeated").is_dir()
        else f"No repetition of {training_log(folder)['kind']}'s training is recorded."
        for folder in folders
    )


def _moved(change: Estimate) -> str:
    if change.low is None or change.high is None:
        return "is one point, too few to say more"
    shown = f"{change.value:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"
    if change.low > 0:
        return f"still adds ({shown})"
    return f"takes away ({shown})" if change.high < 0 else f"adds nothing measurable ({shown})"


def variants(path: str | Path, *, rng: np.random.Generator, n_resamples: int = 2_000) -> pd.DataFrame:
    """Pairs of short trainings that differ in one setting: arm, variant, tokens, difference, low, high, answers.

    The file lists for each pair the arm, and recipe and last point of the curve of what was "tried" and of what it
    stands "instead_of"; ``variant`` names the settings that differ. ``difference`` is the block efficiency of what was
    tried less that of the other, on the same held-out answers, with the interval of the paired bootstrap over answers.
    """
    rows = []
    with readable(path, "write pairs of trainings, each with recipe and point"):
        for pair in json.loads(Path(path).read_text(encoding="utf-8")):
            tried, other = pair["tried"], pair["instead_of"]
            found = _compare(other["point"], tried["point"], rng=rng, n_resamples=n_resamples)
            name = _differing(tried["recipe"], other["recipe"], ignore=LENGTH)
            shown = {"arm": pair["arm"], "variant": name, "tokens": tried["point"]["tokens"], "difference": found.value}
            rows.append(shown | {"low": found.low, "high": found.high, "answers": found.n})
    return pd.DataFrame(rows)


def _differing(recipe: dict[str, Any], other: dict[str, Any], *, ignore: tuple[str, ...] = ()) -> str:
    """Settings that both recipes name and that differ; older recipes name fewer."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_setting(value)} instead of {_setting(other[name])}"
        for name, value in recipe.items()
        if value != other.get(name, value) and name not in ignore
    )


def _setting(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def what_helped(table: pd.DataFrame) -> str:
    """One sentence on the table of ``variants``: what was worse than what it stands instead of, what better."""
    named = table["arm"] + " with " + table["variant"]
    groups = {
        "better": named[table["low"] > 0],
        "worse": named[table["high"] < 0],
        "no difference that could be told": named[(table["low"] <= 0) & (table["high"] >= 0)],
    }
    parts = [f"{words}: {', '.join(found)}" for words, found in groups.items() if len(found)]
    words = "; ".join(parts) or "nothing else was tried"
    return f"{words[0].upper()}{words[1:]}."


def _compare(base: dict[str, Any], point: dict[str, Any], *, rng: np.random.Generator, n_resamples: int) -> Estimate:
    """Block efficiency of a curve point less that of another on the same answers."""
    emitted, blocks = (base["answers"][name] for name in ("emitted", "blocks"))
    if emitted != point["answers"]["emitted"]:
        raise LogError("two trainings were judged on different held-out answers; train both on the same data.")
    sums = np.column_stack([emitted, blocks, point["answers"]["blocks"]]).astype(float)
    return bootstrap_requests(_difference, sums, strata=None, rng=rng, n_resamples=n_resamples)


def _difference(sums: np.ndarray) -> np.ndarray:
    return ratio(sums[..., 0], sums[..., 2]) - ratio(sums[..., 0], sums[..., 1])


def training_facts(folders: Iterable[str | Path]) -> pd.DataFrame:
    """What each training was made of, one column per drafter: recipe, data, vocabulary."""
    columns = {}
    for folder in folders:
        with readable(Path(folder) / "training.json", "train the drafter again"):
            log = training_log(folder)
            columns[log["kind"]] = _facts(log)
    return pd.DataFrame(columns).rename_axis("fact").reset_index()


def _facts(log: dict[str, Any]) -> dict[str, Any]:
    recipe, report = log["recipe"], log["data_report"]
    precision = report.get("precision", {})
    return {
        "generated tokens": f"{report['output_tokens']:,}",
        "of these kept, loops dropped": f"{report['kept_tokens']:,}",
        "answers": f"{report['requests']:,}",
        "looping answers": f"{report['looping']:,}",
        "precision of the generation": report.get("dtype", "not recorded"),
        "greedy choices that it changed": f"{precision['changed_share']:.2%}" if precision else "not measured",
        "draft vocabulary": f"{recipe['draft_vocab']:,}",
        "training tokens in it": f"{log['coverage']['generated']:.2%}",
        "held-out tokens in it": f"{log['coverage']['held_out']:.2%}",
        "all generated tokens in it, loops included": _share(log["coverage"].get("with_loops")),
        "held-out answers": HELD_OUT[recipe.get("split", "answer")],
        "goes on from": _origin(log.get("earlier")),
        "steps": f"{log['curve'][-1]['step']:,}, the best at {log['best_step']:,}",
        "learning rate": f"{recipe['rate']:g}",
        "answers a step": recipe["batch"],
        "optimiser": recipe["optimizer"],
        "loss": recipe["loss"],
        "weights of the slots": recipe["slots"] if log["kind"] == "dflash" else "",
        "precision of the products": log["dtype"],
        "start": recipe["start"],
    }


def _share(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.2%}"


def _origin(earlier: dict[str, Any] | None) -> str:
    if earlier is None:
        return "a new drafter"
    recipe, tokens = earlier["recipe"], earlier["data_report"]["output_tokens"]
    before = f"{_origin(earlier['earlier'])}, then " if "earlier" in earlier else ""
    return f"{before}{earlier['best_step']:,} steps on {tokens:,} generated tokens at {recipe['rate']:g}"


def same_weights(log: PositionLog, folders: Iterable[str | Path]) -> str:
    """One sentence: whether a log was collected with the weights of these folders, by the hashes of its manifest."""
    entries = log.manifest.get("drafters") or {}
    logged = {entry.get("sha256") for entry in entries.values() if isinstance(entry, dict)}
    missing = [Path(folder).name for folder in folders if drafter_sha256(Path(folder)) not in logged]
    if not missing:
        return "The log was collected with the weights whose training is described below."
    return (
        f"The log was collected with other weights than those of {' and '.join(missing)} whose training is described "
        "below: what it says of acceptance and what is said of training are two pools."
    )


def overlap(path: str | Path) -> pd.DataFrame:
    """Evaluation prompts that stand among the training prompts: workload, prompts, training_prompts, exact, near,
    largest_share; the file of `specsel train overlap`."""
    names = ["workload", "prompts", "training_prompts", "exact", "near", "largest_share"]
    with readable(path, "make it with `specsel train overlap`"):
        table = pd.DataFrame(json.loads(Path(path).read_text(encoding="utf-8"))["workloads"])[names]
        return table.astype(dict.fromkeys(names[1:-1], int) | {"largest_share": float})


def told(table: pd.DataFrame) -> str:
    """One sentence on the table of ``overlap``."""
    exact, near, worst = int(table["exact"].sum()), int(table["near"].sum()), table["largest_share"].max()
    asked = f"{table['prompts'].sum():,} evaluation prompts"
    if exact or near:
        return f"Of {asked} {exact:,} stand among the training prompts and {near:,} nearly do."
    return (
        f"None of the {asked} is a training prompt or nearly one; the closest shares {worst:.0%} of its runs of words "
        "with one."
    )


def training_log(folder: str | Path) -> dict[str, Any]:
    """The log that a training wrote beside its weights, its curve after that of the training that it went on from;
    raises LogError naming the file when there is none, or no curve in it."""
    path = Path(folder) / "training.json"
    with readable(path, "give the folder of a trained drafter"):
        log = json.loads(path.read_text(encoding="utf-8"))
        curve = _curve(log)
        for point in curve:
            numbers = [point[name] for name in ("step", "tokens", "loss", "first_token", "block_efficiency")]
            answers = np.array([point["answers"][name] for name in ("emitted", "blocks")], float)
            if not (np.isfinite(numbers).all() and np.isfinite(answers).all()):
                raise ValueError("a point of the curve holds nan or infinity")
        return log | {"kind": str(log["kind"]), "curve": curve}


def _curve(log: dict[str, Any]) -> list[dict[str, Any]]:
    return (_curve(log["earlier"]) if "earlier" in log else []) + log["curve"]
