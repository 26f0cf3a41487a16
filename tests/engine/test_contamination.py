"""Contamination: a training prompt that repeats an evaluation prompt is found, whatever its case, spaces and small
changes."""

from __future__ import annotations

from specsel.engine.contamination import NEAR, shared_runs, words
from specsel.engine.prompts import Prompt

QUESTION = "A farmer has seventeen sheep and sells all but nine of them. How many sheep does the farmer keep, and why?"
OTHER = "Name three rivers that cross more than one border, and say for each of them where it ends and how long it is."


def prompt(text: str) -> Prompt:
    return Prompt("1", "chat", ({"role": "user", "content": text},))


def test_case_spaces_and_punctuation_do_not_hide_a_copy():
    assert words(prompt("  " + QUESTION.upper().replace(" ", "\n  ") + " !!")) == words(prompt(QUESTION))


def test_a_changed_word_is_a_near_copy_and_another_question_is_none():
    changed = words(prompt(QUESTION.replace("seventeen", "fifteen")))
    share = shared_runs([words(prompt(QUESTION)), words(prompt(OTHER))], [changed, "something else entirely"])
    assert NEAR <= share[0] < 1 and share[1] == 0


def test_the_wording_of_the_task_does_not_count():
    """Two hundred prompts that share an instruction: only what is their own can be shared."""
    frame = "Answer the following question in one short sentence and give no reason at all please:"
    asked = [words(prompt(f"{frame} number {i} {i * 7} {i * 13}")) for i in range(200)]
    assert shared_runs(asked, [words(prompt(f"{frame} what is the colour of the sky"))]).max() < NEAR


def test_a_short_prompt_is_compared_as_a_whole():
    assert shared_runs(["who are you", "who is he"], ["who are you"]).tolist() == [1.0, 0.0]
