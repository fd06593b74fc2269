"""What a step computes and sends, what its profile holds, and what foresight says of it."""

import math

import pytest
from load import load

lesson = load("communication_overhead")
SMALL = {"layers": 2, "width": 32}
PSI = 2 * 32 * 32


@pytest.mark.parametrize("rows", [2, 8])
def test_flops_grow_with_rows_a_device_and_bytes_do_not(rows):
    found = lesson.measure(rows, rounds=1, **SMALL)
    # The first of two layers needs no gradient of its input: 5/6 of the products. The rest is tanh and its derivative.
    assert 5 * PSI * rows <= found["FLOPs"] < 5.5 * PSI * rows
    assert found["bytes"] == pytest.approx(2 * 7 / 8 * 4 * PSI, rel=0.01), "the loss and its weight are sent too"
    assert found["ratio"] == found["sync"] / found["gradient"] and found["step"] > 0
    assert found["sum"] == found["gradient"] + found["sync"] + found["update"]


def test_the_profile_holds_the_collectives_and_their_waiting():
    found = lesson.profile(2, steps=2, **SMALL)
    assert 0 < found["waiting"] < found["all"] and 0 < found["collectives"] < found["all"]


def test_what_is_foreseen_for_these_devices():
    target, rows, computes, sends, exposed, ratio = lesson.foreseen(2, "cpu:8", **SMALL)
    assert (target, rows) == ("cpu:8", 2) and ratio == pytest.approx(sends / computes)
    assert 0 < exposed <= sends * (1 + 1e-9), "a sum of rounded times"


@pytest.mark.aot
def test_more_rows_lower_the_ratio_foreseen_for_gpus_and_only_the_computing_changes():
    few, many = (lesson.foreseen(rows, "h100:1x8", **SMALL) for rows in (8, 4096))
    assert few[3] == pytest.approx(many[3]) and few[-1] > many[-1] and math.isfinite(few[-1])


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    def missing(*_, **__):
        raise ValueError("needs XLA's GPU compiler: pip install 'jdp[aot]'")

    monkeypatch.setattr(lesson.jdp, "foresee", missing)
    assert lesson.foreseen(2, "some:1x8", **SMALL) is None and "pip install" in capsys.readouterr().out
