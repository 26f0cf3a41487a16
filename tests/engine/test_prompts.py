"""Prompts: published hashes, rebuilt hub texts, one builder for training and evaluation."""

from __future__ import annotations

import pytest

from specsel.engine import prompts
from specsel.engine.prompts import SHA256, WORKLOADS, PromptError, load_prompts, workloads_in


def test_hub_rows_become_prompts_in_the_published_wording():
    assert prompts.gsm8k(3, {"question": "How\u00a0many? "}) == ("gsm8k/test/3", "How many?", "")
    assert prompts.human_eval(0, {"prompt": "def f():  \n    pass\n"})[1].endswith("```python\ndef f():\n    pass\n```")
    assert prompts.mbpp(0, {"task_id": 11, "text": "Do it.", "test_list": ["assert f(1)", "assert f(2)"]})[1].endswith(
        "tests:\n\nassert f(1)\nassert f(2)"
    )


def test_a_rebuilt_prompt_that_differs_is_named():
    first = next(iter(prompts.index("gsm8k")))
    with pytest.raises(PromptError, match=f"prompt {first} differs"):
        prompts.check({first: (first, "another question", "")}, "gsm8k", 1)
    with pytest.raises(PromptError, match=f"prompt {first} is not in the hub"):
        prompts.check({}, "gsm8k", 1)


def test_a_workload_that_the_hub_does_not_carry_says_where_to_look():
    with pytest.raises(PromptError, match=r"copy\.eval\.jsonl"):
        prompts.load_from_hub("copy")


def test_the_index_lists_every_evaluation_prompt_once():
    counts = {w: len(prompts.index(w)) for w in WORKLOADS}
    assert counts == {"gsm8k": 1319, "code": 661, "chat": 238, "copy": 495}
    assert set(SHA256) == {f"{w}.{split}" for w in WORKLOADS for split in ("eval", "train")}


def test_every_prompt_file_of_a_folder_is_a_workload(tmp_path):
    for name in ("poems.eval.jsonl", "code.eval.jsonl", "art.eval.jsonl", "poems.train.jsonl"):
        (tmp_path / name).write_text("", encoding="utf-8")
    assert workloads_in(tmp_path) == ("code", "art", "poems")
    with pytest.raises(PromptError, match=r"no prompt file <workload>\.eval\.jsonl"):
        workloads_in(tmp_path / "nowhere")


GOOD = '{"id": "p/1", "messages": [{"role": "user", "content": "x"}]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "field 'id' must be text"),
        ('{"id": 7, "messages": []}', "field 'id' must be text"),
        ('{"id": "a", "messages": []}', "field 'messages' must be a list"),
        ('{"id": "a", "messages": [{"role": "user"}]}', "field 'messages' must be a list"),
        (GOOD, "field 'id' 'p/1' is there twice"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, said):
    (tmp_path / "poems.eval.jsonl").write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(PromptError, match=f"poems.eval.jsonl, line 3: {said}"):
        load_prompts("poems", "eval", tmp_path)
