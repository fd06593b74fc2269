"""Classify points by their ring: a model, data made by code, a loss and an optimizer that an experiment file names.

    pip install -e experiments/plugin
    jdp train experiments/plugin/rings.toml --plugin rings

The file names each by `make`; other keys of its table are the function's keywords.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdp


class WaveNet(nnx.Module):
    """Points as waves of growing frequency, then two linear maps."""

    def __init__(self, width: int, octaves: int, rings: int, rngs: nnx.Rngs) -> None:
        self.octaves = octaves
        self.hidden = nnx.Linear(4 * octaves, width, rngs=rngs)
        self.out = nnx.Linear(width, rings, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        angles = points[:, :, None] * 2.0 ** jnp.arange(self.octaves)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(len(points), -1)
        return self.out(jax.nn.relu(self.hidden(waves.astype(self.out.kernel.dtype)))).astype(jnp.float32)


def wave_net(rng: jax.Array, *, width: int = 32, octaves: int = 3, rings: int = 3) -> nnx.Module:
    """[model]: return an nnx.Module, or any pytree of arrays; jdp calls this under jit, with sharded results."""
    return WaveNet(width, octaves, rings, nnx.Rngs(rng))


class Points:
    """[data]: an object with `len` and `[index]`; jdp shuffles, shards and resumes it, and holds out a part."""

    def __init__(self, *, rings: int = 3, points: int = 3000, noise: float = 0.1) -> None:
        if points < 2 * rings:
            raise ValueError(f"points must be two a ring or more; given {points} for {rings}: raise it")
        self.rings, self.points, self.noise = rings, points, noise

    def __len__(self) -> int:
        return self.points

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random, label = np.random.default_rng(index), index % self.rings  # the same on every process
        angle, distance = random.uniform(0, 2 * np.pi), 1 + label + random.normal(scale=self.noise)
        return {"points": distance * np.array([np.cos(angle), np.sin(angle)]), "labels": np.array(label)}


def smoothed(model: WaveNet, batch: dict[str, jax.Array], rng: jax.Array | None, *, share: float = 0.1) -> jdp.Loss:
    """[loss]: cross-entropy with label smoothing (arXiv:1512.00567, section 7)."""
    logits, weights = model(batch["points"]), batch["weights"]  # weights: 0 for rows that only fill a batch
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], logits.shape[-1]), share)
    right = logits.argmax(-1) == batch["labels"]
    total = (optax.softmax_cross_entropy(logits, targets) * weights).sum()
    return jdp.Loss(total, weights.sum(), {"accuracy": (right * weights).sum()})


def signum(schedule: optax.Schedule, *, momentum: float = 0.9) -> optax.GradientTransformation:
    """[optimizer]: the sign of the momentum (arXiv:1802.04434); schedule is the learning rate by step."""
    return optax.chain(optax.ema(momentum, debias=False), optax.scale_by_sign(), optax.scale_by_learning_rate(schedule))
