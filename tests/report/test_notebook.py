"""What notebooks and terminals show of jdp's objects, by IPython's own formatter and in a real kernel.

Nothing is read from a device for it: most of what is drawn here are states whose arrays are gone.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import optax
import pytest
from chromium import MISSING, Chromium, find_chromium
from flax import nnx
from IPython.core.formatters import DisplayFormatter
from jax.sharding import PartitionSpec
from test_plan_page import HOSTILE, Reader, forecast_of, outlook_of, report_of

import jdp
from jdp.report.page import CSS, FRAGMENT_CSS

LAYERS = 12


def init(rng):
    keys = jax.random.split(rng, LAYERS)
    return {
        f"layer{i}": {"kernel": jax.random.normal(key, (64, 64)), HOSTILE: jnp.zeros(64)} for i, key in enumerate(keys)
    }


def plan_of(strategy="zero3", **settings):
    return jdp.Plan(jdp.make_mesh(replica=2, data=4), strategy, **settings)


def state_of(plan):
    return jdp.init_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))


def shown(drawn):
    """What IPython shows of an object: (text, HTML as a checked reader, HTML)."""
    data, _ = DisplayFormatter().format(drawn)
    return data["text/plain"], Reader(data["text/html"]), data["text/html"]


@pytest.fixture(scope="module")
def step_forecast():
    @nnx.jit
    def train_step(params, x):
        return jax.grad(lambda params: jnp.square(x @ params["layer0"]["kernel"]).mean())(params)

    plan = plan_of("zero1")
    params = jdp.init(init, plan, rng=jax.random.key(0))
    x = jax.device_put(np.ones((16, 64), "float32"), plan.batch_sharding)
    return jdp.verify(train_step, params, x, against="zero3", params="params")


@pytest.fixture(scope="module")
def gone():
    """A state whose arrays are gone: nothing of them can be read, and no program can take them."""
    state = state_of(plan_of())
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return state


def test_a_state_is_a_table_of_its_leaves_and_no_array_is_read(gone):
    text, page, _ = shown(gone)
    lines = text.splitlines()
    assert len(lines) < 40  # for 76 leaves
    assert re.search(r"params/layer0/kernel +float32\[64, 64\] +P\('data',\), donated +4 KiB", text)
    elements = LAYERS * (64 * 64 + 64)
    left = [line for line in lines if "left out" in line]
    assert len(left) == 1 and left[0].startswith("… 52 leaves left out")
    assert re.search(rf"all of params +{elements / 1e3:.3g}k elements in 24 ", text)
    for words in ("float32[64, 64]", "P('data',), donated", "all of opt_state", "total"):
        assert words in page.text


def test_bytes_a_device_are_the_plans(gone):
    plan = plan_of()
    held = sum(place.bytes_per_device for place in plan.placements(gone))
    state, placements = repr(gone).splitlines()[-1], repr(plan.placements(gone)).splitlines()[-1]
    assert f"{held / 2**10:.3g} KiB" in state and f"{held / 2**10:.3g} KiB" in placements


@pytest.mark.parametrize("make", [jdp.abstract_state, jdp.init_state])
def test_an_abstract_state_is_shown_like_a_real_one(make):
    plan = plan_of()
    state = make(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
    assert re.search(r"params/layer0/kernel +float32\[64, 64\] +P\('data',\) +4 KiB", repr(state))


def test_trees_of_other_leaves_have_a_repr_too(gone):
    plan = plan_of()
    traced = []
    jax.eval_shape(
        lambda state: traced.append(repr(state)) or state.step,
        jdp.abstract_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0)),
    )
    assert re.search(r"total .* ≤ ", traced[0]) and "being traced" in traced[0]
    assert "NamedSharding" in repr(plan.shardings(gone))
    assert "NumPy" in repr(jax.tree.map(lambda leaf: np.zeros(leaf.shape), gone))
    assert "not said" in repr(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), gone))


def test_placements_are_a_list_with_the_reason_for_each(gone):
    plan = plan_of(offload="optimizer")
    placements = plan.placements(gone)
    assert isinstance(placements, list) and isinstance(placements[0], jdp.Placement)
    path = "opt_state/0/mu/layer0/kernel"
    (number,) = (i for i, each in enumerate(placements) if each.path == path)
    assert repr(placements[number]) == (
        f"Placement('{path}', float32[64, 64], P('data',) at rest, P() while used, 4 KiB a device in host memory: "
        f"{placements[number].reason})"
    )
    text, page, _ = shown(placements[number - 1 : number + 2])
    assert text.splitlines()[0] == "3 placements"
    assert "in host memory" in placements[number].reason and placements[number].reason in page.text
    assert "P('data',) in host memory" in text
    assert re.search(r"of it in host memory +4\.1k elements in 1 +4 KiB", repr(placements[number - 1 : number + 1]))


def test_a_plan_is_one_line_and_a_picture_of_its_mesh():
    plan = plan_of(rules=[(HOSTILE, PartitionSpec())], min_shard_size=0)
    text, page, _ = shown(plan)
    assert text.replace("\n", "").startswith("Plan(replica=2 × data=4 cpu devices, 'zero3', rules=((")
    assert "min_shard_size=0)" in text
    assert page.tags.count("rect") == 8 and str(jax.devices()[7]) in page.text
    assert "gathered at each use" in page.text
    assert repr(plan_of()) == "Plan(replica=2 × data=4 cpu devices, 'zero3')"


def test_a_report_says_its_verdict_in_a_line():
    broken = report_of(kept=False, breaches=["the batch is gathered: write a constraint"])
    text, page, _ = shown(broken)
    assert text.startswith("<Report of zero1 on data=4 for h100:1x4, K=4. BROKEN: ")
    assert "the batch is gathered: write a constraint" in text and len(text) < 400
    for words in ("BROKEN", "the batch is gathered", "reduce", "60 collectives"):
        assert words in page.text


def test_a_plan_report_has_the_pages_parts():
    forecast = forecast_of(outlook_of(), outlook_of("zero3"))
    text, page, html = shown(forecast)
    assert text == "<PlanReport of 2 candidates for h100:1x4, 4 devices: Take zero1. print() says all>"
    for words in ("All fit.", "zero1 is the one to take.", "What a device holds", "What a device sends"):
        assert words in page.text
    assert page.tags.count("svg") >= 2 and len(html) < 500_000
    assert "No candidate fits." in repr(dataclasses.replace(forecast, choice=None))
    nothing = outlook_of(memory=None, report=None, timeline=None, headroom=None, error="no room")
    assert "No candidate compiled." in shown(forecast_of(nothing, choice=None))[1].text


def test_a_foreign_step_is_shown_by_argument_and_line(step_forecast):
    text, page, _ = shown(step_forecast)
    assert text.startswith("<StepForecast of train_step on replica=2 × data=4 for cpu:8. ")
    for words in ("params/layer0/kernel", "held on a device", "total a device", "wire a device"):
        assert words in page.text


def test_a_report_of_any_step_is_printed_and_drawn_like_one_of_jdps(step_forecast):
    lists = {"breaches": ("b",), "strays": ("r",), "symptoms": ("s",), "notes": ("n",)}
    for report in (step_forecast, report_of()):
        report = dataclasses.replace(report, **lists)
        assert str(report).split("\n\n")[-4:] == [
            "Breaches:\n- b",
            "Sent besides:\n- r",
            "Symptoms:\n- s",
            "Notes:\n- n",
        ]
        _, _, html = shown(report)
        assert '<p class="breach">b</p><p>s</p><p>Sent besides: r</p><p class="note">Note: n</p>' in html
        assert f'"><p><strong>{report.verdict.split(",")[0]}' in html


def drawn_objects(step_forecast, gone):
    report = dataclasses.replace(report_of(source=HOSTILE, breaches=[HOSTILE]), notes=(HOSTILE,), strategy=HOSTILE)
    yield from (gone, plan_of().placements(gone), plan_of(rules=[(HOSTILE, PartitionSpec())]), report)
    yield forecast_of(outlook_of(partitioning=HOSTILE, remat=HOSTILE), outlook_of("zero3"), notes=(HOSTILE,))
    yield dataclasses.replace(step_forecast, name=HOSTILE, symptoms=(HOSTILE,), notes=(HOSTILE,))


def test_a_fragment_runs_nothing_loads_nothing_and_keeps_its_style_to_itself(step_forecast, gone):
    assert re.search(r"\A\s*\.jdp \{[^{}]*(?:\{(?:[^{}]|\{[^{}]*\})*\}[^{}]*)*\}\s*\Z", FRAGMENT_CSS), (
        "one rule holds all"
    )
    for drawn in drawn_objects(step_forecast, gone):
        _, page, html = shown(drawn)
        assert "script" not in page.tags and not page.values("src") and "http://evil/" in page.text
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
        assert html.count("<style>") == 1 and html.startswith('<div class="jdp"><style>')
        assert [
            name for value in page.values("class") for name in value.split() if f".{name}" not in CSS + ".jdp"
        ] == []


@pytest.mark.skipif(find_chromium() is None, reason=MISSING)
def test_in_a_browser_the_style_holds_inside_and_nowhere_else(tmp_path):
    own = "<table><tr><td id=own>own</td></tr></table>"
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html>{own}{plan_of()._repr_html_()}", encoding="utf-8")
    look = "getComputedStyle(document.querySelector('{}')).{}"
    with Chromium() as browser:
        browser.open(tmp_path / "page.html", dark=True)
        assert browser.evaluate(look.format("#own", "borderBottomStyle")) == "none"
        assert browser.evaluate(look.format(".jdp td", "borderBottomStyle")) == "solid"
        assert browser.evaluate(look.format("body", "backgroundColor")) == "rgba(0, 0, 0, 0)"
        assert browser.evaluate(look.format(".jdp", "backgroundColor")) == "rgb(20, 23, 27)"
        assert browser.errors == browser.requests[1:] == []


NOTEBOOK = (
    "import jax, jax.numpy as jnp, jdp, optax",
    "plan = jdp.Plan(jdp.make_mesh(data=-1), 'zero1')\nplan",
    "init = lambda rng: {'kernel': jnp.zeros((64, 64))}\n"
    "state = jdp.init_state(init, optax.adam(1e-2), plan, rng=jax.random.key(0))\nstate",
    "plan.placements(state)",
)


def test_a_notebook_shows_them(monkeypatch):
    """A real kernel: what it answers to a front end, for each cell."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    cells = [nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK]
    notebook = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=120, kernel_name="python3"
    ).execute()
    outputs = [cell.outputs[-1].data for cell in notebook.cells[1:]]
    expected = ["Plan(data=2 cpu devices, 'zero1')", "TrainState\nleaf ", "7 placements\nleaf "]
    for output, text in zip(outputs, expected, strict=True):
        assert output["text/plain"].startswith(text)
        assert output["text/html"].startswith('<div class="jdp"><style>')
