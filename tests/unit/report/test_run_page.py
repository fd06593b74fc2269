"""The page of runs: thinned, with the runs' numbers, evaluations and samples, and all escaped.

And what holds for every page: it loads nothing, its policy allows its one script, its style sheet has its classes.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import math
import re

import pytest
from test_plan_page import FAILED, HOSTILE, NO_ROOM, Reader, assert_only_text, forecast_of, outlook_of

from jdp.core.sharding.placement import Placement
from jdp.report.pages import plan_page, run_page
from jdp.report.run import CompiledStep, Run
from jdp.run.read_folder import read_samples

DEVICES = {"platform": "cpu", "device": "cpu", "devices": 4, "hosts": 1, "jax": "0.10", "python": "3.11"}
HISTORY = (
    {"event": "started", "step": 0, "time": 1000.0, **DEVICES},
    {"event": "stopped", "step": 20, "time": 1100.0, "signal": "SIGTERM"},
    {"event": "resumed", "step": 20, "time": 1200.0, **DEVICES},
    {"event": "resumed", "step": 40, "time": 1300.0, **DEVICES},  # the visit before was killed
    {"event": "finished", "step": 60, "time": 1400.0, "stopped_early": False},
)
SETTINGS = {"name": '"a"', "strategy": '"zero1"', "train.steps": "60", "train.batch_size": "16"}
LEAF = Placement("params/head/kernel", (64, 256), "float32", "P('data',)", "P()", 16_384, "dimension 0 over data")


def rows_of(count=60, **more):
    same = {"lr": 1e-3, "grad_norm": 1.5, "step_seconds": 0.25, "data_wait_seconds": 0.025, "tokens_per_second": 4096.0}
    steps = range(1, count + 1)
    rows = [{"step": step, "time": 1000.0 + step, "loss": 5 / step**0.1, **same, **more} for step in steps]
    return [*rows, {"step": count, "time": 1070.0, "eval_loss": 3.125, "eval_bits_per_token": 4.5}]


def run_of(name="a", **changed):
    plain = Run(name, rows_of(), HISTORY, 'name = "a"\n', SETTINGS, (20, 40, 60))
    return dataclasses.replace(plain, **changed)


def compiled(**changed):
    return CompiledStep("cpu:4", outlook_of(**changed), [LEAF], ["times are simulated"])


def read(*runs):
    return Reader(run_page(runs))


@functools.cache
def text_of_two():
    """A page of two runs that differ, one with its compiled step: several tests read it."""
    other = run_of("b", settings=SETTINGS | {"optimizer.lr": "0.1", "strategy": '"ddp"'})
    return run_page([run_of(step=compiled(), rows=rows_of()), other])


def test_the_page_has_the_numbers_of_the_run():
    goodput = "goodput 91 % of 2 h; saving 5.1 %"
    found = read(run_of(rows=rows_of(mfu=0.421), step=compiled(), goodput=goodput))
    for expected in (
        "Run a",
        "Goodput 91 % of 2 h; saving 5.1 %.",
        "60 of 60",
        "finished",
        "3.125 loss, 4.5 bits per token",
        "4.1k tokens/s",
        "42 %",  # MFU
        "10 %",  # of a step waiting for data
        "250 ms",
        "4 × cpu",
        "stopped by SIGTERM",
        "resumed on 4 × cpu",
        "it was killed, or its machine was lost",
        "1.15 GiB",  # bytes of parameters: 1,234,567,890
        "params/head/kernel",
        "16,384",
        "Times are simulated.",
        "the run’s median step took 250 ms on 4 × cpu.",
        'name = "a"',
        "Dotted: resumed.",
    ):
        assert expected in found.text, expected


SAMPLES = [{"step": step, "prompt": "a", "text": f"text {step} {HOSTILE}"} for step in (10, 20)]


def test_hostile_names_stay_text():
    """What a folder, an experiment, a metric or an error may be called, and what a model may write."""
    history = ({"event": "failed", "step": 3, "time": 1.0, "error": HOSTILE}, {"event": HOSTILE, "step": 4})
    hostile = run_of(
        HOSTILE,
        rows=rows_of(**{HOSTILE: 2.0}),
        history=history,
        toml=HOSTILE,
        settings={HOSTILE: HOSTILE},
        notes=[HOSTILE],
        no_step=HOSTILE,
        samples=SAMPLES,
    )
    assert_only_text(read(hostile, run_of("b", step=compiled())))


def test_several_runs_are_compared():
    found = Reader(text_of_two())
    assert "What differs" in found.text
    assert 'strategy "zero1" "ddp"' in found.text and "optimizer.lr – 0.1" in found.text
    assert "train.batch_size" not in found.text.partition("What differs")[2].partition("Loss and learning")[0]
    assert found.values("class").count("key run") == 4, "a legend of two at the losses and the speeds"
    assert "differ only in their names" in read(run_of(rows=[]), run_of("b", rows=[])).text


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of(rows=[], history=(), notes=["No step was logged."]), "No loss was logged."),
        (run_of(rows=[{"step": 1, "loss": math.nan}, {"step": 7, "eval_loss": math.inf}], history=()), "nan"),
        (run_of(history=[*HISTORY[:1], {"event": "bad step", "step": 3, "words": "Step 3 is bad."}]), "Step 3 is bad."),
        (run_of(rows=[], no_step="The data are gone."), "The data are gone."),
        (run_of(rows=[], step=CompiledStep("cpu:4", FAILED, [LEAF], [])), "The step did not compile: RESOURCE_EXHAUST"),
        (run_of(rows=[], step=compiled(timeline=None)), "The rates of these devices are unknown."),
        (run_of(rows=[], settings={}, toml="[["), "[["),
        (run_of(rows=[{"step": 1, "loss": 1e99, "lr": 0.0, "grad_norm": -1.0}]), "1e+99"),
    ],
)
def test_unknown_values_are_said(run, expected):
    found = read(run)
    assert expected in found.text and "What happened" in found.text


@pytest.mark.rest
def test_many_long_runs_make_a_bounded_page():
    rows = [{"step": i, "loss": math.sin(i * i)} for i in range(20_000)]
    text = run_page([run_of(f"run-{i}", rows=rows) for i in range(12)])
    assert len(text.encode()) < 1_500_000
    assert Reader(text).values("stroke-dasharray"), "the eighth run has the first's colour, dashed"


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        (HISTORY[:3], "running, or killed"),
        ([{"event": "failed", "step": 1}], "failed"),
        ([{"event": "finished", "step": 1, "stopped_early": True}], "stopped early"),
        ((), "not known"),
    ],
)
def test_how_a_run_stands(history, expected):
    assert run_of(history=history).state == expected


def test_evaluated_sets_and_samples_are_on_the_page():
    evaluated = {"eval_top5_accuracy": 0.75, "eval_web_top5_accuracy": 0.5, "eval_web_loss": 2.0}
    evaluated |= {"step": 60, "eval_loss": 3.1, "eval_web_perplexity": 7.389, "recall": 0.5, "recall_weight": 3.0}
    page = run_page([run_of(samples=SAMPLES, rows=[*rows_of(), evaluated])])
    for heading in ("Evaluated data sets", "Samples"):
        assert f">{heading}</h2>" in page
    assert ">web</th>" in page and "eval_top5</th>" not in page and ">7.389</td>" in page
    assert page.index("Step 20") < page.index("Step 10")
    assert "recall over steps" in page and "recall_weight over steps" not in page
    assert not [name for name in ("Samples", "Evaluated data") if name in text_of_two()]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[]", b'{"step": "x"}', b""])
def test_damaged_samples_are_left_out_and_noted(tmp_path, damage):
    (tmp_path / "samples").mkdir()
    good = {"step": 5, "prompt": "a", "text": "line\u2028separator"}
    (tmp_path / "samples/5.jsonl").write_bytes(json.dumps(good, ensure_ascii=False).encode() + b"\n" + damage)
    notes = []
    assert read_samples(tmp_path, notes) == [good]
    assert len(notes) == bool(damage) and all("left out" in note for note in notes)


@pytest.fixture(params=["plan", "runs"])
def text(request):
    plan = forecast_of(outlook_of(), outlook_of("ddp", headroom=NO_ROOM))
    return plan_page(plan, title="t") if request.param == "plan" else text_of_two()


def test_it_loads_nothing_from_outside(text):
    found = Reader(text)
    references = found.values("src", "href", "xlink:href", "srcset", "action", "data")
    assert references and all(reference.startswith("#") for reference in references)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    assert re.findall(r"url\((?!#)|@import", text) == []
    assert "default-src 'none'" in found.values("content")[0]
    # Namespaces are names, and nothing is fetched from them.
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert len({*found.values("id")}) == len(found.values("id")), "pictures have no ids of the same name"


def test_every_class_has_a_style(text):
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    used = {name for value in Reader(text).values("class") for name in value.split()}
    assert [name for name in sorted(used) if f".{name}" not in style] == []
