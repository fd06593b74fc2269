"""The whole experiment file.

The constructor checks everything that depends neither on the devices nor on the data. `jdp.experiment.file` checks
the devices, `jdp.experiment.data` the data.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.base.errors import UserError
from jdp.base.toml import brief
from jdp.base.words import DtypeName, Encoding, Offload, Partitioning, PrecisionName, StrategyName, nearest
from jdp.core.sharding.axes import DATA, REPLICA, check_axes
from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.fields import CompilerTable, PackageName, Rule, RunName, Section, named, words_of
from jdp.experiment.schema.model import NEEDED, Model, UnknownModel, model_table
from jdp.experiment.schema.tables import (
    ACCURACY,
    ARRAYS,
    BITS_PER_BYTE,
    OF_TEXT,
    Data,
    EvalSet,
    Guard,
    LossTable,
    Optimizer,
    Sample,
    Train,
    tops,
)

Kind = Literal["text", "images", "features", "own"]


class Experiment(Section):
    """One experiment file, resolved: every key has its value."""

    name: RunName
    """Name of the run, and of its folder."""
    plugin: PackageName | None = None
    """Package of the functions that `make` names in [model], [data], [loss] or [optimizer]. A file alone runs no code:
    give --plugin on the command line too."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all randomness: initial weights, dropout, sample order."""
    strategy: StrategyName = "ddp"
    """Sharding over the data axis: nothing; master weights and optimizer state; gradients too; weights in use too."""
    partitioning: Partitioning | None = None
    """Whether XLA ("auto") or jdp ("manual") places the collectives; "none" = jdp chooses, and reports why."""
    precision: PrecisionName = "fp32"
    """Dtype of the working copy of the weights; master weights are fp32."""
    reduce: DtypeName = "fp32"
    """Dtype in which gradients are summed over devices and microbatches under manual partitioning."""
    offload: Offload | None = None
    """Keep the optimizer's state in the hosts' pinned memory except during the update. "none": keep everything in the
    devices' memory."""
    compiler: CompilerTable = "auto"
    """Options of XLA's compiler: a preset ("default"; "overlap" hides more communication where XLA's default does not;
    "auto": "overlap" on several GPUs), or a table of XLA's options, such as
    { xla_gpu_enable_while_loop_double_buffering = true }. Options unknown to the devices' compiler are dropped and
    reported."""
    wire: Annotated[
        Encoding | None, OnlyFor('partitioning = "manual", where jdp sends', lambda x: x.partitioning != "auto")
    ] = None
    """Encoding of gradients on slow links: "bf16" (2 bytes) or "int8" (1); none = the dtype of `reduce`. Sums are
    fp32."""
    buckets: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Bytes up to which XLA combines collectives of one kind, on GPUs; none = as `compiler` sets."""
    devices: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Virtual CPU devices in this process, in place of the machine's devices."""
    mesh: dict[str, int] = Field(default={DATA: -1})
    """Devices along an axis of the mesh: data, replica (slow links, outermost), and any others for the model, the last
    on the fastest links. One size may be -1: the remaining devices. Default: data = -1."""
    rules: dict[str, Rule] = Field(default={})
    """For the model's own axes: the mesh axis over which each dimension of the parameters at this path is sharded, ""
    for none: ["", "model"]. `*` matches slashes too; the first matching pattern counts."""
    model: SerializeAsAny[Model]
    data: Annotated[Data, Field(validate_default=True)] = Data()
    eval: Annotated[
        dict[str, EvalSet],
        named("data set"),
        OnlyFor("data that jdp reads", lambda x: not x.data.make, ", not data.make"),
    ] = Field(default={})
    """Further data sets to evaluate on."""
    loss: LossTable = LossTable()
    optimizer: Optimizer = Optimizer()
    train: Train
    guard: Guard = Guard()
    sample: Annotated[
        Sample | None,
        OnlyFor(
            "a GPT and text with a known data.tokenizer",
            lambda x: x.model.is_gpt and x.kind == "text" and x.data.knows_text,
        ),
    ] = None

    @field_validator("mesh")
    @classmethod
    def _complete_mesh(cls, mesh: dict[str, int]) -> dict[str, int]:
        if DATA not in mesh:
            outer = {REPLICA: mesh[REPLICA]} if REPLICA in mesh else {}
            mesh = {**outer, DATA: 1 if -1 in mesh.values() else -1, **mesh}
        check_axes(mesh)
        return mesh

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_size(cls, table: Any, info: ValidationInfo) -> Any:
        if not isinstance(table, Mapping):
            return table
        return (model_table(table) or UnknownModel).model_validate(table, context=info.context)

    @field_validator("data")
    @classmethod
    def _whole_context(cls, data: Data, info: ValidationInfo) -> Data:
        model = info.data.get("model")
        if model is None or model.kind != "text" or data.make or data.length:
            return data
        return data.model_copy(update={"length": model.config.context})

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Names of an evaluation's metrics: "eval_…" of the held-out data, "eval_NAME_…" of the held-out side of
        [data.mixture.NAME] and of [eval.NAME]."""
        usual = ("bits_per_token",) if self.in_bits else (ACCURACY,)
        names = dict.fromkeys(("loss", *(self.loss.metrics if self.loss.make else usual), *self.train.eval_metrics))
        sets = ("eval", *(f"eval_{name}" for name in (*self.data.mixture, *self.eval)))
        return tuple(f"{prefix}_{name}" for prefix in sets for name in names)

    @property
    def kind(self) -> Kind:
        """The kind of data: "text", "images" or "features"; "own" with data.make."""
        return "own" if self.data.make else self.model.kind or "own"

    @property
    def in_bits(self) -> bool:
        """Whether the loss is a cross-entropy in nats per token, which is also shown in bits."""
        return self.loss.make is None and self.model.kind == "text"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(broken_rules(self)):
            raise UserError("\n".join(problems))
        return self


# The rules between keys: a line for each that is broken, with keys, rule, value and fix.

_TAKES = {
    "text": 'a GPT learns text: write source = "stdlib", or name files or folders of text',
    "images": 'a ResNet or ViT learns images: write source = "digits", "hf:imagefolder:FOLDER", or an .npz',
    "features": 'an MLP learns vectors: write source = "features.npz", or images: "digits", "hf:imagefolder:FOLDER"',
}


def broken_rules(x: Experiment) -> Iterator[str]:
    model, kinds = x.model, ", ".join(NEEDED)
    if model.kind is None and (tables := [key for key in ("data", "loss") if getattr(x, key).make is None]):
        yield f"{model.chosen} needs {tables[0]}.make beside it, or learns jdp's own data: model.learns = {kinds}"
    elif model.kind and (missing := [key for key in NEEDED[model.kind] if not hasattr(model.config, key)]):
        yield f"{model.chosen} learns {model.kind} and lacks the keywords {', '.join(missing)}: add them to it"
    else:  # the other rules need these
        yield from (*_unread(x, x), *_contradictions(x))


def _unread(x: Experiment, table: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that is set although nothing reads it: the file would not describe the run."""
    for name, field in type(table).model_fields.items():
        key, value = f"{prefix}{name}", getattr(table, name)
        shown, ending = (f"[{key}]", "") if isinstance(value, BaseModel | dict) else (key, f"; given {brief(value)}")
        for only in (rule for rule in field.metadata if isinstance(rule, OnlyFor)):
            if value != field.default and not only.is_read(x):
                yield f"{shown} is for {only.readers}{only.instead.format(x=x)}{ending}: remove it"
        if isinstance(value, BaseModel):
            yield from _unread(x, value, f"{key}.")


def _contradictions(x: Experiment) -> Iterator[str]:
    """Yield a line for each value that contradicts the value of another key."""
    data, train, config, known = x.data, x.train, x.model.config, x.eval_metrics
    if x.kind != "own":
        if (data.source is None) != bool(data.mixture):
            yield 'data.source and [data.mixture.NAME] exclude each other: give one of them (or source = "none")'
        yield from _unfit(x)
    if x.kind == "text" and data.length > config.context:
        yield f"data.length = {data.length} must be at most model.context = {config.context}: lower it, or raise that"
    if twice := [metric for metric in known if known.count(metric) > 1]:
        yield f"{twice[0]} is a metric of two evaluations: rename a table of [data.mixture] or [eval]"
    if (best := train.best_metric) not in known:
        yield f"train.keep_best = {best!r} must be a metric of evaluations, {', '.join(known)}{nearest(best, known)}"
    if train.stop_after and not train.eval_every:
        yield f"train.stop_after = {train.stop_after} counts evaluations during training: set train.eval_every"
    if (warmup := x.optimizer.warmup_steps) > train.steps:
        yield f"optimizer.warmup_steps = {warmup} must be at most train.steps = {train.steps}: lower it, or raise that"
    axes = [axis for axis in x.mesh if axis != REPLICA]  # replica shards the batch only
    ruled = {DATA}
    for pattern, entries in x.rules.items():
        named = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        ruled |= named
        for axis in sorted(named.difference(axes)):
            yield (
                f'rules."{pattern}" must name axes of [mesh] other than replica: {", ".join(axes)}; given {axis!r}: '
                "name one of these, or add it to [mesh]"
            )
    for axis in axes:
        if axis not in ruled and x.mesh[axis] != 1 and x.model.make is None:  # which may have its own metadata
            yield (
                f"mesh.{axis} must be an axis of [rules], else its devices repeat each other's work; given {axis} = "
                f"{x.mesh[axis]}: name it in a rule, or leave these devices to data{nearest(axis, ['data', 'replica'])}"
            )


def _unfit(x: Experiment) -> Iterator[str]:
    """Yield a line for each source that does not fit the model, and each metric that does not fit the two."""
    metrics, sets = x.train.eval_metrics, {f"eval.{name}": table for name, table in x.eval.items()}
    tables = {"data": x.data, **{f"data.mixture.{name}": part for name, part in x.data.mixture.items()}, **sets}
    word = "digits" if x.kind == "text" else "stdlib"
    for key in (key for key, table in tables.items() if word in words_of(table.source)):
        yield f"{key}.source must fit {x.model.chosen}; given {word!r}, and {_TAKES[x.kind]}"
    if x.kind == "text" and not x.data.ids and BITS_PER_BYTE in metrics:
        for key in (key for key, table in sets.items() if any(w.endswith(ARRAYS) for w in words_of(table.source))):
            yield f"{BITS_PER_BYTE} needs text; {key}.source is token ids: remove the metric"
    for metric in (metric for metric in metrics if (metric in OF_TEXT) != (x.kind == "text")):
        of = "text" if metric in OF_TEXT else "classes"
        yield f'train.eval_metrics has "{metric}", which is for {of}, and {x.model.chosen} learns {x.kind}: remove it'
    outputs = getattr(x.model.config, {"text": "vocab_size", "images": "classes", "features": "features_out"}[x.kind])
    for metric in (metric for metric, count in tops(metrics).items() if count > outputs):
        yield f'train.eval_metrics has "{metric}", but the model has {outputs} outputs: lower the number'
