"""A state made by small programs is that of one program, bit for bit, and what is alike is compiled once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
from jdp.core.init import programs
from jdp.core.init.programs import run_init
from jdp.models import GPTConfig, ResNetConfig, build

TABLE = np.arange(6.0)


def model(config: Any) -> Callable[[jax.Array], Any]:
    return lambda key: nnx.state(build(config, rngs=nnx.Rngs(key)))


def scaled(key: jax.Array, scale: np.ndarray) -> jax.Array:
    """Draws that differ in a constant deep in what they call, which the text of the program does not show."""
    inner = jax.checkpoint(lambda x: jax.jit(lambda x: x * jnp.asarray(scale))(x))
    return inner(jax.random.normal(key, (3,)))


def drawn(key: jax.Array) -> dict[str, Any]:
    """What a hand-written `init` may do with its key."""
    first, second, third = jax.random.split(key, 3)
    shared = jax.random.normal(first, (8, 4))
    kernels = jax.vmap(nnx.initializers.orthogonal(), in_axes=(0, None))(jax.random.split(second, 2), (4, 4))
    stacked = jax.lax.map(lambda one: jax.random.normal(one, (16,)), jax.random.split(third, 4))
    return {
        "tied": (shared, shared.T),
        "orthogonal": kernels,
        "stacked": stacked,
        "half": jax.random.normal(jax.random.fold_in(third, 7), (24,), jnp.bfloat16),
        "whole": jax.random.randint(second, (32,), 0, 9),
        "truncated": jax.random.truncated_normal(third, -2, 2, (3, 2)),
        "old": jax.random.uniform(jax.random.PRNGKey(3), (5,)),
        "raw": jax.random.normal(jax.random.wrap_key_data(jax.random.key_data(key)), ()),
        "scaled": [scaled(second, np.float32([1, 2, 3])), scaled(third, np.float32([5, 6, 7]))],
        "table": jnp.asarray(TABLE) + jax.random.uniform(first, (6,)),
        "choice": jax.lax.cond(jax.random.bernoulli(first), jnp.sin, jnp.cos, jnp.arange(2.0)),
        "key": second,
        "zero": jnp.zeros(3),
    }


def unrolled(key: jax.Array) -> Any:
    """Layers with names of their own, which differ in nothing but their keys, and one that is wider."""
    rngs = nnx.Rngs(key)
    return nnx.state(nnx.Sequential(*(nnx.Linear(16, wide, rngs=rngs) for wide in (16, 16, 16, 24))))


def talking(key: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: None, key[None].shape[0])
    return jax.random.normal(key, (4,))


UNROLLED = GPTConfig(vocab_size=64, context=16, layers=5, width=32, heads=2, scan=False)
CASES = {
    "drawn": drawn,
    "talking": talking,
    "scanned": model(GPTConfig(vocab_size=64, context=16, layers=2, width=32, heads=2)),
    "unrolled": unrolled,
    "residual": model(ResNetConfig(classes=3, blocks=(1, 1), width=8, image_size=8, stem="small")),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_one_program(name: str):
    make, key = CASES[name], jax.random.key(5)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shapes = jax.eval_shape(make, key)
    divides = lambda leaf: leaf.ndim and leaf.shape[0] % 8 == 0  # noqa: E731
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*["data"] * bool(divides(leaf)))), shapes)
    one, small = jax.jit(make, out_shardings=shardings)(key), run_init(make, key, shardings)
    assert jax.tree.structure(one) == jax.tree.structure(small)
    for expected, leaf in zip(jax.tree.leaves(one), jax.tree.leaves(small), strict=True):
        assert (leaf.dtype, leaf.sharding) == (expected.dtype, expected.sharding)
        bits = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (leaf, expected)]
        np.testing.assert_array_equal(*bits)


def test_layers_that_are_alike_are_one_program(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    original = programs._program
    monkeypatch.setattr(programs, "_program", lambda *given: made.append(len(given[2])) or original(*given))
    init = model(UNROLLED)
    params = jax.eval_shape(init, jax.random.key(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def make(key: jax.Array) -> Any:
        params = init(key)
        return params, optax.adam(1e-3).init(params)

    run_init(make, jax.random.key(0), jax.tree.map(lambda _: here, jax.eval_shape(make, jax.random.key(0))))
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    assert len(jax.tree.leaves(params)) > 40 and len(made) <= len(shapes) + 3


@pytest.mark.parametrize("size", [(8, 16), (127, 31)])  # the second is padded
def test_init_is_traced_once(size: tuple[int, int]):
    traced = list[Any]()

    def make(key: jax.Array) -> Any:
        traced.append(key)
        return {"kernel": jax.random.normal(key, size), "bias": jnp.zeros(3)}

    plan, key = jdp.Plan(jdp.make_mesh(data=8), "zero3", min_shard_size=64), jax.random.key(0)
    assert bool(jdp.init_state(make, optax.adam(1e-3), plan, rng=key).static.flat) == (size == (127, 31))
    assert len(traced) == 1
    jdp.init(lambda key: make(key), plan, rng=key)
    assert len(traced) == 2


def test_other_keys_take_the_bits_as_jax_has_them():
    for impl in ("rbg", "threefry2x32"):
        key = jax.random.key(1, impl=impl)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        make = lambda key: jax.random.bits(key, (3, 5), jnp.uint16)  # noqa: E731
        np.testing.assert_array_equal(run_init(make, key, here), jax.jit(make)(key))
