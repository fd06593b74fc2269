"""The rows of all devices, for losses that compare examples with each other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jdp.base.errors import UserError, public
from jdp.base.toml import described
from jdp.core.sharding.mesh import manual_batch_axes, set_while

_SEEN: ContextVar[list[bool] | None] = ContextVar("jdp_gathered_rows", default=None)


@public()
def gather_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rows of the whole batch, with their gradient, and the indices of this call's rows among them.

        >>> def contrastive(model, batch, rng):
        ...     images, texts = model(batch["x"]), batch["y"]
        ...     texts, own = jdp.gather_rows(texts)  # in-batch negatives: the texts of all devices
        ...     nll = optax.softmax_cross_entropy_with_integer_labels(images @ texts.T, own)
        ...     return jdp.Loss(total=nll.sum(), weight=len(own))
        >>> train_step = jdp.make_train_step(contrastive, plan, partitioning="manual")
        >>> state, metrics = train_step(state, batch)

    Losses that compare examples with each other need it. Under partitioning="manual" a loss sees one device's rows, and
    this gathers all rows (all_gather over the batch axes). Their gradient returns by a reduce-scatter, so the sum over
    devices is the gradient of the whole batch's loss. Under "auto" a loss sees the whole batch, and `x` is returned.
    A loss that calls this mixes examples on purpose. With several microbatches it is refused, because each microbatch
    would have other negatives.

    Args:
        x: [rows, ...], for each row of the batch that the loss was called with, in order.

    Returns:
        ([all rows, ...], int32 [rows]: the place of each row of `x` among them).

    Raises:
        ValueError: `x` is not an array, or is a scalar.
    """
    if (seen := _SEEN.get()) is not None:
        seen.append(True)
    if not getattr(x, "shape", ()):
        raise UserError(f"gather_rows takes an array of rows; given {described(x)}. Gather each array alone.")
    numbers = jnp.arange(x.shape[0], dtype=jnp.int32)
    if not (axes := manual_batch_axes()):
        return x, numbers
    first = jax.lax.axis_index(axes) * x.shape[0]
    rows = jax.lax.all_gather(x, axes, axis=0, tiled=True)
    return checkpoint_name(rows, "gathered_rows"), numbers + first  # remat keeps them, unlike weights


def recording() -> AbstractContextManager[list[bool]]:
    """Return a context that yields a list, which is not empty afterwards if `gather_rows` was called."""
    return set_while(_SEEN, list[bool]())
