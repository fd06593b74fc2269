"""States of four weights or more on one device, and directories of their checkpoints."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

TX = optax.adamw(0.1)


def plan_of(strategy="zero3", **axes):
    """A plan on as many devices as the axes name, by default all; small arrays are sharded."""
    axes = axes or {"data": 8}
    mesh = jdp.make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    return jdp.Plan(mesh, strategy, min_shard_size=16)


def one_device():
    return plan_of("ddp", data=1)


@functools.cache
def born(size):
    return jdp.init_state(lambda rng: {"w": jnp.ones(size)}, TX, one_device(), rng=jax.random.key(0))


def at(step, weight=None, skipped=0, size=4):
    """A state that has consumed `step` batches, and whose weights are `step`, or `weight`."""
    weights = {"w": jnp.full(size, float(step if weight is None else weight))}
    return replace(born(size), params=weights, step=jnp.int32(step - skipped), skipped=jnp.int32(skipped))


@functools.cache
def target(size=4):
    return jdp.abstract_state(lambda rng: {"w": jnp.zeros(size)}, TX, one_device(), rng=jax.random.key(0))


def fill(directory, *steps, keep=None):
    with jdp.Checkpoints(directory, keep=keep) as saved:
        for step in steps:
            saved.save(at(step), {"count": step})


def weight_of(state):
    return float(state.params["w"][0])


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != ".jdp-checkpoints")


def bits(tree):
    """The leaves by path, as NumPy arrays; keys as their words, abstract leaves left out."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    leaves = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
    keys = {path for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}
    return {path: np.asarray(jax.random.key_data(leaf) if path in keys else leaf) for path, leaf in leaves.items()}


def assert_same_bits(got, want):
    got, want = bits(got), bits(want)
    assert got.keys() == want.keys()
    for path in want:
        one, other = got[path], want[path]
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), path
