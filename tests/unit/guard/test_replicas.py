"""Replicas that should be equal bit for bit: any flipped bit is found, and its device and leaf are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import flipped
from jax.sharding import NamedSharding, PartitionSpec
from tiny_states import plan_of

import jdp
from jdp.guard.replicas import CorruptState, check_replicas, fingerprints


def init(rng):
    return {"kernel": jax.random.normal(rng, (16, 8)), "bias": jnp.zeros(8), "scale": jnp.ones((3, 5))}


def state_of(plan):
    return jdp.init_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))


def with_param(state, name, leaf):
    return dataclasses.replace(state, params={**state.params, name: leaf})


def test_every_replicated_leaf_is_compared():
    replicated = len(jax.tree.leaves(state_of(plan_of("ddp"))))
    assert check_replicas(state_of(plan_of("ddp"))) == replicated
    zero = state_of(plan_of("zero1"))
    assert check_replicas(zero) == sum(leaf.is_fully_replicated for leaf in jax.tree.leaves(zero)) < replicated
    hybrid = state_of(plan_of("zero3", replica=2, data=4))
    assert check_replicas(hybrid) == replicated, "shards are replicated over `replica`"


@pytest.mark.parametrize(("word", "bit"), [(0, 0), (77, 13), (127, 31)])
def test_flipped_bits_are_named_with_their_device(word, bit):
    state, device = state_of(plan_of("ddp")), jax.devices()[5]
    wrong = with_param(state, "kernel", flipped(state.params["kernel"], device, word=word, bit=bit))
    said = r"device 5 \(cpu, number 5 of process 0\) differs from .* in params/kernel: "
    with pytest.raises(CorruptState, match=said) as error:
        check_replicas(wrong)
    (difference,) = error.value.differences
    assert difference.path == "params/kernel" and difference.devices == (device,) and len(difference.agreeing) == 7


def test_signs_of_zero_and_nan_payloads_count():
    state = state_of(plan_of("ddp"))
    zeros = flipped(state.params["bias"], jax.devices()[2], bit=31)  # -0.0, which equals 0.0
    with pytest.raises(CorruptState, match="device 2"):
        check_replicas(with_param(state, "bias", zeros))
    nans = jax.device_put(jnp.full(4, jnp.nan), state.params["bias"].sharding)
    assert check_replicas({"nan": nans}) == 1, "a NaN equals itself"
    with pytest.raises(CorruptState, match="device 3"):
        check_replicas({"nan": flipped(nans, jax.devices()[3], bit=3)})


def test_of_two_replicas_nobody_knows_which_is_wrong():
    state = state_of(plan_of("zero3", replica=2, data=4))
    wrong = with_param(state, "kernel", flipped(state.params["kernel"], jax.devices()[6]))
    said = r"device 2 \(.*\) and device 6 \(.*\) differ from one another in params/kernel, one of them is wrong"
    with pytest.raises(CorruptState, match=said):
        check_replicas(wrong)


def test_a_change_of_two_elements_does_not_cancel():
    """Both words of a copy are swapped, and one gains what another loses: a plain sum is blind to both."""
    for swapped in ([2, 1, 30, 40], [1, 2, 31, 39]):
        copies = [np.int32(swapped if device.id == 1 else [1, 2, 30, 40]) for device in jax.devices()]
        shards = jax.device_put(copies, jax.devices())
        with pytest.raises(CorruptState, match="device 1"):
            check_replicas({"x": jax.make_array_from_single_device_arrays((4,), plan_of().replicated, shards)})


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "float8_e4m3fn", "complex64", "int4"])
def test_every_dtype_has_a_fingerprint(dtype):
    ones = jnp.ones((3, 2))
    leaf, other = jax.device_put([x.astype(dtype) for x in (ones, ones.at[1, 1].set(0))], plan_of().replicated)
    assert check_replicas({"x": leaf}) == 1
    assert (np.asarray(fingerprints({"x": leaf}).values) != np.asarray(fingerprints({"x": other}).values)).all()


def test_what_is_replicated_nowhere_is_not_compared():
    assert check_replicas({}) == 0 and check_replicas({"x": np.ones(3), "y": jnp.ones(3)}) == 0
    assert check_replicas({"x": jax.device_put(jnp.ones(8), NamedSharding(plan_of().mesh, PartitionSpec("data")))}) == 0
