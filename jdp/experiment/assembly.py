"""From a validated experiment to the objects of a run: its inputs and its training.

`jdp.run` reaches models and their FLOPs only through an `Assembly`. It makes the evaluation itself
(`jdp.run.evaluation`).
"""

from __future__ import annotations

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
from numpy.typing import NDArray

from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.tree_paths import matches, path_of
from jdp.core.flax_nnx import built, split
from jdp.core.init.train_state import abstract_state, init_state
from jdp.core.plan import Plan
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import make_mesh
from jdp.core.state import TrainState
from jdp.core.step import Step, make_train_step
from jdp.core.types import Batch, Device
from jdp.core.update.ema import ema_params
from jdp.data import VOCAB_SIZE, NumpyBatch, Source, global_batches
from jdp.data.feed import Feed, process_rows, shard_batches
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import ExperimentError, mesh_sizes, to_toml
from jdp.experiment.losses import loss_of
from jdp.experiment.optimizer import learning_rate, optimizer
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.fields import words_of
from jdp.foresight.timing.model_flops import seconds_at_peak
from jdp.guard.memory_check import check_batch, check_state
from jdp.guard.nonfinite import Inspection
from jdp.models import GPTConfig, ModelConfig, ViTConfig
from jdp.models.construction import build, parameter_shapes

MOST_PARAMETERS = 2**50


@dataclass(frozen=True)
class Assembly:
    """The objects of a run. Expensive objects are made at first use and kept, here and in both parts."""

    experiment: Experiment
    mesh: Mesh  # of real devices, or of described devices to compile for

    @staticmethod
    def on_devices(experiment: Experiment, devices: list[Device] | None = None) -> Assembly:
        """Return an assembly on the given devices, by default on all devices of this machine or cluster."""
        if devices is not None:
            mesh_sizes(experiment.mesh, len(devices))  # its error names [mesh]
        return Assembly(experiment, make_mesh(devices=devices, **experiment.mesh))

    @cached_property
    def training(self) -> Training:
        return Training(self.experiment, self.mesh)

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs(self.experiment, self.training)

    @cached_property
    def toml(self) -> str:
        return to_toml(self.experiment)

    @cached_property
    def seconds_at_peak(self) -> float | None:
        """Seconds that a training step would take at the devices' peak; None if the peak is unknown."""
        return seconds_at_peak(self.training.step, self.training.abstract_state, self.inputs.abstract_batch)

    def check_memory(self) -> None:
        """Check, before data is read, that a batch and the state can fit into memory. Raises ValueError."""
        check_batch(self.inputs.abstract_batch, self.experiment.train.batch_size)
        check_state(self.training.abstract_state, self.mesh, self.experiment.strategy)


@dataclass(frozen=True)
class Training:
    """The model, its state, and the step."""

    experiment: Experiment
    mesh: Mesh

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

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by path, such as `layers/attention/query/kernel`."""
        if isinstance(self.config, ModelConfig):
            return parameter_shapes(self.config)
        params = jax.eval_shape(lambda rng: split(built(self.init, rng)[0])[0], self.rng)
        return {path_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}

    @property
    def parameter_count(self) -> int:
        return sum(map(math.prod, self.parameter_shapes.values()))

    @property
    def trained_count(self) -> int:
        """Number of the parameters that are trained (`train.wrt`)."""
        patterns = self.experiment.train.wrt or "*"
        return sum(math.prod(shape) for path, shape in self.parameter_shapes.items() if matches(path, patterns))

    @cached_property
    def plan(self) -> Plan:
        """The plan of mesh, strategy and [rules] ("" is an unsharded dimension).

        Raises ExperimentError for a rule that matches no parameter, or does not divide one.
        """
        rules = self.experiment.rules
        specs = [(pattern, PartitionSpec(*(entry or None for entry in entries))) for pattern, entries in rules.items()]
        shapes = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in self.parameter_shapes.items()}
        try:
            plan = Plan(self.mesh, self.experiment.strategy, rules=tuple(specs))
            plan.param_placements(shapes)
        except ValueError as error:
            raise ExperimentError(f"[rules]: {error}") from None
        return replace(plan, offload=self.experiment.offload)

    @cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer(self.experiment, self.parameter_shapes)

    @cached_property
    def learning_rate(self) -> optax.Schedule:
        return learning_rate(self.experiment)

    def state(self) -> TrainState:
        """Make a fresh state, sharded by the plan."""
        return init_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.experiment.train.wrt)

    @cached_property
    def abstract_state(self) -> TrainState:
        """The state's shapes and shardings. Raises ExperimentError if it is too large for XLA to compile."""
        state = abstract_state(self.init, self.tx, self.plan, rng=self.rng, wrt=self.experiment.train.wrt)
        if (count := sum(leaf.size for leaf in jax.tree.leaves(state.params))) > MOST_PARAMETERS:
            raise ExperimentError(f"a model has at most 2^50 parameters; given {count:.1e}: lower its sizes")
        return state

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with its averaged parameters (`optimizer.ema_decay`), or unchanged if it has none."""
        return state if self.experiment.optimizer.ema_decay is None else ema_params(state)

    @cached_property
    def step(self) -> Step:
        """The training step: loss, gradients, update. Raises ValueError for a compiler option that XLA refuses."""
        experiment = self.experiment
        step = make_train_step(
            loss_of(experiment),
            self.plan,
            clip_norm=experiment.optimizer.clip_norm,
            wire=experiment.wire,
            buckets=experiment.buckets,
            **self.step_options,
        )
        _ = step.compiler_options  # refuse wrong options now, before the first batch
        return step

    @property
    def step_options(self) -> dict[str, Any]:
        """The options of all steps. jdp's own losses and models are tried in its tests, not in every run."""
        experiment = self.experiment
        return {
            "check_loss": experiment.loss.make is not None or experiment.model.make is not None,
            "accumulate": experiment.train.accumulate,
            "precision": replace(Precision.of(experiment.precision), reduce=experiment.reduce),
            "partitioning": experiment.partitioning,
            "compiler": experiment.compiler,
        }

    @cached_property
    def inspection(self) -> Inspection:
        """Recomputes a step's gradient to find the parts that are not finite; compiled once."""
        return Inspection(self.step)


@dataclass(frozen=True)
class Inputs:
    """The data, as batches on the devices of a training."""

    experiment: Experiment
    training: Training

    @cached_property
    def data(self) -> Any:
        return open_data(self.experiment)

    @cached_property
    def eval_sets(self) -> dict[str, Source]:
        """The evaluation sets by the prefix of their metrics: "eval", "eval_NAME"."""
        return open_eval_sets(self.experiment, self.data)

    @cached_property
    def prompts(self) -> dict[str, tuple[NDArray[np.int32], np.int32]]:
        """The prompts of [sample] by text: tokens [1, n], padded to one length, and the position of the last token.

        Raises ExperimentError for a prompt that does not fit into the model's context.
        """
        table = self.experiment.sample
        if table is None:
            return {}
        tokenizer, context = self.data.tokenizer, self.training.config.context
        tokens = {text: tokenizer.opened(tokenizer.encode(text)) for text in words_of(table.prompt)}
        longest = max(map(len, tokens.values()))
        if longest >= context:
            raise ExperimentError(
                f"sample.prompt must be shorter than the model's context of {context} tokens; given one of {longest}: "
                "shorten it"
            )
        if longest + table.length > context:
            notice(
                f"sample.length = {table.length}: {context - longest} tokens fit into the model's context of {context}"
            )
        padded = {text: np.pad(row, (0, longest - len(row))) for text, row in tokens.items()}
        return {text: (padded[text][None], np.int32(len(row) - 1)) for text, row in tokens.items()}

    def train_batches(self, start: int) -> Iterable[NumpyBatch]:
        """Return the training batches from step `start` on, all rows of each."""
        return self._batches(self.data.train, start=start, **self._train_order)

    def train_feed(self, start: int, samples: int) -> Feed:
        """Return the training batches after `start` steps and `samples` samples, on the devices, read ahead."""
        return self.feed(self.data.train, start=start, samples=samples, **self._train_order)

    def feed(self, source: Source, *, most: int | None = None, **order: Any) -> Feed:
        """Return at most `most` global batches of `source` on the devices, read ahead; `order` has keywords of
        `global_batches` (seed, shuffle, start, samples, epochs)."""
        rows = process_rows(self.training.plan, self.experiment.train.batch_size)
        return shard_batches(itertools.islice(self._batches(source, rows=rows, **order), most), self.training.plan)

    def _batches(self, source: Source, **order: Any) -> Iterable[NumpyBatch]:
        # Reading an image or a sample of data.make takes a millisecond, any other sample microseconds.
        threads = min(16, len(os.sched_getaffinity(0))) if self.experiment.kind in ("images", "own") else 2
        return global_batches(source, batch_size=self.experiment.train.batch_size, threads=threads, **order)

    @property
    def _train_order(self) -> dict[str, Any]:
        return {"seed": self.experiment.seed, "shuffle": self.experiment.data.shuffle}

    @property
    def unit(self) -> str:
        """The unit of speed: "tokens" or "examples"."""
        return "tokens" if self.experiment.kind == "text" else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens, or examples, of a global batch."""
        return self.experiment.train.batch_size * (self.experiment.data.length if self.unit == "tokens" else 1)

    @cached_property
    def abstract_batch(self) -> Batch:
        experiment, config, kind = self.experiment, self.training.config, self.experiment.kind
        if kind == "own":
            each: dict[str, Any] = {name: (array.shape, array.dtype) for name, array in self.data.first.items()}
            learns = experiment.model.kind if experiment.loss.make is None else None
            expected = ("tokens", "targets") if learns == "text" else (learns, "labels") if learns else ()
            if missing := [name for name in expected if name not in each]:
                rule = f"{experiment.model.chosen} learns {' and '.join(expected)}, or what [loss] names"
                raise ExperimentError(f"{rule}; a sample of {self.data.name} lacks {', '.join(missing)}: add them")
        elif kind == "text":
            length = (experiment.data.length,)
            names = ["tokens", "targets", *(["segments"] if experiment.data.packing == "documents" else [])]
            each = {**dict.fromkeys(names, (length, "int32")), "weights": (length, "float32")}
        else:
            image = kind == "images" and (config.image_size, config.image_size, config.channels)
            shape = image or (config.features_in,)
            each = {kind: (shape, "float32"), "labels": ((), "int32"), "weights": ((), "float32")}
        rows, sharding = experiment.train.batch_size, self.training.plan.batch_sharding
        shapes = ((name, (rows, *shape), dtype) for name, (shape, dtype) in each.items())
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape, dtype in shapes}
