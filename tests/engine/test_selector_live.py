"""A redraft selector in the live engine makes the blocks of its replay, and a stranger's selector is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_harness import config  # noqa: F401  (a fixture)

from specsel import logs
from specsel.engine.decode import Decoder, redrafting
from specsel.engine.harness import collect
from specsel.engine.live import race
from specsel.engine.prompts import encode, load_prompts
from specsel.logs import SpecselError
from specsel.replay import Plan, follow
from specsel.selection.selector import Selector


@pytest.fixture
def run(target, pool, config, tmp_path):  # noqa: F811
    return collect(target, pool, tmp_path / "run", config)


def half(log, arm):
    """A selector that redrafts below the middle of an arm's first confidences, which no value in the log comes near."""
    values = np.unique(log.stats["conf_first"][:, log.arms.index(arm)])
    values = values[np.isfinite(values)]
    widest = len(values) // 3 + int(np.diff(values)[len(values) // 3 : -(len(values) // 3)].argmax())
    middle = float(values[widest : widest + 2].mean())  # a log rounds to six digits
    return Selector(
        log.arms,
        arm,
        log.draft_len,
        logs.STATS,
        fill=(middle,) * 4,
        center=(0.0, 0.0, middle, *[0.0] * 5),
        scale=(1.0,) * 8,
        weights=(0.0, 0.0, -1.0, *[0.0] * 5),
        intercept=0.0,
        threshold=0.5,
    )


@pytest.mark.parametrize("arm", ["dflash", "eagle"])
def test_the_selector_makes_the_same_blocks_live_and_in_replay(target, features, pool, config, run, arm):  # noqa: F811
    """Request by request: blocks, drafts and emitted tokens; some blocks are redrafted and some are not."""
    log = logs.read_log(run)
    selector, decoder = half(log, arm), Decoder(features, pool, draft_len=4)
    again = selector.redraft(log.stats)
    assert 0.1 < again.mean() < 0.9
    first = Plan.one("selector", log, np.full(log.n_positions, log.arms.index(arm)))
    replayed = follow(log, Plan("selector", first.arms | again[:, None]))
    prompts = {
        (w, p.id): encode(target.tokenizer, p)
        for w in config.workloads
        for p in load_prompts(w, "eval", config.prompts)
    }
    for r, request in enumerate(log.requests):
        prompt = prompts[log.workloads[log.workload[r]], request]
        trace = decoder.run(prompt, redrafting(selector, log.arms), max_new=24)
        assert len(trace.blocks) == replayed.blocks[r]
        assert sum(b.emitted for b in trace.blocks) == replayed.emitted[r]
        pulls = [sum(a in b.proposed for b in trace.blocks) for a in log.arms]
        assert pulls == replayed.pulls[r].tolist()


def test_a_selector_races_and_another_pool_is_refused_by_name(features, pool, config, run, tmp_path):  # noqa: F811
    half(logs.read_log(run), "eagle").save(tmp_path / "s.json")
    options = {"policies": ("plain",), "selector": tmp_path / "s.json", "per_workload": 1, "prompts": config.prompts}
    records = json.loads(race(features, pool, run, **options).read_text(encoding="utf-8"))["records"]
    assert {r["policy"] for r in records} == {"plain", "selector:s.json"} and all(r["same_output"] for r in records)
    strange = replace(half(logs.read_log(run), "eagle"), features=("conf_min",))
    for other, words in ((strange, "for features"), (replace(strange, arms=("a", "eagle")), "for arms")):
        other.save(tmp_path / "s.json")
        with pytest.raises(SpecselError, match=words):
            race(features, pool, run, **options)
