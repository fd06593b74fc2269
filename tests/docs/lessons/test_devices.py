"""What every lesson runs on, and that each keeps the bounds that it is read within."""

import ast
import os
import subprocess
import sys

import pytest
from load import LESSONS, load

PROGRAM = "from devices import use_eight_devices; use_eight_devices(); import jax; print(jax.device_count())"


def test_a_lesson_has_eight_devices_by_itself():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    if load("devices").visible_gpus(clean):
        pytest.skip("about machines without an NVIDIA driver")
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=LESSONS, env=clean, capture_output=True, text=True)
    assert found.stdout.strip() == "8", found.stderr


def test_devices_that_have_started_stay():
    import jax

    before = jax.devices()
    load("devices").use_eight_devices()
    assert jax.devices() == before


@pytest.mark.parametrize("lesson", sorted(LESSONS.glob("*.py")), ids=lambda path: path.stem)
def test_a_lesson_can_be_read_in_one_sitting(lesson):
    text = lesson.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    story, program, _ = (ast.get_docstring(ast.parse(text)) or "").partition("\n    python experiments/lessons/")
    assert len(story.split()) <= 120, "formulas and sources stand below the command"
    assert program or "def main(" not in text, "the command that runs it"
