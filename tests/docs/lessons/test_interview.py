"""Thirty-one questions, numbered, whose answers are short sentences; `test_exercises.py` follows their links."""

import re

from load import LESSONS

PAGE = (LESSONS / "INTERVIEW.md").read_text("utf-8")
ASKED = re.findall(r"^(\d+)\. \*\*(.+?)\*\*(.*?)(?=^\d+\. |^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_questions_in_order():
    assert [int(number) for number, _, _ in ASKED] == list(range(1, 32))
    assert len({question for _, question, _ in ASKED}) == 31


def test_answers_are_short():
    for number, _, answer in ASKED:
        sentences = re.split(r"(?<=[.?!])\s+", re.sub(r"\]\([^)]*\)", "]", answer).strip())
        assert len(sentences) <= 3, number
        assert max(len(sentence.split()) for sentence in sentences) <= 30, number


def test_the_short_lessons_are_asked_for():
    for name in ("gradient_accumulation", "mixed_precision", "data_and_seeds", "input_bound", "zero_muon"):
        assert f"]({name}.py)" in PAGE
