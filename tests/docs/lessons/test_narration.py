"""What lessons share: eight devices, bounds of their length, readable pictures, and tables with what they show."""

import ast
import logging
import os
import subprocess
import sys

import pytest
from load import LESSONS, load

from jdp.base.notices import notice_anywhere
from jdp.report.charts import chart

narration = load("narration")
PROGRAMS = sorted(path for path in LESSONS.glob("*.py") if "def main(" in path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("x", "y", "labels"),
    [
        ([1e-3, 1e3], [1, 1e7], ["0.001", "1,000", "10,000,000"]),
        ([2, 3, 5], [20, 30, 50], ["2", "3", "20", "30"]),  # within a decade: its own minor labels
    ],
)
def test_logarithmic_axes_are_labelled_with_numbers(x, y, labels, tmp_path, capsys):
    figure, (panel,) = chart()
    panel.loglog(x, y)
    narration.keep(figure, tmp_path / "picture.svg", "a line")
    text = (tmp_path / "picture.svg").read_text("utf-8")
    assert "mathdefault" not in text and "$" not in text
    assert all(f">{label}</text>" in text for label in labels)


def test_reports_stand_below_the_tables(capsys):
    def lesson():
        notice_anywhere("a report of test_narration")
        narration.show("Numbers", ("what", "number"), [("half", 0.5)], "What you see:  a half.\n  Nothing else.")

    logger = logging.getLogger("jdp")
    before, elsewhere = (logger.level, logger.propagate, list(logger.handlers)), logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(elsewhere)  # as libraries add one to the root logger
    narration.tell(lesson)
    logging.getLogger().removeHandler(elsewhere)
    out, err = capsys.readouterr()
    assert out.endswith(
        "half  0.5\nWhat you see: a half. Nothing else.\n\nReported by jdp:\n  a report of test_narration\n"
    )
    assert not err and before == (logger.level, logger.propagate, list(logger.handlers))


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda path: path.stem)
def test_every_lesson_keeps_reports_from_its_tables(lesson):
    assert lesson.read_text("utf-8").endswith("    tell(main)\n")


PROGRAM = "from devices import use_eight_devices; use_eight_devices(); import jax; print(jax.device_count())"


def test_a_lesson_has_eight_devices_by_itself():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    if load("devices").visible_gpus(clean):
        pytest.skip("about machines without an NVIDIA driver")
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=LESSONS, env=clean, capture_output=True, text=True)
    assert found.stdout.strip() == "8", found.stderr


@pytest.mark.parametrize("lesson", sorted(LESSONS.glob("*.py")), ids=lambda path: path.stem)
def test_a_lesson_can_be_read_in_one_sitting(lesson):
    text = lesson.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    story, program, _ = (ast.get_docstring(ast.parse(text)) or "").partition("\n    python experiments/lessons/")
    assert len(story.split()) <= 120, "formulas and sources stand below the command"
    assert program or "def main(" not in text, "the command that runs it"
