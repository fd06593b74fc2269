"""The entries that the synchronisation keeps in a state between steps (`TrainState.sync`)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jdp.base.notices import notice
from jdp.core.plan import Plan
from jdp.core.sharding.user_mesh import auto_axes
from jdp.core.state import TrainState
from jdp.core.step_settings import StepSettings
from jdp.core.types import PyTree


def with_sync_entries(state: TrainState, shapes: dict[str, PyTree], plan: Plan, settings: StepSettings) -> TrainState:
    """Return the state with entries of these shapes, zeros at first; the state itself if it has them."""
    if jax.tree.map(jnp.shape, state.sync) == jax.tree.map(jnp.shape, shapes):
        return state
    if state.sync:
        notice(
            f"the state kept {' and '.join(state.sync)} for another way to synchronise, which this step does not "
            f"take over: wire={settings.wire.gradients!r} on {plan.batch_shards} shards of the batch"
        )

    changed = {"sync": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)}
    placed = {"sync": plan.shardings(replace(state, **changed)).sync}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.params)):
        describe = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        return replace(state, **jax.tree.map(describe, changed, placed))
    zeros = lambda: {"sync": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)}  # noqa: E731
    with auto_axes(plan.mesh):
        return replace(state, **jax.jit(zeros, out_shardings=placed)())
