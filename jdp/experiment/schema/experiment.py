"""The keys of an experiment file: strict, frozen models, each field with its line of `jdp train --help-all`.

fields.py     the kinds of value
model.py      [model]
data.py       [data], [data.mixture.NAME], [eval.NAME]
optimizer.py  [loss], [optimizer]
evaluate.py   the metrics of evaluations
train.py      [train], [sample], [guard]
made.py       `make` of [model], [data], [loss] and [optimizer]: a function of the user's own
this file     the whole file, and the rules between its tables: each broken rule is one line (keys, rule, fix)

The constructor checks everything that depends neither on the devices nor on the data. `jdp.experiment.file` checks
the devices, `jdp.experiment.data` the data.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.words import DtypeName, Encoding, Offload, Partitioning, PrecisionName, StrategyName
from jdp.core.sharding.axes import DATA, REPLICA, check_axes
from jdp.experiment.schema.data import ARRAYS, OF_TEXT, Data, EvalSet, Ingredient, words_of
from jdp.experiment.schema.evaluate import eval_metrics, metric_problems
from jdp.experiment.schema.fields import NONE, CompilerTable, PackageName, Rule, RunName, Section, named
from jdp.experiment.schema.model import NEEDED, AnyModel, Model, model_table
from jdp.experiment.schema.optimizer import USED_BY, LossTable, Optimizer, unused
from jdp.experiment.schema.train import Guard, Sample, Train
from jdp.models.configs import GPTConfig, ModelConfig
from jdp.models.sizes import parameter_lower_bound, traced_layers

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
    "Train",
    "model_table",
]

Kind = Literal["text", "images", "features", "own"]
OTHERS_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("label", "heldout", "size", "augment"),
    "images": (*OF_TEXT, "size"),
    "features": ("mixture", *OF_TEXT, "augment"),
}
"""Kind -> the keys of [data] that only other kinds read."""
MOST_PARAMETERS = 2**50
MOST_TRACED = 10_000
_TAKES = {
    "text": ('text: write source = "stdlib", or name files or folders of text', "a GPT learns text"),
    "images": (
        'images: write source = "digits", "hf:imagefolder:FOLDER" and its like, or an .npz',
        "a ResNet or ViT learns images",
    ),
    "features": (
        'features: write source = "features.npz", or images: "digits", "hf:imagefolder:FOLDER"',
        "an MLP learns vectors",
    ),
}


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
    wire: Encoding | None = None
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
    eval: dict[str, EvalSet] = Field(default={})
    """Further data sets to evaluate on."""
    loss: LossTable = LossTable()
    optimizer: Optimizer = Optimizer()
    train: Train
    guard: Guard = Guard()
    sample: Sample | None = None

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
        return (model_table(table) or AnyModel).model_validate(table, context=info.context)

    @field_validator("data")
    @classmethod
    def _whole_context(cls, data: Data, info: ValidationInfo) -> Data:
        model = info.data.get("model")
        if model is None or model.kind != "text" or data.make or data.length:
            return data
        return data.model_copy(update={"length": model.config.context})

    @field_validator("eval")
    @classmethod
    def _eval_names(cls, sets: dict[str, EvalSet]) -> dict[str, EvalSet]:
        named("data set", sets)
        return sets

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Names of an evaluation's metrics."""
        return eval_metrics(self)

    @property
    def kind(self) -> Kind:
        """The kind of data: "text", "images" or "features"; "own" with data.make."""
        return "own" if self.data.make else self.model.kind or "own"

    @property
    def in_bits(self) -> bool:
        """Whether the loss is a cross-entropy in nats per token, which is also shown in bits."""
        return self.loss.measured is None and self.model.kind == "text"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(disagreements(self))
        if problems:
            raise UserError("\n".join(problems))
        return self


def disagreements(experiment: Experiment) -> Iterator[str]:
    """Yield a line for every rule between keys that is broken."""
    if problems := list(_made(experiment)):  # the other rules need what these make
        yield from problems
        return
    yield from _size(experiment)
    yield from unused(experiment.optimizer)
    if experiment.kind != "own":
        yield from _data(experiment)
    yield from metric_problems(experiment)
    yield from _rules(experiment)
    yield from experiment.train.export_problems(experiment.model)
    warmup, steps = experiment.optimizer.warmup_steps, experiment.train.steps
    if warmup > steps:
        yield f"optimizer.warmup_steps must be at most train.steps = {steps}; given {warmup}: lower it, or train longer"
    if experiment.loss.metrics and not experiment.loss.make:
        yield f"loss.metrics is a key of loss.make; given {experiment.loss.metrics}: give that, or remove the key"
    if experiment.wire is not None and experiment.partitioning == "auto":
        yield 'wire is for partitioning = "manual", where jdp sends; given "auto": remove one of the keys'
    if experiment.sample and not (experiment.kind == "text" and isinstance(experiment.model.config, GPTConfig)):
        yield f"[sample] needs a GPT; {experiment.model.chosen} is not one: remove the table"


def _made(experiment: Experiment) -> Iterator[str]:
    """Yield the conflicts between the user's functions and the tables beside them."""
    model, config = experiment.model, experiment.model.config
    if model.kind is None:
        for key, table in (("data", experiment.data), ("loss", experiment.loss)):
            if table.make is None:
                kinds = ", ".join(NEEDED)
                yield f"{model.chosen} needs {key}.make beside it, or learns jdp's own data: model.learns = {kinds}"
    elif missing := [key for key in NEEDED[model.kind] if not hasattr(config, key)]:
        yield f"{model.chosen} learns {model.kind} and lacks the keywords {', '.join(missing)}: add them to it"
    if experiment.data.make and experiment.eval:
        yield f"[eval.NAME] is read by jdp; given beside data.make = {experiment.data.make!r}: remove the table"


def _size(experiment: Experiment) -> Iterator[str]:
    """Yield a line if the model fits no machine, or if tracing it would not end."""
    config, name = experiment.model.config, experiment.model.chosen
    if not isinstance(config, ModelConfig):
        return
    if (count := parameter_lower_bound(config)) > MOST_PARAMETERS:
        power = int((count.bit_length() - 1) * math.log10(2))
        yield f"model has more than 10^{power} parameters, which no machine holds: lower the sizes in [model]"
    if (layers := traced_layers(config)) > MOST_TRACED:
        scanned = " (scan = true has no such limit)" if hasattr(config, "scan") else ""
        rule = f"{name} takes at most {MOST_TRACED:,} layers, because each is compiled separately"
        yield f"{rule}; given {layers:,}{scanned}"


def _data(experiment: Experiment) -> Iterator[str]:
    """Yield the conflicts between the model and its data that show without reading the data."""
    data, kind, name = experiment.data, experiment.kind, experiment.model.chosen
    for twice in sorted(data.mixture.keys() & experiment.eval.keys()):
        yield f"eval.{twice} and data.mixture.{twice} are both evaluated as eval_{twice}: rename one"
    if (data.source is None) != bool(data.mixture):
        yield 'data.source and [data.mixture.NAME] exclude each other: give one of them (or source = "none")'
    if data.mixture and data.heldout is not None:
        yield f"data.heldout is for one source, not for [data.mixture.NAME]; given {data.heldout!r}: remove it"
    if kind == "text":
        yield from _tokens(experiment)
    fix, why = _TAKES[kind]
    tables = {f"eval.{one}": table for one, table in experiment.eval.items()}
    tables |= {"data": data, **{f"data.mixture.{one}": text for one, text in data.mixture.items()}}
    other_word = "digits" if kind == "text" else "stdlib"
    for key in (key for key, table in tables.items() if other_word in words_of(table.source)):
        yield f"{key}.source must fit {name}: {why}; given {other_word!r}, which is not {fix}"
    for key in OTHERS_KEYS[kind]:
        if (given := getattr(data, key)) != Data.model_fields[key].default:
            yield f"data.{key} is not used by {name}, as {why}; given {cut(repr(given))}: remove it"


def _tokens(experiment: Experiment) -> Iterator[str]:
    """Yield the conflicts between the keys of text."""
    data, context = experiment.data, getattr(experiment.model, "context", math.inf)
    if data.length > context:
        yield f"data.length must be at most model.context = {context}; given {data.length}: lower it, or raise that"
    if data.weights is not None and data.labels is not None:
        yield "data.weights and data.labels both say which tokens count: remove one"
    if data.ids is not None and data.field is not None:
        yield "data.field names a column of text, and data.ids one of token ids: remove one"
    if experiment.sample and not data.knows_text:
        what = "ids" if data.ids else f"an {ARRAYS} of tokens"
        yield f"[sample] needs the tokenizer that made the tokens; given {what}: name data.tokenizer, or leave it out"
    if data.ids is None and len(data.sources) > 1 and any(source.endswith(ARRAYS) for source in data.sources):
        yield f"an {ARRAYS} of tokens must be the only data.source; given {len(data.sources)} sources: name one"


def _rules(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each rule with an axis over which parameters are not sharded."""
    axes = [axis for axis in experiment.mesh if axis != REPLICA]  # replica shards the batch only
    for pattern, entries in experiment.rules.items():
        named = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        for axis in sorted(named.difference(axes)):
            yield (
                f'rules."{pattern}" must name axes of [mesh] other than replica: {", ".join(axes)}; given {axis!r}: '
                "name one of these, or add it to [mesh]"
            )
