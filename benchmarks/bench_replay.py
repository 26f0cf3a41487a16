"""How fast replay is: the curve from 10^5 to 10^7 positions, and the full policy table of one campaign.

Run it with `python benchmarks/bench_replay.py [--quick]`. Logs are simulated; times are wall-clock on this machine.
"""

import argparse
import os
import resource
import sys
import time

import numpy as np

from specsel.policies import UCB1, FollowTheLeader
from specsel.replay import fixed, oracle_dp, replay
from specsel.simulation import Model, simulate_positions
from specsel.tuning import compare, split_requests

PASSAGES = ((0.0, 0.0, 0.0, 0.0), (0.5, -0.5, 2.5, 0.3))


def simulated(positions, *, with_stats, length=180):
    """About so many positions, in requests of about this length, over four workloads."""
    model = Model(
        requests_per_workload=max(1, round(positions / length / 4)),
        output_len=(length - 60, length + 60),
        passage=PASSAGES,
    )
    return simulate_positions(model, rng=np.random.default_rng(7), with_stats=with_stats)


def seconds(function):
    """Best of three, after one call to warm up."""
    function()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def curve(sizes):
    """Positions per second against the size of the log: linear time means constant speed."""
    jobs = {
        "fixed arm": lambda log: fixed(log, 0),
        "exact oracle": oracle_dp,
        "UCB1": lambda log: replay(log, UCB1()),
        "FTL, delayed": lambda log: replay(log, FollowTheLeader(), feedback="delayed"),
    }
    print(
        f"{'positions':>12} {'requests':>9} " + " ".join(f"{name + ', M/s':>18}" for name in jobs) + f" {'peak MiB':>9}"
    )
    for size in sizes:
        log = simulated(size, with_stats=False)
        speeds = [log.n_positions / 1e6 / seconds(lambda job=job, log=log: job(log)) for job in jobs.values()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        print(
            f"{log.n_positions:12,d} {log.n_requests:9,d} " + " ".join(f"{s:18.2f}" for s in speeds) + f" {peak:9,.0f}",
            flush=True,
        )


def table(n_seeds, *, tuned):
    """The time for the full policy table, with every kind of feedback and intervals."""
    log = simulated(1100 * 180, with_stats=True)
    rng = np.random.default_rng(7)
    train, test = split_requests(log, share=0.3, rng=rng) if tuned else (log, log)
    start = time.perf_counter()
    found = compare(train, test, rng=rng, seeds=range(n_seeds), tuned=tuned, workers=2)
    spent = time.perf_counter() - start
    kinds = found.groupby("feedback").size().to_dict()
    print(
        f"policy table: {len(found)} rows ({kinds}), {log.n_requests} requests, {log.n_positions:,} positions, "
        f"{n_seeds} seeds, {'tuned on 30 %, shown on 70 %' if tuned else 'not tuned'}: {spent:.1f} s, 2 processes"
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10^6 positions, no tuning")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, numpy {np.__version__}, python {sys.version.split()[0]}")
    curve((10**5, 10**6) if options.quick else (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7))
    print(table(1, tuned=False)[["policy", "feedback", "reset", "block_efficiency"]].to_string())
    if not options.quick:
        table(20, tuned=True)
