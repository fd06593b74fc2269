"""The optimizer of a step: checked when a state is made, and called at the end of every step (`guarded_update`).

The state is arrays of constant shapes, and the update needs nothing that a step does not have. The checks need only
shapes, so a mistake is found before a compilation.

The end of a step clips the gradient, updates the optimizer, and keeps the old state if a value is not finite. A
gradient can be finite and its update not: a learning rate is NaN, or a weight overflows. So the new parameters and the
new optimizer state are checked too; the devices exchange two numbers for each parameter, in one collective. With
`Plan.offload` the optimizer's state is fetched from host memory as a whole before the update, and put back after.
"""

import math
import re
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.toml import described
from jdp.base.tree_paths import path_of
from jdp.core.plan import Plan
from jdp.core.reading import DECOMPOSITIONS, UPDATE, every_eqn
from jdp.core.sharding.host_memory import to_device, to_host
from jdp.core.sharding.placement import Placement
from jdp.core.state import TrainState, trained_part, with_trained
from jdp.core.types import PyTree


def is_optimizer(tx: Any) -> bool:
    return not isinstance(tx, type) and all(callable(getattr(tx, name, None)) for name in ("init", "update"))


def check_optimizer(tx: Any) -> None:
    if not is_optimizer(tx):
        fix = " Call it first, with its settings." if callable(tx) else ""
        fix = " Pass its optax transformation." if hasattr(tx, "opt_state") else fix
        raise UserError(f"tx is an optax optimizer, e.g. optax.adamw(3e-4); given {described(tx)}.{fix}")


def apply(tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
    """Return parameters and optimizer state after an update, which gets the loss as `value` if it accepts that."""
    if isinstance(params, optax.LookaheadParams):  # two copies; the gradient is that of the fast one
        grads = grads.fast
    tx = optax.with_extra_args_support(tx)
    try:
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    except TypeError as error:  # an optimizer with other extra arguments (optax.contrib.sam)
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def first_state(tx: Any, params: PyTree) -> PyTree:
    """Return `tx.init(params)` with every leaf as a `jax.Array`."""
    try:
        opt_state = tx.init(params)
    except Exception as error:
        raise UserError(_why_not(error, params)) from error
    for path, leaf in jax.tree.leaves_with_path(opt_state):
        if not isinstance(leaf, jax.Array | int | float | complex) and not hasattr(leaf, "__array__"):
            raise UserError(
                f"An optimizer's state holds arrays only; opt_state/{path_of(path)} is {leaf!r}. Keep settings in the "
                "functions of optax.GradientTransformation(init, update)."
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.result_type(leaf)), opt_state)


def check_update(tx: Any, params: PyTree, opt_state: PyTree) -> ClosedJaxpr:
    """Check one update, on shapes alone; return its program."""
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        trace = jax.make_jaxpr(partial(apply, tx), return_shape=True)
        program, (_, after) = trace(params, opt_state, params, loss)
    except Exception as error:
        raise UserError(_why_not(error, params)) from error
    old, new = (
        {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (opt_state, after)
    )
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            raise UserError(
                f"An optimizer's state keeps its structure, shapes and dtypes from step to step; opt_state/{path} is "
                f"{old.get(path, 'nothing')} before an update and {new.get(path, 'nothing')} after it. Change its init."
            )
    return program


def products(program: ClosedJaxpr) -> set[int]:
    """Return the numbers of elements of the arrays that a program multiplies as matrices, or decomposes."""
    names = {"dot_general", *DECOMPOSITIONS}
    eqns = (eqn for eqn in every_eqn(program.jaxpr) if eqn.primitive.name in names)
    return {math.prod(x.aval.shape) for eqn in eqns for x in eqn.invars}  # pyright: ignore[reportAttributeAccessIssue]


def _why_not(error: Exception, params: PyTree) -> str:
    """Describe the failure of an optimizer on shapes; jdp is not its cause."""
    given = "A step gives an optimizer gradients, state, parameters and value= (the loss); this optimizer"
    if isinstance(error, TypeError) and "missing" in str(error) and (missing := re.findall(r"'(\w+)'", str(error))):
        return f"{given} also needs {', '.join(missing)}. Leave out its cause, as in optax.lbfgs(linesearch=None)."
    *_, last = traceback.extract_tb(error.__traceback__)
    said = next(iter(str(error).splitlines()), "").rstrip(".")
    scalars = [path_of(path) for path, leaf in jax.tree.leaves_with_path(params) if not leaf.shape]
    fix = "Choose another optimizer, for all parameters or for those that it cannot update (optax.multi_transform)."
    fix = "Give masks and labels as functions of nested dicts, not nnx.State." if "statelib" in str(error) else fix
    fix += f" Scalar parameters, which it may not update: {listed(scalars)}." if scalars else ""
    return f"{given} raised {type(error).__name__}: {said} ({Path(last.filename).name}:{last.lineno}). {fix}"


def fetched(plan: Plan, state: TrainState, grads: PyTree) -> tuple[TrainState, PyTree]:
    """Return the state with its optimizer's state in device memory, and the gradients.

    The barrier makes the transfer wait for the gradients: otherwise XLA may hold the state beside the activations.
    """
    if plan.offload is None:
        return state, grads
    on_host = tuple(placement.on_host for placement in jax.tree.leaves(plan.state_placements(state).opt_state))
    hosts = jax.tree.map(to_host, trained_part(state.opt_state, on_host))
    hosts, grads = jax.lax.optimization_barrier((hosts, grads))
    opt_state = with_trained(state.opt_state, jax.tree.map(to_device, hosts), on_host)
    return replace(state, opt_state=opt_state), grads


def at_rest(plan: Plan, state: TrainState) -> TrainState:
    """Return a new state in the shardings and memories that the plan gives it."""

    def moved(x: jax.Array, placement: Placement) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, placement.rest))
        return to_host(x) if placement.on_host else x

    return jax.tree.map(moved, state, plan.state_placements(state))


def guarded_update(
    clip_norm: float | None, state: TrainState, grads: PyTree, total: jax.Array, weight: jax.Array, model_state: PyTree
) -> tuple[TrainState, jax.Array]:
    norm, square = _norm(grads, state.step)
    finite = jnp.isfinite(norm if clip_norm is not None else square) & jnp.isfinite(total)
    finite &= _stays_finite((state.model_state,), (model_state,))
    params, opt_state = clipped_update(clip_norm, state, grads, norm, total / weight)
    finite &= _stays_finite((state.params, state.opt_state), (params, opt_state))
    updated = replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state)
    kept = replace(state, skipped=state.skipped + 1)
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), updated, kept), norm


def clipped_update(
    clip_norm: float | None, state: TrainState, grads: PyTree, norm: jax.Array, loss: jax.Array
) -> tuple[PyTree, PyTree]:
    params = trained_part(state.params, state.static.trained)
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = optax.tree.cast_like(grads, params)
    with jax.named_scope(UPDATE):
        params, opt_state = apply(state.static.tx, grads, state.opt_state, params, loss)
    return with_trained(state.params, params, state.static.trained), opt_state


def broken(before: PyTree, after: PyTree) -> PyTree:
    """Return a tree of booleans, True for numbers that became NaN or infinite; None for leaves that cannot.

    An infinite number may stay infinite: a running maximum begins at -inf.
    """

    def of_leaf(old: jax.Array, new: jax.Array) -> jax.Array | None:
        if old is new or not jnp.issubdtype(old.dtype, jnp.inexact):
            return None
        return (jnp.isfinite(old) & ~jnp.isfinite(new)) | (jnp.isnan(new) & ~jnp.isnan(old))

    return jax.tree.map(of_leaf, before, after)


def _stays_finite(before: PyTree, after: PyTree) -> jax.Array:
    """Return False if a leaf without NaN or infinity now has one: 0 · x is NaN for both, and so is its sum.

    A parameter and the optimizer's leaves that mirror it share a sum, which XLA computes from the old state. With a sum
    for each leaf XLA keeps their shared terms: under ddp the stacked gradients of Llama 3 8B's layers, 23 GiB.

    The sums are compared as an array. XLA repeats a chain of scalars in each kernel that uses its end, so a program
    would grow with the square of its parameters. A sum over an array is not repeated.
    """
    sums = dict[tuple[str, tuple[int, ...]], tuple[jax.Array, jax.Array]]()
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if old is new or not jnp.issubdtype(old.dtype, jnp.inexact):
            continue
        keys = path_of(path).split("/")[1:]
        ends = [("/".join(keys[start:]), new.shape) for start in range(len(keys) + 1)]
        name = next((end for end in ends if end in sums), ends[0])
        zeros = 0 * old, 0 * new
        sums[name] = (sums[name][0] + zeros[0], sums[name][1] + zeros[1]) if name in sums else zeros
    old, new = (jnp.array([abs(pair[i].sum()).astype(jnp.float32) for pair in sums.values()]) for i in (0, 1))
    return ((new == 0) | (old != 0)).all()


def _norm(grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the global L2 norm of float32 gradients, and its square; the square may overflow, the norm does not.

    Beside Σg² it sums (g · 2⁻¹⁰⁰)² in the same pass over the gradients, which is finite if Σg² overflows. The factor
    depends on a value: otherwise XLA would multiply the squares by its square, which is zero. The last sum ends the
    chains of scalars (`_stays_finite`); without the maximum XLA would make a chain of it, too.
    """
    tiny = jnp.where(step >= 0, jnp.float32(2.0**-100), jnp.float32(1))
    square = optax.tree.norm(grads, squared=True)
    scaled = optax.tree.norm(jax.tree.map(lambda g: g * tiny, grads), squared=True)
    square, scaled = jnp.maximum(jnp.array([[square, scaled], [0, 0]]), 0).sum(axis=0)
    return jnp.where(jnp.isinf(square), jnp.sqrt(scaled) / tiny, jnp.sqrt(square)), square
