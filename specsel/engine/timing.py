"""Timings of the parts of a block: drafting, verification, catch-up and overhead, as raw samples with the hardware they
belong to.

Rounds visit every measured thing once, in the same order, so that a slow moment of the machine falls on all of them.
The first WARM_UP rounds are kept in the file and left out by whoever summarises it.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from specsel import logs
from specsel.engine.decode import accept, attention_mask, merge
from specsel.engine.generate import greedy
from specsel.engine.provenance import hardware
from specsel.engine.target import Features, keep

WARM_UP = 5
CATCH_UP_TOKENS = 3
"""Tokens by which the caches of a drafter are brought up in the catch-up timing: about one block."""


@dataclass(frozen=True, slots=True)
class TimingConfig:
    """Context lengths and numbers of verified rows in tokens, and timed samples of each after the warm-up."""

    contexts: tuple[int, ...] = (64, 128, 256, 512)
    rows: tuple[int, ...] = (1, 2, 4, 7, 10, 13, 16, 19, 24, 28, 32, 40)
    samples: int = 30
    draft_len: int = 9
    seed: int = 0


def measure(features: Features, pool: dict, config: TimingConfig) -> dict:
    """All samples as the content of ``timings.json``: seconds by what was timed, arm or rows, and context length."""
    device = features.target.model.device
    generator = torch.Generator().manual_seed(config.seed)
    vocab = features.target.model.config.vocab_size
    text = torch.randint(0, vocab, (max(config.contexts) + CATCH_UP_TOKENS + 1,), generator=generator).to(device)
    tasks = [task for context in config.contexts for task in _tasks(features, pool, config, text, context)]
    samples = []
    for _ in tqdm(range(WARM_UP + config.samples), unit="round", disable=None):
        samples += [labels | {"seconds": _clock(run, prepare, device)} for labels, prepare, run in tasks]
    result = {"schema": 1, "hardware": hardware(device.type == "cuda"), "dtype": features.target.dtype}
    return result | {"warmup": WARM_UP, "samples": samples}


def _clock(run: Callable, prepare: Callable, device: torch.device) -> float:
    """Seconds of one call on prepared input, with the device idle before each clock read."""
    given = prepare()
    _wait(device)
    start = time.perf_counter()
    run(given)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tasks(
    features: Features, pool: dict, config: TimingConfig, text: torch.Tensor, context: int
) -> Iterator[tuple[dict, Callable, Callable]]:
    """(labels, prepare, run) of everything that is timed at one context length; what prepares hands over to what
    runs."""
    _, taps, cache = features(text[:context])
    more = features(text[: context + CATCH_UP_TOKENS])[1][context:]
    following = text[context + 1 : context + 1 + CATCH_UP_TOKENS].tolist()
    for arm, drafter in pool.items():
        if drafter.parts:
            continue  # each of them is timed
        drafter.reset()
        drafter.extend(text[: context + 1].tolist(), taps)
        ready, labels = copy.copy(drafter), {"arm": arm, "context": context}
        drafter.reset()
        yield {"what": "t_draft"} | labels, lambda ready=ready: ready, lambda d: d.propose(config.draft_len)
        yield {"what": "catch_up"} | labels, lambda ready=ready: _branch(ready), lambda d: d.extend(following, more)
    for rows in config.rows:
        call = {"positions": context + torch.arange(rows, device=text.device), "cache": cache}
        call["mask"] = attention_mask(merge(0, [list(range(1, rows))]), context, text.device)
        labels = {"what": "t_verify", "rows": rows, "context": context}
        yield labels, lambda: keep(cache, context), lambda _, ids=text[:rows], call=call: features(ids, **call)
    if context == config.contexts[len(config.contexts) // 2]:
        draft = list(range(config.draft_len))
        logits = torch.zeros(config.draft_len + 1, features.target.model.config.vocab_size, device=text.device)
        longer = features(text[: config.draft_len + 1], cache=copy.deepcopy(cache))[2]
        yield {"what": "overhead"}, lambda: copy.deepcopy(longer), lambda c: _bookkeeping(c, context, draft, logits)


def _branch(drafter):
    """A drafter whose text can grow without touching the original's."""
    branch = copy.copy(drafter)
    if hasattr(branch, "index"):
        branch.index = copy.deepcopy(branch.index)
    return branch


def _bookkeeping(cache, context: int, draft: list[int], logits: torch.Tensor) -> None:
    """What a block costs besides drafting and the target pass: trie, mask, choice, acceptance, roll-back."""
    trie = merge(0, [draft])
    attention_mask(trie, context, logits.device)
    accepted, _, _ = accept(draft, greedy(logits, [], []).argmax(-1).tolist(), remaining=len(draft) + 1, eos_ids=())
    keep(cache, context, context + torch.arange(accepted + 1, device=logits.device))


def write_timings(run: Path, timings: dict) -> Path:
    """Writes ``timings.json`` into a run folder."""
    path = run / "timings.json"
    logs.write_bytes_atomically(path, json.dumps(timings, separators=(",", ":")).encode() + b"\n")
    return path
