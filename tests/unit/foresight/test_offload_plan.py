"""What `jdp plan` says of a step whose optimizer rests in host memory: compiled for eight H100s, none of them here."""

import jax
import jax.numpy as jnp
import optax
import pytest
from trainings import abstract_step

import jdp
from jdp.core import layers
from jdp.foresight.foresee import candidates, estimate
from jdp.foresight.program.module import HOST_MEMORY
from jdp.foresight.targets.resolve import target

pytestmark = pytest.mark.aot


WIDTH, LAYERS, ROWS = 256, 6, 64


def init(rng):
    return {"up": jnp.ones((LAYERS, WIDTH, 4 * WIDTH)), "down": jnp.ones((LAYERS, 4 * WIDTH, WIDTH))}


def loss(layers, batch, rng):
    block = lambda layer, x: x + jax.nn.relu(x @ layer["up"]) @ layer["down"]  # noqa: E731
    out = jdp.scan_layers(block, layers, batch["x"].astype(jnp.bfloat16))
    return jdp.Loss((out.astype(jnp.float32) ** 2).sum(), jnp.float32(len(out)))


@pytest.fixture(scope="module")
def foreseen():
    """A candidate and its estimate for h100:1x8, where the layers are a loop."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layers._Body, "unrolls", False)
        plan = jdp.Plan(jdp.make_mesh(data=8), "zero3", offload="optimizer")
        step, state = abstract_step(loss, init, optax.adamw(1e-3), plan, precision="bf16")
        devices = target("h100:1x8")
        batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}
        (candidate,) = candidates(step, state, batch, devices, strategies=["zero3"])
        compiled = candidate.compile(devices)
        return candidate, compiled, estimate(candidate, devices, tokens=ROWS)


def test_host_memory_is_as_planned(foreseen):
    candidate, compiled, told = foreseen
    placements = candidate.step.plan.placements(candidate.state)
    planned = sum(p.bytes_per_device for p in placements if p.on_host)
    assert planned == 2 * 4 * LAYERS * 8 * WIDTH * WIDTH // 8
    assert compiled.host_bytes == planned == told.memory.host
    assert told.memory.optimizer == 4  # the counter
    assert told.memory.total == compiled.total_bytes
    assert told.memory.table()[-2][0] == "in host memory, per device"


def test_copies_are_timed_once_by_the_host_link(foreseen):
    """A step fetches both moments, and writes them."""
    _, compiled, told = foreseen
    weights = 4 * LAYERS * 8 * WIDTH * WIDTH // 8
    moved = (2 + 2) * weights
    assert told.timeline.host_seconds == pytest.approx(moved / (0.75 * 64e9), rel=1e-3)
    line = told.timeline
    assert 0 < line.host_wait_seconds <= line.host_seconds
    assert line.step_seconds == pytest.approx(line.compute_seconds + line.exposed_seconds + line.host_wait_seconds)
    assert HOST_MEMORY in compiled.text and not any("host" in caveat for caveat in line.caveats)


def test_verify_takes_the_copies_as_asked_for(foreseen):
    _, _, told = foreseen
    assert told.report.kept and not any(symptom.startswith("The host") for symptom in told.report.symptoms)
