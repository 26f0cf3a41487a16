"""Training of the two neural drafters on the target's own greedy answers: one resumable loop for both."""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from specsel.engine.data import Example, examples, output_counts, read_prompt_counts, read_report, shards
from specsel.engine.drafters.dflash import DFlash
from specsel.engine.drafters.eagle import Eagle
from specsel.engine.losses import dflash_loss, eagle_loss
from specsel.engine.recipes import TrainConfig, TrainError, block_size, rate_factor, recipe_of
from specsel.engine.start import (
    earlier_drafter,
    exchange_vocabulary,
    inverse_vocabulary,
    new_dflash,
    new_eagle,
    randomise,
)
from specsel.engine.target import Target, bf16_pays, sha256_of
from specsel.logs import readable, walk, write_bytes_atomically

HELD_OUT_EVERY = 64
STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class Split:
    """Which answers of a data folder are trained on, and which are held out: those of the last shard, or every
    ``every``-th one of each (0: whole shards).

    A shard holds the same prompts whenever it is generated, so its answers stay unseen; the number of an answer in its
    shard changes with the loops that are dropped before it.
    """

    training: list[Path]
    test: list[Path]
    every: int = 0

    def answers(self, path: Path, *, held_out: bool = False) -> Iterator[Example]:
        """The answers of a shard on one side of the split."""
        for i, example in enumerate(examples(path)):
            if not self.every or (i % self.every == 0) == held_out:
                yield example

    def held_out(self, n: int | None = None) -> Iterator[Example]:
        """The first ``n`` held-out answers (None: all)."""
        return itertools.islice((e for path in self.test for e in self.answers(path, held_out=True)), n)


def split_of(paths: list[Path], how: str, earlier: dict[str, Any] | None = None) -> Split:
    """The split that a recipe names; ``earlier``: log of a training that is gone on from. Raises TrainError when no
    shard is left to train on, or when the earlier training knew the held-out shard."""
    if how == "answer":
        return Split(paths, paths, HELD_OUT_EVERY)
    if len(paths) < 2:
        raise TrainError(f"{paths[0].parent}: one shard alone; the last one is held out, so generate more answers.")
    while earlier:
        known = [entry["shard"] for entry in earlier["data"]]
        if paths[-1].name in (known[:-1] if earlier["recipe"].get("split") == "shard" else known):
            raise TrainError(f"{paths[-1]}: held out now, but an earlier training learned it; generate more answers.")
        earlier = earlier.get("earlier")
    return Split(paths[:-1], paths[-1:])


def draft_vocabulary(
    split: Split,
    size: int,
    vocab: int,
    eos_ids: tuple[int, ...],
    ids: Tensor | None = None,
    all_prompts: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The ``size`` most frequent ids of the training answers, end ids included, sorted, or the given ``ids``; and the
    share of output tokens covered: of the "generated" answers that are trained on, of those "held_out", and of all
    answers "with_loops".

    Output tokens count fully, prompt tokens a quarter (rare words of an answer mostly stand in some prompt):
    ``all_prompts`` (V,) counts those of all training prompts; None: those of the answered ones. Ids that never occur
    fill the rest from the lowest on: in a byte-pair vocabulary low ids are the early, frequent merges.
    """
    answered, outputs, test = torch.zeros(3, vocab)
    for path in split.training:
        for example in split.answers(path):
            prompt, output = example.tokens.tensor_split([example.n_prompt])
            answered += prompt.bincount(minlength=vocab)
            outputs += output.bincount(minlength=vocab)
    for example in split.held_out():
        test += example.tokens[example.n_prompt :].bincount(minlength=vocab)
    counts = outputs + (answered if all_prompts is None else all_prompts) / 4
    counts[list(eos_ids)] = counts.max() + 1
    if ids is None:
        ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    everything = sum(output_counts(path, vocab) for path in sorted({*split.training, *split.test})).double()
    covered = {"generated": outputs, "held_out": test, "with_loops": everything}
    return ids, {name: float(n[ids].sum() / n.sum()) for name, n in covered.items()}


def held_out_score(drafter, batch: list[Example], draft_len: int) -> dict[str, Any]:
    """First-token acceptance over all positions and block efficiency of always running one drafter on held-out answers,
    with tokens and blocks of every answer for an interval."""
    first, emitted, blocks = 0, [], []
    for e in batch:
        output = e.tokens[e.n_prompt :].numpy()
        accepted = drafter.propose_all(e.tokens.tolist(), e.n_prompt, e.taps, draft_len).accepted(output)
        first += int((accepted > 0).sum())
        emitted.append(len(accepted))
        blocks.append(len(walk(np.array([0, len(accepted)]), accepted + 1)))
    answers = {"emitted": emitted, "blocks": blocks}
    efficiency = sum(emitted) / sum(blocks)
    return {"first_token": first / sum(emitted), "block_efficiency": efficiency, "answers": answers}


def _shuffled(split: Split, seed: int) -> Iterator[Example]:
    """Training answers without end, in an order that ``seed`` determines: shard after shard, shuffled inside."""
    for epoch in itertools.count():
        for index in np.random.default_rng([seed, epoch]).permutation(len(split.training)):
            kept = list(split.answers(split.training[index]))
            for i in np.random.default_rng([seed, epoch, index]).permutation(len(kept)):
                yield kept[i]


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a recipe: Muon (orthogonalised momentum, its update scaled to AdamW's size) for the matrices
    between input and head, AdamW for vectors and heads; or AdamW for everything."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        matrix = config.optimizer != "adamw" and parameter.ndim == 2 and "lm_head" not in name
        groups[matrix].append(parameter)
    made = [torch.optim.AdamW(groups[False], lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0)]
    if groups[True]:
        made.append(torch.optim.Muon(groups[True], lr=config.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def flush_tiny_numbers() -> None:
    """Lets numbers below the normal range of fp32 be 0, in this thread and in those started later: gradients are full
    of them, and products with them took up to 80 times as long."""
    torch.set_flush_denormal(True)


def _new(
    kind: str, target: Target, paths: list[Path], config: TrainConfig, after: Path | None
) -> tuple[nn.Module, Tensor, Split, dict]:
    """The drafter that a training starts with, its draft vocabulary, the split of its answers, and what the training's
    log says of both."""
    if (config.start == "earlier") != (after is not None):
        raise TrainError(f"start '{config.start}': name a drafter to go on from with start 'earlier', and only then.")
    torch.manual_seed(config.seed)
    model, known, earlier = earlier_drafter(kind, after) if after else (None, None, None)
    split = split_of(paths, config.split, earlier)
    embedding, kept = target.model.model.embed_tokens.weight, config.vocabulary == "kept" and model is not None
    counts = None if kept or config.counted == "answered" else read_prompt_counts(paths[0].parent)
    options = {"ids": known if kept else None, "all_prompts": counts}
    ids, coverage = draft_vocabulary(split, config.draft_vocab, len(embedding), target.eos_ids, **options)
    if model and not kept:
        model = exchange_vocabulary(model, ids, embedding)
    model = model or (new_eagle if kind == "eagle" else new_dflash)(target, ids, config)
    told = {"coverage": coverage} | ({"earlier": earlier} if earlier else {})
    return model.to(target.model.device), ids, split, told


def train_drafter(
    kind: str,
    target: Target,
    data: Path,
    out: Path,
    config: TrainConfig,
    *,
    after: Path | None = None,
    n_shards: int | None = None,
    report: Callable[[dict], None] = print,
) -> dict:
    """Trains one drafter ("eagle" or "dflash"), a new one or the one in the folder ``after`` further, on the first
    ``n_shards`` shards of ``data`` (None: all), and writes weights, config and log to ``out``; resumes from
    ``out/state.pt`` when it is there.

    The best held-out weights are written (bf16 safetensors), with ``config.json`` and ``training.json`` (recipe, data
    hash, learning curve; the earlier training's own under "earlier", and tokens are counted on from it).
    """
    paths, device, low = shards(data)[:n_shards], target.model.device, bf16_pays(target.model.device)
    model, ids, split, told = _new(kind, target, paths, config, after)
    embedding, head = target.model.model.embed_tokens.weight, target.model.lm_head.weight
    sliced, inverse = head[ids.to(device)], inverse_vocabulary(ids, len(embedding)).to(device)
    drafter = Eagle(model, embedding) if kind == "eagle" else DFlash(model, embedding, head)
    optimizers = make_optimizers(model, config)
    log = {"kind": kind, "recipe": asdict(config), **told, "dtype": "bf16 autocast" if low else "float32"}
    data_files = [{"shard": path.name, "sha256": sha256_of(path)} for path in paths]
    log |= {"target": target.sha256, "data": data_files, "data_report": read_report(paths), "curve": []}
    first = _resume(out / STATE, model, optimizers, log)
    if config.keep and not first:
        _write_weights(out / "checkpoints" / "random", randomise(copy.deepcopy(model), config.seed))
    stream = itertools.islice(_shuffled(split, config.seed), first * config.batch, None)
    test = list(split.held_out(config.held_out))
    seen = log["curve"] or log.get("earlier", {}).get("curve")
    started, losses, tokens = time.monotonic(), [], (seen[-1]["tokens"] if seen else 0)
    for step in range(first, config.steps):
        if _stalled(log["curve"], config.patience):
            break
        for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
            group["lr"] = config.rate * rate_factor(step, config)
        batch = [_to(e, device) for e in itertools.islice(stream, config.batch)]
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        model.train()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            if kind == "eagle":
                loss = eagle_loss(model, batch, embedding, inverse, config)
            else:
                size = block_size(step, config)
                loss = dflash_loss(model, batch, embedding, inverse, config, generator, sliced, size)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        tokens += sum(len(e.lse) for e in batch)
        if step + 1 in config.keep:
            _write_weights(out / "checkpoints" / f"step_{step + 1}", model)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            model.eval()
            score = held_out_score(drafter, test, config.draft_len)
            log["curve"].append({"step": step + 1, "tokens": tokens, "loss": float(np.mean(losses)), **score})
            report(log["curve"][-1] | {"seconds": round(time.monotonic() - started, 1)})
            losses = []
            _save(out, model, optimizers, log)
    return log


def repeat_training(
    kind: str,
    target: Target,
    data: Path,
    out: Path,
    told: dict[str, Any],
    *,
    report: Callable[[dict], None] = print,
    **changes: Any,
) -> dict:
    """Trains a drafter as the training log ``told`` tells it, with some settings of the last training changed: the
    trainings that it went on from come first, each in a folder "earlier" of the next one's. Raises TrainError when
    ``data`` holds fewer shards than the training had."""
    config, n = recipe_of(told, **changes), len(told["data"])
    if (found := len(shards(data))) < n:
        raise TrainError(f"{data}: {found} shards, the training had {n}; run `specsel train data` with more --tokens.")
    after = out / "earlier" if "earlier" in told else None
    if after:
        repeat_training(kind, target, data, after, told["earlier"], report=report)
    return train_drafter(kind, target, data, out, config, after=after, n_shards=n, report=report)


def _stalled(curve: list[dict], patience: int) -> bool:
    """True when the last ``patience`` evaluations did not exceed the best block efficiency before them."""
    scores = [point["block_efficiency"] for point in curve]
    return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])


def _to(example: Example, device: torch.device) -> Example:
    names = ("tokens", "taps", "top_ids", "top_logits", "lse")
    return replace(example, **{name: getattr(example, name).to(device) for name in names})


def _resume(state: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], log: dict) -> int:
    """Restores weights, optimisers and curve of an interrupted run of the same recipe and data; returns the first step
    to do. Raises TrainError for another recipe, data or target: a curve must describe one training."""
    if not state.is_file():
        return 0
    with readable(state, "remove it to train from the start", TrainError, (Exception,)):
        kept = torch.load(state, map_location="cpu", weights_only=True)
        saved = json.loads(kept["log"])
    for name in ("kind", "recipe", "data", "target", "earlier"):
        if saved.get(name) != json.loads(json.dumps(log.get(name))):
            raise TrainError(
                f"{state}: the unfinished training has another '{name}'; continue it as it was, or remove the folder."
            )
    model.load_state_dict(kept["weights"])
    for optimizer, tensors in zip(optimizers, kept["optimizers"], strict=True):
        optimizer.load_state_dict(tensors)
    log["curve"] = saved["curve"]
    if saved["dtype"] != log["dtype"]:
        log["dtype"] = f"{saved['dtype']}, then {log['dtype']}"
    return saved["curve"][-1]["step"]


def _save(out: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], log: dict) -> None:
    """Writes the drafter's folder, if this is the best point, its log, and last the state, in one step: a training that
    is stopped before that does the piece again."""
    best = max(log["curve"], key=lambda point: point["block_efficiency"])
    if best is log["curve"][-1]:
        _write_weights(out, model)
    write_bytes_atomically(
        out / "training.json", json.dumps(log | {"best_step": best["step"]}, indent=1).encode() + b"\n"
    )
    kept = {"weights": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "log": json.dumps(log)}
    torch.save(kept, out / "state.part")
    os.replace(out / "state.part", out / STATE)


def _write_weights(folder: Path, model: nn.Module) -> None:
    """Writes a drafter's folder: bf16 weights and its config."""
    low = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    write_bytes_atomically(folder / "model.safetensors", save(low))
    write_bytes_atomically(folder / "config.json", json.dumps(asdict(model.config), indent=1).encode() + b"\n")
