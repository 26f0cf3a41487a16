"""Collection: asks every drafter the same question at every position of the target's own outputs and writes the run
folder.

Groups of requests are generated together; then each request is scored by itself: one teacher-forced target pass for the
features, one batched draft per arm for all positions, acceptance by comparison. Nothing is verified: under greedy
decoding the output does not depend on the drafter. A scored request is a small file of its own until the end, so a stop
at any moment loses the request in flight only, and the files of a resumed run are byte-identical to those of an
uninterrupted one.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specsel import log as logs
from specsel.engine.draft import Drafts
from specsel.engine.generate import BatchedTarget, Choose, Generation, generate, greedy, is_looping, sampled
from specsel.engine.ngram import suffix_match_lengths
from specsel.engine.prompts import WORKLOADS, Prompt, encode, load_prompts, prompts_sha256
from specsel.engine.target import Features, Target
from specsel.engine.train import accepted_counts
from specsel.log import SpecselError

GROUP = 16
"""Requests generated together; a fixed grouping keeps an output independent of where a run was interrupted."""


class CollectError(SpecselError):
    """The run cannot be collected or resumed as asked."""


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """What to collect: ``requests`` prompts per workload (None = all), at most ``max_new`` output tokens, drafts of
    ``draft_len``."""

    requests: int | None = 16
    workloads: tuple[str, ...] = WORKLOADS
    max_new: int = 160
    draft_len: int = 9
    temperature: float = 0.0  # 0 = greedy; else one Gumbel noise stream per request and absolute position
    seed: int = 0  # of the noise streams
    prompts: Path | None = None

    def chooser(self, group: list[Prompt]) -> Choose:
        """The choice rule of the target for a group of requests."""
        return (
            sampled(self.temperature, self.seed, [f"{p.workload}/{p.id}" for p in group])
            if self.temperature
            else greedy
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """One request: a row of the request table, and its log records (none when nothing followed the first token)."""

    row: dict
    records: list[dict]


def collect(target: Target, pool: dict, out: Path, config: CollectConfig, *, drafters: dict | None = None) -> Path:
    """Collects a run folder, or resumes it, or returns at once when it is complete.

    Raises CollectError when another process is collecting there or when the unfinished run was started with other
    settings.
    """
    if (out / "manifest.json").is_file():
        logs.read_log(out)
        return out
    settings = _settings(target, config, drafters or {})
    parts = out.parent / f".{out.name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    with _only_writer(parts, out):
        started = _same_settings(parts, settings)
        queue = [p for w in config.workloads for p in load_prompts(w, "eval", config.prompts, limit=config.requests)]
        with tqdm(total=len(queue), unit="request", disable=None) as bar:
            _score_all(target, pool, config, queue, parts, bar)
        _merge(parts, out, queue, settings | {"started": started, "finished": _now()}, tuple(pool))
        shutil.rmtree(parts)
    return out


def _score_all(target: Target, pool: dict, config: CollectConfig, queue: list[Prompt], parts: Path, bar: tqdm) -> None:
    features, bulk = Features(target), None
    for start in range(0, len(queue), GROUP):
        group = queue[start : start + GROUP]
        names = [parts / f"{start + i:06d}.json" for i in range(len(group))]
        if not all(name.is_file() for name in names):
            bulk = bulk or BatchedTarget(target.model, target.taps, dtype=target.model.dtype)
            answers = answer_group(bulk, target, group, config)
            for name, prompt, answer in zip(names, group, answers, strict=True):
                if not name.is_file():
                    scored = score(features, pool, prompt, answer, config)
                    logs.write_bytes_atomically(name, json.dumps(asdict(scored)).encode())
        bar.update(len(group))


def answer_group(
    bulk: BatchedTarget, target: Target, group: list[Prompt], config: CollectConfig
) -> list[Generation | None]:
    """The target's answers to a group, in order; None for a prompt that does not fit into the target's window."""
    ids = [encode(target.tokenizer, prompt) for prompt in group]
    fits = [i for i, tokens in enumerate(ids) if len(tokens) + config.max_new <= target.window]
    answers: list[Generation | None] = [None] * len(group)
    if fits:
        choose = config.chooser([group[i] for i in fits])
        for answer in generate(
            bulk, [ids[i] for i in fits], max_new=config.max_new, eos_ids=target.eos_ids, batch=len(fits), choose=choose
        ):
            answers[fits[answer.index]] = answer
    return answers


def score(features: Features, pool: dict, prompt: Prompt, answer: Generation | None, config: CollectConfig) -> Scored:
    """Drafts of every arm at every position of one answer, with accepted counts, statistics and context."""
    row = {
        "workload": prompt.workload,
        "request": prompt.id,
        "category": prompt.category,
        "prompt_sha256": prompt.sha256,
    }
    if answer is None:
        return Scored(
            row | {"prompt_tokens": None, "output_tokens": 0, "stop": "prompt too long", "looping": False, "ties": 0},
            [],
        )
    tokens, output = answer.tokens.tolist(), np.array(answer.output)
    logits, taps, _ = features(answer.tokens[:-1].to(features.target.model.device))
    logits = logits[answer.n_prompt - 1 :]
    row |= {
        "prompt_tokens": answer.n_prompt,
        "output_tokens": len(output),
        "stop": answer.stop,
        "looping": is_looping(answer.output),
    }
    if len(output) < 2:
        return Scored(row | {"ties": 0}, [])
    drafts = {}
    for arm, drafter in pool.items():
        if arm == "cascade":
            drafts[arm] = drafter.combine(drafts["ngram"], drafts[drafter.config.fallback])
            continue
        drafts[arm] = drafter.propose_all(tokens, answer.n_prompt, taps, config.draft_len)
        if drafter.needs_taps and np.isnan(drafts[arm].confidence[drafts[arm].proposed > 0, 0]).any():
            raise CollectError(
                f"{prompt.workload}/{prompt.id}: drafter '{arm}' gave NaN logits; "
                "check its weights. Finished requests are kept."
            )
    context = _context(logits, tokens, answer.n_prompt)
    again = config.chooser([prompt])(logits, [0] * len(output), list(range(len(output))))
    ties = int(
        (again.cpu().numpy() != output).sum()
    )  # positions where rounding moved the choice between the two passes
    return Scored(row | {"ties": ties}, list(_records(prompt, drafts, output, context)))


def _context(logits: torch.Tensor, tokens: list[int], n_prompt: int) -> dict[str, np.ndarray]:
    """What is known before drafting at every anchor: suffix match, entropy and confidence of the distribution that
    chose the anchor."""
    log_p = torch.log_softmax(logits[:-1].float(), -1)
    p = log_p.exp()
    return {
        "match_length": suffix_match_lengths(tokens, n_prompt),
        "target_entropy": -(p * log_p).sum(-1).cpu().numpy(),
        "target_confidence": p.amax(-1).cpu().numpy(),
    }


def _records(
    prompt: Prompt, drafts: dict[str, Drafts], output: np.ndarray, context: dict[str, np.ndarray]
) -> Iterator[dict]:
    accepted = {arm: accepted_counts(d, output) for arm, d in drafts.items()}
    statistics = {arm: d.statistics() for arm, d in drafts.items()}
    for p in range(len(output) - 1):
        arms = {
            arm: _arm(d, p, int(accepted[arm][p]), {name: _number(v[p]) for name, v in statistics[arm].items()})
            for arm, d in drafts.items()
        }
        yield {
            "workload": prompt.workload,
            "request": prompt.id,
            "position": p,
            "remaining": len(output) - 1 - p,
            "on_path": False,
            "context": {name: _number(values[p]) for name, values in context.items()},
            "arms": arms,
        }


def _arm(drafts: Drafts, p: int, accepted: int, statistics: dict) -> dict:
    asked = drafts.proposed[p] >= 0
    entry = {
        "proposed": int(drafts.proposed[p]) if asked else None,
        "accepted": accepted if asked else None,
        **statistics,
    }
    if drafts.match_length is not None:
        entry["match_length"] = int(drafts.match_length[p])
    if drafts.source is not None:
        entry["source"] = drafts.sources[drafts.source[p]]
    return entry


def _number(value: float) -> float | int | None:
    value = value.item()
    return None if value != value else value


def _merge(parts: Path, out: Path, queue: list[Prompt], manifest: dict, arms: tuple[str, ...]) -> None:
    """Joins the scored requests into the run folder; ``path_arm`` is the arm with the highest block efficiency over the
    whole run."""
    scored = [json.loads((parts / f"{i:06d}.json").read_text(encoding="utf-8")) for i in range(len(queue))]
    lines = b"".join(logs.encode_row(record) for part in scored for record in part["records"])
    if not lines:
        raise CollectError("no answer has more than one token; there is nothing to log.")
    whole = parts / "all.jsonl"
    whole.write_bytes(lines)
    log = logs.read_log(whole)
    blocks = [len(logs.block_view(log, k).rows) for k in range(log.n_arms)]
    path_arm = int(np.argmin(blocks))
    on_path = np.zeros(log.n_positions, bool)
    on_path[logs.block_view(log, path_arm).rows] = True
    log = replace(
        log,
        on_path=on_path,
        path_arm=log.arms[path_arm],
        draft_len=manifest["draft_len"],
        label="MEASURED",
        run=out.name,
        request_table=pd.DataFrame([part["row"] for part in scored]),
        manifest={},
    )
    ready = parts / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    logs.write_log(ready, log, manifest)
    os.replace(ready, out)


@contextlib.contextmanager
def _only_writer(parts: Path, out: Path) -> Iterator[None]:
    with open(parts / "lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CollectError(
                f"{out}: another process is collecting this run; wait for it or choose another folder."
            ) from None
        yield


def _same_settings(parts: Path, settings: dict) -> str:
    """Start time of the run; refuses to resume a run that was started with other settings."""
    path = parts / "settings.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        for name in ("target", "drafters", "draft_len", "max_new_tokens", "prompts", "dtype", "decoding"):
            if saved["settings"][name] != json.loads(json.dumps(settings[name])):
                raise CollectError(
                    f"{parts}: the unfinished run was started with another '{name}'; "
                    "use the same settings or remove the folder."
                )
        return saved["started"]
    started = _now()
    logs.write_bytes_atomically(path, json.dumps({"started": started, "settings": settings}).encode())
    return started


def _settings(target: Target, config: CollectConfig, drafters: dict) -> dict:
    counts = {w: len(load_prompts(w, "eval", config.prompts, limit=config.requests)) for w in config.workloads}
    template = target.tokenizer.chat_template or ""
    return {
        "draft_len": config.draft_len,
        "max_new_tokens": config.max_new,
        "decoding": {
            "mode": "sampled" if config.temperature else "greedy",
            "temperature": config.temperature,
            "seed": config.seed,
        },
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "target": {
            "name": target.name,
            "sha256": target.sha256,
            "chat_template_sha256": logs.sha256_of(template.encode()),
        },
        "drafters": drafters,
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")}
        | {"python": platform.python_version()},
        "hardware": {
            "cpu": cpu_name(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
        },
        "prompts": {
            w: {"file": f"{w}.eval.jsonl", "sha256": prompts_sha256(w, "eval", config.prompts), "count": n}
            for w, n in counts.items()
        },
        "git_commit": git_commit(),
    }


def cpu_name() -> str:
    """Model name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git_commit() -> str | None:
    """Commit of the working tree that ran, None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
