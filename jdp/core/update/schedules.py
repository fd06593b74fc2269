"""Learning rates for large batches: scale the rate with the batch, and warm it up. The functions name the sources."""

import math
from typing import Any, Literal

import jax.numpy as jnp
import optax

from jdp.base.errors import UserError, public
from jdp.base.words import is_integer, is_number

RULES = ("linear", "sqrt")


@public()
def scaled_lr(base_lr: float, *, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """Return the learning rate for a batch size, given one that was tuned for another batch size.

        >>> jdp.scaled_lr(0.1, base_batch=256, batch=8192)
        3.2
        >>> jdp.scaled_lr(1e-3, base_batch=256, batch=1024, rule="sqrt")
        0.002

    Args:
        base_lr: the learning rate that was tuned.
        base_batch: the global batch size, in examples, that it was tuned for.
        batch: the global batch size to use: examples a step over all devices and microbatches.
        rule: "linear": base_lr · batch / base_batch, for SGD (Krizhevsky 2014, arXiv:1404.5997; Goyal et al. 2017,
            arXiv:1706.02677, section 2.1). "sqrt": base_lr · √(batch / base_batch), for Adam and similar optimizers
            (Krizhevsky 2014; Malladi et al. 2022, arXiv:2205.10287; for LAMB You et al. 2019, arXiv:1904.00962).

    Raises:
        ValueError: a rate or a batch that is not a positive number; an unknown rule.
    """
    if rule not in RULES:
        raise UserError(f"The rule that scales a learning rate is one of {', '.join(RULES)}; given {rule!r}.")
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        if not (is_number(value) and 0 < value < math.inf):
            raise UserError(f"Scaling a learning rate takes positive numbers; given {name}={value!r}.")
    ratio = batch / base_batch
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


@public()
def warmup(rate: float | optax.Schedule, steps: int, *, start: float = 0.0) -> optax.Schedule:
    """Return a schedule with a gradual warm-up: from `start` to `rate` in equal increments, then `rate`.

        >>> rate = jdp.warmup(optax.cosine_decay_schedule(0.4, 1000), steps=4)
        >>> [round(float(rate(step)), 2) for step in range(5)]
        [0.1, 0.2, 0.3, 0.4, 0.4]

    The first step is one increment above `start`; the last step of the warm-up has the full rate (Goyal et al. 2017,
    arXiv:1706.02677, section 2.2).

    Args:
        rate: the learning rate to reach, or an optax schedule that follows. Its step 0 is the end of the warm-up, which
            ends at its first value.
        steps: number of optimizer steps of the warm-up; 0 for none.
        start: the learning rate to start from. Give the base rate of one worker's batch to warm up as the paper does.

    Returns:
        A function of the number of optimizer steps taken, as optax's optimizers accept for a learning rate.

    Raises:
        ValueError: `rate` is neither a number nor a schedule, `steps` is not an integer, or `steps` or `start` is
            negative.
    """
    if not callable(rate) and not is_number(rate):
        raise UserError(f"A warm-up's rate is a number, or an optax schedule that follows it; given {rate!r}.")
    if not is_integer(steps) or not is_number(start) or not (steps >= 0 and start >= 0):
        raise UserError(f"A warm-up takes an integer steps >= 0 and start >= 0; given {steps=}, {start=}.")

    def schedule(count: Any) -> Any:
        after = jnp.maximum(jnp.asarray(count) - steps, 0)
        full: Any = rate(after) if callable(rate) else rate
        share = jnp.minimum((jnp.asarray(count, jnp.float32) + 1) / max(steps, 1), 1.0)
        return start + (full - start) * share

    return schedule
