"""The entries that the synchronisation keeps in a state between steps (`TrainState.sync`)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jdp.base.notices import notice
from jdp.core.plan import Plan
from jdp.core.sharding.axes import REPLICA
from jdp.core.sharding.user_mesh import auto_axes
from jdp.core.state import STACKED, TrainState
from jdp.core.step_settings import StepSettings
from jdp.core.types import PyTree
from jdp.core.update.local_steps import stack, unstack


def with_sync_entries(state: TrainState, shapes: dict[str, PyTree], plan: Plan, settings: StepSettings) -> TrainState:
    """Return the state with entries of these shapes, zeros at first; the state itself if it has them."""
    local, replicas = settings.local_steps, plan.mesh.shape.get(REPLICA, 1)
    fits = not local or all(x.shape[:1] == (replicas,) for x in jax.tree.leaves(state.opt_state))
    if fits and jax.tree.map(jnp.shape, state.sync) == jax.tree.map(jnp.shape, shapes):
        return state
    if state.sync:
        notice(
            f"the state kept {' and '.join(state.sync)} for another way to synchronise, which this step does not "
            f"take over: wire={settings.wire.gradients!r}, local_steps={local} on "
            f"{plan.batch_shards} shards of the batch"
        )
    was_stacked = STACKED in state.sync

    def converted(opt_state: PyTree) -> dict[str, PyTree]:
        opt_state = plan.entered(opt_state)
        one = unstack(opt_state) if was_stacked else opt_state
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return {"opt_state": stack(one, replicas) if local else one, "sync": zeros}

    with auto_axes(plan.mesh):
        changed = jax.eval_shape(converted, state.opt_state)
    shardings = plan.shardings(replace(state, **changed))
    placed = {name: getattr(shardings, name) for name in changed}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.params)):
        describe = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        return replace(state, **jax.tree.map(describe, changed, placed))
    with auto_axes(plan.mesh):
        return replace(state, **jax.jit(converted, out_shardings=placed)(state.opt_state))
