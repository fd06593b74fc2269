"""The types that travel: a loss as a sum and a weight, the aliases used in signatures, and what counts as a number."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import jax

PyTree = Any
Device = Any
"""A `jax.Device`, real or only described; jaxlib ships no types for it."""
Batch = PyTree
"""A pytree of arrays whose leading dimension is the example; global arrays inside a step."""
Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """The sum of a loss over examples, and the sum of their weights.

    A step's objective is Σtotal / Σweight over all devices and all microbatches, and its gradient Σ∇total / Σweight.
    So padding, uneven last batches, the number of microbatches and the number of devices never change the objective,
    which an average of averages does.

    Returning a `Loss` promises that `total` is a sum over examples: each example's part may depend on that example
    only. That promise is what lets jdp sum gradients locally and synchronise once (`partitioning="manual"`).

    Args:
        total: scalar, summed over the examples of the batch that was given.
        weight: scalar, the sum of the examples' weights (tokens that count, rows that are not padding). No gradient
            flows through it. Where it sums to 0 over the whole step there is nothing to learn: the step is skipped, its
            `weight` metric is 0 and its `loss` not a number.
        metrics: name -> scalar summed over examples, reported divided by `weight`; or a pair (total, weight) with its
            own weight, such as {"accuracy": (correct.sum(), rows)}.
    """

    total: jax.Array
    weight: jax.Array
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


LossFn = Callable[[Any, Batch, Any], Any]
"""`loss_fn(model_or_params, batch, rng)` -> `Loss`, or a scalar taken as the mean over the batch."""
InitFn = Callable[[jax.Array], Any]
"""`init(rng)` -> an `nnx.Module`, or any pytree of floating-point parameters."""


def is_whole(value: Any) -> bool:
    """Whether it is an integer, of Python or NumPy; True and 8.0 are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Whether it is a real number, of Python or NumPy; True is none."""
    return not isinstance(value, bool) and isinstance(value, Real)
