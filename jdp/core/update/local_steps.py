"""Local steps: each replica takes several optimizer steps by itself, then the replicas agree on their weights.

A call of the step is a round. Every replica (a set of devices along the other axes of the mesh) starts from the same
weights θ. It takes H steps with its own part of the batch and its own optimizer state, and ends at θ_r. Then, once:

    Δ = θ - mean over replicas of θ_r
    m ← μ · m + Δ
    θ ← θ - η · (Δ + μ · m)

With η = 1 and μ = 0 the weights are averaged: local SGD (Stich 2019, arXiv:1805.09767). With AdamW inside, η = 0.7 and
Nesterov's μ = 0.9 it is DiLoCo (Douillard et al. 2023, arXiv:2311.08105). Across `replica`, the slow links, a device
sends its shard of Δ once in H steps. Inside a replica the strategy is the same as without local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from jdp.base.numbers import is_integer, is_number
from jdp.core.batch import interleave
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.user_mesh import auto_axes, entered, mesh_of_home
from jdp.core.state import MOMENTUM, STACKED, TrainState, trained_part, with_trained
from jdp.core.types import Batch, PyTree

Once = Callable[[Plan, TrainState, Batch], tuple[TrainState, PyTree, jax.Array]]
"""(plan of a replica, state, batch of one step) -> (the state after it, its sums, the gradient's norm)."""


@dataclass(frozen=True)
class LocalSteps:
    """How many steps a replica takes by itself, and how the replicas then agree.

        >>> plan = jdp.Plan(jdp.make_mesh(replica=2, data=4), "zero3")
        >>> state = jdp.init_state(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
        >>> diloco = jdp.LocalSteps(2, lr=0.7, momentum=0.9)
        >>> train_step = jdp.make_train_step(loss_fn, plan, local_steps=diloco)
        >>> state, metrics = train_step(state, batch)  # a round: two steps of each replica
        >>> int(state.sync["rounds"])
        1

    Attributes:
        steps: H, optimizer steps of a replica in a round; the rows of a batch are split into so many. Raise it until
            the slow links no longer limit the speed.
        lr: η, the outer learning rate; 1 takes the replicas' mean. DiLoCo uses 0.7, with a momentum of 0.9.
        momentum: μ, Nesterov momentum of the outer optimizer, from 0 to below 1. Above 0 the state holds it, sharded
            like the parameters. Use it with many steps in a round, where plain averages learn slower.

    Raises:
        ValueError: a setting is out of range.
    """

    steps: int
    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not is_integer(self.steps) or self.steps < 1:
            raise ValueError(f"local_steps is a number of steps, 1 or more; given {self.steps!r}: give an integer.")
        if not is_number(self.lr) or not 0 < self.lr <= 10:
            raise ValueError(f"LocalSteps.lr is above 0 and at most 10; given {self.lr!r}: give a number, such as 0.7.")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(
                f"LocalSteps.momentum is from 0 to below 1; given {self.momentum!r}: give a number, such as 0.9."
            )

    @staticmethod
    def of(given: int | LocalSteps | None, plan: Plan) -> LocalSteps | None:
        """Return the settings that `local_steps` stands for; None for none.

        Args:
            given: a number of steps, whose weights are averaged; a `LocalSteps`; or None.
            plan: of the step.

        Raises:
            ValueError: it is neither, or the plan's mesh has no replicas.
        """
        if given is None:
            return None
        local = given if isinstance(given, LocalSteps) else LocalSteps(given)
        if plan.mesh.shape.get(REPLICA, 1) == 1:
            raise ValueError(
                "local_steps are taken by each replica alone, so the mesh needs a replica axis of 2 or more; given "
                f"{dict(plan.mesh.shape)}: jdp.make_mesh(replica=2, data=-1)."
            )
        return local

    def kept_shapes(self, params: PyTree) -> dict[str, PyTree]:
        """Return the shapes and dtypes that are kept between rounds, besides each replica's optimizer state.

        Args:
            params: the trained parameters, real or abstract; None for frozen ones.
        """
        shapes: dict[str, PyTree] = {STACKED: jax.ShapeDtypeStruct((), jnp.int32)}
        if self.momentum:
            shapes[MOMENTUM] = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        return shapes


def train_round(
    local: LocalSteps, plan: Plan, group: int, once: Once, state: TrainState, batch: Batch
) -> tuple[TrainState, PyTree, jax.Array]:
    """Take a round; return the state after it, the sums over its steps and replicas, and the mean gradient norm.

    If a gradient is not finite in any step of any replica, the whole round changes nothing and counts as skipped.
    """
    mesh, trained = plan.mesh, state.static.trained
    inner = plan.on(_mesh_of_a_replica(mesh))
    key = jax.random.fold_in(state.rng, state.consumed)

    def run(params: PyTree, opt_state: PyTree, model_state: PyTree, key: jax.Array, batch: Batch) -> Any:
        def split(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(interleave(x, local.steps, group), PartitionSpec(None, DATA))

        def body(state: TrainState, batch: Batch) -> Any:
            after, sums, norm = once(inner, state, batch)
            return after, (sums, norm)

        own = jax.random.fold_in(key, jax.lax.axis_index(REPLICA))  # other noise in each replica
        zero = jnp.zeros((), jnp.int32)
        opt_state = jax.tree.map(lambda x: x[0], opt_state)
        start = TrainState(zero, params, opt_state, model_state, own, zero, {}, state.static)
        after, (sums, norms) = jax.lax.scan(body, start, jax.tree.map(split, batch))
        sums, norm = jax.tree.map(lambda x: x.sum(axis=0), sums), norms.mean()
        ended = (trained_part(after.params, trained), after.opt_state, after.model_state, sums, norm, after.skipped)
        return jax.tree.map(lambda x: x[None], ended)

    each, same = PartitionSpec(REPLICA), PartitionSpec()
    replicas = jax.shard_map(
        run, mesh=mesh, in_specs=(same, each, same, same, each), out_specs=each, axis_names={REPLICA}, check_vma=False
    )
    params, opt_state, model_state, sums, norms, skipped = replicas(
        state.params, state.opt_state, state.model_state, key, batch
    )
    finite = (skipped == 0).all()
    before = trained_part(state.params, trained)
    delta = _mean_change(plan, state, before, params)
    momentum, change = state.sync.get(MOMENTUM), delta
    if local.momentum:
        momentum = jax.tree.map(lambda m, d: local.momentum * m + d, momentum, delta)
        change = jax.tree.map(lambda m, d: d + local.momentum * m, momentum, delta)
    agreed = jax.tree.map(lambda p, c: (p - local.lr * c).astype(p.dtype), before, change)
    sync = {STACKED: state.sync[STACKED] + 1, **({MOMENTUM: momentum} if local.momentum else {})}
    updated = replace(
        state,
        step=state.step + 1,
        params=with_trained(state.params, agreed, trained),
        opt_state=opt_state,
        model_state=jax.tree.map(_mean_state, state.model_state, model_state),
        sync=sync,
    )
    kept = replace(state, skipped=state.skipped + 1)
    new = jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), updated, kept)
    return new, jax.tree.map(lambda x: x.sum(axis=0), sums), norms.mean()


def stack(opt_state: PyTree, replicas: int) -> PyTree:
    """Return each replica's own copy of an optimizer's state: leaves [...] -> [replicas, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (replicas, *x.shape)), opt_state)


def unstack(opt_state: PyTree) -> PyTree:
    """Return one state for all replicas: leaves [replicas, ...] -> [...], the mean of floating-point ones."""
    return jax.tree.map(lambda x: x.mean(axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0], opt_state)


def of_replicas(function: Callable[[PyTree, PyTree], PyTree], opt_state: PyTree, params: PyTree) -> PyTree:
    """Return `function(opt_state of all replicas, params)`, sharded like the parameters."""
    leaves = jax.tree.leaves((opt_state, params))
    if not leaves or not all(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in leaves):
        return function(unstack(opt_state), params)
    shardings, tree = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, params))
    mesh, program = _of_replicas(function, tuple(shardings), tree)
    with auto_axes(mesh):
        return program(opt_state, params)


@lru_cache
def _of_replicas(function: Callable[..., Any], shardings: tuple[Any, ...], tree: Any) -> tuple[Mesh, Any]:
    mesh = mesh_of_home(shardings[0].mesh)

    def one(*given: PyTree) -> PyTree:
        opt_state, params = entered(given, mesh)
        return function(unstack(opt_state), params)

    return mesh, jax.jit(one, out_shardings=tree.unflatten(shardings))


def _mean_change(plan: Plan, state: TrainState, before: PyTree, after: PyTree) -> PyTree:
    """Return Δ, float32, at rest specs: each device sends its shard over `replica`, and nothing else."""
    placements = trained_part(plan.param_placements(state.params, state.static), state.static.trained)
    rest = jax.tree.map(lambda placement: placement.rest, placements)
    ended = jax.tree.map(lambda placement: PartitionSpec(REPLICA, *placement.rest), placements)
    count = plan.mesh.shape[REPLICA]

    def change(before: PyTree, after: PyTree) -> PyTree:
        moved = jax.tree.map(lambda b, a: b.astype(jnp.float32) - a[0].astype(jnp.float32), before, after)
        return jax.tree.map(lambda x: jax.lax.psum(x, REPLICA) / count, moved)

    return jax.shard_map(change, mesh=plan.mesh, in_specs=(rest, ended), out_specs=rest, check_vma=False)(before, after)


def _mean_state(before: jax.Array, after: jax.Array) -> jax.Array:
    """Return model state after a round: the replicas' mean in floating point, else the first one's (all are equal)."""
    if not jnp.issubdtype(before.dtype, jnp.floating):
        return after[0]
    return after.astype(jnp.float32).mean(axis=0).astype(before.dtype)


def _mesh_of_a_replica(mesh: Mesh) -> Mesh:
    position = mesh.axis_names.index(REPLICA)
    names = tuple(name for name in mesh.axis_names if name != REPLICA)
    types = tuple(t for name, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if name != REPLICA)
    return Mesh(np.take(mesh.devices, 0, axis=position), names, axis_types=types)


def is_inside_a_replica() -> bool:
    """Return True while a replica's own steps are traced: along `replica` arrays are the device's own."""
    return REPLICA in jax.sharding.get_abstract_mesh().manual_axes
