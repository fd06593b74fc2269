"""The keys of an experiment file: strict, frozen models, each field with the one line that `jdp train --help` shows.

Top to bottom: the kinds of value, then the tables in the order they stand in a file, then the whole. A constructor that
returns has checked everything that can be checked without counting devices; what needs the count is in `experiment.py`.
"""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from jdp.mesh import DATA, REPLICA
from jdp.models.gpt import GPTConfig
from jdp.models.mlp import MLPConfig
from jdp.models.sizes import SIZES

NONE = "none"
"""How a file says None, which TOML cannot: `clip_norm = "none"`."""

ModelConfig = GPTConfig | MLPConfig

USED_BY: dict[str, tuple[str, ...]] = {
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "adam": ("b1", "b2", "eps"),
    "lion": ("b1", "b2", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
}
"""optimizer -> the keys it reads; a key set for nothing would make the file say what the run does not do."""


def _run_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise ValueError("must be letters, digits, dots, dashes and underscores only, as it names a folder of runs/")
    return name


def _axis_size(size: int) -> int:
    if size < 1 and size != -1:
        raise ValueError("must be 1 or more, or -1 for what the other axes leave")
    return size


def _model_name(name: str) -> str:
    if name not in SIZES:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{size}'" for size in SIZES)})
    return name


def _source(source: Any) -> Any:
    words = source if isinstance(source, list | tuple) else (source,)
    if not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError('must be "stdlib", a path or glob, or an array of them, as text in quotes')
    return source if isinstance(source, str) else tuple(words)


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
AxisSize = Annotated[int, AfterValidator(_axis_size)]
Source = Annotated[str | tuple[str, ...], PlainValidator(_source)]


class Section(BaseModel):
    """A table of the file: no unknown keys, nothing converted, nothing changed afterwards."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _from_toml(cls, table: Any) -> Any:
        """TOML has no null, and arrays where Python has tuples: read `"none"` as None where None may stand."""
        if not isinstance(table, Mapping):
            return table
        return {key: cls._value(key, value) for key, value in table.items()}

    @classmethod
    def _value(cls, key: str, value: Any) -> Any:
        if value == NONE and key in cls.model_fields:
            return None if type(None) in typing.get_args(cls.model_fields[key].annotation) else value
        return tuple(value) if isinstance(value, list) else value


class Model(Section):
    """[model]: what to train. The size named, with any of its fields changed."""

    name: Annotated[str, AfterValidator(_model_name)]
    """Which size to start from; any of its fields may be given beside it."""

    @property
    def config(self) -> ModelConfig:
        """The resolved configuration, for `jdp.models`."""
        kind = type(SIZES[self.name])
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @model_validator(mode="after")
    def _obeys_its_own_rules(self) -> Self:
        assert self.config  # the constructor checks, and its ValueError is the message
        return self


class _AnyModel(Model):
    """Stands in for a [model] whose name is missing or unknown, so that this is the only thing said about it."""

    model_config = ConfigDict(extra="allow")


@functools.cache
def model_table(name: str) -> type[Model]:
    """The [model] table for the size `name`: its configuration's fields, with the size's values as the defaults."""
    size = SIZES[name]
    hints = typing.get_type_hints(type(size))
    fields: dict[str, Any] = {
        field.name: (hints[field.name], getattr(size, field.name)) for field in dataclasses.fields(size)
    }
    return create_model(f"Model_{name}", __base__=Model, **fields)


class Data(Section):
    """[data]: the text to learn from."""

    source: Source = "stdlib"
    """"stdlib" (Python's own library source), or path(s) or glob(s): relative to the experiment file, or when given on
    the command line to the working directory."""
    length: Count = 0
    """Tokens a sample; 0 = the model's context."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text kept for evaluation."""
    shuffle: bool = True
    """Shuffle the training samples anew each epoch."""


class Optimizer(Section):
    """[optimizer]: the update rule and its learning rate over the run."""

    name: Literal["adamw", "adam", "lion", "sgd"] = "adamw"
    """The update rule."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps over which the rate rises in equal parts to lr."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the rate does after the warm-up, until the last step."""
    final_lr_fraction: Fraction = 0.0
    """Rate at the end as a share of lr (cosine, linear)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; never on biases and norm scales (adamw, lion, sgd)."""
    b1: Decay = 0.9
    """Decay of the first moment (adamw, adam, lion)."""
    b2: Decay = 0.999
    """Decay of the second moment (adamw, adam, lion)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator (adamw, adam)."""
    momentum: Decay = 0.0
    """Momentum (sgd)."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest global gradient norm; larger gradients are scaled down to it."""


class Train(Section):
    """[train]: how long, how much at a time, how often."""

    steps: Positive
    """Optimizer steps in the whole run."""
    batch_size: Positive
    """Samples a step, over all devices and microbatches."""
    accumulate: Positive = 1
    """Microbatches a step."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    eval_every: Count = 0
    """Steps between evaluations on held-out data; 0 = only at the end."""
    eval_batches: Positive = 10
    """Most batches an evaluation reads."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: Positive = 3
    """How many of the newest checkpoints stay."""
    max_skips_in_a_row: Positive = 10
    """Stop after so many consecutive steps skipped because their gradients were not finite."""


class Sample(Section):
    """[sample]: text written by the model at the end of the run; leave the table out for none."""

    prompt: Annotated[str, Field(min_length=1)] = "\n"
    """Text to continue."""
    length: Positive = 200
    """Tokens to add."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 = always the likeliest."""
    top_k: Positive | None = None
    """Draw only from the k likeliest tokens; "none" = from all."""


class Experiment(Section):
    """One experiment file, resolved: every key has its value."""

    name: Annotated[str, AfterValidator(_run_name)]
    """Name of the run, and of its folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Where all randomness starts: initial weights, dropout, sample order."""
    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"
    """What is sharded over the data axis: nothing; master weights and optimizer state; gradients too; weights in use
    too."""
    partitioning: Literal["auto", "manual"] | None = None
    """Who places the collectives: XLA, or jdp; "none" = jdp picks and says why."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the working copy of the weights; master weights are fp32."""
    devices: Positive | None = None
    """Virtual CPU devices in this process, instead of what the machine has."""
    mesh: dict[str, AxisSize] = {DATA: -1}
    """Devices along an axis, outermost first: data, replica (slow links), any others for the model. One may be -1, what
    the others leave; data is, when left out."""
    model: SerializeAsAny[Model]
    data: Annotated[Data, Field(validate_default=True)] = Data()
    optimizer: Optimizer = Optimizer()
    train: Train
    sample: Sample | None = None

    @field_validator("mesh")
    @classmethod
    def _complete_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        for axis in mesh:
            if not axis.isidentifier() or axis == "devices":
                raise ValueError(f"has an axis {axis!r}: an axis is named like a variable, and not `devices`")
        if list(mesh.values()).count(-1) > 1:
            raise ValueError("can have only one axis of size -1 (what the others leave)")
        if DATA in mesh:
            return mesh
        added = {DATA: 1 if -1 in mesh.values() else -1}
        outer = {REPLICA: mesh[REPLICA]} if REPLICA in mesh else {}
        return {**outer, **added, **mesh}

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_size(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        name = table.get("name")
        return (model_table(name) if isinstance(name, str) and name in SIZES else _AnyModel).model_validate(table)

    @field_validator("data")
    @classmethod
    def _whole_context(cls, data: Data, info: ValidationInfo) -> Data:
        context = getattr(info.data.get("model"), "context", 0)
        return data if data.length else data.model_copy(update={"length": context})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [*_lengths(self), *_unused(self.optimizer)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _lengths(experiment: Experiment) -> typing.Iterator[str]:
    """Problems between the lengths that several tables state."""
    context = getattr(experiment.model, "context", math.inf)
    length, warmup, steps = experiment.data.length, experiment.optimizer.warmup_steps, experiment.train.steps
    if length > context:
        yield f"data.length must be at most model.context = {context}; given {length}: lower it, or raise model.context"
    if warmup > steps:
        yield f"optimizer.warmup_steps must be at most train.steps = {steps}; given {warmup}"


def _unused(optimizer: Optimizer) -> typing.Iterator[str]:
    """Keys set to something although this optimizer, or this schedule, does not read them."""
    for key in sorted({key for keys in USED_BY.values() for key in keys} - set(USED_BY[optimizer.name])):
        value, default = getattr(optimizer, key), Optimizer.model_fields[key].default
        if value != default:
            users = " and ".join(name for name, keys in USED_BY.items() if key in keys)
            yield (
                f"optimizer.{key} is not used by {optimizer.name}, only by {users}; given {value}: "
                f"remove it (or {key} = {default}), or change optimizer.name"
            )
    if optimizer.schedule == "constant" and optimizer.final_lr_fraction:
        yield (
            f"optimizer.final_lr_fraction is not used by the constant schedule; given {optimizer.final_lr_fraction}: "
            "remove it (or final_lr_fraction = 0.0), or choose cosine or linear"
        )
