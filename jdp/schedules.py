"""Learning rates for large batches: scale the rate with the batch, and warm it up.

A rate that was tuned for `base_batch` examples a step is carried over to another global batch: linearly (Krizhevsky
2014, arXiv:1404.5997; Goyal et al. 2017, arXiv:1706.02677, section 2.1), which keeps k small steps and one k times as
large alike for SGD, or by the square root (Krizhevsky 2014), which keeps the variance of the update alike and is what
adaptive optimizers follow (Malladi et al. 2022, arXiv:2205.10287; You et al. 2019, arXiv:1904.00962, for LAMB). The
first steps of a large rate diverge: so warm up gradually (Goyal et al. 2017, section 2.2).
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
import optax

RULES = ("linear", "sqrt")


def scaled_lr(base_lr: float, *, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """The learning rate for `batch` examples a step, given one that was tuned for `base_batch`.

    Args:
        base_lr: the rate that was tuned.
        base_batch: the global batch, in examples, that it was tuned for.
        batch: the global batch at hand: rows a step over all devices and microbatches.
        rule: "linear" for SGD: base_lr · batch / base_batch; "sqrt" for Adam and its kin: base_lr times the root of
            that ratio.

    Raises:
        ValueError: a rate or a batch that is not positive; an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"The rule to scale a learning rate by is one of {', '.join(RULES)}; got {rule!r}.")
    for name, value in (("base_lr", base_lr), ("base_batch", base_batch), ("batch", batch)):
        if not value > 0:
            raise ValueError(f"Scaling a learning rate takes positive numbers; got {name}={value}.")
    ratio = batch / base_batch
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


def warmup(rate: float | optax.Schedule, steps: int, *, start: float = 0.0) -> optax.Schedule:
    """Gradual warm-up: from `start` up to `rate` in `steps` equal increments, then `rate` (Goyal et al. 2017, 2.2).

    Args:
        rate: the rate to reach, or a schedule that goes on from there; it counts its own steps from the end of the
            warm-up, and the ramp ends at its first value.
        steps: optimizer steps the ramp takes. Step 0 has `start`, step `steps` is the first at the full rate. 0: none.
        start: the rate of the first step; the paper starts from the base rate of one worker's batch.

    Raises:
        ValueError: `steps` or `start` is negative.
    """
    if steps < 0 or start < 0:
        raise ValueError(f"A warm-up takes steps >= 0 and start >= 0; got steps={steps}, start={start}.")

    def schedule(count: Any) -> Any:
        after = jnp.maximum(jnp.asarray(count) - steps, 0)
        full: Any = rate(after) if callable(rate) else rate
        share = jnp.minimum(jnp.asarray(count, jnp.float32) / steps, 1.0) if steps else jnp.float32(1)
        return start + (full - start) * share

    return schedule
