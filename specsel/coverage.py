"""Do the intervals cover? Simulated corpora with known truth, one interval each, and the share that holds the truth.

The same corpora are judged with requests and with blocks as the unit of resampling. Labelled SIM: nothing measured
enters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from specsel.claims import Claim
from specsel.log import BlockLog, block_view
from specsel.simulation import Model, simulate_positions, true_block_efficiency, true_oracle_gap
from specsel.statistics import Statistic, bootstrap_requests, bootstrap_rows, pooled_ratio, ratio, request_sums

# correlated blocks (a large request effect), rankings that flip inside a request, workloads of different difficulty
CORRELATED = Model(
    arms=("first", "second"),
    workloads=("u", "v", "w"),
    logit=((0.6, 0.2), (0.9, 0.7), (0.1, 0.4)),
    passage=((0.6, -0.6), (-0.6, 0.6)),
    request_sd=0.8,
    no_draft=(0.0, 0.1),
    silent=(),
    requests_per_workload=40,
    output_len=(20, 40),
)


def coverage_study(
    model: Model = CORRELATED,
    *,
    rng: np.random.Generator,
    corpora: int = 200,
    n_resamples: int = 1_000,
    level: float = 0.95,
) -> pd.DataFrame:
    """Share of intervals that hold the truth, per quantity and unit of resampling, with exact binomial limits.

    Columns: quantity, unit ("requests" or "blocks"), truth, held, corpora, coverage, low, high, width (mean width of
    the intervals).
    """
    truths = {
        "block efficiency": float(true_block_efficiency(model)[0]),
        "oracle gap": float(true_oracle_gap(model, 0)),
    }
    held = {(q, unit): 0 for q in truths for unit in ("requests", "blocks")}
    width = dict.fromkeys(held, 0.0)
    for _ in range(corpora):
        log = simulate_positions(model, rng=rng, with_stats=False)
        view = block_view(log, 0)
        for quantity, (rows, statistic) in _quantities(view).items():
            options = {"rng": rng, "n_resamples": n_resamples, "level": level}
            found = {
                "requests": bootstrap_requests(
                    statistic, request_sums(rows, view.request_of, log.n_requests), strata=log.workload, **options
                ),
                "blocks": bootstrap_rows(statistic, rows, strata=view.workload_of, **options),
            }
            for unit, estimate in found.items():
                held[quantity, unit] += estimate.low <= truths[quantity] <= estimate.high
                width[quantity, unit] += estimate.high - estimate.low
    limits = {key: binomtest(h, corpora).proportion_ci(level) for key, h in held.items()}
    return pd.DataFrame(
        [
            {
                "quantity": q,
                "unit": unit,
                "truth": truths[q],
                "held": h,
                "corpora": corpora,
                "coverage": h / corpora,
                "low": limits[q, unit].low,
                "high": limits[q, unit].high,
                "width": width[q, unit] / corpora,
            }
            for (q, unit), h in held.items()
        ]
    )


def _quantities(view: BlockLog) -> dict[str, tuple[np.ndarray, Statistic]]:
    """Per quantity: rows (B, 2) of numerator and denominator of each block, and the statistic of their sums."""
    own, best = view.emitted[:, 0].astype(float), view.emitted.max(axis=1).astype(float)
    gap: Callable = lambda s: ratio(s[..., 0], s[..., 1]) - 1  # noqa: E731
    return {
        "block efficiency": (np.stack([own, np.ones_like(own)], axis=1), pooled_ratio),
        "oracle gap": (np.stack([best, own], axis=1), gap),
    }


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
