"""Types that the whole package uses: `Loss`, and the aliases in signatures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jdp.base.errors import UserError

PyTree = Any
Device = Any
"""A `jax.Device`, real or described; jaxlib ships no types for it."""
Batch = PyTree
"""A pytree of arrays whose leading dimension is the rows (examples); global arrays inside a step."""
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

    A step minimises Σtotal / Σweight over all devices and all microbatches; its gradient is Σ∇total / Σweight. So
    padding, uneven last batches, and the numbers of microbatches and devices do not change the objective, as they would
    change an average of averages.

    A `Loss` declares that `total` and `weight` are sums over rows, and that the term of a row depends on that row only.
    So each device may call the loss on its own rows, sum gradients locally and send them once
    (`partitioning="manual"`). jdp tests this before the first step (`check_loss`).

    Args:
        total: scalar, any floating-point dtype: the loss summed (not averaged) over the examples of the given batch.
        weight: scalar, any dtype: the sum of the examples' weights (tokens that count, rows that are not padding). No
            gradient flows through it. If it sums to 0 over the whole step, the step is skipped: its `weight` metric is
            0 and its `loss` is NaN.
        metrics: name -> a sum over examples, reported divided by `weight`: a scalar, or an array (a confusion matrix)
            whose shape does not depend on the number of rows. A metric with its own weight is a pair (total, weight),
            such as {"accuracy": (correct.sum(), rows)}. This weight is a scalar or has the total's shape;
            accuracy_weight reports it. The names loss, weight, grad_norm and skipped are taken.
    """

    total: jax.Array
    weight: jax.Array | float
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


LossFn = Callable[[Any, Batch, Any], Any]
"""`loss_fn(model_or_params, batch, rng)` -> `Loss`, or a scalar: the loss of all rows in `batch`."""
InitFn = Callable[[jax.Array], Model]
"""`init(rng)` -> an `nnx.Module`, or any pytree of parameters."""


class PartsError(UserError):
    """A loss cannot be called on parts of the batch. The message is a clause: the reason and the remedy."""
