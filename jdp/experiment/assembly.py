"""From a validated experiment to the objects of a run: data, mesh, plan, state, steps. Nothing below sees the file."""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jdp.core.init import abstract_state, init_state
from jdp.core.sharding.mesh import make_mesh
from jdp.core.sharding.plan import Plan
from jdp.core.state import TrainState
from jdp.core.step import Step, make_eval_step, make_train_step
from jdp.core.toml import toml_value
from jdp.core.types import Batch, Device, LossFn
from jdp.data import VOCAB_SIZE, Source, global_batches
from jdp.data.feed import Feed, process_rows, shard_batches
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import ExperimentError
from jdp.experiment.losses import features_loss, image_loss, text_loss
from jdp.experiment.optimizer import optimizer
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.timing.mfu import seconds_at_peak
from jdp.models import GPTConfig, ModelConfig, build
from jdp.models.sizes import parameter_shapes


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
        """Raises ExperimentError for a rule that matches no parameter, or does not divide one."""
        _check_rules(self.experiment, dict(self.mesh.shape), parameter_shapes(self.config))
        return Plan(self.mesh, self.experiment.strategy, rules=self.rules)

    @property
    def rules(self) -> tuple[tuple[str, PartitionSpec], ...]:
        """[rules] as `Plan` takes them: "" is a dimension that is not sharded."""
        return tuple(
            (pattern, PartitionSpec(*(entry or None for entry in entries)))
            for pattern, entries in self.experiment.rules.items()
        )

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer(self.experiment)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's configuration. Raises ExperimentError for a GPT that has fewer tokens than there are bytes."""
        config, data = self.experiment.model.config, self.experiment.data
        bytes_are_read = data.tokenizer == "bytes" and not any(word.endswith(".npz") for word in data.sources)
        if isinstance(config, GPTConfig) and bytes_are_read and config.vocab_size < VOCAB_SIZE:
            raise ExperimentError(
                f"model.vocab_size must be at least {VOCAB_SIZE}, as tokens are bytes; given {config.vocab_size}"
            )
        return config

    @cached_property
    def loss(self) -> LossFn:
        """The loss function of the model's kind."""
        return {"text": text_loss, "images": image_loss, "features": features_loss}[self.experiment.kind]

    @cached_property
    def data(self) -> Any:
        """The data set of [data]; see `jdp.experiment.data`."""
        return open_data(self.experiment)

    @cached_property
    def eval_sets(self) -> dict[str, Source]:
        """What evaluations read, by the beginning of their metrics' names."""
        return open_eval_sets(self.experiment, self.data)

    def feed(
        self,
        source: Source,
        *,
        seed: int,
        shuffle: bool,
        start: int = 0,
        epochs: int | None = None,
        most: int | None = None,
    ) -> Feed:
        """Global batches of `source` on the devices, read ahead; the first `most` of them. Else as `global_batches`."""
        size = self.experiment.train.batch_size
        decodes = self.experiment.kind == "images"  # a millisecond each, where other samples take microseconds
        batches = global_batches(
            source,
            batch_size=size,
            seed=seed,
            rows=process_rows(self.plan, size),
            start=start,
            shuffle=shuffle,
            epochs=epochs,
            threads=min(16, len(os.sched_getaffinity(0))) if decodes else 2,
        )
        return shard_batches(itertools.islice(batches, most), self.plan)

    @cached_property
    def init(self) -> Callable[[jax.Array], nnx.Module]:
        config = self.config
        return lambda rng: build(config, rngs=nnx.Rngs(rng))

    @property
    def rng(self) -> jax.Array:
        return jax.random.key(self.experiment.seed)

    @property
    def wrt(self) -> str | tuple[str, ...] | None:
        return self.experiment.train.wrt

    @property
    def trained_count(self) -> int:
        """How many parameters are trained."""
        patterns = (self.wrt,) if isinstance(self.wrt, str) else self.wrt or ("*",)
        shapes = parameter_shapes(self.config).items()
        return sum(math.prod(shape) for path, shape in shapes if any(fnmatch.fnmatchcase(path, p) for p in patterns))

    def state(self) -> TrainState:
        return init_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.wrt)

    def abstract_state(self) -> TrainState:
        """The state's shapes and where they lie; traced once."""
        return self._abstract_state

    @cached_property
    def _abstract_state(self) -> TrainState:
        return abstract_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.wrt)

    def abstract_batch(self) -> Batch:
        """The shapes of a global batch."""
        rows, config = self.experiment.train.batch_size, self.config
        if isinstance(config, GPTConfig):
            names = ["tokens", "targets", *(["segments"] if self.experiment.data.packing == "documents" else [])]
            length = (rows, self.experiment.data.length)
            shapes = {**dict.fromkeys(names, (length, "int32")), "weights": (length, "float32")}
        else:
            size = getattr(config, "image_size", 0)
            inputs = (size, size, getattr(config, "channels", 0)) if size else (getattr(config, "features_in", 0),)
            name = "images" if size else "features"
            shapes = {name: ((rows, *inputs), "float32"), "labels": ((rows,), "int32"), "weights": ((rows,), "float32")}
        lies = self.plan.batch_sharding
        return {name: jax.ShapeDtypeStruct(shape, kind, sharding=lies) for name, (shape, kind) in shapes.items()}

    @cached_property
    def train_step(self) -> Step:
        chosen = self.experiment
        return make_train_step(
            self.loss,
            self.plan,
            clip_norm=chosen.optimizer.clip_norm,
            sync_batch_norm=chosen.sync_batch_norm,
            **self._of_both_steps,
        )

    @cached_property
    def seconds_at_peak(self) -> float | None:
        """What a training step would take at the devices' peak; None where that is not known."""
        return seconds_at_peak(self.train_step, self.abstract_state(), self.abstract_batch())

    @cached_property
    def eval_step(self) -> Step:
        return make_eval_step(self.loss, self.plan, **self._of_both_steps)

    @property
    def _of_both_steps(self) -> dict[str, Any]:
        chosen = self.experiment
        return {
            "accumulate": chosen.train.accumulate,
            "precision": chosen.precision,
            "partitioning": chosen.partitioning,
        }


def _check_rules(experiment: Experiment, sizes: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
    """Say what is wrong with [rules] by the key of the file; the plan would say it of `Plan(rules=...)`."""
    left = dict(shapes)
    for pattern, entries in experiment.rules.items():
        key, given = f"rules.{toml_value(pattern)}", toml_value(entries)
        if not any(fnmatch.fnmatchcase(path, pattern) for path in shapes):
            raise ExperimentError(
                f"{key} must match a parameter, and matches none of the {len(shapes)}, such as "
                f"{', '.join(list(shapes)[:3])}: mend the pattern, or remove it"
            )
        for path in [path for path in left if fnmatch.fnmatchcase(path, pattern)]:
            shape = left.pop(path)  # the first rule that matches counts
            axes = [(entry,) if isinstance(entry, str) else entry for entry in entries]
            if len(axes) > len(shape):
                raise ExperimentError(
                    f"{key} must have an entry for each dimension at most; given {given}, which has {len(axes)} "
                    f"entries; {path} {list(shape)} has {len(shape)} dimensions: remove entries, or mend the pattern"
                )
            pieces = [math.prod(sizes[axis] for axis in each if axis) for each in axes]
            if any(size % count for size, count in zip(shape, pieces, strict=False)):
                raise ExperimentError(
                    f"{key} must divide the dimensions of what it matches; given {given}, which cuts {path} "
                    f"{list(shape)} into {' × '.join(map(str, pieces))}: change the rule, the size, or [mesh]"
                )
