"""The state is born sharded, bitwise the same on any mesh, and `abstract_state` is its description."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from tiny_states import assert_same_bits
from trainings import plan_of as _plan_of

import jdp


class Model(nnx.Module):
    """Initialisers of several kinds, a BatchNorm's state, and a Dropout's keys."""

    def __init__(self, *, rngs):
        self.embedding = nnx.Embed(64, 32, rngs=rngs)  # normal
        self.layers = nnx.List([nnx.Linear(32, 24, rngs=rngs)])  # truncated normal
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make(rng):
    return Model(rngs=nnx.Rngs(rng))


def plan_of(strategy, **axes):
    return _plan_of(strategy, math.prod(axes.values()), min_shard_size=64, **axes)


ADAM = optax.adamw(1e-3)


def initial(plan, init=make):
    return jdp.init_state(init, ADAM, plan, rng=jax.random.key(3))


@functools.cache
def reference():
    return initial(plan_of("ddp", data=1))


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("zero3", {"data": 2}), ("zero2", {"replica": 2, "data": 4}), ("zero1", {"data": 8}), ("ddp", {"data": 8})],
)
@pytest.mark.default_ids("zero3-axes0", "zero1-axes2", "ddp-axes3")
def test_initial_values_are_the_same_on_any_mesh(strategy, axes):
    state = initial(plan_of(strategy, **axes))
    assert_same_bits(state, reference())
    sharded = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.is_fully_replicated]
    assert len(sharded) == (0 if strategy == "ddp" else 2)  # the kernel and the embedding


@pytest.mark.parametrize(("strategy", "bound"), [("zero3", 0.5), ("ddp", 3.5)])
def test_no_device_holds_more_than_it_keeps(strategy, bound, monkeypatch):
    """The memory of the programs that make the state, in copies of the parameters: under ZeRO-3 over eight devices the
    result is 3/8 of one (weights and two moments), and its temporaries must not hold a whole array either."""
    compiled, jit = [], jax.jit

    def spy(function, **options):
        jitted = jit(function, **options)

        def call(*args):
            compiled.append(jitted.lower(*args).compile())
            return compiled[-1](*args)

        return call if "out_shardings" in options else jitted

    def init(rng):
        first, second = jax.random.split(rng)
        return {"w": jax.random.normal(first, (256, 512)), "v": jax.random.truncated_normal(second, -2, 2, (512, 256))}

    monkeypatch.setattr(jax, "jit", spy)
    initial(jdp.Plan(jdp.make_mesh(), strategy), init=init)
    memory, copy = [program.memory_analysis() for program in compiled], 4 * 2 * 256 * 512
    assert max(one.temp_size_in_bytes for one in memory) < bound * copy
    kept = 3 * copy // (8 if strategy == "zero3" else 1)
    assert kept <= sum(one.output_size_in_bytes for one in memory) < kept + 1024 * len(memory)


class Filled(nnx.Module):
    def __init__(self):
        self.w, self.seen = nnx.Param(jnp.full(8, 0.1)), nnx.BatchStat(jnp.full(8, 2))


@pytest.mark.parametrize(
    ("strategy", "init"),
    [("ddp", make), ("zero3", make), ("ddp", lambda _: {"w": jnp.full(8, 0.1)}), ("ddp", lambda _: Filled())],
    ids=["ddp", "zero3", "tree", "module"],
)
def test_the_abstract_state_describes_the_real_one(strategy, init):
    """`jnp.full` without a dtype is weakly typed, another type than what a step returns, which would compile again."""
    plan = plan_of(strategy, data=8)
    real, described = initial(plan, init), jdp.abstract_state(init, ADAM, plan, rng=jax.random.key(3))
    assert jax.tree.structure(described) == jax.tree.structure(real)
    leaves, shardings = jax.tree.leaves_with_path(real), jax.tree.leaves(plan.shardings(real))
    for (path, leaf), about, sharding in zip(leaves, jax.tree.leaves(described), shardings, strict=True):
        assert isinstance(about, jax.ShapeDtypeStruct), path
        assert (about.shape, about.dtype) == (leaf.shape, leaf.dtype), path
        assert about.sharding == leaf.sharding == sharding, path
        assert not getattr(leaf, "weak_type", False) and not getattr(about, "weak_type", False), path


def test_linens_other_collections_are_not_trained_as_parameters():
    def init(rng):
        return {"params": {"w": jnp.ones(3)}, "batch_stats": {"mean": jnp.zeros(3)}}

    plan, tx, rng = jdp.Plan(jdp.make_mesh()), optax.sgd(0.1), jax.random.key(0)
    with pytest.raises(ValueError, match=r"'batch_stats' would be trained.*variables\[\"params\"\].*ToNNX"):
        jdp.abstract_state(init, tx, plan, rng=rng)
    assert jdp.abstract_state(init, tx, plan, rng=rng, wrt="params/*").static.trained == (False, True)
    for others in ({}, {"head": {"w": jnp.ones(3)}}, {"batch_stats": {}}):  # a name of one's own, and nothing in it
        jdp.abstract_state(lambda rng, others=others: {"params": {"w": jnp.ones(3)}, **others}, tx, plan, rng=rng)
