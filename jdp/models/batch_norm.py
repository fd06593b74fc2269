"""Batch normalisation over the rows of nonzero weight.

`flax.nnx.BatchNorm` takes a mask, but over devices it takes the mean of the devices' means. That is the mean over all
rows only if every device masks equally many. Here sums and counts are reduced instead, so padding may be anywhere.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class BatchNorm(nnx.BatchNorm):
    """nnx.BatchNorm (arXiv:1502.03167) of [batch, height, width, channels], in x's dtype; all inside is float32.

    Variances are biased, in the running average too, as in Flax (PyTorch's running average is unbiased).
    """

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalise x [batch, ..., channels] by the batch's statistics, which update the running averages, or by those
        averages.

        `use_running_average` of None is as `train()` or `eval()` set it last. Where `mask`, which broadcasts to x, is
        False, values are left out of the statistics; if nothing is left, the averages stay as they are.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        y = x.astype(jnp.float32)
        if frozen:
            mean, variance = self.mean[...], self.var[...]
        else:
            mean, variance, count = self._statistics(y, mask)
            rate = jnp.where(count > 0, 1.0 - self.momentum, 0.0)
            self.mean[...] += rate * (mean - self.mean[...])
            self.var[...] += rate * (variance - self.var[...])
        y = (y - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None:
            y = y * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)

    def _statistics(self, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return mean and variance [channels], and the number of elements they are of, over all devices."""
        dims = tuple(range(x.ndim - 1))
        counted = jnp.broadcast_to(True if mask is None else mask, (*x.shape[:-1], 1))
        sums = [jnp.sum(z, axis=dims, where=counted) for z in (x, jnp.square(x))]
        total = jnp.concatenate([*sums, jnp.sum(counted, axis=dims, dtype=jnp.float32)])
        if self.axis_name is not None:  # one small collective
            total = jax.lax.psum(total, self.axis_name, axis_index_groups=self.axis_index_groups)
        count = total[-1]
        mean, square = jnp.split(total[:-1] / jnp.maximum(count, 1.0), 2)
        return mean, jnp.maximum(square - jnp.square(mean), 0.0), count
