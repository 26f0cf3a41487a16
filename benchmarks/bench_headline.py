"""How fast the intervals are: every headline figure of a campaign, and one interval against a Python loop over rows.

Run it with `python benchmarks/bench_headline.py [RUN] [--blocks N]`. Without a run the log is simulated with about N
blocks; times are wall-clock on this machine.
"""

import argparse
import time

import numpy as np

from specsel.headline import headline
from specsel.log import read_log
from specsel.redraft import dominant_blocks, oracle_gap, redraft_sums
from specsel.simulation import Model, simulate_positions
from specsel.statistics import bootstrap_requests


def simulated(blocks):
    """About so many blocks of the best arm (a little over three tokens each), in requests of 180 tokens."""
    model = Model(requests_per_workload=max(2, round(blocks * 3.3 / 180 / 4)), output_len=(120, 240),
                  passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)))
    return simulate_positions(model, rng=np.random.default_rng(7))


def timed(work):
    """Seconds of one call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def loop_over_rows(best, base, n_resamples, rng):
    """What a first draft does: draw blocks one resample at a time, in Python."""
    drawn = []
    for _ in range(n_resamples):
        rows = rng.integers(len(best), size=len(best))
        drawn.append(sum(best[rows].tolist()) / sum(base[rows].tolist()) - 1)
    return np.quantile(drawn, (0.025, 0.975))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("run", nargs="?")
    parser.add_argument("--blocks", type=int, default=20_000)
    options = parser.parse_args()
    log = read_log(options.run) if options.run else simulated(options.blocks)
    blocks = dominant_blocks(log)
    print(f"{log.run}: {log.n_positions:,} positions, {blocks.n_blocks:,} blocks, {log.n_requests:,} requests")
    seconds, claims = timed(lambda: headline(log, rng=np.random.default_rng(0)))
    print(f"headline, {len(claims)} claims, 10,000 resamples each: {seconds:.2f} s")
    sums = redraft_sums(blocks, np.zeros(blocks.n_blocks, dtype=bool))
    fast, _ = timed(lambda: bootstrap_requests(oracle_gap, sums, strata=blocks.workload, rng=np.random.default_rng(0)))
    counts, few = blocks.emitted, 20
    slow, _ = timed(lambda: loop_over_rows(counts.max(axis=1), counts[:, blocks.arms.index(blocks.path_arm)], few,
                                           np.random.default_rng(0)))
    slow *= 10_000 / few
    print(f"oracle gap, 10,000 resamples of requests: {fast:.3f} s; Python loop over block rows: {slow:.1f} s "
          f"(from {few} resamples); {slow / fast:.0f} times faster")


if __name__ == "__main__":
    main()
