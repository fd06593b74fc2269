"""The optimizer's state in host memory (`Plan.offload`): fetched as a whole before the update, then put back."""

from __future__ import annotations

from dataclasses import replace

import jax

from jdp.core.plan import Plan
from jdp.core.sharding.host_memory import rest_sharding, to_device, to_host
from jdp.core.sharding.placement import Placement
from jdp.core.state import TrainState
from jdp.core.types import PyTree


def fetched(plan: Plan, state: TrainState, grads: PyTree) -> tuple[TrainState, PyTree]:
    """Return a state with the optimizer's state in device memory, and the gradients, which it is fetched after.

    Without the barrier XLA may fetch it first, and hold it beside the activations.
    """
    if plan.offload is None:
        return state, grads
    leaves, tree = jax.tree.flatten(state.opt_state)
    on_host = [placement.on_host for placement in jax.tree.leaves(plan.state_placements(state).opt_state)]
    hosts = [to_host(x) for x, is_there in zip(leaves, on_host, strict=True) if is_there]
    hosts, grads = jax.lax.optimization_barrier((hosts, grads))
    moved = map(to_device, hosts)
    opt_state = [next(moved) if is_there else x for x, is_there in zip(leaves, on_host, strict=True)]
    return replace(state, opt_state=tree.unflatten(opt_state)), grads


def at_rest(plan: Plan, state: TrainState) -> TrainState:
    """Return a new state sharded as it rests, in the memory where the plan keeps it."""

    def moved(x: jax.Array, placement: Placement) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, rest_sharding(plan.mesh, replace(placement, memory="device")))
        return to_host(x) if placement.on_host else x

    return jax.tree.map(moved, state, plan.state_placements(state))
