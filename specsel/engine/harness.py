"""Collection: asks every drafter the same question at every position of the target's own outputs and writes the run
folder.

Groups of requests are answered together by batched decoding, which leaves the target's features behind; every finished
answer is scored by itself: one batched draft per arm for all positions, acceptance by comparison. Nothing is verified:
the output does not depend on the drafter. A scored request is a small file of its own until the end, so a stop at any
moment loses the requests in flight only. A group is always answered as a whole, so the files of a run that was resumed,
or spread over Ray workers, are byte-identical to those of a run in one go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specsel import logs
from specsel.engine.drafters.base import Drafts
from specsel.engine.drafters.ngram import suffix_match_lengths
from specsel.engine.generate import Answers, BatchedTarget, Generation, choice_rule, is_looping
from specsel.engine.prompts import Prompt, encode, load_prompts, workloads_in
from specsel.engine.provenance import now, settings_of
from specsel.engine.target import Target
from specsel.logs import SpecselError

GROUP = 64
"""Requests answered together. Rounding depends on what is computed together, so the grouping is fixed."""
TIE = 1e-3
"""Margin of the two best scores under which rounding could have moved a choice."""
SETTINGS = ("target", "drafters", "draft_len", "max_new_tokens", "prompts", "dtype", "decoding")
ROUNDING = ("versions", "hardware")


class CollectError(SpecselError):
    """The run cannot be collected or resumed as asked."""


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """What to collect: ``requests`` prompts per workload (None = all), at most ``max_new`` output tokens, drafts of
    ``draft_len``."""

    requests: int | None = 16
    workloads: tuple[str, ...] | None = None  # None: every <workload>.eval.jsonl of the folder
    max_new: int = 160
    draft_len: int = 9
    temperature: float = 0.0  # 0 = greedy; else one Gumbel noise stream per request and absolute position
    seed: int = 0  # of the noise streams
    prompts: Path | None = None

    def queue(self) -> list[Prompt]:
        """The prompts to answer, in order: the first of every workload, so that runs of equal size share theirs."""
        return [p for found in self.by_workload().values() for p in found]

    def by_workload(self) -> dict[str, list[Prompt]]:
        """The prompts to answer, by workload."""
        names = self.workloads or workloads_in(self.prompts)
        return {w: load_prompts(w, "eval", self.prompts, limit=self.requests) for w in names}


def collect(
    target: Target,
    pool: dict,
    out: Path,
    config: CollectConfig,
    *,
    drafters: dict | None = None,
    executor: str = "local",
    workers: int = 2,
) -> Path:
    """Collects a run folder, or resumes it, or returns at once when it is complete.

    ``executor`` "ray" spreads the groups over ``workers`` actors; the files are the same. Raises CollectError when
    another process is collecting there, when the run was started with other settings, when a drafter fails, and when
    the disk is full; what is finished is kept.
    """
    if executor not in ("local", "ray"):
        raise CollectError(f"executor '{executor}' is unknown; choose local or ray.")
    settings, parts = settings_of(target, config, drafters or {}), out.parent / f".{out.name}.parts"
    if (out / "manifest.json").is_file():
        _same(logs.read_log(out).manifest, settings, f"{out}: the run is complete, and was collected", SETTINGS)
        shutil.rmtree(parts, ignore_errors=True)
        return out
    parts.mkdir(parents=True, exist_ok=True)
    with _only_writer(parts, out):
        started = _same_settings(parts, settings)
        collector = Collector(target, pool, config, parts)
        _score_all(collector, executor, workers)
        _merge(collector, out, settings | {"started": started, "finished": now()})
        shutil.rmtree(parts, ignore_errors=True)
    return out


def _score_all(collector: Collector, executor: str, workers: int) -> None:
    starts = [s for s in collector.starts if not all(path.is_file() for path in collector.parts_of(s))]
    if executor == "ray" and starts:
        finished = on_ray(collector, starts, workers)
    else:
        finished = map(collector.score_group, starts)
    done = len(collector.queue) - sum(len(collector.parts_of(start)) for start in starts)
    with tqdm(total=len(collector.queue), initial=done, unit="request", disable=None) as bar:
        for count in finished:
            bar.update(count)


class Collector:
    """Answers and scores groups of requests into a folder of parts: the work of one process, or of one Ray actor."""

    def __init__(self, target: Target, pool: dict, config: CollectConfig, parts: Path) -> None:
        self.target, self.pool, self.config, self.parts = target, pool, config, parts.absolute()
        self.queue, self.bulk, self.group = config.queue(), None, GROUP

    @property
    def starts(self) -> range:
        """The first request of every group."""
        return range(0, len(self.queue), self.group)

    def parts_of(self, start: int) -> list[Path]:
        """The files of the group that begins at request ``start``: the request's row, then its log lines."""
        return [self.parts / f"{i:06d}.jsonl" for i in range(start, min(start + self.group, len(self.queue)))]

    def score_group(self, start: int) -> int:
        """Answers a group and writes the parts that are not there yet, each as soon as its answer is finished; returns
        the number of its requests."""
        paths = self.parts_of(start)
        prompts = self.queue[start : start + len(paths)]
        for i, answer in self.answers(prompts):
            if not paths[i].is_file():
                if answer:
                    answer.taps = answer.taps.to(self.target.model.device)
                row, records = score(self.pool, prompts[i], answer, self.config)
                lines = [json.dumps(row).encode() + b"\n", logs.encode_rows(records)]
                logs.write_bytes_atomically(paths[i], b"".join(lines))
        return len(paths)

    def answers(self, prompts: list[Prompt]) -> Iterator[tuple[int, Generation | None]]:
        """The target's answers with their index, in the order in which they finish; None for a prompt that does not fit
        into the target's window."""
        target, config = self.target, self.config
        self.bulk = self.bulk or BatchedTarget(target.model, target.taps, dtype=target.model.dtype)
        ids = [encode(target.tokenizer, prompt) for prompt in prompts]
        fits = [i for i, tokens in enumerate(ids) if len(tokens) + config.max_new <= target.window]
        yield from ((i, None) for i in range(len(prompts)) if i not in fits)
        if not fits:
            return
        choose = choice_rule(config.temperature, config.seed, [prompts[i].key for i in fits])
        options = {"max_new": config.max_new, "eos_ids": target.eos_ids, "batch": self.group, "choose": choose}
        for answer in Answers(self.bulk, [ids[i] for i in fits], observe=True, **options):
            yield fits[answer.index], answer


def score(pool: dict, prompt: Prompt, answer: Generation | None, config: CollectConfig) -> tuple[dict, list[dict]]:
    """One request: its row of the request table and its log records (none when nothing followed the first token), with
    drafts of every arm at every position, accepted counts, statistics and context."""
    row = {"workload": prompt.workload, "request": prompt.id, "category": prompt.category}
    row["prompt_sha256"] = prompt.sha256
    if answer is None:
        nothing = {"prompt_tokens": None, "output_tokens": 0, "stop": "prompt too long", "looping": False, "ties": 0}
        return row | nothing, []
    output, ties = np.array(answer.output), int((answer.said["margin"] < TIE).sum())
    row |= {"prompt_tokens": answer.n_prompt, "output_tokens": len(output), "stop": answer.stop}
    row |= {"looping": is_looping(answer.output), "ties": ties}  # ties: rounding could move them on another machine
    if len(output) < 2:
        return row, []
    context = {"match_length": suffix_match_lengths(answer.tokens.tolist(), answer.n_prompt)}
    context |= {f"target_{name}": answer.said[name].numpy() for name in ("entropy", "confidence")}
    return row, list(_records(prompt, draft_all(pool, prompt, answer, config.draft_len), output, context))


def draft_all(pool: dict, prompt: Prompt, answer: Generation, draft_len: int) -> dict[str, Drafts]:
    """The drafts of every arm at every position of an answer; CollectError names the arm that fails."""
    tokens, drafts = answer.tokens.tolist(), {}
    for arm, drafter in pool.items():
        try:
            if drafter.parts:
                drafts[arm] = drafter.combine(*(drafts[part] for part in drafter.parts))
            else:
                drafts[arm] = drafter.propose_all(tokens, answer.n_prompt, answer.taps, draft_len)
        except Exception as error:
            raise CollectError(
                f"{prompt.key}: drafter '{arm}' failed ({type(error).__name__}: {error}). Finished requests are kept."
            ) from error
        drafted = np.arange(draft_len) < drafts[arm].proposed[:, None]
        if drafter.needs_taps and np.isnan(drafts[arm].confidence[drafted]).any():
            raise CollectError(
                f"{prompt.key}: drafter '{arm}' gave NaN logits; check its weights. Finished requests are kept."
            )
    return drafts


def _records(
    prompt: Prompt, drafts: dict[str, Drafts], output: np.ndarray, context: dict[str, np.ndarray]
) -> Iterator[dict]:
    arms = {arm: _columns(d, output) for arm, d in drafts.items()}
    for p in range(len(output) - 1):
        place = {"workload": prompt.workload, "request": prompt.id, "position": p, "remaining": len(output) - 1 - p}
        yield place | {
            "on_path": False,
            "context": {name: values[p] for name, values in context.items()},
            "arms": {arm: {name: values[p] for name, values in columns.items()} for arm, columns in arms.items()},
        }


def _columns(drafts: Drafts, output: np.ndarray) -> dict[str, np.ndarray]:
    """What the log says of an arm at every anchor of an output (T,), by field, each (T - 1,)."""
    counts, asked = {"proposed": drafts.proposed, "accepted": drafts.accepted(output)}, drafts.proposed >= 0
    columns = {name: np.where(asked, n, None) for name, n in counts.items()} | drafts.statistics()
    if drafts.match_length is not None:
        columns["match_length"] = drafts.match_length
    if drafts.source is not None:
        columns["source"] = np.array(drafts.sources)[drafts.source]
    return columns


def _merge(collector: Collector, out: Path, manifest: dict) -> None:
    """Joins the scored requests into the run folder; ``path_arm`` is the arm with the highest block efficiency over the
    whole run."""
    parts = collector.parts
    paths = [path for start in collector.starts for path in collector.parts_of(start)]
    texts = [path.read_bytes().partition(b"\n") for path in paths]
    lines = b"".join(text for _, _, text in texts)
    if not lines:
        raise CollectError("no answer has more than one token; there is nothing to log.")
    whole = parts / "all.jsonl"
    whole.write_bytes(lines)
    log = logs.read_log(whole)
    blocks = [logs.block_rows(log, k) for k in range(log.n_arms)]
    best = int(np.argmin([len(rows) for rows in blocks]))
    on_path = np.isin(np.arange(log.n_positions), blocks[best])
    table = pd.DataFrame([json.loads(row) for row, _, _ in texts])
    manifest |= {"label": "MEASURED", "run": out.name, "path_arm": log.arms[best]}
    ready = parts / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    logs.write_log(ready, replace(log, on_path=on_path, request_table=table), manifest)
    os.replace(ready, out)


@contextlib.contextmanager
def _only_writer(parts: Path, out: Path) -> Iterator[None]:
    """Keeps other processes from collecting the same run, and tells of a failing disk in one sentence."""
    with open(parts / "lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CollectError(
                f"{out}: another process is collecting this run; wait for it or choose another folder."
            ) from None
        try:
            yield
        except OSError as error:
            raise CollectError(
                f"{parts}: cannot be written ({error.strerror or error}). Finished requests are kept: "
                "make room and run the same command again."
            ) from error


def _same_settings(parts: Path, settings: dict) -> str:
    """Start time of the run; refuses to resume a run that was started with other settings, also such as change the
    rounding."""
    path = parts / "settings.json"
    if path.is_file():
        with logs.readable(path, f"remove {parts} and collect again", CollectError):
            saved = json.loads(path.read_text(encoding="utf-8"))
            _same(saved["settings"], settings, f"{parts}: the unfinished run was started", (*SETTINGS, *ROUNDING))
            return saved["started"]
    started = now()
    logs.write_bytes_atomically(path, json.dumps({"started": started, "settings": settings}).encode())
    return started


def _same(saved: dict, settings: dict, what: str, names: tuple[str, ...]) -> None:
    for name in names:
        if saved.get(name) != json.loads(json.dumps(settings[name])):
            raise CollectError(f"{what} with another '{name}'; use the same settings, or remove the folder.")


class _Actor:
    """A collector in a process of its own. Rounding must be the same everywhere, so it computes with the threads of the
    caller, and machines must be of one kind; on several of them the folder of parts is a shared one."""

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
