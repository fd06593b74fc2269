"""The gradient noise scale: how large a batch may usefully be, measured at the cost of a few scalars.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1, estimate the squared norm of the true gradient G, and the trace
S of its covariance for one row. The estimates are without bias, from the mean gradients of few and of many rows. The
ratio S / |G|² of averages over steps is the noise scale. With fewer rows steps are mostly noise and more devices help
almost in full; with many more they hardly help (section 2.2).

Here rows count by their weight in the loss, so that padding counts nothing, and the unit is that of `Loss.weight`: rows
or tokens. A batch of weight W has the mean gradient G_W. Its parts p have the sums g_p of weight w_p, where E|g_p|² =
w_p² · |G|² + w_p · S. With q = Σ|g_p|² / W² and v = Σw_p² / W²

    |G|² = (|G_W|² - q) / (1 - v)        S = W · (q - v · |G|²)

These are the paper's formulas if all parts have the same weight.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

SMOOTHING = 0.95
"""Share of the old average that a step keeps; |G|² and S are averaged apart, as a mean of ratios would be biased."""
LEAST = 1e-3
"""The least 1 - v of a step that counts: with all weight in one part there is nothing to compare, only rounding."""


def updated(kept: jax.Array, parts: jax.Array, big: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the averages with one more step's estimates."""
    q, v = parts[0] / weight**2, parts[1] / weight**2
    signal = (big - q) / (1 - v)
    noise = q - v * signal
    new = SMOOTHING * kept + (1 - SMOOTHING) * jnp.stack([signal, weight * noise, noise])
    return jnp.where(1 - v > LEAST, new, kept)


def ratio(kept: jax.Array) -> jax.Array:
    """Return the noise scale, in the unit of the loss's weight; infinite while no signal shows in the noise."""
    return jnp.where(kept[0] > 0, kept[1] / jnp.where(kept[0] > 0, kept[0], 1), jnp.inf)


def hint(kept: jax.Array, unit: str) -> str:
    """Return a sentence about a run's batches, from the averages of its last steps."""
    (_, noise, of_batch), found = map(float, kept), float(ratio(kept))
    batch = noise / of_batch if of_batch else math.nan
    scale = f"noise scale: about {found:,.0f} {unit} at the end, and a batch has {batch:,.0f}"
    if batch < found / 2:
        return f"{scale}: larger batches would still save steps, almost in proportion"
    if batch > 2 * found:
        return f"{scale}: smaller batches would learn almost as much from a step; more devices help little here"
    return f"{scale}: a fair balance of steps and samples"
