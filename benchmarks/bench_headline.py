"""How fast the intervals are: every headline figure of a campaign, and one interval against a Python loop over rows.

Run it with `python benchmarks/bench_headline.py [RUN] [--requests N] [--blocks N]`. Without a run the log is simulated:
`--requests` of about 167 positions (default: a campaign of 1,138), or as many as give about `--blocks` blocks. The
headline uses all cores and is timed by the clock; its processor seconds are printed too, because other work on the
machine does not count in them. The two ways of resampling are compared in processor seconds.
"""

import argparse
import os
import time

import numpy as np

from specsel.logs import read_log
from specsel.selection import redraft
from specsel.selection.blocks import blocks as blocks_of
from specsel.stats import Resampling, by
from specsel.study.headline import headline
from specsel.study.simulation import Model, simulate_positions


def simulated(requests):
    """A log of so many requests over four workloads, 1,138 of them about 190,000 positions."""
    model = Model(
        requests_per_workload=max(2, round(requests / 4)),
        output_len=(110, 224),
        passage=((0.8, 0, 0, 0), (-2.5, 1, 1, -2.5)),
    )
    return simulate_positions(model, rng=np.random.default_rng(7))


def timed(work):
    """Processor seconds of one call, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


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
    parser.add_argument("--requests", type=int, default=1_138)
    parser.add_argument("--blocks", type=int, help="instead of --requests; a campaign has about 58,000")
    options = parser.parse_args()
    requests = options.requests if options.blocks is None else round(options.blocks / 51)
    log = read_log(options.run) if options.run else simulated(requests)
    blocks = blocks_of(log)
    size = f"{log.n_positions:,} positions, {len(blocks):,} blocks, {log.n_requests:,} requests"
    print(f"{log.run}: {size}", flush=True)
    start = time.perf_counter()
    seconds, claims = timed(lambda: headline(log))
    print(
        f"headline, {len(claims)} claims, 10,000 resamples each: {time.perf_counter() - start:.2f} s, "
        f"{seconds:.2f} processor seconds, {os.cpu_count()} cores",
        flush=True,
    )
    requests, few = redraft.requests(blocks, np.zeros(len(blocks))), 20
    gap = {"oracle_gap": redraft.oracle_gap}
    fast, _ = timed(lambda: by(requests, gap, groups=["all"], resampling=Resampling(seed=0)))
    best, own = blocks.best.to_numpy(), blocks.own.to_numpy()
    slow, _ = timed(lambda: loop_over_rows(best, own, few, np.random.default_rng(0)))
    slow *= 10_000 / few
    print(
        f"oracle gap, 10,000 resamples of requests: {fast:.3f} s; Python loop over block rows: {slow:.1f} s "
        f"(from {few} resamples); {slow / fast:.0f} times faster"
    )


if __name__ == "__main__":
    main()
