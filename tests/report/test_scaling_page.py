"""Several targets side by side: the table, the sentences, the JSON and the page, and `jdp plan` with CPU targets."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
from test_plan_page import NO_ROOM, Reader, events_of, forecast_of, outlook_of, timeline_of

from jdp.cli import main as cli
from jdp.foresight.advice.scaling import Scaling
from jdp.foresight.candidates.smallest_cluster import Smallest
from jdp.foresight.cost.bill import Bill
from jdp.foresight.forecast import PlanReport
from jdp.report.scaling_page import scaling_page

DIGITS = """
name = "digits"
strategy = "zero1"
[model]
name = "mlp"
hidden = [16]
[data]
source = "digits"
[train]
steps = 10
batch_size = 64
"""


def plan_for(devices: int, step: float, *, money: bool = True, **changed: object) -> PlanReport:
    """A plan of one candidate whose step takes `step` seconds."""
    line = replace(timeline_of(events_of(20), exposed=1e-6), step_seconds=step, error=0.22)
    one = outlook_of(timeline=line, devices=devices)
    bill = Bill(1e12, "tokens", one.tokens, step, devices, 2.5 if money else None, 0.22)
    return replace(forecast_of(one), target=f"h100:{devices}x1", devices=devices, bill=bill, **changed)


def three() -> Scaling:
    small = replace(forecast_of(outlook_of(headroom=NO_ROOM, timeline=None), choice=None), target="h100:1x1", devices=1)
    small = replace(small, notes=("rounded up", "of all"))
    return Scaling((small, plan_for(8, 0.1, notes=("of all",)), plan_for(64, 0.02, notes=("of all",))))


def test_a_row_each_with_efficiency_against_the_first_that_runs():
    scaling = three()
    rows = [dict(zip(scaling.headings, row, strict=True)) for row in scaling.table()]
    assert [row["fits"] for row in rows] == ["no", "yes", "yes"]
    assert [row["efficiency"] for row in rows] == ["–", "100 %", "62 %"]  # 5 times as fast on 8 times as many
    assert [row["take"] for row in rows] == ["–", "zero1", "zero1"]
    assert rows[0]["money"] == "–" and rows[2]["days"] == "1.77 days"
    assert [row["efficiency"] for row in scaling.to_json()["scaling"]] == [None, 1.0, pytest.approx(0.625)]
    free = Scaling((plan_for(8, 0.1, money=False), plan_for(64, 0.02, money=False)))
    assert free.headings[-1] == "device-hours"


def test_the_sentences_name_the_smallest_and_the_fewest_hours():
    scaling = three()
    assert "The smallest of these that it fits, by the compiled sizes: h100:8x1, under zero1." in scaling.why
    assert "Fewest device-hours: 1,700, on h100:8x1." in scaling.why
    assert scaling.notes == ("h100:1x1: rounded up", "of all")


def test_the_smallest_beyond_those_given_is_told_once_for_a_kind():
    least = Smallest("h100:1x1", "zero3", 60 * 2**30, 77 * 2**30)
    scaling = Scaling((plan_for(8, 0.1, smallest=least), plan_for(64, 0.02, smallest=replace(least, name="zero1"))))
    [told] = [sentence for sentence in scaling.why if "zero3 on h100:1x1, 60 GiB of 77 GiB" in sentence]
    assert "foreseen, not compiled (--smallest compiles it)" in told and "zero1 on h100:1x1" not in str(scaling.why)


def test_the_page_has_numbers_table_and_two_pictures():
    found = Reader(scaling_page(three(), title="t", described="GPT, 128 rows"))
    for expected in ("GPT, 128 rows. Compiled", "smallest that fits h100:8x1", "fastest h100:64x1", "62 %", "4,240"):
        assert expected in found.text, expected
    assert found.values("class").count("number") == 4 and found.tags.count("svg") == 2
    assert "Nothing fits." in found.text and "least money" in found.text


def test_one_size_has_no_curve():
    assert "svg" not in Reader(scaling_page(Scaling((plan_for(8, 0.1), plan_for(8, 0.2))), title="t")).tags


def test_the_command_compares_targets(tmp_path, capsys):
    """JAX makes the number of virtual devices once, so the most that any target has are asked for: eight, as here, and
    in a process of its own four."""
    file, page = tmp_path / "digits.toml", tmp_path / "page.html"
    file.write_text(DIGITS)
    jax.devices()
    given = ["plan", str(file), "--target", "cpu:1,cpu:8", "--strategy", "zero1", "--tokens", "1e6"]
    assert cli.main([*given, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["target"] for each in found["targets"]] == ["cpu:1", "cpu:8"]
    assert found["scaling"][0]["efficiency"] == 1.0 and found["targets"][1]["bill"]["steps"] == 15625
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    program = [sys.executable, "-m", "jdp", "plan", str(file), "--target", "cpu:1,cpu:4", "--strategy", "zero1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines() if line.startswith("cpu:")] == [
        ["cpu:1", "1", "zero1"],
        ["cpu:4", "4", "zero1"],
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--target", "h100:1x8,h100:1x8"), "--target takes different words"),
        (("--target", "h100:1x8,h100:8x8", "--trace", "t.json"), "--trace shows the step of one target; given 2"),
        (("--target", "h100:1x8,h100:8x8", "--tune"), "--tune searches for one target"),
    ],
)
def test_what_needs_one_target_says_so(given, expected, capfd):
    assert cli.main(["plan", "nowhere.toml", *given]) == 2
    out, err = capfd.readouterr()
    assert not out and expected in err
