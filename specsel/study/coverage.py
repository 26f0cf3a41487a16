"""Do the intervals cover? Simulated corpora with known truth, and how often each published kind of interval holds it.

The corpora are drawn and resampled side by side, as columns of one table, so that a thousand cost seconds. The result
is stored (`python -m specsel.study.coverage`), and the book reads it. Labelled SIM: nothing measured enters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from specsel.costs import break_even_rhos
from specsel.logs.log import BlockLog, PositionLog, SpecselError, block_view, readable, write_bytes_atomically
from specsel.paper.claims import Claim
from specsel.replay.replay import fixed
from specsel.selection.redraft import capture, oracle_gap, redraft_rate, redraft_sums, skill, token_gain
from specsel.study.oldstats import Statistic, bootstrap_many, bootstrap_rows, pooled_ratio, ratio
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
SEED, CORPORA, CHUNK = 20_261, 1_000, 25
SIZES = (40, 300)  # requests per workload: a small log, and a campaign
DOUBT = 0.6  # the fixed selector of the study redrafts below this mean confidence
REDRAFT, ARMS, TOKENS = slice(0, 5), slice(5, 7), 7  # columns of the sums of a request


def _headroom(sums: np.ndarray) -> np.ndarray:
    """Blocks of the best arm of all over those of the best arm of each workload, - 1; sums (..., W, 8)."""
    blocks = sums[..., ARMS]
    return ratio(blocks.sum(axis=-2).min(axis=-1), blocks.min(axis=-1).sum(axis=-1)) - 1


QUANTITIES: Mapping[str, Statistic] = {
    "block efficiency": lambda s: ratio(s[..., TOKENS], s[..., 5]),
    "block efficiency, one workload": lambda s: ratio(s[..., TOKENS], s[..., 5]),
    "gain of one arm over another": lambda s: ratio(s[..., 6], s[..., 5]) - 1,
    "workload headroom": _headroom,
    "oracle gap": lambda s: oracle_gap(s[..., REDRAFT]),
    "capture": lambda s: capture(s[..., REDRAFT]),
    "redraft rate": lambda s: redraft_rate(s[..., REDRAFT]),
    "skill": lambda s: skill(s[..., REDRAFT]),
    "skill, one workload": lambda s: skill(s[..., REDRAFT]),
    "token gain": lambda s: token_gain(s[..., REDRAFT]),
    "break-even rho": lambda s: break_even_rhos(token_gain(s[..., REDRAFT]), redraft_rate(s[..., REDRAFT])),
}
BY_BLOCKS: Mapping[str, Statistic] = {"block efficiency": pooled_ratio, "oracle gap": lambda s: pooled_ratio(s) - 1}


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
    large = sum(_sums(part, (seed, 0, i))[0].sum(axis=1) for i in range(50))  # (W, 8)
    redraft = large[:, REDRAFT] / large[:, TOKENS:] * tokens[:, None]
    sums = np.concatenate([redraft, blocks, tokens[:, None]], axis=1)
    found = {
        q: float(f(sums if f is _headroom else sums[0] if "one workload" in q else sums.sum(axis=0)))
        for q, f in QUANTITIES.items()
    }
    return found | {"oracle gap": true_oracle_gap(model, 0)}


def _sums(model: Model, seed: tuple[int, ...]) -> tuple[np.ndarray, PositionLog, BlockLog]:
    """(W, R / W, 8) sums of every request of a simulated log, the log, and the blocks of its first arm."""
    log = simulate_positions(model, rng=np.random.default_rng(seed))
    view = block_view(log, 0)
    redraft = redraft_sums(view, view.stats["conf_mean"][:, 0] < DOUBT)
    blocks = [fixed(log, k).blocks for k in range(2)]
    sums = np.column_stack([redraft, *blocks, np.diff(log.starts)])
    return sums.reshape(len(model.workloads), -1, sums.shape[1]), log, view


def _chunk(model: Model, size: int, seed: tuple[int, ...], n_resamples: int, level: float) -> dict[Any, list]:
    """Estimates of `size` corpora per (quantity, unit); the corpora are neighbours in one simulated log."""
    per, n_workloads = model.requests_per_workload, len(model.workloads)
    sums, log, view = _sums(replace(model, requests_per_workload=per * size), seed)
    totals = sums.reshape(n_workloads, size, per, -1).swapaxes(1, 2).reshape(n_workloads * per, size, -1)
    names = [(q, c) for q in QUANTITIES for c in range(size)]
    options = {"rng": np.random.default_rng((*seed, 1)), "n_resamples": n_resamples, "level": level}
    found = bootstrap_many(
        {name: QUANTITIES[name[0]] for name in names},
        totals,
        strata=np.repeat(np.arange(n_workloads), per),
        columns={name: name[1] for name in names},
        within={name: [0] for name in names if "one workload" in name[0]},
        split=[name for name in names if QUANTITIES[name[0]] is _headroom],
        **options,
    )
    estimates = {(q, "requests"): [found[q, c] for c in range(size)] for q in QUANTITIES}
    corpus_of = (np.arange(log.n_requests) % (per * size) // per)[view.request_of]
    own, best = view.emitted[:, 0].astype(float), view.emitted.max(axis=1).astype(float)
    rows = {"block efficiency": np.stack([own, np.ones_like(own)], axis=1), "oracle gap": np.stack([best, own], axis=1)}
    for quantity, statistic in BY_BLOCKS.items():
        estimates[quantity, "blocks"] = [
            bootstrap_rows(statistic, rows[quantity][at], strata=view.workload_of[at], **options)
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


# ---- two comparisons of intervals


def width_ratio(wide: Claim, narrow: Claim) -> float | None:
    """How many times wider one interval is than another; None when one of them has no width."""
    if None in (wide.low, narrow.low) or narrow.high == narrow.low:
        return None
    return (wide.high - wide.low) / (narrow.high - narrow.low)


def seed_shift(first: Claim, second: Claim) -> float | None:
    """Largest move of a limit between two draws of resamples, in widths of the interval; None without an interval."""
    if None in (first.low, second.low) or first.high == first.low:
        return None
    return max(abs(first.low - second.low), abs(first.high - second.high)) / (first.high - first.low)


if __name__ == "__main__":
    print(save(coverage_study(), *sys.argv[1:2]))
