"""Batch statistics over several devices that each see their own rows.

`nnx.BatchNorm` with an axis name averages the devices' means. With a mask, this is the mean over all rows only if every
device masks the same number. So sums and counts are reduced instead.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.base.notices import notice


def synchronise(norm: nnx.BatchNorm, axes: tuple[str, ...]) -> None:
    """Make a norm compute its statistics over the mesh axes `axes` besides the local rows; `()`: local rows only."""
    if norm.axis_name is not None:
        notice("jdp replaces BatchNorm's axis_name by the axes of the batch")
    norm.axis_name = cast(Any, axes or None)
    if axes:  # nnx's own setter would add an attribute
        object.__setattr__(norm, "__class__", _masked(type(norm)))


class _Masked(nnx.BatchNorm):
    """nnx.BatchNorm whose statistics with a mask are those of all devices' rows together."""

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        running = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or running or running is None:
            return super().__call__(x, use_running_average, mask=mask)
        scale, bias = (None if v is None else v[...] for v in (self.scale, self.bias))
        x, mean, _, scale, bias = self.promote_dtype((x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype)
        features = {dim % x.ndim for dim in (self.axis if isinstance(self.axis, tuple) else (self.axis,))}
        mean, var = self._statistics(x, tuple(dim for dim in range(x.ndim) if dim not in features), mask)
        for average, new in ((self.mean, mean), (self.var, var)):
            average[...] = self.momentum * average[...] + (1 - self.momentum) * new
        shape = [size if dim in features else 1 for dim, size in enumerate(x.shape)]
        factor = jax.lax.rsqrt(var + self.epsilon).reshape(shape)
        y = (x - mean.reshape(shape)) * (factor if scale is None else factor * scale.reshape(shape))
        return (y if bias is None else y + bias.reshape(shape)).astype(x.dtype)

    def _statistics(self, x: jax.Array, dims: tuple[int, ...], mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return mean and variance over `dims` of the unmasked elements, in float32 or wider; NaN if all are masked."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
        counted = jnp.broadcast_to(mask, [x.shape[i] if i in dims else size for i, size in enumerate(mask.shape)])
        count = jnp.sum(counted, axis=dims, dtype=wide.dtype)  # one number, unless features have masks of their own

        def means(*terms: jax.Array) -> list[jax.Array]:
            sums = jnp.stack([jnp.sum(term, axis=dims, where=counted) for term in terms])
            total = jnp.concatenate([sums.ravel(), count.ravel()])  # one small collective
            total = jax.lax.psum(total, self.axis_name, axis_index_groups=self.axis_index_groups)
            return list(total[: sums.size].reshape(sums.shape) / total[sums.size :].reshape(count.shape))

        if self.use_fast_variance:
            mean, square = means(wide, jnp.square(wide))
            return mean, jnp.maximum(square - jnp.square(mean), 0.0)
        [mean] = means(wide)
        [var] = means(jnp.square(wide - jnp.expand_dims(mean, dims)))
        return mean, var


@functools.cache
def _masked(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """Return a class with `_Masked` between `kind` and nnx.BatchNorm, so that `super()` in a subclass finds it."""
    if issubclass(_Masked, kind):
        return _Masked
    return cast(Any, type(kind.__name__, (cast(Any, kind), _Masked), {}))
