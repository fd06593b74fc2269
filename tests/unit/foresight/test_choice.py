"""The choice of a plan follows from its numbers: the fastest candidate that fits, and the reasons."""

from dataclasses import replace

import pytest

from jdp.foresight.foresee import Estimate, PlanReport
from jdp.foresight.memory import Headroom, Memory
from jdp.foresight.timing.timeline import Timeline
from jdp.foresight.traffic.theory import Promise, Theory
from jdp.foresight.verify import Report

GIB = 2**30


def estimate(strategy, *, gib, step=0.1, kept=True):
    """A candidate that holds `gib` on a device that has 70 GiB; seconds a step."""
    times = {"step_seconds": step, "compute_seconds": step}
    line = Timeline(**times, communication_seconds=0.0, exposed_seconds=0.0, flops=1e12, events=(), caveats=())
    fits = gib <= 70
    report = Report(
        name=strategy,
        kept=kept,
        target="h100:1x8",
        mesh={"data": 8},
        theory=Theory(0, ()),
        wire_bytes_per_device=1e9,
        bound_wire_bytes_per_device=1e9,
        ratio=1.0,
        memory=Memory(parameters=int(gib * GIB)),
        headroom=Headroom(fits, int(gib * GIB), 70 * GIB, 0.9 if 60 < gib <= 70 else None, "needs much"),
        timeline=line if fits else None,
    )
    return Estimate(strategy, 1, report=report)


def words(*estimates):
    report = PlanReport("h100:1x8", 8, estimates)
    return report.choice, " ".join(report.why)


@pytest.mark.parametrize(("reduced", "gathered"), [(4, 2), (2, 2), (4, 4)])
def test_the_saving_of_narrow_gradients(reduced, gathered):
    """It is reported if weights are gathered in 16 bits and gradients are not; 8 GiB in float32 are 7 on the wire."""
    plain = estimate("zero1", gib=60)
    reduction = Promise("reduce-scatter", 2 * reduced * GIB, ("data",), 8, 1, reduced, GIB // 2)
    theory = Theory(0, (reduction, Promise("all-gather", GIB, ("data",), 8, 1, gathered, GIB // 2)))
    sent = replace(plain.report, theory=theory, wire_bytes_per_device=8 * GIB, partitioning="manual")
    _, why = words(replace(plain, report=sent))
    sentence = '7 GiB of the 8 GiB sent; with reduce = "bf16" a device sends 4.5 GiB.'
    assert (sentence in why) == ((reduced, gathered) == (4, 2))


def test_the_fastest_that_fits():
    choice, why = words(estimate("ddp", gib=96), estimate("zero1", gib=60), estimate("zero3", gib=31, step=0.109))
    assert choice.strategy == "zero1"
    assert "ddp 96 GiB, zero1 60 GiB, zero3 31 GiB; zero1, zero3 fit" in why
    assert "Take zero1: a step takes 100 ms; zero3 takes 9.0 % longer." in why


def test_equally_fast_candidates_are_chosen_by_memory():
    alike = estimate("zero1", gib=5, step=0.1004), estimate("ddp", gib=10), estimate("zero3", gib=3, step=0.1012)
    choice, why = words(*alike)
    assert choice.strategy == "zero1" and "ddp takes as long; zero3 takes as long" in why
    choice, _ = words(estimate("zero1", gib=5), estimate("ddp", gib=10), estimate("zero3", gib=3, kept=False))
    assert choice.strategy == "zero1", "one that keeps its contract comes first"


def test_where_nothing_fits_it_says_what_needs_least():
    choice, why = words(estimate("ddp", gib=96), estimate("zero3", gib=80))
    assert choice is None and "none fits. zero3 needs the least, 80 GiB." in why


def test_what_is_not_known_is_not_compared():
    failed = Estimate("ddp", 1, error="no room")
    assert words(failed) == (None, "No candidate compiled.")
    assert PlanReport("cpu:8", 8, (failed,)).verdict == "No candidate compiled."
    untimed = estimate("ddp", gib=1)
    untimed = replace(untimed, report=replace(untimed.report, headroom=None, timeline=None))
    choice, why = words(untimed, failed)
    assert choice is untimed and why.startswith("A device holds: ddp 1 GiB. Its memory is not known here. ddp holds")
    assert "the time of a step is unknown for this target" in why


def test_the_definitions():
    one = estimate("zero1", gib=60)
    line = replace(one.timeline, compute_seconds=0.09, communication_seconds=0.02, exposed_seconds=0.01)
    one = replace(one, report=replace(one.report, timeline=line), model_flops=8e13, peak_flops=1e15, tokens=8192)
    assert one.mfu == pytest.approx(8e13 / (0.1 * 8 * 1e15))
    assert one.tokens_per_second == pytest.approx(81920)
    assert one.efficiency == pytest.approx(0.9)
    assert one.timeline.exposed_fraction == pytest.approx(0.5)
