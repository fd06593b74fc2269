"""The end of a step: clip the gradient, update the optimizer, and keep the old state where a value is not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
import optax

from jdp.core.plan import Plan
from jdp.core.state import TrainState, map_flat, trained_part, with_trained
from jdp.core.tracing.collectives import update_scope
from jdp.core.types import PyTree
from jdp.core.update.optimized import optimized


def guarded_update(
    clip_norm: float | None,
    plan: Plan,
    state: TrainState,
    grads: PyTree,
    total: jax.Array,
    weight: jax.Array,
    model_state: PyTree,
) -> tuple[TrainState, jax.Array]:
    """Return the state after the optimizer's update by these gradients, and the gradient's norm."""
    trained = state.static.trained
    params = trained_part(state.params, trained)
    # Padding counts as zero: divided by a weight of zero it would be NaN where the gradient itself is infinite.
    norm, square = _norm(map_flat(lambda g, flat: flat.masked(g), grads, "params", state.static), state.step)
    finite = jnp.isfinite(norm if clip_norm is not None else square) & jnp.isfinite(total)
    finite &= _stays_finite(state.model_state, model_state)
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    with update_scope():
        params, opt_state = optimized(plan, state, grads, total / weight)
    params = with_trained(state.params, params, trained)
    updated = replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state)
    kept = replace(state, skipped=state.skipped + 1)
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), updated, kept), norm


def _stays_finite(before: PyTree, after: PyTree) -> jax.Array:
    """Return a boolean scalar: True if no number turned into NaN or infinity.

    What was infinite may stay so: a running maximum begins at -inf.
    """
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    changed = [(old, new) for old, new in pairs if old is not new and jnp.issubdtype(new.dtype, jnp.inexact)]
    broken = [(jnp.isfinite(old) & ~jnp.isfinite(new)) | (jnp.isnan(new) & ~jnp.isnan(old)) for old, new in changed]
    return jnp.logical_not(reduce(jnp.logical_or, map(jnp.any, broken), jnp.bool_(False)))


def _norm(grads: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the global L2 norm of float32 gradients, and its square; the square may overflow, the norm does not.

    Beside Σg² it sums (g · 2⁻¹⁰⁰)² in the same pass over the gradients, which is finite if Σg² overflows. The factor
    depends on a value: otherwise XLA would multiply the squares by its square, which is zero.
    """
    tiny = jnp.where(step >= 0, jnp.float32(2.0**-100), jnp.float32(1))
    square = optax.tree.norm(grads, squared=True)
    scaled = optax.tree.norm(jax.tree.map(lambda g: g * tiny, grads), squared=True)
    return jnp.where(jnp.isinf(square), jnp.sqrt(scaled) / tiny, jnp.sqrt(square)), square
