"""The words of a plan follow from its numbers: what fits, what is fastest and why, what to change."""

from dataclasses import replace

import pytest
from tiny_experiment import points_text, write_points

from jdp.cli.main import main
from jdp.core.tracing.collectives import Gathered
from jdp.foresight.advice.advice import advise
from jdp.foresight.forecast import Estimate, PlanReport, Settings
from jdp.foresight.memory.peak import Headroom, Memory
from jdp.foresight.timing.parts import Part
from jdp.foresight.timing.timeline import Timeline
from jdp.foresight.traffic.gathering import Gathering
from jdp.foresight.traffic.theory import Theory
from jdp.foresight.verify import Report

GIB = 2**30


def estimate(
    strategy, *, gib, step=0.1, exposed=0.01, sent=0.02, matmul=1e-3, activations=1.0, kept=True, products=None
):
    """A candidate that holds `gib`, of which `activations`, on a device that has 70 GiB; seconds a step."""
    line = Timeline(
        step_seconds=step,
        compute_seconds=step - exposed,
        communication_seconds=sent,
        exposed_seconds=exposed,
        flops=1e12,
        bytes=1e9,
        matmul_seconds=step / 2 if products is None else products,
        median_matmul_seconds=matmul,
        kernels=10,
        events=(),
        caveats=(),
    )
    memory = Memory(
        parameters=int((gib - activations) * GIB),
        gradients=0,
        optimizer=0,
        working=0,
        activations=int(activations * GIB),
        batch=0,
        other=0,
        unattributed=0,
    )
    report = Report(
        kept=kept,
        strategy=strategy,
        partitioning="manual",
        why="",
        target="h100:1x8",
        mesh={"data": 8},
        accumulate=1,
        theory=Theory(0, ()),
        wire_bytes_per_device=1e9,
        theory_wire_bytes_per_device=1e9,
        ratio=1.0,
        rows=(),
        model_axes=(),
        collectives=(),
    )
    return Estimate(
        strategy,
        1,
        None,
        partitioning="manual",
        memory=memory,
        headroom=Headroom(gib <= 70, int(gib * GIB), 70 * GIB, 0.9 if 60 < gib <= 70 else None, "needs much"),
        report=report,
        timeline=line,
        model_flops=8e13,
        peak_flops=1e15,
        tokens=8192,
        devices=8,
    )


def words(*estimates):
    choice, why = advise(estimates)
    return choice, " ".join(why)


def test_the_fastest_that_fits():
    choice, why = words(
        estimate("ddp", gib=96, step=0.08), estimate("zero1", gib=60, step=0.1), estimate("zero3", gib=31)
    )
    assert choice.strategy == "zero3", "as fast as zero1, and holds less"
    assert "ddp 96 GiB, zero1 60 GiB, zero3 31 GiB; zero1, zero3 fit" in why
    assert "zero1 takes as long and holds 29 GiB more" in why


def test_why_it_is_faster():
    slow = estimate("zero3", gib=31, step=0.109, exposed=0.019)
    choice, why = words(estimate("zero1", gib=60), slow)
    assert choice.strategy == "zero1"
    assert "zero3 takes 9.0 % longer: it waits 9 ms longer for other devices" in why
    choice, why = words(estimate("zero1", gib=60), estimate("ddp", gib=65, step=0.12))
    assert "ddp takes 20 % longer: it computes 20 ms longer" in why


def test_a_mesh_of_its_own_is_named_as_keys():
    far = replace(estimate("zero3", gib=31, step=0.09), axes={"replica": 8, "data": 8})
    assert "--mesh.replica 8 --mesh.data 8" in words(estimate("zero1", gib=60), far)[1]
    assert "--mesh" not in words(estimate("zero1", gib=30, step=0.08), far)[1], "the experiment's own is set already"


def test_equals_are_named_too():
    same = [estimate("zero1", gib=60), estimate("zero2", gib=60), estimate("ddp", gib=65, step=0.13)]
    _, why = words(*same)
    assert "zero1 is the one to take: a step takes 100 ms; zero2 takes as long in as much memory; ddp takes 30 %" in why
    choice, why = words(
        estimate("zero1", gib=5, step=0.1004), estimate("ddp", gib=10), estimate("zero3", gib=3, step=0.1012)
    )
    assert choice.strategy == "zero1" and "ddp takes as long and holds 5 GiB more" in why
    assert "zero3 takes as long and holds 2 GiB less" in why


def test_a_zero3_that_holds_its_weights_whole_is_said_whatever_is_chosen():
    plain, whole = estimate("zero1", gib=60), estimate("zero3", gib=60, step=0.13)
    assert "like zero2" not in words(plain, whole)[1]
    held = Gathering((Gathered("head", True, 8, 16),), 1, {"head": 8})
    whole = replace(whole, report=replace(whole.report, gathering=held))
    choice, why = words(plain, whole)
    assert choice.strategy == "zero1"
    assert why.count("This zero3 holds its weights like zero2: 16 B of 16 B") == 1
    assert "run the layers through jdp.scan_layers" in whole.to_json()["like_zero2"]


def test_how_much_is_hidden_and_what_to_change():
    _, why = words(estimate("zero1", gib=60, exposed=0.02, sent=0.04, matmul=40e-6))
    assert "50 % of that time is hidden" in why
    assert "batch per device is too small" in why and "40 µs" in why
    assert "waits for others in 20 % of a step" in why
    _, why = words(estimate("zero1", gib=60, exposed=0.001))
    assert "too small" not in why and "waits for others" not in why and "Matrix products" not in why
    _, why = words(estimate("zero1", gib=60, exposed=0.0, products=0.02))
    assert "Matrix products are 20 % of its computing time" in why


def test_what_costs_most_and_what_to_change_about_it():
    """100 ms, of which it waits 10; a device has 10 GiB left."""
    plain = estimate("ddp", gib=60, exposed=0.01)
    costs = {
        "matrix products": Part(0.04, recomputed=0.012, unfused=0.04),
        "attention": Part(0.02, unfused=0.02),
        "element-wise": Part(0.016, lines={"/x/other.py:1": 0.006, "/x/norms.py:7": 0.01}),
        "copies": Part(0.012),
        "optimizer": Part(0.0005),
    }
    _, why = words(replace(plain, timeline=replace(plain.timeline, parts=costs)))
    assert (
        "It computes 90 ms: 44 % in matrix products, 22 % in unfused attention, 18 % in element-wise work (most at "
        "norms.py:7), 13 % in copies; 13 % of that is computed again" in why
    )
    assert "[length, length]" in why and 'scan = "auto"' in why and "10 GiB left" in why and "saves up to 12 ms" in why
    assert "zero1 shards" not in why, "the update is little"
    costs = {"matrix products": Part(0.06), "attention": Part(0.02), "optimizer": Part(0.02)}
    shard = replace(plain, devices=8, timeline=replace(plain.timeline, parts=costs))
    assert "zero1 shards" in words(shard)[1] and "for any batch" in words(replace(shard, strategy="zero1"))[1]
    assert "[length" not in words(shard)[1], "a fused call"


def test_nothing_fits():
    choice, why = words(estimate("ddp", gib=500), estimate("zero1", gib=300))
    assert choice is None and "none fits" in why and "zero3 shards them most" in why
    choice, why = words(estimate("zero3", gib=150, activations=10))
    assert choice is None and "take more devices (about 3 times as many" in why  # 150 / (70 - 10) rounded up
    choice, why = words(estimate("zero3", gib=150, activations=140))
    assert choice is None and "raise accumulate, rematerialise" in why
    choice, why = words(estimate("zero3", gib=190, activations=90))
    assert choice is None and "raise accumulate, rematerialise" in why, "no number of devices helps"


def test_what_must_be_set_for_it_to_fit():
    """jax takes 75 % of a GPU by default: a step that needs more runs out of memory unless more is given to it."""
    assert "needs much." not in words(estimate("zero1", gib=50))[1]
    assert "zero1 needs much." in words(estimate("zero1", gib=65))[1]


def test_a_broken_contract_is_said():
    assert "jdp verify" in words(estimate("zero1", gib=60, kept=False))[1]
    choice, _ = words(estimate("zero1", gib=60, kept=False), estimate("zero2", gib=61))
    assert choice.strategy == "zero2", "of two as fast, the one that keeps it"


def test_no_times_no_memory():
    bare = replace(estimate("zero1", gib=60), timeline=None, headroom=None)
    choice, why = words(bare, replace(bare, strategy="ddp"))
    assert choice is not None and "not known" in why


def test_what_did_not_compile_is_no_choice():
    failed = Estimate("ddp", 1, None, error="XLA did not compile this step: x")
    assert advise([failed])[0] is None
    assert words(failed, estimate("zero1", gib=60))[0].strategy == "zero1"
    forecast = PlanReport("h100:1x8", 8, (failed,), None, ("No candidate compiled.",))
    assert "did not compile" in str(forecast)
    assert forecast.to_json()["strategies"][0]["fits"] is False


def test_the_definitions():
    one = estimate("zero1", gib=60, step=0.1, exposed=0.01, sent=0.02)
    assert one.mfu == pytest.approx(8e13 / (0.1 * 8 * 1e15))
    assert one.tokens_per_second == pytest.approx(81920)
    assert one.efficiency == pytest.approx(0.9)
    assert one.exposed_fraction == pytest.approx(0.5)


ALL_SET = Settings("bf16", "overlap", "none", False, "cudnn", 4, True)
COSTS = {"copies": Part(0.02), "attention": Part(0.02, unfused=0.02), "matrix products": Part(0.03, recomputed=0.015)}


@pytest.mark.parametrize(
    ("changed", "asked", "not_asked"),
    [
        ({}, (), ("overlap", "--max-batch", "scan = false", "model.attention", "remat =")),
        ({"compiler": "default"}, ('compiler = "overlap"',), ("--max-batch",)),
        ({"compiler": None}, ('compiler = "overlap"',), ()),
        ({"compiler": "own"}, (), ("overlap",)),
        ({"compiler": "none"}, (), ("overlap",)),
        ({"max_batch": False}, ("--max-batch finds",), ("overlap",)),
        ({"scan": True}, ("scan = false", 'scan = "auto"'), ()),
        ({"scan": "auto"}, ("scan = false",), ("one by one",)),
        (
            {"scan": True, "remat": "full"},
            ("scan = false", 'remat = "dots_except_mlp", "dots" or "none"'),
            ("rematerialisation has fewer",),
        ),
        ({"remat": "dots"}, ('(remat = "none")',), ("Copies are", '"dots"')),
        ({"remat": "none"}, (), ("rematerialising less",)),
        ({"remat": ""}, (), ("rematerialising less", "Copies are")),
        ({"attention": "xla"}, ("model.attention",), ()),
        ({"attention": "auto", "precision": "fp32"}, ('precision = "bf16"',), ("model.attention",)),
        ({"attention": "auto"}, ("cuDNN has no kernel",), ('precision = "bf16"', "model.attention")),
    ],
)
def test_advice_never_asks_for_what_is_set(changed, asked, not_asked):
    plain = estimate("zero1", gib=60, exposed=0.02, sent=0.04)
    plain = replace(plain, timeline=replace(plain.timeline, parts=COSTS), settings=replace(ALL_SET, **changed))
    _, why = words(plain)
    assert [each for each in asked if each not in why] == [] == [each for each in not_asked if each in why], why


@pytest.mark.parametrize(
    ("changed", "asked", "not_asked"),
    [
        ({}, ("raise accumulate, rematerialise (remat), or give",), ()),
        ({"remat": "dots"}, ('the MLP (remat = "dots_except_mlp") or all (remat = "full")',), ()),
        ({"remat": "dots_except_mlp"}, ('rematerialise all (remat = "full")',), ('"dots_except_mlp"',)),
        ({"remat": "full"}, ("raise accumulate, or give a device fewer rows",), ("rematerialise",)),
        ({"remat": "full", "rows": 1}, ("shorten the rows",), ("raise accumulate", "rematerialise", "fewer rows")),
    ],
)
def test_what_does_not_fit_is_told_what_is_left_to_do(changed, asked, not_asked):
    tall = replace(estimate("zero3", gib=150, activations=140), settings=replace(ALL_SET, **changed))
    _, why = words(tall)
    assert [each for each in asked if each not in why] == [] == [each for each in not_asked if each in why], why


def test_a_lower_precision_is_advice_for_fp32_only():
    wide = replace(estimate("zero3", gib=150, activations=10), settings=ALL_SET)
    assert "precision" not in words(wide)[1]
    assert "lower precision" in words(replace(wide, settings=replace(ALL_SET, precision="fp32")))[1]


def test_what_cpus_alone_send_is_explained_and_not_judged(tmp_path, capsys):
    """XLA:CPU widens bf16."""
    file = write_points(tmp_path, points_text("[train]\nsteps = 2\nbatch_size = 16\n", hidden=512))
    command = ["plan", str(file), "--target", "cpu:8", "--strategy", "zero1", "--precision", "bf16", "--no-cache"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "BREAKS" not in out and "breaks" not in out
    assert "Note: this is XLA:CPU's program" in out and "with the target h100:1x8" in out
