"""A plug-in of jdp: which ring is a point on? A model, a data set made by code, a loss and an optimizer, each by name.

    pip install -e experiments/plugin
    jdp train experiments/plugin/rings.toml --plugin rings
    jdp train --plugin rings --help        # the fields below, as keys

Each is a dataclass, whose fields become keys of the experiment file, and a function that takes an instance of it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from pydantic import Field

import jdp
from jdp.plugin import register_dataset, register_loss, register_model, register_optimizer


@dataclass(frozen=True)
class Waves:
    """Points as waves of growing frequency, then two linear maps.

    Fields:
        width: of the hidden layer.
        octaves: waves of each coordinate; the frequency doubles from one to the next.
        rings: how many there are to tell apart.
        activation: between the two maps.
    """

    width: Annotated[int, Field(ge=1)] = 32
    octaves: Annotated[int, Field(ge=1, le=16)] = 3
    rings: int = 3
    activation: Literal["relu", "tanh"] = "relu"


class WaveNet(nnx.Module):
    def __init__(self, fields: Waves, rngs: nnx.Rngs) -> None:
        self.fields = fields
        self.hidden = nnx.Linear(4 * fields.octaves, fields.width, rngs=rngs)
        self.out = nnx.Linear(fields.width, fields.rings, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        angles = points[:, :, None] * 2.0 ** jnp.arange(self.fields.octaves)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(len(points), -1)
        activation = jax.nn.relu if self.fields.activation == "relu" else jnp.tanh
        return self.out(activation(self.hidden(waves.astype(self.out.kernel.dtype)))).astype(jnp.float32)


@register_model("wave-net", Waves)
def wave_net(fields: Waves, rngs: nnx.Rngs) -> nnx.Module:  # or any pytree of arrays
    return WaveNet(fields, rngs)


@dataclass(frozen=True)
class Rings:
    """Points around the origin, at distances 1, 2, ... and some noise.

    Fields:
        rings: how many; a point's label is the ring that it is on.
        points: samples in all.
        noise: standard deviation of the distance.
    """

    rings: int = 3
    points: int = 3000
    noise: Annotated[float, Field(ge=0)] = 0.1

    def __post_init__(self) -> None:
        if self.points < 2 * self.rings:
            raise ValueError(f"points must be two a ring or more; given {self.points} for {self.rings}: raise it")


@register_dataset("rings", Rings)
class Points:  # what `make` returns needs `len` and `[index]`; jdp shuffles, shards, resumes and holds some out
    def __init__(self, fields: Rings) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return self.fields.points

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random, label = np.random.default_rng(index), index % self.fields.rings  # the same on every process
        angle, distance = random.uniform(0, 2 * np.pi), 1 + label + random.normal(scale=self.fields.noise)
        return {"points": distance * np.array([np.cos(angle), np.sin(angle)]), "labels": np.array(label)}


@dataclass(frozen=True)
class Smoothed:
    """Cross-entropy in which every class gets a share of the label.

    Fields:
        share: of the label that is spread over all classes (arXiv:1512.00567, section 7).
    """

    share: Annotated[float, Field(ge=0, lt=1)] = 0.1


@register_loss("smoothed", Smoothed, metrics=["accuracy"])
def smoothed(fields: Smoothed, model: WaveNet, batch: dict[str, jax.Array], rng: jax.Array | None) -> jdp.Loss:
    logits, weights = model(batch["points"]), batch["weights"]  # weights: 0 for rows that only fill a batch
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], logits.shape[-1]), fields.share)
    right = logits.argmax(-1) == batch["labels"]
    total = (optax.softmax_cross_entropy(logits, targets) * weights).sum()
    return jdp.Loss(total, weights.sum(), {"accuracy": (right * weights).sum()})


@dataclass(frozen=True)
class Signum:
    """Momentum, of which only the sign is taken (arXiv:1802.04434).

    Fields:
        momentum: share of the momentum that a step keeps.
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


@register_optimizer("signum", Signum)
def signum(fields: Signum, schedule: optax.Schedule) -> optax.GradientTransformation:
    momentum = optax.ema(fields.momentum, debias=False)
    return optax.chain(momentum, optax.scale_by_sign(), optax.scale_by_learning_rate(schedule))
