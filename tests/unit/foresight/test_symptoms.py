"""Signs of something unmeant, each provoked in a real program: found, with parameter and line; a good one has none."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trainings import abstract_step

import jdp
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import verify

pytestmark = pytest.mark.aot


def good(params, x, rng, mesh):
    return jnp.tanh(x @ params["w"])


def reshards(params, x, rng, mesh):
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["w"]), NamedSharding(mesh, P("data")))
    return jax.lax.with_sharding_constraint(jnp.sin(hidden), NamedSharding(mesh, P(None, "model")))


def takes_one_of_many_keys(params, x, rng, mesh):
    keys = jax.random.split(jax.random.key(1), x.shape[0])
    keys = jax.lax.with_sharding_constraint(keys, NamedSharding(mesh, P("data")))
    return good(params, x, rng, mesh) * jax.random.bernoulli(keys[3], 0.5, (x.shape[0], 320))


def draws_its_own_bits(params, x, rng, mesh):
    return good(params, x, rng, mesh) * jax.random.bernoulli(rng, 0.5, (x.shape[0], 320))


def prints(params, x, rng, mesh):
    hidden = good(params, x, rng, mesh)
    jax.debug.print("{}", hidden.sum())
    return hidden


@functools.cache
def verified(hidden_of, *, on="h100:1x8", strategy="ddp", replicated=False, **axes):
    mesh = jdp.make_mesh(devices=target(on).devices, **axes)
    plan = jdp.Plan(mesh, strategy)

    def init(rng):
        return {"w": jax.random.normal(rng, (256, 320)), "v": jax.random.normal(rng, (320, 64))}

    def loss(params, batch, rng):
        return jdp.Loss(jnp.sum((hidden_of(params, batch["x"], rng, mesh) @ params["v"]) ** 2), jnp.float32(96))

    step, state = abstract_step(loss, init, optax.adamw(1e-3), plan, partitioning="auto")
    if replicated:
        everywhere = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))  # noqa: E731
        state = dataclasses.replace(state, params=jax.tree.map(everywhere, state.params))
    return verify(step, state, {"x": jax.ShapeDtypeStruct((96, 256), "float32")})


def lines(function):
    text, first = inspect.getsourcelines(function)
    return [f"{__file__}:{number}" for number in range(first, first + len(text))]


@pytest.mark.parametrize("on", ["h100:1x8", "cpu:8"])
@pytest.mark.parametrize("model", [good, draws_its_own_bits])
def test_a_good_step_has_none(on, model):
    assert verified(model, on=on).symptoms == ()


def test_resharding_names_the_tensor_and_the_line():
    report = verified(reshards, data=4, model=2)
    forward, backward = report.symptoms
    for symptom in (forward, backward):
        assert symptom.startswith("Resharding: a tensor f32[96, 320] is copied whole to every device to go from ")
        assert any(line in symptom for line in lines(reshards)), symptom


def test_random_numbers_that_travel():
    model = takes_one_of_many_keys
    report = verified(model)
    assert report.symptoms
    for symptom in report.symptoms:
        assert symptom.startswith("Random numbers: ")
        assert any(line in symptom for line in lines(model)), symptom


def test_a_callback_to_the_host():
    [symptom] = verified(prints, on="cpu:8").symptoms
    assert symptom.startswith("The host: debug_print calls back into Python (xla_ffi_python_cpu_callback)")
    assert any(line in symptom for line in lines(prints))


@pytest.mark.parametrize("on", ["h100:1x8", "cpu:8"])
def test_state_that_cannot_be_updated_in_place(on):
    [symptom] = verified(good, on=on, strategy="zero1", replicated=True).symptoms
    held = "400 KiB"  # w and v, whole, in fp32
    assert symptom.startswith(f"Donation: params/w, params/v ({held} a device) cannot be updated in place")
