"""The rows of all devices, for losses that compare examples with each other."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from jdp.core.sharding.traced_mesh import manual_batch_axes

_SEEN: ContextVar[list[bool] | None] = ContextVar("jdp_gathered_rows", default=None)


def gather_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rows of the whole batch, with their gradient, and which are this call's: for in-batch negatives.

        texts, own = jdp.gather_rows(text)  # text: [rows, features]
        nll = optax.softmax_cross_entropy_with_integer_labels(image @ texts.T, own)
        return jdp.Loss(total=nll.sum(), weight=len(own))

    Under partitioning="manual" a loss sees one device's rows: the others' are gathered (all_gather over the batch axes;
    their gradient comes back by a reduce-scatter, so that the sum over devices is the gradient of the whole batch's
    loss). Elsewhere a loss sees the whole batch, and `x` is returned. A loss that calls this is taken to mix examples
    on purpose; with several microbatches or local steps, each of which would have other negatives, it is refused, and
    with a measured noise scale, which is of rows that do not depend on each other.

    Args:
        x: [rows, ...], one for each row of the batch that the loss was called with, in order.

    Returns:
        ([all rows, ...], int32 [rows]: the place of each row of `x` among them).
    """
    if (seen := _SEEN.get()) is not None:
        seen.append(True)
    numbers = jnp.arange(x.shape[0], dtype=jnp.int32)
    if not (axes := manual_batch_axes()):
        return x, numbers
    first = jax.lax.axis_index(axes) * x.shape[0]
    return jax.lax.all_gather(x, axes, axis=0, tiled=True), numbers + first


@contextmanager
def recording() -> Generator[list[bool]]:
    """Give a list that is not empty afterwards if `gather_rows` was called."""
    seen: list[bool] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)
