"""Coding exercises: each stub fails, each solution is right, and plausible mistakes are found."""

import subprocess
import sys

import jax
import pytest
from load import LESSONS

FOLDER = LESSONS / "exercises"


@pytest.fixture(autouse=True)
def folder_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def checks():
    import checks

    return checks.CHECKS


NAMES = ("broadcast", "mean_gradient", "ring", "contracted", "last_ends", "buckets")
NAMES += ("sends_over_computes", "zero1_update", "efficiency")


def test_every_exercise_is_checked():
    assert tuple(checks()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_fails_and_the_solution_passes(name: str):
    import solved
    import yours

    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        checks()[name](getattr(yours, name))
    checks()[name](getattr(solved, name))


WRONG = {
    "broadcast": lambda own: jax.lax.pmax(own, "data"),
    "mean_gradient": lambda summed, rows: jax.lax.pmean(summed / rows, "data"),
    "buckets": lambda sizes, limit: [[number] for number in reversed(range(len(sizes)))],
    "sends_over_computes": lambda rows, devices, flops, bandwidth: flops * 8 / (6 * rows * bandwidth),
    "zero1_update": lambda w, g, m: (w - 0.1 * jax.lax.psum(g, "data"), 0.9 * m),
    "ring": lambda own: jax.lax.psum(own, "data"),
    "contracted": lambda x, w: x @ w,
    "last_ends": lambda ready, sends: ready[0] + sum(sends),
    "efficiency": lambda repeated, divided, devices: (repeated + divided) / (repeated + divided / devices),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_plausible_mistake_is_seen(name: str):
    with pytest.raises(AssertionError):
        checks()[name](WRONG[name])


def test_the_program_reports_each_answer():
    run = lambda *given: subprocess.run([sys.executable, str(FOLDER), *given], capture_output=True, text=True)  # noqa: E731
    solved, yours = run("--solved"), run("buckets")
    assert solved.returncode == 0 and solved.stdout.count(" right\n") == len(NAMES), solved.stdout + solved.stderr
    assert yours.returncode == 1 and "buckets   not yet. buckets: begin with the last tensor" in yours.stdout
