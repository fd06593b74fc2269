"""The keys of an experiment file: strict, frozen models, each field with the one line that `jdp train --help` shows.

fields.py     the kinds of value
model.py      [model]
data.py       [data], [data.mixture.NAME], [eval.NAME]
optimizer.py  [optimizer]
train.py      [train], [sample]
track.py      [track]
here          the whole file, and the rules between its tables: each that is broken is one line (keys, rule, fix)

A constructor that returns has checked everything that can be checked without counting devices or reading data; what
needs the count is in `jdp.experiment`, what needs the data in `jdp.experiment.data`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.core.hints import nearest
from jdp.core.sharding.mesh import DATA, REPLICA
from jdp.core.toml import LONGEST, cut
from jdp.experiment.schema.data import Data, EvalSet, Ingredient
from jdp.experiment.schema.fields import NONE, AxisSize, Rule, RunName, Section, named
from jdp.experiment.schema.model import AnyModel, Model, model_table
from jdp.experiment.schema.optimizer import USED_BY, Optimizer, unused
from jdp.experiment.schema.track import Track
from jdp.experiment.schema.train import Sample, Train
from jdp.models.gpt import GPTConfig
from jdp.models.lower_bounds import parameter_lower_bound, traced_layers
from jdp.models.mlp import MLPConfig

__all__ = [
    "NONE",
    "USED_BY",
    "Data",
    "EvalSet",
    "Experiment",
    "Ingredient",
    "Model",
    "Optimizer",
    "Sample",
    "Section",
    "Track",
    "Train",
    "model_table",
]

Kind = Literal["text", "images", "features"]
OTHERS_KEYS = {
    "text": ("label", "heldout", "size"),
    "images": ("mixture", "tokenizer", "packing", "length", "size"),
    "features": ("mixture", "tokenizer", "packing", "length"),
}
"""kind -> the keys of [data] that only other kinds read."""
MOST_PARAMETERS = 2**50
MOST_TRACED = 10_000
ARRAYS = ".npz"
_WORDS = {"text": ("stdlib",), "images": ("digits",), "features": ("digits",)}
_TAKES = {
    "text": ('text: write source = "stdlib", or name files or folders of text', "a GPT learns text"),
    "images": (
        'images: write source = "digits", a folder with a subfolder for each class, or "hf:NAME"',
        "a ResNet or ViT learns images",
    ),
    "features": (
        'features: write source = "features.npz", or images: "digits", a folder with a subfolder for each class',
        "an MLP learns vectors",
    ),
}


class Experiment(Section):
    """One experiment file, resolved: every key has its value."""

    name: RunName
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
    sync_batch_norm: bool = True
    """BatchNorm over the rows of all devices; false: each device's own, under manual partitioning."""
    devices: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Virtual CPU devices in this process, instead of what the machine has."""
    mesh: dict[str, AxisSize] = Field(default={DATA: -1})
    """Devices along an axis: data, replica (slow links, outermost), any others for the model, the last on the fastest
    links. One may be -1, what the others leave; data is, when left out."""
    rules: dict[str, Rule] = Field(default={})
    """For the model's own axes: which dimension of the parameters of this path (`*` matches slashes too) lies over
    which mesh axis, "" for none: ["", "model"]. The first pattern that matches counts."""
    model: SerializeAsAny[Model]
    data: Annotated[Data, Field(validate_default=True)] = Data()
    eval: dict[str, EvalSet] = Field(default={})
    """Further data sets to evaluate on."""
    optimizer: Optimizer = Optimizer()
    train: Train
    track: Track = Track()
    sample: Sample | None = None

    @field_validator("mesh")
    @classmethod
    def _complete_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        for axis in mesh:
            if not axis.isidentifier() or axis == "devices" or len(axis) > LONGEST:
                raise ValueError(f"has an axis {cut(repr(axis))}: an axis is named like a variable, and not `devices`")
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
        return (model_table(table.get("name")) or AnyModel).model_validate(table)

    @field_validator("data")
    @classmethod
    def _whole_context(cls, data: Data, info: ValidationInfo) -> Data:
        context = getattr(info.data.get("model"), "context", 0)
        return data if data.length else data.model_copy(update={"length": context})

    @field_validator("eval")
    @classmethod
    def _eval_names(cls, sets: dict[str, EvalSet]) -> dict[str, EvalSet]:
        named("data set", sets)
        return sets

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """The metrics that an evaluation gives, such as "eval_loss"."""
        return eval_metrics(self)

    @property
    def kind(self) -> Kind:
        """What the model learns from: "text", "images" or "features"."""
        return kind_of(self)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def kind_of(experiment: "Experiment") -> Kind:
    """What the model learns from."""
    config = experiment.model.config
    return "text" if isinstance(config, GPTConfig) else "features" if isinstance(config, MLPConfig) else "images"


def eval_metrics(experiment: "Experiment") -> tuple[str, ...]:
    """The metrics an evaluation gives: of the held-out data, of that of each text of a mixture, of each [eval.NAME]."""
    own = ("loss", "bits_per_token") if kind_of(experiment) == "text" else ("loss", "accuracy")
    sets = ("eval", *(f"eval_{name}" for name in (*experiment.data.mixture, *experiment.eval)))
    return tuple(f"{prefix}_{name}" for prefix in sets for name in own)


def disagreements(experiment: "Experiment") -> Iterator[str]:
    """Every rule between keys that is broken."""
    yield from _size(experiment)
    yield from _lengths(experiment)
    yield from unused(experiment.optimizer)
    yield from _data(experiment)
    yield from _metrics(experiment)
    yield from _rules(experiment)
    if experiment.train.init_names != "jdp" and (experiment.train.init_from is None or kind_of(experiment) != "text"):
        yield "train.init_names is for a GPT's weights from a safetensors file, train.init_from: give one, or remove it"
    if experiment.sample and kind_of(experiment) != "text":
        yield f"[sample] is text written by a GPT; model.name = {experiment.model.name!r} writes none: remove the table"


def _size(experiment: "Experiment") -> Iterator[str]:
    """Models that no machine holds, or whose tracing does not end: tracing one would be the end of the process."""
    config, name = experiment.model.config, experiment.model.name
    if (count := parameter_lower_bound(config)) > MOST_PARAMETERS:
        power = int((count.bit_length() - 1) * math.log10(2))
        yield f"model has more than 10^{power} parameters, which no machine holds: lower the sizes in [model]"
    if (layers := traced_layers(config)) > MOST_TRACED:
        scanned = " (scan = true has no such limit)" if hasattr(config, "scan") else ""
        rule = f"model.name = {name!r} takes at most {MOST_TRACED:,} layers, as they are compiled one by one"
        yield f"{rule}; given {layers:,}{scanned}"


def _lengths(experiment: "Experiment") -> Iterator[str]:
    """Problems between the lengths that several tables state."""
    context = getattr(experiment.model, "context", math.inf)
    length, warmup, steps = experiment.data.length, experiment.optimizer.warmup_steps, experiment.train.steps
    if length > context:
        yield f"data.length must be at most model.context = {context}; given {length}: lower it, or raise model.context"
    if warmup > steps:
        yield f"optimizer.warmup_steps must be at most train.steps = {steps}; given {warmup}: lower it, or train longer"


def _data(experiment: "Experiment") -> Iterator[str]:
    """Problems between the model and its data that show without reading it."""
    data, kind, name = experiment.data, kind_of(experiment), experiment.model.name
    for twice in sorted(data.mixture.keys() & experiment.eval.keys()):
        yield f"eval.{twice} has the name of data.mixture.{twice}, whose held-out text is evaluated as that: rename one"
    if data.tokenizer == NONE and experiment.sample:
        yield '[sample] needs a tokenizer, and data.tokenizer is "none" (token ids): name the one that made them'
    tokens = any(source.endswith(ARRAYS) for source in data.sources)
    if data.source is None and not data.mixture:
        yield "data.source is none, and there is no [data.mixture.NAME] in its place: give one of them"
    if data.source is not None and data.mixture:
        yield 'data.source and [data.mixture.NAME] exclude each other: remove one (or source = "none")'
    if kind == "text" and tokens and (experiment.sample or len(data.sources) > 1):
        yield f"data.source is an {ARRAYS} of tokens: it stands alone, and [sample] needs text; remove one of them"
    fix, why = _TAKES[kind]
    for key, sources in _sources(experiment):
        for source in sources:
            if _other_kind(source, kind):
                yield f"{key} must fit model.name = {name!r}: {why}; given {cut(repr(source))}, which is not {fix}"
    for key in OTHERS_KEYS[kind]:
        default = Data.model_fields[key].default
        if getattr(data, key) != default:
            given = cut(repr(getattr(data, key)))
            yield f"data.{key} is not used by model.name = {name!r}, as {why}; given {given}: remove it"


def _sources(experiment: "Experiment") -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "data.source", experiment.data.sources
    for name, one in experiment.eval.items():
        yield f"eval.{name}.source", (one.source,) if isinstance(one.source, str) else one.source


def _other_kind(source: str, kind: Kind) -> bool:
    """Whether a source says by its name that it is another kind of data."""
    words = {word for one in _WORDS.values() for word in one} - {*_WORDS[kind]}
    return source in words


def _metrics(experiment: "Experiment") -> Iterator[str]:
    """Metrics that are asked for and no evaluation gives."""
    train, known = experiment.train, eval_metrics(experiment)
    asked = {"stop_metric": train.stop_metric, "keep_best": train.keep_best if train.keep_best is not True else None}
    for key, metric in asked.items():
        if metric and metric not in known:
            given = f"{cut(repr(metric))}{nearest(str(metric), known)}"
            yield f"train.{key} must be a metric of the evaluations, {', '.join(known)}; given {given}"
    if train.stop_after and not train.eval_every:
        yield (
            f"train.stop_after = {train.stop_after} counts evaluations, but there is one at the end only: "
            "set train.eval_every"
        )


def _rules(experiment: "Experiment") -> Iterator[str]:
    """Rules that name an axis the mesh has not, or the one that only carries the batch."""
    for pattern, entries in experiment.rules.items():
        flat = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        for axis in sorted(flat - set(experiment.mesh)):
            axes = ", ".join(experiment.mesh)
            yield f'rules."{pattern}" must name axes of [mesh], which are {axes}; given {axis!r}: add it to [mesh]'
        if REPLICA in flat & set(experiment.mesh):
            yield f'rules."{pattern}" names `replica`, which carries the batch only: use data, or an axis of the model'
