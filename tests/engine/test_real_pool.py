"""The real pool on real prompts: the committed log is what the engine does, and nothing that drafts changes the output.

Needs the embedded target (`specsel fetch`) and the prompt files (SPECSEL_PROMPTS, else data/prompts).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specsel import logs
from specsel.engine import target as targets
from specsel.engine.decode import Decoder, always, plain
from specsel.engine.live import first_difference, margin_at
from specsel.engine.pool import load_pool
from specsel.engine.prompts import default_folder, encode, load_prompts
from specsel.engine.recipes import TrainConfig
from specsel.engine.start import new_dflash, new_eagle, randomise
from specsel.engine.target import Features, load_target

ROOT = Path(__file__).parents[2]
RUN = ROOT / "data" / "runs" / "campaign"
TIE = 1e-3
"""Top-1/top-2 logit margin below which rounding alone can move an fp32 choice between two machines or two batch
shapes."""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (targets.home() / "targets" / targets.EMBEDDED).is_dir(), reason="run `specsel fetch` first"
    ),
    pytest.mark.skipif(
        not (default_folder() / "gsm8k.eval.jsonl").is_file(), reason="no prompt files: set SPECSEL_PROMPTS"
    ),
]


@pytest.fixture(scope="module")
def real():
    target = load_target()
    config = {name: ROOT / "data/drafters" / name for name in ("eagle", "dflash")}
    target, pool = load_pool(target, config)
    return target, Features(target), pool


@pytest.fixture(scope="module")
def requests():
    """The first logged request of each workload: (index in the log, prompt)."""
    log = logs.read_log(RUN)
    first = [int(np.flatnonzero(log.workload == w)[0]) for w in range(len(log.workloads))]
    texts = {w: {p.id: p for p in load_prompts(w, "eval")} for w in log.workloads}
    return log, [(r, texts[log.workloads[log.workload[r]]][log.requests[r]]) for r in first]


def test_the_committed_log_is_what_the_engine_does(real, requests):
    """One request a workload, every arm: all blocks as logged, or the first difference stands at a tie of the target's
    logits."""
    target, features, pool = real
    log, chosen = requests
    decoder = Decoder(features, pool, draft_len=log.draft_len)
    for r, prompt in chosen:
        for k, arm in enumerate(log.arms):
            trace = decoder.run(encode(target.tokenizer, prompt), always(arm), max_new=log.manifest["max_new_tokens"])
            where = first_difference(log, r, k, trace)
            assert where is None or margin_at(trace, where, log.draft_len) < TIE, (arm, prompt.id, where)


def test_real_drafters_and_their_union_leave_the_greedy_output_unchanged(real, requests):
    """Library greedy decoding == plain == union of all four, token for token, up to the first tie."""
    target, features, pool = real
    decoder = Decoder(features, pool)
    for _, prompt in requests[1]:
        ids = encode(target.tokenizer, prompt)
        truth = target.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=48)[0, len(ids) :].tolist()
        for decide in (plain, lambda position, state: (list(pool), None)):
            trace = decoder.run(ids, decide, max_new=48)
            same = next((i for i, (a, b) in enumerate(zip(trace.output, truth, strict=False)) if a != b), len(truth))
            assert trace.output == truth or trace.margins[same] < TIE


def test_an_untrained_drafter_changes_nothing_and_helps_little(real, requests):
    """Drafters with random layers in the slots of the trained ones: same output, block efficiency 1.0 to 1.05."""
    target, features, trained = real
    eagle, dflash = trained["eagle"], trained["dflash"]
    from specsel.engine.drafters.dflash import DFlash
    from specsel.engine.drafters.eagle import Eagle

    head = randomise(new_eagle(target, eagle.model.target_ids, TrainConfig()), seed=0)
    model = randomise(new_dflash(target, dflash.ids, TrainConfig()), seed=1)
    embedding, lm_head = target.model.model.embed_tokens.weight, target.model.lm_head.weight
    pool = {"eagle": Eagle(head, embedding), "dflash": DFlash(model, embedding, lm_head)}
    decoder, blocks, emitted = Decoder(features, pool), 0, 0
    for _, prompt in requests[1]:
        ids = encode(target.tokenizer, prompt)
        truth = decoder.run(ids, plain, max_new=32)
        for arm in pool:
            trace = decoder.run(ids, always(arm), max_new=32)
            assert trace.output == truth.output
            blocks, emitted = blocks + len(trace.blocks), emitted + len(trace.output) - 1
    assert 1.0 <= emitted / blocks <= 1.05
