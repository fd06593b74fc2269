"""From a validated experiment to the objects of a run: data, mesh, plan, state, steps. Only this layer sees the file.

`jdp.run` reaches models and their FLOPs only through an `Assembly`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jdp.base.toml import cut
from jdp.base.tree_paths import matches, path_of
from jdp.core.flax_nnx import built, split
from jdp.core.init.train_state import abstract_state, init_state
from jdp.core.make_step import make_eval_step, make_train_step
from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import make_mesh
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch, Device, LossFn
from jdp.core.update.ema import ema_params
from jdp.data import VOCAB_SIZE, NumpyBatch, Source, global_batches
from jdp.data.feed import Feed, process_rows, shard_batches
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import ExperimentError, mesh_sizes, to_toml
from jdp.experiment.losses import features_loss, image_loss, text_loss, text_scores
from jdp.experiment.make import function_of
from jdp.experiment.optimizer import learning_rate, optimizer
from jdp.experiment.schema.evaluate import tops
from jdp.experiment.schema.experiment import Experiment
from jdp.foresight.timing.model_flops import seconds_at_peak
from jdp.guard.memory_check import check_batch, check_state, check_weights
from jdp.guard.nonfinite import Inspection
from jdp.models import GPTConfig, ModelConfig, ViTConfig
from jdp.models.construction import build, parameter_shapes
from jdp.models.sizes import parameter_lower_bound


@dataclass(frozen=True)
class Assembly:
    """The objects of a run. Expensive objects are made at first use and kept.

    Attributes:
        experiment: the validated file.
        mesh: real devices, or described devices to compile for.
    """

    experiment: Experiment
    mesh: Mesh

    @staticmethod
    def on_devices(experiment: Experiment, devices: list[Device] | None = None) -> Assembly:
        """Return an assembly on the given devices, by default on all devices of this machine or cluster."""
        if devices is not None:
            mesh_sizes(experiment.mesh, len(devices))  # its error names [mesh]
        return Assembly(experiment, make_mesh(devices=devices, **experiment.mesh))

    @cached_property
    def plan(self) -> Plan:
        """The plan of mesh, strategy and [rules] ("" is an unsharded dimension).

        Raises ExperimentError for a rule that matches no parameter, or does not divide one.
        """
        rules = self.experiment.rules
        specs = [(pattern, PartitionSpec(*(entry or None for entry in entries))) for pattern, entries in rules.items()]
        shapes = self.parameter_shapes
        try:
            plan = Plan(self.mesh, self.experiment.strategy, rules=tuple(specs))
            plan.param_placements({p: jax.ShapeDtypeStruct(shape, np.float32) for p, shape in shapes.items()})
        except ValueError as error:
            raise ExperimentError(f"[rules]: {error}") from None
        return replace(plan, offload=self.experiment.offload)

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer."""
        return optimizer(self.experiment, self.parameter_shapes)

    @cached_property
    def learning_rate(self) -> optax.Schedule:
        """The learning rate as a function of the number of completed optimizer steps."""
        return learning_rate(self.experiment)

    @cached_property
    def toml(self) -> str:
        """The experiment as resolved."""
        return to_toml(self.experiment)

    @cached_property
    def config(self) -> Any:
        """The model's configuration: a `ModelConfig`, or the keywords of model.make.

        Raises ExperimentError for a GPT of bytes with a vocabulary below 256, and for "cudnn" attention without GPUs.
        """
        config, data = self.experiment.model.config, self.experiment.data
        bytes_are_read = data.tokenizer == "bytes" and data.knows_text
        if self.experiment.kind == "text" and bytes_are_read and config.vocab_size < VOCAB_SIZE:
            raise ExperimentError(
                f"model.vocab_size must be at least {VOCAB_SIZE} because tokens are bytes; given {config.vocab_size}: "
                "raise it, or name a data.tokenizer"
            )
        platform = self.mesh.devices.flat[0].platform
        if isinstance(config, GPTConfig | ViTConfig) and config.attention == "cudnn" and platform != "gpu":
            raise ExperimentError(
                f'model.attention = "cudnn" runs on NVIDIA GPUs; given {platform} devices: set "auto" or "xla"'
            )
        return config

    @cached_property
    def loss(self) -> LossFn:
        """The loss function of [loss], or the usual loss for the kind of model."""
        table, kind = self.experiment.loss, self.experiment.model.kind
        if table.make is not None:
            return functools.partial(function_of(table.make), **table.keywords)
        assert kind is not None  # the schema asks for a loss then
        return {"text": text_loss, "images": image_loss, "features": features_loss}[kind]

    @property
    def eval_loss(self) -> LossFn:
        """The loss function of the evaluations."""
        if not (ranks := tops(self.experiment.train.eval_metrics)):
            return self.loss
        of_kind = {"text": text_scores, "images": image_loss, "features": features_loss}[self.experiment.kind]
        return functools.partial(of_kind, tops=ranks)

    @cached_property
    def data(self) -> Any:
        """The data set of [data], opened."""
        return open_data(self.experiment)

    @cached_property
    def eval_sets(self) -> dict[str, Source]:
        """The evaluation sets by the prefix of their metrics: "eval", "eval_NAME"."""
        return open_eval_sets(self.experiment, self.data)

    def train_batches(self, start: int) -> Iterable[NumpyBatch]:
        """Return the training batches from step `start` on, all rows of each."""
        return self._batches(self.data.train, start=start, **self._train_order)

    def train_feed(self, start: int, samples: int) -> Feed:
        """Return the training batches after `start` steps and `samples` samples, on the devices, read ahead."""
        return self.feed(self.data.train, start=start, samples=samples, **self._train_order)

    def feed(self, source: Source, *, most: int | None = None, **order: Any) -> Feed:
        """Return at most `most` global batches of `source` on the devices, read ahead; `order` has keywords of
        `global_batches` (seed, shuffle, start, samples, epochs)."""
        rows = process_rows(self.plan, self.experiment.train.batch_size)
        return shard_batches(itertools.islice(self._batches(source, rows=rows, **order), most), self.plan)

    def _batches(self, source: Source, **order: Any) -> Iterable[NumpyBatch]:
        # An image or a sample of data.make takes a millisecond, any other sample microseconds.
        threads = min(16, len(os.sched_getaffinity(0))) if self.experiment.kind in ("images", "own") else 2
        return global_batches(source, batch_size=self.experiment.train.batch_size, threads=threads, **order)

    @property
    def _train_order(self) -> dict[str, Any]:
        return {"seed": self.experiment.seed, "shuffle": self.experiment.data.shuffle}

    @cached_property
    def init(self) -> Callable[[jax.Array], Any]:
        """The function that makes the model from a key. It raises ExperimentError if the result is not a model."""
        config, table = self.config, self.experiment.model

        def make(rng: jax.Array) -> Any:
            if table.make is None:
                return build(config, rngs=nnx.Rngs(rng))
            model = table.call(rng)
            leaves = jax.tree.leaves(model)
            wrong = [leaf for leaf in leaves or [model] if not isinstance(leaf, jax.Array | np.ndarray)]
            if wrong and not isinstance(model, nnx.Module):
                raise ExperimentError(
                    f"{table.chosen} returns an nnx.Module, or a pytree of arrays; given {cut(repr(wrong[0]))}: return "
                    "one"
                )
            return model

        return make

    @property
    def rng(self) -> jax.Array:
        """The run's key, made from `seed`."""
        return jax.random.key(self.experiment.seed)

    @property
    def parameter_count(self) -> int:
        """Number of the model's parameters."""
        return sum(map(math.prod, self.parameter_shapes.values()))

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by path, such as `layers/attention/query/kernel`."""
        if isinstance(self.config, ModelConfig):
            return parameter_shapes(self.config)
        params = jax.eval_shape(lambda rng: split(built(self.init, rng)[0])[0], self.rng)
        return {path_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}

    @property
    def trained_count(self) -> int:
        """Number of the parameters that are trained (`train.wrt`)."""
        wrt = self.experiment.train.wrt
        patterns = (wrt,) if isinstance(wrt, str) else wrt or ("*",)
        shapes = self.parameter_shapes.items()
        return sum(math.prod(shape) for path, shape in shapes if matches(path, patterns))

    @property
    def unit(self) -> str:
        """The unit of speed: "tokens" or "examples"."""
        return "tokens" if self.experiment.kind == "text" else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens, or examples, of a global batch."""
        return self.experiment.train.batch_size * (self.experiment.data.length if self.unit == "tokens" else 1)

    def state(self) -> TrainState:
        """Make a fresh state, sharded by the plan."""
        return init_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.experiment.train.wrt)

    def abstract_state(self) -> TrainState:
        """Return the state's shapes, dtypes and shardings; traced once."""
        return self._state

    @cached_property
    def _state(self) -> TrainState:
        return abstract_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.experiment.train.wrt)

    def check_memory(self) -> None:
        """Check, before data is read, that weights, a batch and the state can fit into memory. Raises ValueError."""
        given, own = self.experiment, isinstance(self.config, ModelConfig)  # a user's model must be traced first
        count = parameter_lower_bound(self.config) if own else 0
        check_weights(count, self.mesh, given.strategy, sharded=given.strategy != "ddp" or bool(given.rules))
        check_batch(self.abstract_batch(), given.train.batch_size)
        check_state(self.abstract_state(), self.mesh, given.strategy)

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with its averaged parameters (`optimizer.ema_decay`), or unchanged if it has none."""
        return state if self.experiment.optimizer.ema_decay is None else ema_params(state)

    def abstract_batch(self) -> Batch:
        """Return the shapes, dtypes and shardings of a global batch."""
        rows, config = self.experiment.train.batch_size, self.config
        if self.experiment.kind == "own":
            shapes = {name: ((rows, *array.shape), array.dtype) for name, array in self.data.first.items()}
        elif self.experiment.kind == "text":
            names = ["tokens", "targets", *(["segments"] if self.experiment.data.packing == "documents" else [])]
            length = (rows, self.experiment.data.length)
            shapes = {**dict.fromkeys(names, (length, "int32")), "weights": (length, "float32")}
        else:
            is_image = self.experiment.kind == "images"
            inputs = (config.image_size, config.image_size, config.channels) if is_image else (config.features_in,)
            name = self.experiment.kind
            shapes = {name: ((rows, *inputs), "float32"), "labels": ((rows,), "int32"), "weights": ((rows,), "float32")}
        sharding = self.plan.batch_sharding
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, (shape, dtype) in shapes.items()}

    @cached_property
    def train_step(self) -> Step:
        """The training step: loss, gradients, update. Raises ValueError for a compiler option that XLA refuses."""
        step = make_train_step(
            self.loss,
            self.plan,
            clip_norm=self.experiment.optimizer.clip_norm,
            wire=self.experiment.wire,
            buckets=self.experiment.buckets,
            **self._step_options,
        )
        _ = step.compiler_options  # refuse wrong options now, before the first batch
        return step

    @cached_property
    def inspection(self) -> Inspection:
        """Recomputes a step's gradient to find the parts that are not finite; compiled once."""
        return Inspection(self.train_step)

    @cached_property
    def seconds_at_peak(self) -> float | None:
        """Seconds that a training step would take at the devices' peak; None if the peak is unknown."""
        return seconds_at_peak(self.train_step, self.abstract_state(), self.abstract_batch())

    @cached_property
    def eval_step(self) -> Step:
        """The evaluation step: means of the metrics over a batch, and their weight."""
        return make_eval_step(self.eval_loss, self.plan, **self._step_options)

    @property
    def _step_options(self) -> dict[str, Any]:
        """The options of both steps. jdp's own losses and models are tried in its tests, not in every run."""
        experiment = self.experiment
        return {
            "check_loss": experiment.loss.make is not None or experiment.model.make is not None,
            "accumulate": experiment.train.accumulate,
            "precision": replace(Precision.of(experiment.precision), reduce=experiment.reduce),
            "partitioning": experiment.partitioning,
            "compiler": experiment.compiler,
        }
