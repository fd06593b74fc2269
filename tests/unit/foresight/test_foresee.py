"""`jdp plan` and `jdp verify` on an experiment file, for a real GPU target: the promised JSON, its sums, the cache, the
page, several targets, and one clear error for each mistake."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny_experiment import SMALL

import jdp
from jdp.cli import main as cli

pytestmark = pytest.mark.aot


DIGITS = """
name = "digits"
strategy = "zero1"
[model]
name = "mlp"
hidden = [512]
[data]
source = "digits"
[train]
steps = 10
batch_size = 4096
"""
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
PROMISED = {"strategy", "partitioning", "fits", "bytes_per_device", "wire_bytes_per_device", "tokens_per_second"}
PROMISED |= {"theory_wire_bytes_per_device", "exposed_fraction", "step_seconds", "mfu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two experiment files, and a cache of its own that the module's tests share."""
    path = tmp_path_factory.mktemp("foresee")
    (path / "small.toml").write_text(SMALL)
    (path / "digits.toml").write_text(DIGITS)
    return path


@pytest.fixture(scope="module")
def jdp_command(folder):
    """Run a command in this process; (exit code, stdout, stderr)."""

    def run(command, *arguments, file="digits.toml"):
        with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as out:
            patched.setenv("JDP_CACHE_DIR", str(folder / "cache"))
            with redirect_stderr(io.StringIO()) as err:
                code = cli.main([command, str(folder / file), *arguments])
        return code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="module")
def planned(jdp_command):
    """What the first plan prints as JSON."""
    code, out, _ = jdp_command("plan", "--target", "h100:1x8", "--json")
    assert code == 0
    return json.loads(out)


def test_the_promised_object(planned):
    assert planned.keys() >= {"target", "devices", "strategies", "choice", "why"}
    assert (planned["target"], planned["devices"]) == ("h100:1x8", 8)
    assert [row["strategy"] for row in planned["strategies"]] == STRATEGIES
    for row in planned["strategies"]:
        assert row.keys() >= PROMISED
        assert row["fits"] is True and row["error"] is None
        assert sum(row["memory"].values()) == row["bytes_per_device"]
        assert 0 <= row["exposed_fraction"] <= 1 and 0 < row["mfu"] < 1
        assert row["tokens_per_second"] == pytest.approx(4096 / row["step_seconds"])
    assert planned["choice"] in STRATEGIES and planned["choice"] in planned["why"]


def test_the_second_plan_comes_from_the_cache(planned, jdp_command, folder):
    page = folder / "plan.html"
    code, out, _ = jdp_command("plan", "--target", "h100:1x8", "--json", "--html", str(page))
    again = json.loads(out)
    assert code == 0 and all(row["compile_seconds"] == 0 and row["cached"] for row in again["strategies"])
    assert not all(row["cached"] for row in planned["strategies"])
    compiled = dict.fromkeys(("compile_seconds", "cached"))
    assert [row | compiled for row in again["strategies"]] == [row | compiled for row in planned["strategies"]]
    assert again | {"strategies": planned["strategies"]} == planned
    text = page.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>") and all(name in text for name in STRATEGIES)


@pytest.mark.usefixtures("planned")  # which takes the time to compile
def test_people_get_tables_and_sentences(jdp_command):
    code, out, err = jdp_command("plan", "--target", "h100:1x8")
    assert code == 0 and "Memory at the peak" in out and ": a step takes " in out
    assert "[1/4] compiling ddp" in err
    for name in STRATEGIES:
        rows = [line for line in out.splitlines() if line.startswith(f"{name} ") and line[-1] != "."]
        assert len(rows) == 2, "one of memory, one of time"


@pytest.mark.rest
def test_what_does_not_fit_has_no_times(jdp_command):
    given = ("--target", "a100:1x8", "--strategy", "ddp", "--train.batch_size", str(2**28))
    code, out, _ = jdp_command("plan", *given, "--json")
    [row] = json.loads(out)["strategies"]
    assert code == 0 and row["fits"] is False and row["bytes_per_device"] > row["available_bytes"]
    timed = ("step_seconds", "mfu", "exposed_fraction", "exposed_seconds", "tokens_per_second", "efficiency")
    assert {row[key] for key in timed} == {None} and row["wire_bytes_per_device"] > 0
    code, out, _ = jdp_command("plan", *given)
    [line] = [line for line in out.splitlines() if line.startswith("ddp") and {"auto", "manual"} & {*line.split()}]
    assert code == 0 and line.split()[-6:] == ["–"] * 6


def test_verify_keeps_or_breaks(jdp_command, planned):
    code, out, _ = jdp_command("verify", "--target", "h100:1x8", "--json")
    report = json.loads(out)
    assert code == 0 and report["kept"] and report["breaches"] == []
    assert (report["strategy"], report["target"]) == ("zero1", "h100:1x8")
    (row,) = (r for r in planned["strategies"] if r["strategy"] == "zero1")
    assert report["wire_bytes_per_device"] == row["wire_bytes_per_device"]
    kinds = {c["kind"] for c in report["collectives"]}
    assert {"reduce-scatter", "all-gather"} <= kinds
    assert all(not c["in_accumulation_loop"] for c in report["collectives"])

    arguments = ("--partitioning", "auto", "--train.accumulate", "2", "--precision", "fp32")
    code, out, _ = jdp_command("verify", "--target", "h100:1x8", *arguments)
    assert code == 1 and "partitioning" in out and "manual" in out


MISTAKES = [
    (("plan", "--target", "h1000:8x8"), "did you mean h100?"),
    (("plan", "--target", "h100:1x8", "--model.attention", "cudnn", "--precision", "fp32"), "takes 16-bit floats"),
    (("plan", "--target", "h100:1x8", "--train.accumulate", "1000000000"), "fewer than 2^31 rows: lower accumulate"),
    (("plan", "--target", "h100:1x8", "--html", "/no/such/folder/p.html"), "there is no folder"),
    (("plan", "--target", "h100:1x8,h100:2x8", "--html", "page.html"), "a page on one target; given 2"),
]


@pytest.mark.parametrize(
    ("arguments", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_mistakes(jdp_command, arguments, said):
    code, out, err = jdp_command(*arguments, file="small.toml")
    assert code == 2 and out == ""
    assert said in err and "Traceback" not in err


def test_from_python_around_ones_own_model(folder, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", str(folder / "cache"))

    def own(rng):
        return {name: jax.random.normal(rng, shape) for name, shape in (("in", (256, 128)), ("out", (128, 256)))}

    def own_loss(params, batch, rng):
        logits = params["in"][batch["tokens"]] @ params["out"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jdp.Loss((nll * batch["weights"]).sum(), batch["weights"].sum())

    plan = jdp.Plan(jdp.make_mesh(data=8), "zero3")
    state = jdp.abstract_state(own, optax.sgd(1e-2), plan, rng=jax.random.key(0))
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((16, 64), jnp.int32))
    batch |= {"weights": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    step = jdp.make_train_step(own_loss, plan, check_loss=False)
    seen = []
    options = {"strategies": ["zero3"], "accumulate": [1, 2], "progress": lambda *a: seen.append(a)}
    forecast = jdp.foresee(step, state, batch, "h100:2x8", **options)
    found = [(o.strategy, o.accumulate, o.report.mesh) for o in forecast.estimates]
    assert found == [("zero3", k, {"data": 16}) for k in (1, 2)]
    assert seen == [(0, 2, "zero3"), (1, 2, "zero3 K=2"), (2, 2, "")]
    assert [o.tokens for o in forecast.estimates] == [32 * 64] * 2, "the same batch for every candidate"
    assert any("given 16: rounded up to 32" in note for note in forecast.notes)
    assert step.plan.strategy == "zero3" and step.partitioning is None, "the step itself is left alone"
    with pytest.raises(ValueError, match=r"jdp\.foresee takes a training step .*; given an evaluation step"):
        jdp.foresee(jdp.make_eval_step(own_loss, plan, check_loss=False), state, batch, "h100:1x8")
