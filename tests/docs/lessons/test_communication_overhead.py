"""What a step and its parts compute and send, what its profile holds, and what foresight says of it."""

import jax
import numpy as np
import pytest
from load import load

from jdp.foresight.program.collectives import collectives, total_wire_bytes

lesson, step_parts = load("communication_overhead"), load("step_parts")
SMALL = {"layers": 2, "width": 32}
PSI = 2 * 32 * 32


@pytest.mark.parametrize("rows", [2, 8])
def test_only_flops_grow_with_rows_per_device(rows):
    found = lesson.measure(rows, rounds=1, **SMALL)
    # The first of two layers needs no gradient of its input: 5/6 of the products. The rest is tanh and its derivative.
    assert 5 * PSI * rows <= found["FLOPs"] < 5.5 * PSI * rows
    assert found["bytes"] == pytest.approx(2 * 7 / 8 * 4 * PSI, rel=0.01), "the loss and its weight are sent too"
    assert found["ratio"] == found["sync"] / (found["forward"] + found["backward"]) and found["step"] > 0
    assert found["sum"] == found["forward"] + found["backward"] + found["sync"] + found["update"]


def test_the_parts_are_the_step():
    """Run one after the other they make the step's state, only `sync` sends, and the passes' FLOPs are the gradient's:
    else no sum of their times is the step's."""
    step, state, batch = step_parts.setup(8, **SMALL)
    programs = step_parts.programs(step.plan.mesh, state, batch["x"])
    function, given = programs["update"]
    norm, (params, _) = function(*given)
    after, metrics = step(state, batch)
    assert float(norm) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)  # float32 sums of 64 rows
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, after.params)
    compiled = {name: function.lower(*given).compile() for name, (function, given) in programs.items()}
    sent = {name: total_wire_bytes(collectives(each.as_text())) for name, each in compiled.items()}
    assert sent == {"forward": 0, "backward": 0, "sync": 2 * 7 / 8 * 4 * PSI, "update": 0}
    flops = sum(compiled[name].cost_analysis()["flops"] for name in ("forward", "backward"))
    assert flops == pytest.approx(lesson.measure(8, rounds=1, **SMALL)["FLOPs"], rel=0.1)


@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__")  # jaxlib 0.12's, on Python 3.13
def test_the_profile_holds_the_collectives_and_their_waiting():
    found = lesson.profile(2, steps=2, **SMALL)
    assert 0 < found["waiting"] < found["all"] and 0 < found["collectives"] < found["all"]


@pytest.mark.aot
def test_what_is_predicted_for_gpus():
    target, rows, computes, sends, exposed, ratio = lesson.foreseen(2, "h100:1x8", **SMALL)
    assert (target, rows) == ("h100:1x8", 2) and ratio == pytest.approx(sends / computes)
    assert 0 < exposed <= sends * (1 + 1e-9), "a sum of rounded times"


def test_each_roof_has_its_rows():
    """989 TFLOP/s over 3.35 TB/s is 295 FLOPs a byte of memory; over 450 and 50 GB/s 2,198 and 19,780 a byte sent."""
    few, many = lesson.roofline(16), lesson.roofline(32768)
    assert few["memory"] == pytest.approx(295 / (16 * 4096 / (4096 + 32)), rel=1e-3)
    assert many["memory"] < 1 and many["NVLink"] == pytest.approx(2198 / (6 / 7 * 32768), rel=1e-3)
    assert few["InfiniBand"] == pytest.approx(9 * few["NVLink"])
    assert lesson.roofline(32768)["InfiniBand"] < 1 < lesson.roofline(16384)["InfiniBand"]


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    def missing(*_, **__):
        raise ValueError("needs XLA's GPU compiler: pip install 'jdp[aot]'")

    monkeypatch.setattr(lesson.jdp, "foresee", missing)
    assert lesson.foreseen(2, "some:1x8", **SMALL) is None and "pip install" in capsys.readouterr().out
