"""Prompts: published hashes, rebuilt hub texts, one builder for training and evaluation."""

from __future__ import annotations

import pytest

from specsel.engine import hub
from specsel.engine.prompts import SHA256, WORKLOADS, PromptError


def test_hub_rows_become_prompts_in_the_published_wording():
    assert hub.gsm8k(3, {"question": "How\u00a0many? "}) == ("gsm8k/test/3", "How many?", "")
    assert hub.human_eval(0, {"prompt": "def f():  \n    pass\n"})[1].endswith("```python\ndef f():\n    pass\n```")
    assert hub.mbpp(0, {"task_id": 11, "text": "Do it.", "test_list": ["assert f(1)", "assert f(2)"]})[1].endswith(
        "tests:\n\nassert f(1)\nassert f(2)"
    )


def test_a_rebuilt_prompt_that_differs_is_named():
    first = next(iter(hub.index("gsm8k")))
    with pytest.raises(PromptError, match=f"prompt {first} differs"):
        hub.check({first: (first, "another question", "")}, "gsm8k", 1)
    with pytest.raises(PromptError, match=f"prompt {first} is not in the hub"):
        hub.check({}, "gsm8k", 1)


def test_a_workload_that_the_hub_does_not_carry_says_where_to_look():
    with pytest.raises(PromptError, match=r"copy\.eval\.jsonl"):
        hub.load_from_hub("copy")


def test_the_index_lists_every_evaluation_prompt_once():
    counts = {w: len(hub.index(w)) for w in WORKLOADS}
    assert counts == {"gsm8k": 1319, "code": 661, "chat": 238, "copy": 495}
    assert set(SHA256) == {f"{w}.{split}" for w in WORKLOADS for split in ("eval", "train")}
