"""Answers to the exercises and the questions of experiments/lessons, its worked numbers, and the coding exercises."""

import re

import jax
import pytest
from load import LESSONS, load
from own_process import python

from jdp.base.chips import GPUS
from jdp.foresight.traffic.theory import ring_bytes, sent_bytes, zero_bytes

B7, B70, B175 = 7 * 10**9, 70 * 10**9, 175 * 10**9
README = (LESSONS / "README.md").read_text("utf-8")


def gigabytes(count, devices, *names):
    return [zero_bytes(count, devices, name).total / 1e9 for name in names]


HELD = B175 / (8 * 8)  # a device's parameters, with 8 devices of `model` and 8 of `pipeline`
ADAMW = sent_bytes(B7, 8, "zero1", params=4, grads=4)
ANSWERS = {
    "weights and their all-reduce": ([2 * B7 / 1e9, ring_bytes("all-reduce", 2 * B7, 8) / 1e9], [14, 24.5]),
    "GPT-3 on 64 devices": (gigabytes(B175, 64, "ddp", "zero1", "zero2", "zero3"), [2800, 732.8, 388.3, 43.75]),
    "80 GB of state on 8 devices": (gigabytes(5 * 10**9, 8, "ddp", "zero1", "zero3"), [80, 27.5, 10]),
    "80 GB of state on 2 devices": (gigabytes(5 * 10**9, 2, "ddp", "zero1", "zero3"), [80, 50, 40]),
    "1": (ring_bytes("all-reduce", 2 * B7, 8) / 450e9, 0.0544),
    "3": ([HELD / 1e9, 2 * HELD / 1e9, ring_bytes("all-reduce", 2 * HELD, 8) / 1e9], [2.73, 5.47, 9.57]),
    "7": (
        [sent_bytes(B7, 8, "zero3", accumulate=k) / sent_bytes(B7, 8, "ddp", accumulate=k) for k in (1, 4)],
        [1.5, 6],
    ),
    # 6 FLOPs a row and parameter against 2 · 7/8 · 4 bytes a parameter: rows = bytes · FLOPs a byte / 6
    "8": (ring_bytes("all-reduce", 4, 8) * 0.4 * 989e12 / 450e9 / 6, 1026),
    # one gather instead of two: D + D, and the whole working copy is there: what jdp calls zero2
    "10": ([sent_bytes(B7, 8, name) / sent_bytes(B7, 8, "zero3") for name in ("zero2", "ddp")], [2 / 3, 2 / 3]),
    "10, bytes": (zero_bytes(B7, 8, "zero2").parameters, 2 * B7),
    "11, gathered": ((ADAMW + ring_bytes("all-gather", 2 * B7, 8)) / ADAMW, 1.25),
    "11, owned": ((ADAMW + 2 * ring_bytes("all-to-all", 2 * B7 // 8, 8)) / ADAMW, 1.0625),
}
"""An exercise, or a worked number -> the number by jdp's formulas, and the answer, of three digits."""


@pytest.mark.parametrize(("computed", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_those_of_the_formulas(computed, answer):
    assert computed == pytest.approx(answer, rel=2e-3)


def test_links_are_those_that_plans_use():
    chip = GPUS["h100"]
    rates = [rate / 1e9 for rate in (chip.link_bandwidth, chip.host_bandwidth, chip.network_bandwidth)]
    rates.insert(0, chip.memory_bandwidth / 1e12)
    shown = re.findall(r"^\| (?:memory|NVLink|PCIe|InfiniBand)[^|]*\| ([\d.]+) [TG]B/s", README, flags=re.MULTILINE)
    assert [f"{rate:.3g}" for rate in rates] == shown


def test_4_devices_for_70b():
    held = [zero_bytes(B70, devices, "zero3").total for devices in (13, 14)]
    assert held[1] <= 80e9 < held[0]
    assert zero_bytes(B70, 10**6, "zero2").total > 80e9  # the whole weights are 140 GB


def test_5_where_a_naive_exchange_is_faster():
    size = load("ring_allreduce").size_where_equal(8, 10e-6, 50e9)
    assert size == pytest.approx(666_667, abs=1)


def test_every_lesson_is_in_the_order():
    rows = re.findall(r"^\| \d+ \| \[(\w+\.py)\]", README, flags=re.MULTILINE)
    assert len(rows) == len(set(rows)) == 17
    programs = {path.name for path in LESSONS.glob("*.py") if "def main(" in path.read_text("utf-8")}
    assert programs == set(rows)


INTERVIEW = (LESSONS / "INTERVIEW.md").read_text("utf-8")
ASKED = re.findall(r"^(\d+)\. \*\*(.+?)\*\*(.*?)(?=^\d+\. |^## |\Z)", INTERVIEW, flags=re.MULTILINE | re.DOTALL)


def test_questions_with_a_program_or_table_each():
    numbers, questions, answers = zip(*ASKED, strict=True)
    assert numbers == tuple(map(str, range(1, 32))) and len({*questions}) == 31
    headings = re.findall(r"^## (.*)", README, re.M)
    places = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings} | {""}
    for answer in answers:
        links = re.findall(r"\]\(([\w.]+)(?:#([\w-]+))?\)", answer)
        assert links and all((LESSONS / file).is_file() and part in places for file, part in links), answer


def test_numbers_of_the_interview_are_those_recorded():
    planned = load("planned")
    (first, *_, last), replicas = planned.RECORDED[planned.FEW], planned.RECORDED[planned.REPLICAS][-1]
    shown = f"reach {last[0]:.0%} while 8 reach {first[0]:.0%}".replace("%", " %")
    assert shown in INTERVIEW and f"it is {replicas[0]:.0%}".replace("%", " %") in INTERVIEW


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
    solved, yours = python(FOLDER, "--solved"), python(FOLDER, "buckets")
    assert solved.returncode == 0 and solved.stdout.count(" right\n") == len(NAMES), solved.stdout + solved.stderr
    assert yours.returncode == 1 and "buckets   not yet. buckets: begin with the last tensor" in yours.stdout
