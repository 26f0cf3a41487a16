"""How fast replay is: the curve from 10^5 to 10^7 positions, and the full policy table of one campaign.

Run it with `python benchmarks/bench_replay.py [--quick]`. Logs are simulated. Seconds are processor seconds, so that
other work on the machine does not count; the table also shows its wall-clock time with two processes.
"""

import argparse
import os
import resource
import sys
import time
from dataclasses import replace

import numpy as np

from specsel.policies.plain import UCB1, FollowTheLeader
from specsel.replay import fixed, oracle_dp, per_request, replay
from specsel.stats import Resampling, by
from specsel.study.policies import policy_table, split_requests
from specsel.study.simulation import Model, simulate_positions

PASSAGES = ((0.0, 0.0, 0.0, 0.0), (0.5, -0.5, 2.5, 0.3))
REQUESTS, POSITIONS = 1_138, 190_000  # of a campaign


def simulated(requests, *, with_stats, length=180):
    """So many requests (a multiple of four) of about this length, over four workloads and four arms."""
    model = Model(requests_per_workload=max(1, requests // 4), output_len=(length - 60, length + 60), passage=PASSAGES)
    return simulate_positions(model, rng=np.random.default_rng(7), with_stats=with_stats)


def campaign():
    """A log of exactly the size of a campaign: two requests left out, outputs start later until positions fit."""
    log = simulated(REQUESTS + 2, with_stats=True).select(np.arange(1, REQUESTS + 1))
    lengths = np.diff(log.starts)
    cut = np.full(REQUESTS, (log.n_positions - POSITIONS) // REQUESTS)
    cut[: (log.n_positions - POSITIONS) % REQUESTS] += 1
    keep = log.position >= np.repeat(cut, lengths)
    rows = {name: getattr(log, name)[keep] for name in ("proposed", "accepted", "on_path", "remaining")}
    return replace(
        log,
        **rows,
        starts=np.concatenate([[0], np.cumsum(lengths - cut)]),
        position=(log.position - np.repeat(cut, lengths))[keep],
        context={n: v[keep] for n, v in log.context.items()},
        stats={n: v[keep] for n, v in log.stats.items()},
    )


def seconds(function):
    """Processor seconds: best of three, after one call to warm up."""
    function()
    times = []
    for _ in range(3):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def curve(sizes):
    """Positions per second against the size of the log: linear time means constant speed."""
    jobs = {
        "fixed arm": lambda log: fixed(log, 0),
        "exact oracle": oracle_dp,
        "UCB1": lambda log: replay(log, UCB1()),
        "FTL, delayed": lambda log: replay(log, FollowTheLeader(), feedback="delayed"),
    }
    columns = " ".join(f"{name + ', M/s':>18}" for name in jobs)
    print(f"{'positions':>12} {'requests':>9} {columns} {'peak MiB':>9}")
    for size in sizes:
        log = simulated(size // 180, with_stats=False)
        speeds = [log.n_positions / 1e6 / seconds(lambda job=job, log=log: job(log)) for job in jobs.values()]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        row = " ".join(f"{s:18.2f}" for s in speeds)
        print(f"{log.n_positions:12,d} {log.n_requests:9,d} {row} {peak:9,.0f}", flush=True)


def used():
    """Processor seconds of this process and of those that it has started and ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table(n_seeds, *, tuned):
    """The time for the full policy table, with every kind of feedback and intervals."""
    log, rng = campaign(), np.random.default_rng(7)
    train, test = split_requests(log, share=0.5, rng=rng) if tuned else (log, log)
    start, before = time.perf_counter(), used()
    found, runs = policy_table(train, test, seeds=range(n_seeds), tune=tuned, workers=2)
    efficiency = {name: lambda s, name=name: s.tokens / s["blocks", name] for name in runs}
    by(per_request(test, runs), efficiency, groups=["all"], resampling=Resampling(20_000))
    wall, spent = time.perf_counter() - start, used() - before
    kinds = ", ".join(f"{n} {name or 'without feedback'}" for name, n in found.groupby("feedback").size().items())
    print(
        f"policy table of {log.n_requests:,} requests, {log.n_positions:,} positions, {log.n_arms} arms: "
        f"{len(found)} rows ({kinds}), {n_seeds} seeds, "
        f"{'tuned on one half, shown on the other' if tuned else 'not tuned'}: {spent:.0f} processor seconds, "
        f"{spent / 2:.0f} s on two free cores; {wall:.0f} s of wall clock here",
        flush=True,
    )
    return found.assign(block_efficiency=[run.block_efficiency for run in runs.values()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10^6 positions, no tuning")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, numpy {np.__version__}, python {sys.version.split()[0]}")
    curve((10**5, 10**6) if options.quick else (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7))
    print(table(1, tuned=False)[["policy", "feedback", "reset", "block_efficiency"]].to_string())
    if not options.quick:
        table(20, tuned=True)
