"""`jdp.verify` from Python: the step on a target's devices, and the report in words and as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from judged import judged
from trainings import plan_of

import jdp
from jdp.foresight.verify import verify


def loss_fn(params, batch, rng):
    return jdp.Loss(jnp.sum((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2), jnp.float32(batch["x"].shape[0]))


def init(rng):
    return {"w": jax.random.normal(rng, (64, 128)), "v": jax.random.normal(rng, (128, 64))}


def made(strategy="zero1", *, devices=8, abstract=True, **settings):
    plan, state_of = plan_of(strategy, devices), jdp.abstract_state if abstract else jdp.init_state
    state = state_of(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_fn, plan, **settings, check_loss=False)
    return step, state, {"x": np.ones((16, 64), np.float32)}


PROMISED_KEYS = ["kept", "strategy", "target", "wire_bytes_per_device", "theory_wire_bytes_per_device", "ratio"]


@pytest.mark.aot
def test_a_step_that_keeps_the_contract():
    report = verify(*made(accumulate=2, abstract=False), "h100:1x8")  # its own devices are CPUs
    assert report.kept
    assert (report.strategy, report.partitioning, report.target) == ("zero1", "manual", "h100:1x8")
    assert report.theory_wire_bytes_per_device == 7 / 8 * 2 * 4 * 16384
    assert report.ratio == pytest.approx(1, abs=0.001)
    assert (report.breaches, report.symptoms) == ((), ())
    text = str(report)
    assert text.startswith("zero1 on data=8 for h100:1x8, K=2, manual: the loss returns jdp.Loss")
    assert "Kept: a device sends 112 KiB a step, 1.000 of theory's 112 KiB." in text
    assert "reduce-scatter  64 KiB    64 KiB  1.000  no" in text


@pytest.mark.aot
def test_the_promised_json():
    report = verify(*made(accumulate=2, partitioning="auto"), "h100:1x8")
    given = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert list(given)[:9] == [*PROMISED_KEYS, "judged", "collectives", "breaches"]
    assert given["kept"] is report.kept is False and given["judged"]
    assert (given["strategy"], given["target"], given["ratio"]) == ("zero1", "h100:1x8", pytest.approx(1.5, abs=0.001))
    assert given["breaches"] == list(report.breaches) != []
    for collective in given["collectives"]:
        first = {name: collective[name] for name in ("kind", "dtype", "payload_bytes", "count")}
        assert list(map(type, first.values())) == [str, str, int, int]
    looped = {c["kind"]: c["payload_bytes"] * c["count"] for c in given["collectives"] if c["in_accumulation_loop"]}
    assert looped == {"reduce-scatter": 2 * 64 * 1024}
    assert "BROKEN" in str(report)
    assert report.breaches[0] in str(report)


def test_on_this_machines_devices():
    report = judged(*made("zero3", devices=4, abstract=False, accumulate=2, partitioning="manual"))
    assert report.kept
    assert (report.target, report.mesh) == ("cpu:4", {"data": 4})
    assert "XLA:CPU" in report.notes[-1]


@pytest.mark.aot
@pytest.mark.parametrize("target", [None, "cpu:8"])
def test_what_xla_cpu_sends_is_not_judged(target):
    """In auto it sums whole gradients on every device instead of scattering them."""
    report = verify(*made("zero1", partitioning="auto"), target)
    why = "Not judged, as XLA:CPU sends what XLA:GPU does not"
    assert str(report).splitlines()[1].startswith(f"{why}: a device sends 168 KiB a step, 1.501 of")
    assert (report.kept, report.breaches, report.to_json()["judged"]) == (None, (), False)
    assert "<-" not in str(report) and "BROKEN" not in str(report)
    assert not judged(*made("zero1", partitioning="auto"), target).kept
    assert verify(*made("zero1", partitioning="auto"), "h100:1x8").kept


def test_one_device_sends_nothing():
    report = verify(*made("zero3", devices=1))
    assert report.kept
    assert (report.wire_bytes_per_device, report.theory_wire_bytes_per_device, report.ratio) == (0, 0, 0)
    assert (report.collectives, report.rows) == ((), ())
    assert "nothing is sent" in str(report)
