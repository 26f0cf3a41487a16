"""Collection on several processes or machines: groups of requests as calls of Ray actors, which Ray schedules.

Each actor writes the parts of its requests into the folder of the run (on several machines: a shared folder); merging
is the same as in one process. Rounding must be the same everywhere, so an actor computes with the threads of the
caller, and machines must be of one kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from specsel.logs import SpecselError


class _Actor:
    """A collector in a process of its own."""

    def __init__(self, collector, threads: int) -> None:
        torch.set_num_threads(threads)
        self.collector = collector

    def score_group(self, start: int) -> int:
        """See ``Collector.score_group``."""
        return self.collector.score_group(start)


def on_ray(collector, starts: list[int], workers: int) -> Iterator[int]:
    """Scores the groups that begin at ``starts``, in any order; yields the number of requests of each when it is done.

    Starts a local Ray when none is running and RAY_ADDRESS names none.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.util import ActorPool
    except ModuleNotFoundError as error:
        raise SpecselError("the executor 'ray' needs the extra 'ray': pip install 'specsel[ray]'.") from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        shared = ray.put(collector)
        actors = [ray.remote(_Actor).remote(shared, torch.get_num_threads()) for _ in range(min(workers, len(starts)))]
        yield from ActorPool(actors).map_unordered(lambda actor, start: actor.score_group.remote(start), starts)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        if ours:
            ray.shutdown()
