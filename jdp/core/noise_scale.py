"""The gradient noise scale: how large a batch may usefully be, measured at the cost of a few scalars.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: with the squared norms of the mean gradient of a whole batch of
B rows, and of its parts of b rows on average,

    |G|² = (B · |G_B|² - b · |G_b|²) / (B - b)        S = (|G_b|² - |G_B|²) / (1 / b - 1 / B)

estimate the squared norm of the true gradient and the trace of its covariance for one row, without bias. Their ratio
S / |G|², of averages over steps, is the noise scale in rows: with fewer rows steps are mostly noise and more devices
help almost in full; with many more they hardly help (section 2.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SMOOTHING = 0.95
"""Share of the old average that a step keeps; |G|² and S are averaged apart, as a mean of ratios would be biased."""


def updated(kept: jax.Array, small: jax.Array, big: jax.Array, rows: int, parts: int) -> jax.Array:
    """Return the averages with one more step's estimates.

    Args:
        kept: float32 [3]: the averages of |G|² and S, and how much of 1 their weights add up to.
        small: squared norm of a part's mean gradient, averaged over the parts.
        big: squared norm of the whole batch's.
        rows: of the batch, B.
        parts: that it was split into, 2 or more; each has b = B / parts rows.
    """
    part = rows / parts
    signal = (rows * big - part * small) / (rows - part)
    noise = (small - big) / (1 / part - 1 / rows)
    return SMOOTHING * kept + (1 - SMOOTHING) * jnp.stack([signal, noise, jnp.ones_like(signal)])


def ratio(kept: jax.Array) -> jax.Array:
    """Return the noise scale in rows; infinite while no signal shows in the noise.

    Args:
        kept: as `updated` returns it.
    """
    return jnp.where(kept[0] > 0, kept[1] / jnp.where(kept[0] > 0, kept[0], 1), jnp.inf)


def hint(noise_scale: float, rows: int) -> str:
    """Return what a noise scale says about a batch, in a sentence.

    Args:
        noise_scale: in rows, the last of a run.
        rows: of a batch.
    """
    scale = f"noise scale: about {noise_scale:,.0f} rows at the end, and a batch has {rows:,}"
    if rows < noise_scale / 2:
        return f"{scale}: larger batches would still save steps, almost in proportion"
    if rows > 2 * noise_scale:
        return f"{scale}: smaller batches would learn almost as much from a step; more devices help little here"
    return f"{scale}: a fair balance of steps and samples"
