"""Files beside a log, damaged at any place: what reads them takes the change or tells it in one sentence."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsel.costs import load_costs
from specsel.logs import STATS, SpecselError
from specsel.selection.blocks import blocks
from specsel.selection.selector import Selector, fit_selector
from specsel.stats import Resampling
from specsel.study import drafters
from specsel.study.checks import engine_check
from specsel.study.simulation import Model, simulate_positions

LOG = simulate_positions(Model(requests_per_workload=4, output_len=(20, 30)), rng=np.random.default_rng(3))
ANSWERS = {"emitted": [60, 40], "blocks": [30, 20]}
POINT = {"step": 1, "tokens": 10, "loss": 3.0, "first_token": 0.2, "block_efficiency": 2.0, "answers": ANSWERS}
RECIPE = {"draft_vocab": 60, "batch": 8, "optimizer": "muon", "loss": "soft", "start": "target", "rate": 4e-3}
TRAINING = {
    "kind": "eagle",
    "recipe": RECIPE,
    "data_report": {"output_tokens": 1200, "kept_tokens": 1000, "requests": 10, "looping": 2},
    "coverage": {"generated": 0.99, "held_out": 0.98},
    "dtype": "float32",
    "best_step": 1,
    "curve": [POINT, POINT],
}
SAMPLES = [
    {"what": what, "context": 64, "seconds": 0.01} | of
    for what, of in (("t_draft", {"arm": "eagle"}), ("t_verify", {"rows": 10}))
    for _ in range(3)
]
DIFFERENCE = {"workload": "chat", "request": "1", "position": 3, "margin": 1e-6}
CHECK = {"requests": 2, "equal": 1, "blocks": 9, "tokens": 20, "differences": [DIFFERENCE]}

VALUES = [None, True, -1, 0, 10**12, 1.5, float("nan"), float("inf"), "", "1", [], [1], {}, {"a": 1}, ...]
"""What is put in place of something in a file; the ellipsis: it is removed."""


def read_selector(folder):
    Selector.load(folder / "selector.json", arms=LOG.arms, draft_len=LOG.draft_len, features=STATS).redraft(LOG.stats)


def read_training(folder):
    for point in drafters.training_log(folder)["curve"]:
        drafters.held_out(point, resampling=Resampling(9))


READERS = {
    "selector.json": (None, read_selector),
    "training.json": (TRAINING, read_training),
    "timings.json": ({"warmup": 1, "samples": SAMPLES}, lambda folder: load_costs(folder).table),
    "engine_check.json": (
        {"log_sha256": "x", "arms": {"eagle": CHECK}},
        lambda folder: engine_check(folder, replace(LOG, sha256="x")),
    ),
}


def places(value, above=()):
    """Paths of everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above] * bool(above) + [path for key, item in inner for path in places(item, (*above, key))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("files")
    fit_selector(blocks(LOG)).save(found / "selector.json")
    for name, (content, _) in READERS.items():
        if content:
            (found / name).write_text(json.dumps(content))
    return found


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=80)
@given(data=st.data())
def test_any_damage_is_taken_or_told(folder, name, data):
    path, read = folder / name, READERS[name][1]
    text = path.read_text()
    content = json.loads(text)
    read(folder)
    damaged = copy.deepcopy(content)
    place = data.draw(st.sampled_from(places(content)))
    inside = damaged
    for key in place[:-1]:
        inside = inside[key]
    value = data.draw(st.sampled_from(VALUES))
    if value is ...:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    cut = data.draw(st.one_of(st.none(), st.integers(1, len(text))))
    path.write_text(json.dumps(damaged)[:cut])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(folder)
    except SpecselError as error:
        assert "\n" not in str(error)
    finally:
        path.write_text(text)
