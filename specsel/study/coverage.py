"""Do the intervals cover? Simulated corpora with known truth, and how often each published kind of interval holds it.

The corpora are drawn and resampled side by side, as columns of one table, so that a thousand cost seconds. The result
is stored (`python -m specsel.study.coverage`), and the book reads it. Labelled SIM: nothing measured enters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from specsel.costs import break_even_rho
from specsel.logs import PositionLog, SpecselError, readable, write_bytes_atomically
from specsel.replay.replay import fixed
from specsel.selection.redraft import capture, oracle_gap, redraft_rate, skill, token_gain
from specsel.stats import Estimate, Resampling, Sums, by, by_rows, ratio, request_sums
from specsel.study.simulation import Model, expected_over_blocks, simulate_positions, true_oracle_gap

# correlated blocks (a large request effect), rankings that flip inside a request and between workloads
CORRELATED = Model(
    arms=("first", "second"),
    workloads=("u", "v", "w"),
    logit=((0.6, 0.0), (0.9, 0.4), (-0.1, 0.8)),
    passage=((0.6, -0.6), (-0.6, 0.6)),
    request_sd=0.8,
    no_draft=(0.0, 0.1),
    silent=(),
    requests_per_workload=40,
    output_len=(20, 40),
)
FILE = "data/studies/coverage.json"
SEED, CORPORA, CHUNK = 20_261, 3_000, 25
SIZES = (40, 300)  # requests per workload: a small log, and a campaign
DOUBT = 0.6  # the fixed selector of the study redrafts below this mean confidence
COLUMNS = ("own", "gain", "taken", "redrafted", "blocks", "first", "second", "tokens")  # sums of a request, see `_sums`


def _headroom(s: Sums) -> np.ndarray:
    """Blocks of the best arm of all over those of the best arm of each workload, - 1; sums per workload."""
    best = np.minimum(s.first.sum(axis=-1), s.second.sum(axis=-1))
    return ratio(best, np.minimum(s.first, s.second).sum(axis=-1)) - 1


QUANTITIES: Mapping[str, Callable[[Sums], np.ndarray]] = {
    "block efficiency": lambda s: ratio(s.tokens, s.first),
    "block efficiency, one workload": lambda s: ratio(s.tokens, s.first),
    "gain of one arm over another": lambda s: ratio(s.second, s.first) - 1,
    "workload headroom": _headroom,
    "oracle gap": oracle_gap,
    "capture": capture,
    "redraft rate": redraft_rate,
    "skill": skill,
    "skill, one workload": skill,
    "token gain": token_gain,
    "break-even rho": lambda s: break_even_rho(token_gain(s), 1.0, redraft_rate(s)),
}
BY_BLOCKS = {"block efficiency": lambda s: ratio(s[:, 0], s[:, 1]), "oracle gap": lambda s: ratio(s[:, 2], s[:, 0])}


def coverage_study(
    model: Model = CORRELATED,
    *,
    sizes: Sequence[int] = SIZES,
    seed: int = SEED,
    corpora: int = CORPORA,
    n_resamples: int = 1_000,
    level: float = 0.95,
) -> dict[str, Any]:
    """One interval per quantity and corpus of the model, and how many hold the truth, per chunk of corpora.

    With requests as the unit of resampling for every quantity, with blocks for two, for corpora of several sizes
    (requests per workload). The result is what `save` stores: settings and rows of quantity, unit, requests, truth,
    held (one count per chunk), width (mean) and method (of the first interval).
    """
    truths, rows = truth(model, seed=seed), {}
    for size in sizes:
        sized = replace(model, requests_per_workload=size)
        for number in range(-(-corpora // CHUNK)):
            count = min(CHUNK, corpora - number * CHUNK)
            for (quantity, unit), found in _chunk(sized, count, (seed, size, number), n_resamples, level).items():
                fresh = {
                    "quantity": quantity,
                    "unit": unit,
                    "requests": size,
                    "truth": truths[quantity],
                    "held": [],
                    "width": 0.0,
                    "method": found[0].method,
                }
                row = rows.setdefault((quantity, unit, size), fresh)
                row["held"].append(int(sum(e.low <= row["truth"] <= e.high for e in found)))
                row["width"] += sum(e.high - e.low for e in found) / corpora
    return {
        "schema": 1,
        "label": "SIM",
        "seed": seed,
        "corpora": corpora,
        "n_resamples": n_resamples,
        "level": level,
        "model": json.loads(json.dumps(asdict(model))),
        "rows": list(rows.values()),
    }


def truth(model: Model, *, seed: int = SEED, requests: int = 100_000) -> dict[str, float]:
    """The value of every quantity in an infinitely long log: exact where the model gives it, else of a very large log.

    What a fixed selector does has no closed form: it is taken from `requests` requests per workload of their own seed;
    their error is a small part of that of a corpus.
    """
    blocks = np.stack([expected_over_blocks(model, k) for k in range(2)], axis=1)  # (W, 2) per request
    tokens = np.full(len(model.workloads), sum(model.output_len) / 2)
    part = replace(model, requests_per_workload=requests // 50)
    shape = len(model.workloads), part.requests_per_workload, len(COLUMNS)
    large = sum(_sums(_log(part, (seed, 0, i)))[0].reshape(shape).sum(axis=1) for i in range(50))  # (W, 8)
    redraft = large[:, :5] / large[:, -1:] * tokens[:, None]
    sums = np.column_stack([redraft, blocks, tokens])
    each, total = Sums(sums.T[None], COLUMNS), Sums(sums.sum(axis=0)[None], COLUMNS)
    one = Sums(sums[:1], COLUMNS)
    found = {
        q: f(each if f is _headroom else one if "one workload" in q else total).item() for q, f in QUANTITIES.items()
    }
    return found | {"oracle gap": true_oracle_gap(model, 0)}


def _log(model: Model, seed: tuple[int, ...]) -> PositionLog:
    return simulate_positions(model, rng=np.random.default_rng(seed))


def _sums(log: PositionLog) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(R, 8) sums of every request, a fixed selector asking after the first arm's drafts; then (B, 3) own tokens, 1 and
    gain of the blocks of the first arm, and (B,) their requests."""
    run = fixed(log, 0, keep_path=True)
    rows = run.path.rows
    own, best = log.emitted[rows, 0].astype(float), log.emitted[rows].max(axis=1)
    redraft, request_of = log.stats["conf_mean"][rows, 0] < DOUBT, log.request_of[rows]
    parts = np.stack([own, best - own, (best - own) * redraft, redraft, 0 * own + 1], axis=1)
    blocks = [run.blocks, fixed(log, 1).blocks]
    table = np.column_stack([request_sums(parts, request_of, log.n_requests), *blocks, np.diff(log.starts)])
    return table, parts[:, [0, 4, 1]], request_of


def _chunk(model: Model, size: int, seed: tuple[int, ...], n_resamples: int, level: float) -> dict[Any, list[Estimate]]:
    """Estimates of `size` corpora per (quantity, unit); the corpora are neighbours in one simulated log."""
    per, n_workloads = model.requests_per_workload, len(model.workloads)
    log = _log(replace(model, requests_per_workload=per * size), seed)
    sums, blocks, request_of = _sums(log)
    side_by_side = sums.reshape(n_workloads, size, per, -1).swapaxes(1, 2).reshape(n_workloads * per, -1)
    workload = np.repeat(np.arange(n_workloads), per)
    columns = zip([(n, c) for c in range(size) for n in COLUMNS], side_by_side.T, strict=True)
    table = pd.DataFrame({"workload": workload, "one": np.where(workload == 0, "one", None), **dict(columns)})
    how = Resampling(n_resamples, level, int(np.random.SeedSequence(seed).generate_state(1)[0]))
    estimates: dict[Any, list[Estimate]] = {}
    for group in ("all", "one"):
        chosen = [q for q in QUANTITIES if ("one workload" in q) == (group == "one")]
        asked = {(q, c): lambda s, f=QUANTITIES[q], c=c: f(s)[:, c] for q in chosen for c in range(size)}
        split = [key for key in asked if QUANTITIES[key[0]] is _headroom]
        figures = by(table, asked, resampling=how, groups=[group], split=split)
        estimates |= {(q, "requests"): figures.estimate[figures.quantity == q].tolist() for q in chosen}
    corpus_of = (np.arange(log.n_requests) % (per * size) // per)[request_of]
    workload_of = log.workload[request_of]
    for quantity, statistic in BY_BLOCKS.items():
        estimates[quantity, "blocks"] = [
            by_rows(statistic, blocks[at], workload=workload_of[at], resampling=how)
            for at in (corpus_of == c for c in range(size))
        ]
    return estimates


# ---- the stored result


def save(study: Mapping[str, Any], path: str | Path = FILE) -> Path:
    """Write a study with a hash of its content; the same study gives the same bytes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**study, "sha256": _digest(study)}, indent=1, allow_nan=False)
    write_bytes_atomically(path, text.encode() + b"\n")
    return Path(path)


def read_study(path: str | Path = FILE) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A stored study as a table with exact binomial limits of each coverage, and its settings.

    Columns: quantity, unit, requests, method, truth, width, held, corpora, coverage, low, high. Raises SpecselError
    when the file is not what `save` wrote.
    """
    with readable(path, "make the coverage study with `python -m specsel.study.coverage`", SpecselError):
        study = json.loads(Path(path).read_text("utf-8"))
        if study.pop("sha256") != _digest(study):
            raise ValueError("its hash does not match its content")
    table = pd.DataFrame(study.pop("rows"))
    table = table.assign(held=[sum(held) for held in table["held"]], corpora=study["corpora"])
    limits = [binomtest(h, study["corpora"]).proportion_ci(study["level"]) for h in table["held"]]
    return table.assign(
        coverage=table["held"] / table["corpora"], low=[x.low for x in limits], high=[x.high for x in limits]
    ), study


def _digest(study: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(study, sort_keys=True, allow_nan=False).encode()).hexdigest()


if __name__ == "__main__":
    print(save(coverage_study(), *sys.argv[1:2]))
