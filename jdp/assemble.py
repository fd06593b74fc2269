"""From a validated experiment to the objects of a run: data, mesh, plan, state, steps. Nothing below sees the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from jdp.data import VOCAB_SIZE, TextData, text_data
from jdp.experiment import ExperimentError, optimizer
from jdp.init import abstract_state, init_state
from jdp.mesh import make_mesh
from jdp.models import GPTConfig, build, next_token_loss
from jdp.plan import Plan
from jdp.schema import Experiment
from jdp.state import TrainState
from jdp.step import Step, make_eval_step, make_train_step
from jdp.types import Batch, Device, Loss


def text_loss(model: Any, batch: Batch, rng: jax.Array | None) -> Loss:
    """Next-token cross-entropy in nats, summed over the tokens that count.

    Args:
        model: a GPT.
        batch: "tokens" and "targets" int32 [rows, length], "weights" float32 [rows, length].
        rng: for dropout; None turns it off.
    """
    return Loss(*next_token_loss(model(batch["tokens"], rng=rng), batch["targets"], batch["weights"]))


@dataclass(frozen=True)
class Assembly:
    """Everything a run is made of; parts that cost something are made when first asked for.

    Attributes:
        experiment: the validated file.
        mesh: of real devices, or of described ones to compile for.
    """

    experiment: Experiment
    mesh: Mesh

    @staticmethod
    def on_devices(experiment: Experiment, devices: list[Device] | None = None) -> Assembly:
        """On all devices of this machine or cluster, or on those given."""
        return Assembly(experiment, make_mesh(devices=devices, **experiment.mesh))

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.mesh, self.experiment.strategy)

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer(self.experiment)

    @cached_property
    def config(self) -> GPTConfig:
        """The model's configuration. Raises ExperimentError for a model that cannot read text."""
        config = self.experiment.model.config
        if not isinstance(config, GPTConfig):
            raise ExperimentError(
                f"data.source gives text, which a GPT can learn; model.name = {self.experiment.model.name!r} takes "
                "vectors: choose a gpt size, or use that model from Python"
            )
        if config.vocab_size < VOCAB_SIZE:
            raise ExperimentError(
                f"model.vocab_size must be at least {VOCAB_SIZE}, as tokens are bytes; given {config.vocab_size}"
            )
        return config

    @cached_property
    def data(self) -> TextData:
        source = self.experiment.data.source
        return text_data(
            source if isinstance(source, str) else list(source),
            length=self.experiment.data.length,
            heldout_fraction=self.experiment.data.heldout_fraction,
        )

    @cached_property
    def init(self) -> Callable[[jax.Array], nnx.Module]:
        config = self.config
        return lambda rng: build(config, rngs=nnx.Rngs(rng))

    @property
    def rng(self) -> jax.Array:
        return jax.random.key(self.experiment.seed)

    def state(self) -> TrainState:
        return init_state(self.init, self.tx, self.plan, rng=self.rng)

    def abstract_state(self) -> TrainState:
        return abstract_state(self.init, self.tx, self.plan, rng=self.rng)

    def abstract_batch(self) -> Batch:
        """The shapes of a global batch."""
        shape = (self.experiment.train.batch_size, self.experiment.data.length)
        kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        return {k: jax.ShapeDtypeStruct(shape, t, sharding=self.plan.batch_sharding) for k, t in kinds.items()}

    @cached_property
    def train_step(self) -> Step:
        chosen = self.experiment
        return make_train_step(
            text_loss,
            self.plan,
            accumulate=chosen.train.accumulate,
            precision=chosen.precision,
            partitioning=chosen.partitioning,
            clip_norm=chosen.optimizer.clip_norm,
        )

    @cached_property
    def eval_step(self) -> Step:
        chosen = self.experiment
        return make_eval_step(
            text_loss,
            self.plan,
            accumulate=chosen.train.accumulate,
            precision=chosen.precision,
            partitioning=chosen.partitioning,
        )
