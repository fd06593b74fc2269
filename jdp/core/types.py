"""Types that the whole package uses: `Loss`, and the aliases in signatures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jdp.base.errors import UserError

PyTree = Any
Device = Any
"""A `jax.Device`, real or a description of one that this machine does not have; jaxlib ships no types for it."""
Batch = PyTree
"""A pytree of arrays whose leading dimension is the example; global arrays inside a step."""
Metrics = dict[str, jax.Array]
Model = TypeVar("Model", covariant=True)
"""The result of `init`: an `nnx.Module`, or a pytree of parameters."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """The result of a loss function: the sum of the loss over examples, and the sum of their weights.

        >>> def loss_fn(model, batch, rng):
        ...     error = ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)  # [rows]
        ...     mask = batch["mask"]  # 0 for padding
        ...     return jdp.Loss((error * mask).sum(), mask.sum(), {"mae": (abs(error) * mask).sum()})
        >>> train_step = jdp.make_train_step(loss_fn, plan)
        >>> state, metrics = train_step(state, {**batch, "mask": np.ones(16, "float32")})
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'mae', 'skipped', 'weight']

    A step minimises Σtotal / Σweight over all devices and all microbatches; its gradient is Σ∇total / Σweight.
    Therefore padding, uneven last batches, the number of microbatches and the number of devices never change the
    objective. An average of averages would.

    Returning a `Loss` declares that `total` and `weight` are sums over rows: a row's term depends on that row only. So
    each device may call the loss on its own rows, sum gradients locally and send once (`partitioning="manual"`). The
    declaration is tried before the first step (`check_loss`).

    Args:
        total: scalar, any floating-point dtype: the loss summed (not averaged) over the examples of the given batch.
        weight: scalar, any dtype: the sum of the examples' weights (tokens that count, rows that are not padding). No
            gradient flows through it. If it sums to 0 over the whole step, the step is skipped: its `weight` metric is
            0 and its `loss` is NaN.
        metrics: reported beside the loss: name -> scalar or array of any shape, summed over examples (a confusion
            matrix, an image). It is reported divided by `weight`. Give a pair (total, weight) for a metric with its own
            weight, such as {"accuracy": (correct.sum(), rows)}. That weight is a scalar or has the total's shape. The
            shape must not depend on the number of rows; every element is all-reduced once a step. The names loss,
            weight, grad_norm and skipped are taken.
    """

    total: jax.Array
    weight: jax.Array | float
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


LossFn = Callable[[Any, Batch, Any], Any]
"""`loss_fn(model_or_params, batch, rng)` -> `Loss`, or a scalar, the loss of all rows that it sees."""
InitFn = Callable[[jax.Array], Model]
"""`init(rng)` -> an `nnx.Module`, or any pytree of parameters."""


class PartsError(UserError):
    """A loss cannot be called on parts of the batch. The message is a clause: what stands in the way, the remedy."""
