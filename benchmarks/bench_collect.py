"""Collection speed: the batched collector against a block-by-block harness on the same requests, on this machine.

The harness stands at every position in turn, drafts with all four arms, and verifies the union of their drafts in one
pass of the target. Both give accepted counts of every arm at every position; they are compared. Needs the engine, the
embedded target and the prompt files. Rates are per second of processor time (of wall-clock time in brackets, which on a
busy machine says little); the ratio should be 10 or more.

    python benchmarks/bench_collect.py [requests per workload, collector] [requests, harness] [output tokens]
"""

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DRAFT_LEN = 9


def clock():
    """Processor seconds of all threads, and wall-clock seconds."""
    return np.array([time.process_time(), time.perf_counter()])


def block_by_block(features, pool, prompt: list[int], max_new: int) -> list[dict[str, int]]:
    """Accepted counts by arm at every position of one request: draft, verify the union, move on by one token."""
    import torch

    from specsel.engine.decode import accept, attention_mask, merge
    from specsel.engine.target import keep

    logits, taps, cache = features(torch.tensor(prompt), last_only=True)
    for drafter in pool.values():
        drafter.reset()
    output, found = [int(logits[0].argmax())], []
    new, eos = prompt + output, features.target.eos_ids
    while output[-1] not in eos and len(output) < max_new:
        for drafter in pool.values():
            drafter.extend(new, taps)
        drafts = {arm: drafter.propose(DRAFT_LEN).row(0) for arm, drafter in pool.items()}
        trie, cached = merge(output[-1], list(drafts.values())), len(prompt) + len(output) - 1
        positions, mask = cached + torch.tensor(trie.depths), attention_mask(trie, cached)
        logits, taps, _ = features(torch.tensor(trie.tokens), cache=cache, positions=positions, mask=mask)
        choices, rule = logits.argmax(-1).tolist(), {"remaining": max_new - len(output), "eos_ids": eos}
        paths = zip(drafts.items(), trie.paths, strict=True)
        found.append({arm: accept(d, [choices[node] for node in [0, *path]], **rule)[0] for (arm, d), path in paths})
        keep(cache, cached, torch.tensor([cached]))
        new, taps = choices[:1], taps[:1]
        output += new
    return found


def main(per_workload: int = 8, few: int = 4, max_new: int = 96) -> None:
    if importlib.util.find_spec("torch") is None:
        return print("skipped: the engine is not installed here (make env-all)")
    from specsel import engine
    from specsel.engine.harness import Collector
    from specsel.engine.prompts import encode
    from specsel.logs import STATS

    target, pool = engine.load_pool(engine.load_target())
    config = engine.CollectConfig(requests=per_workload, max_new=max_new, draft_len=DRAFT_LEN)
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(target, pool, config, Path(folder))
        start = clock()
        for first in collector.starts:
            collector.score_group(first)
        batched_s = clock() - start
        lines = [
            path.read_text("utf-8").splitlines()[1:] for first in collector.starts for path in collector.parts_of(first)
        ]
    logged = [[{a: e["accepted"] for a, e in json.loads(line)["arms"].items()} for line in part] for part in lines]
    chosen = range(0, len(lines), max(1, len(lines) // few))[:few]
    features, start, slow = engine.Features(target), clock(), []
    for i in chosen:
        slow.append(block_by_block(features, pool, encode(target.tokenizer, collector.queue[i]), max_new))
    slow_s = clock() - start
    positions, others = sum(map(len, logged)), sum(map(len, slow))
    rates = positions * len(pool) / batched_s, others * len(pool) / slow_s
    equal = sum(a == b for i, part in zip(chosen, slow, strict=True) for a, b in zip(logged[i], part, strict=False))
    for name, rate, n in zip(("batched collector", "block by block"), rates, (positions, others), strict=True):
        print(f"{name:18} {rate[0]:9.1f} positions x arms / s  [{rate[1]:.1f}]   ({n} positions)")
    ratio = rates[0] / rates[1]
    print(f"{'ratio':18} {ratio[0]:9.1f} [{ratio[1]:.1f}]   ({equal} of {others} positions equal)")
    print(f"{len(STATS)} statistics of both neural arms and the context are logged by the collector only")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
