"""Training data: the target's own greedy answers to the training prompts, with tap features and soft targets, in
resumable shards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from tqdm import tqdm

from specsel.engine.generate import Answers, BatchedTarget, Generation, is_looping
from specsel.engine.prompts import WORKLOADS, Prompt, encode, load_prompts
from specsel.engine.target import Features, Target, bf16_pays, dtype_name
from specsel.logs import SpecselError, readable, write_bytes_atomically

SHARD_PROMPTS = 512
MAX_NEW = 256
MAX_PROMPT = 640


class DataError(SpecselError):
    """The training data are missing or unusable."""


def interleave(folder: Path | None = None) -> list[Prompt]:
    """All training prompts of the four workloads in turn, each in file order, so that every prefix is a fair mixture.

    Workloads that run out are skipped.
    """
    turns = itertools.zip_longest(*(load_prompts(workload, "train", folder) for workload in WORKLOADS))
    return [prompt for turn in turns for prompt in turn if prompt]


def shard_path(out: Path, number: int) -> Path:
    return out / f"shard_{number:03d}.safetensors"


def build(
    target: Target, out: Path, *, tokens: int, prompts: Path | None = None, dtype: str | None = None, batch: int = 128
) -> dict:
    """Generates shards in ``out`` until at least ``tokens`` output tokens without loops are there; finished shards are
    kept.

    ``dtype`` is the precision of the generation; None: bf16 where that is faster, else fp32. Each shard is written
    under a temporary name and renamed, so a stop at any moment loses the shard in progress only. Returns the counts
    over all shards and what the precision changed, also written to ``data.json``; the token counts of all prompts,
    answered or not, are written beside the shards. Raises DataError when the prompts run out.
    """
    dtype = dtype_name(dtype or ("bfloat16" if bf16_pays(target.model.device) else "float32"))
    out.mkdir(parents=True, exist_ok=True)
    queue = [(p, encode(target.tokenizer, p)) for p in interleave(prompts)]
    write_prompt_counts(out, [ids for _, ids in queue], len(target.model.model.embed_tokens.weight))
    queue = [(p, ids) for p, ids in queue if len(ids) <= MAX_PROMPT]
    bulk, paths, total = None, [], {"kept_tokens": 0}
    with tqdm(total=tokens, unit="tok", disable=None) as bar:
        for number, start in enumerate(range(0, len(queue), SHARD_PROMPTS)):
            paths.append(shard_path(out, number))
            if not paths[-1].is_file():
                bulk = bulk or BatchedTarget(target.model, target.taps, dtype=getattr(torch, dtype))
                part = queue[start : start + SHARD_PROMPTS]
                _write_shard(paths[-1], part, _answers(bulk, target, part, batch, bar), dtype, target.sha256)
            total = read_counts(paths)
            bar.n = total["kept_tokens"]
            bar.refresh()
            if total["kept_tokens"] >= tokens:
                break
        else:
            raise DataError(
                f"the prompts are used up after {total['kept_tokens']} tokens; ask for fewer tokens than {tokens}."
            )
    used = " and ".join(sorted({_metadata(path)["dtype"] for path in paths}))
    report = total | {"dtype": used, "precision": precision(target, out)}
    (out / "data.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


@torch.inference_mode()
def precision(target: Target, out: Path, answers: int = 64) -> dict[str, float]:
    """How often the generation's precision changed a greedy choice.

    Over the first answers of the first shard: the share of output positions at which the fp32 target, given the same
    prefix, chooses another token.
    """
    features, changed, positions = Features(target), 0, 0
    for e in itertools.islice(examples(shards(out)[0]), answers):
        logits, _, _ = features(e.tokens[:-1].to(target.model.device))
        changed += int((logits[e.n_prompt - 1 :].argmax(-1).cpu() != e.tokens[e.n_prompt :]).sum())
        positions += len(e.lse)
    return {"answers": answers, "positions": positions, "changed": changed, "changed_share": changed / positions}


def _answers(bulk: BatchedTarget, target: Target, part: list, batch: int, bar: tqdm) -> list[Generation]:
    order = sorted(range(len(part)), key=lambda i: len(part[i][1]))  # rows of like length waste no attention
    answers = [None] * len(part)
    options = {"max_new": MAX_NEW, "eos_ids": target.eos_ids, "batch": batch, "keep_top": True, "stop_loops": True}
    for answer in Answers(bulk, [part[i][1] for i in order], **options):
        answers[order[answer.index]] = answer
        bar.update(len(answer.output))
    return answers


def _write_shard(path: Path, part: list, answers: list[Generation], dtype: str, target_sha256: str) -> None:
    looping = torch.tensor([answer.stop == "loop" or is_looping(answer.output) for answer in answers])
    output = torch.tensor([len(answer.output) for answer in answers])
    sums = {"output_tokens": output.sum(), "looping": looping.sum(), "kept_tokens": output[~looping].sum()}
    counts = {"requests": len(answers)} | {name: int(n) for name, n in sums.items()}
    found = [{"tokens": answer.tokens.int(), "taps": answer.taps} | answer.said for answer in answers]
    tensors = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    n_prompt = torch.tensor([answer.n_prompt for answer in answers])
    tensors |= {"n_prompt": n_prompt, "n_output": output, "looping": looping}
    requests = [f"{prompt.workload}/{prompt.id}" for prompt, _ in part]
    metadata = {"counts": json.dumps(counts), "requests": json.dumps(requests), "dtype": dtype, "target": target_sha256}
    save_file(tensors, f"{path}.part", metadata)
    os.replace(f"{path}.part", path)


def write_prompt_counts(out: Path, prompts: list[list[int]], vocab: int) -> None:
    """Writes how often every target id stands in the prompts, (V,), to a data folder."""
    counts = torch.tensor(list(itertools.chain.from_iterable(prompts))).bincount(minlength=vocab)
    write_bytes_atomically(out / "prompts.safetensors", save({"counts": counts}))


def read_prompt_counts(out: Path) -> Tensor:
    """How often every target id stands in the training prompts, (V,). Raises DataError when the data folder does not
    tell."""
    path = out / "prompts.safetensors"
    if not path.is_file():
        raise DataError(f"{path}: not there. Run `specsel train data` again; the answers that it finds are kept.")
    return _tensors(path)["counts"]


def read_counts(paths: list[Path]) -> dict[str, int]:
    """Counts over some shards: requests, output tokens, looping answers, and tokens of the others."""
    counts = [json.loads(_metadata(path)["counts"]) for path in paths]
    return {name: sum(c[name] for c in counts) for name in counts[0]}


def _metadata(path: Path) -> dict[str, str]:
    with _readable(path), safe_open(str(path), "pt") as shard:
        return shard.metadata()


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped."""
    with _readable(path):
        return load_file(path)


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    return readable(path, "remove it and run `specsel train data` again", DataError, (Exception,))


def read_report(paths: list[Path]) -> dict:
    """Counts over some shards of a data folder, and what ``build`` found out about the folder once it was finished."""
    report = paths[0].with_name("data.json")
    with _readable(report):
        said = dict(json.loads(report.read_text(encoding="utf-8"))) if report.is_file() else {}
    return said | read_counts(paths)


@dataclass(slots=True)
class Example:
    """One training answer: ``tokens`` (n,), ``taps`` (n - 1, 3H), soft targets of its T = n - ``n_prompt`` output
    tokens."""

    tokens: Tensor
    n_prompt: int
    taps: Tensor
    top_ids: Tensor
    top_logits: Tensor
    lse: Tensor


def examples(path: Path) -> Iterator[Example]:
    """Answers of one shard that are no loops and long enough to train on; the shard is memory-mapped."""
    data = _tensors(path)
    n_prompt, n_output, looping = (data[name].tolist() for name in ("n_prompt", "n_output", "looping"))
    lengths = [sum(pair) for pair in zip(n_prompt, n_output, strict=True)]
    parts = [data["tokens"].split(lengths), n_prompt, data["taps"].split([n - 1 for n in lengths])]
    parts += [data[name].split(n_output) for name in ("top_ids", "top_logits", "lse")]
    for loop, n, tokens, *others in zip(looping, n_output, *parts, strict=True):
        if not loop and n >= 4:
            yield Example(tokens.long(), *others)


def output_counts(path: Path, vocab: int) -> Tensor:
    """How often every target id stands in the answers of one shard, loops included, (V,)."""
    data = _tensors(path)
    in_turn = torch.stack([data["n_prompt"], data["n_output"]], dim=1).flatten().tolist()
    return torch.cat(data["tokens"].split(in_turn)[1::2]).bincount(minlength=vocab)


def shards(out: Path) -> list[Path]:
    """Finished shards of a data folder, in order; raises DataError when there is none."""
    found = sorted(out.glob("shard_*.safetensors"))
    if not found:
        raise DataError(f"{out}: no training data here. Run `specsel train data` first.")
    return found
