"""Model state other than the parameters: which leaves a call of the model changed, and how they reach the next step.

A leaf that a call did not change is still the same array. It is neither averaged over devices nor carried from one
microbatch to the next, because the sum over devices of a mask filled with `finfo.min` would overflow.
"""

from collections.abc import Callable
from operator import and_

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jdp.base.errors import UserError
from jdp.base.tree_paths import path_in_model, path_of
from jdp.core.types import Batch, PyTree


def changed_leaves(before: PyTree, after: PyTree) -> tuple[bool, ...]:
    """Return for each leaf, in order, whether it is another array than before."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return tuple(old is not new for old, new in pairs)


def names_of(model_state: PyTree) -> list[str]:
    """Return the path of each leaf, in order; for several models `model_state` is a tuple."""
    leaves = jax.tree.leaves_with_path(model_state)
    if not isinstance(model_state, tuple):
        return [path_of(path) for path, _ in leaves]
    return [path_in_model(path[0].idx, len(model_state), path_of(path[1:])) for path, _ in leaves]


def refuse_varying(
    call: Callable[[PyTree, Batch, PyTree], PyTree],
    model_state: PyTree,
    batch: Batch,
    key: PyTree,
    *,
    carried: bool,
) -> None:
    """Refuse model state that is not floating point and would differ between devices."""
    leaves = jax.tree.leaves(model_state)
    fixed = [not jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    if not any(fixed):
        return
    jaxpr = jax.make_jaxpr(call)(model_state, batch, key).jaxpr
    needs = [partial_eval.dce_jaxpr(jaxpr, [i == j for j in range(len(leaves))])[1] for i in range(len(leaves))]
    varies = [any(used[len(leaves) :]) for used in needs]
    for _ in leaves if carried else ():  # after one microbatch, after two, ...
        varies = [v or any(map(and_, used, varies)) for v, used in zip(varies, needs, strict=True)]
    for name, leaf, is_fixed, is_varying in zip(names_of(model_state), leaves, fixed, varies, strict=True):
        if is_fixed and is_varying:
            raise UserError(
                f"Under partitioning='manual' {name} ({leaf.dtype}) would depend on each device's rows and differ "
                "between devices; only floating-point state is averaged. Use partitioning='auto', which sees the whole "
                "batch, or keep it in floating point."
            )


def mean_over(x: jax.Array, axes: tuple[str, ...], devices: int) -> jax.Array:
    """Return the mean of the devices' `x` along mesh axes, in x's dtype, computed in float32 or wider.

    Values are first divided by a power of two above the number of devices, which is exact, so that no sum of finite
    values overflows. A mean that rounds up beyond `finfo.max` is clipped to it.
    """
    wide, scale = jnp.promote_types(x.dtype, jnp.float32), 2 ** devices.bit_length()
    mean = jax.lax.psum(x.astype(wide) / scale, axes) / devices
    largest = jnp.asarray(jnp.finfo(x.dtype).max, wide) / scale
    return (scale * jnp.where(jnp.isfinite(mean), jnp.clip(mean, -largest, largest), mean)).astype(x.dtype)
