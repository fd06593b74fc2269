"""The tables [loss] and [optimizer]: the loss, and the update rule with its learning rate over the run."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jdp.experiment.schema.fields import Count, Decay, Fraction, Single
from jdp.experiment.schema.make import Made

USED_BY: dict[str, tuple[str, ...]] = {
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "adam": ("b1", "b2", "eps"),
    "lion": ("b1", "b2", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
    "adafactor": ("momentum", "weight_decay"),
    "lamb": ("b1", "b2", "eps", "weight_decay"),
    "lars": ("momentum", "weight_decay"),
    "rmsprop": ("b2", "eps", "momentum"),
    "adagrad": ("eps",),
    "muon": ("beta", "adam_lr", "b1", "b2", "eps", "weight_decay"),
}
"""Optimizer -> the keys that it reads. Others are refused, because the file would not describe the run."""


class Optimizer(Made):
    """[optimizer]: the update rule and its learning rate over the run. Or `make`, a function of (schedule, keywords)
    that returns an optax.GradientTransformation; schedule is the learning rate by step."""

    _shared: ClassVar = ("lr", "warmup_steps", "schedule", "final_lr_fraction", "ema_decay", "clip_norm")
    _arguments: ClassVar[tuple[str, ...]] = ("schedule",)

    name: Literal["adamw", "adam", "lion", "sgd", "adafactor", "lamb", "lars", "rmsprop", "adagrad", "muon"] = "adamw"
    """The update rule."""
    lr: Annotated[float, Field(gt=0), Single] = 3e-4
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps over which the rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up, until the last step."""
    final_lr_fraction: Fraction = 0.0
    """Final learning rate as a share of the peak (cosine, linear)."""
    weight_decay: Annotated[float, Field(ge=0), Single] = 0.0
    """Weight decay; not applied to biases and norm scales (adamw, lion, sgd, adafactor, lamb, lars, muon). Decoupled
    from the gradient, except in lars."""
    b1: Decay = 0.9
    """Decay of the first moment (adamw, adam, lion, lamb, muon)."""
    b2: Decay = 0.999
    """Decay of the second moment (adamw, adam, lion, lamb, rmsprop, muon)."""
    eps: Annotated[float, Field(gt=0), Single] = 1e-8
    """Added to the denominator (adamw, adam, lamb, rmsprop, adagrad, muon)."""
    momentum: Decay = 0.0
    """Momentum (sgd, adafactor, lars, rmsprop); muon's is beta."""
    beta: Decay = 0.95
    """Decay of the momentum that is orthogonalized, a Nesterov momentum (muon)."""
    adam_lr: Annotated[float, Field(gt=0), Single] | None = None
    """Peak learning rate of AdamW for all parameters except hidden matrices (muon); none = lr."""
    ema_decay: Decay | None = None
    """Decay of a moving average of the parameters, used by evaluations and samples; none = no average."""
    clip_norm: Annotated[float, Field(gt=0), Single] | None = None
    """Largest global gradient norm; larger gradients are scaled down to it."""


class LossTable(Made):
    """[loss]: the loss to minimise, by default the cross-entropy of the next token or the class. Or `make`, a function
    of (model, batch, rng, keywords) that returns a jdp.Loss."""

    _shared: ClassVar[tuple[str, ...]] = ("metrics",)
    _arguments: ClassVar[tuple[str, ...]] = ("model", "batch", "rng")

    metrics: tuple[str, ...] = ()
    """With make: names in jdp.Loss.metrics for early stopping and the best checkpoint. Larger is better for names that
    end in "accuracy", smaller for all others."""

    @property
    def chosen(self) -> str:
        """The key that chooses the loss, and its value, for messages."""
        return f"loss.make = {self.make!r}"
