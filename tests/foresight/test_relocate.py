"""A step, its state and its batch on a target's devices; rows that do not divide are rounded up, with one message."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import target


def loss_fn(params, batch, rng):
    return jdp.Loss(jnp.sum((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2), jnp.float32(batch["x"].shape[0]))


def init(rng):
    return {"w": jax.random.normal(rng, (64, 128)), "v": jax.random.normal(rng, (128, 64))}


def made(strategy="zero1", *, devices=None, rows=16, abstract=True, mesh=None, **settings):
    mesh = jdp.make_mesh(devices=devices or jax.devices(), **(mesh or {}))
    plan = jdp.Plan(mesh, strategy)
    state_of = jdp.abstract_state if abstract else jdp.init_state
    state = state_of(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss_fn, plan, **settings), state, {"x": np.ones((rows, 64), np.float32)}


def test_a_step_moves_to_a_targets_devices():
    step, state, batch = made("zero3", abstract=False, accumulate=2)
    moved = abstract_on(step, state, batch, "h100:2x8")
    mesh = moved.step.plan.mesh
    assert dict(mesh.shape) == {"data": 16}
    assert mesh.devices.flat[0].platform == "gpu"
    assert moved.state.params["w"].sharding == jax.NamedSharding(mesh, jax.P(None, "data"))
    assert moved.state.opt_state[0].mu["w"].sharding == moved.state.params["w"].sharding
    assert jax.tree.map(lambda x: (x.shape, x.dtype), moved.state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert moved.step.accumulate == 2
    assert step.plan.mesh.devices.flat[0].platform == "cpu"


def test_other_axes_keep_their_sizes_or_do_not_divide():
    axes = {"replica": 2, "data": 2, "model": 2}
    moved = abstract_on(*made(mesh=axes), target("h100:4x8"))
    assert dict(moved.step.plan.mesh.shape) == {"replica": 2, "data": 8, "model": 2}
    with pytest.raises(ValueError, match=r"h100:1x6: .* model=2 \(the others make 4\), but there are 6 devices"):
        abstract_on(*made(mesh=axes), "h100:1x6")


def test_rows_are_rounded_up_with_a_note():
    moved = abstract_on(*made(rows=24, accumulate=3), "h100:8x8")
    assert moved.batch["x"].shape == (192, 64)
    assert moved.batch["x"].sharding == moved.step.plan.batch_sharding
    [note] = moved.notes
    assert note == "a batch's rows must divide by data=64 × accumulate=3 = 192; given 24: 192 are taken"
    assert abstract_on(*made(rows=128), "h100:8x8").notes == ()


def test_without_a_target_everything_keeps_its_placement():
    step, state, batch = made(devices=jax.devices()[:4], abstract=False)
    moved = abstract_on(step, state, batch)
    assert moved.step is step
    assert jax.tree.map(lambda x: x.sharding, moved.state.params) == jax.tree.map(lambda x: x.sharding, state.params)
    assert (moved.batch["x"].shape, moved.notes) == ((16, 64), ())
