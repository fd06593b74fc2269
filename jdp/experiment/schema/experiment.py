"""The keys of an experiment file: strict, frozen models, each field with the one line that `jdp train --help` shows.

fields.py     the kinds of value
model.py      [model]
data.py       [data], [data.mixture.NAME], [eval.NAME]
optimizer.py  [loss], [optimizer]
evaluate.py   [evaluate]
train.py      [train], [sample], [track], [guard]; wire.py [wire], [local_steps]
registered.py the possible names of [model], [data], [loss], [optimizer], plug-ins' too; chosen.py these tables
this file     the whole file, and the rules between its tables: each broken one is one line (keys, rule, fix)

The constructor checks everything that needs neither the number of devices nor the data. `jdp.experiment.file` checks
against the devices, `jdp.experiment.data` against the data.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.base.shorten import cut
from jdp.base.words import DtypeName, Offload, Partitioning, PrecisionName, StrategyName
from jdp.core.sharding.axes import DATA, REPLICA, check_axes
from jdp.experiment.schema.chosen import TABLES, chosen_tables
from jdp.experiment.schema.data import (
    ARRAYS,
    DATASETS,
    OF_EVERY,
    OF_TEXT,
    Data,
    EvalSet,
    Ingredient,
)
from jdp.experiment.schema.evaluate import Evaluate, eval_metrics, metric_problems
from jdp.experiment.schema.fields import NONE, BoolOrAuto, CompilerTable, PackageName, Rule, RunName, Section, named
from jdp.experiment.schema.model import AnyModel, Model, model_table
from jdp.experiment.schema.optimizer import LOSSES, USED_BY, LossTable, Optimizer, unused
from jdp.experiment.schema.registered import Table
from jdp.experiment.schema.train import Guard, Sample, Track, Train
from jdp.experiment.schema.wire import LocalStepsTable, WireTable
from jdp.models.configs.gpt import GPTConfig
from jdp.models.configs.sizes import ModelConfig
from jdp.models.lower_bounds import parameter_lower_bound, traced_layers

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

Kind = Literal["text", "images", "features", "own"]
OTHERS_KEYS: dict[Kind, tuple[str, ...]] = {
    "own": tuple(key for key in Data.model_fields if key not in OF_EVERY),
    "text": ("label", "heldout", "size", "crop_padding", "resized_crop", "flip"),
    "images": (*OF_TEXT, "size"),
    "features": ("mixture", *OF_TEXT, "crop_padding", "resized_crop", "flip"),
}
"""Kind -> the keys of [data] that only other kinds read."""
MOST_PARAMETERS = 2**50
MOST_TRACED = 10_000
_WORDS = {"text": ("stdlib",), "images": ("digits",), "features": ("digits",)}
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
    """A package that registers models, data sets, losses and optimizers (jdp.plugin), whose fields are listed with
    --plugin PACKAGE --help. It is code, which a file alone does not run: give --plugin on the command line too."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Where all randomness starts: initial weights, dropout, sample order."""
    strategy: StrategyName = "ddp"
    """What is sharded over the data axis: nothing; master weights and optimizer state; gradients too; weights in use
    too."""
    partitioning: Partitioning | None = None
    """XLA or jdp places the collectives; "none" = jdp chooses, and reports why."""
    precision: PrecisionName = "fp32"
    """Type of the working copy of the weights; master weights are fp32. fp8: bf16's working copy, and the products with
    weights in float8, except the logits'; for H100 GPUs and later."""
    reduce: DtypeName = "fp32"
    """Type in which gradients are summed over devices and microbatches, under manual partitioning."""
    offload: Offload | None = None
    """Keep the optimizer's state and the master weights in the hosts' pinned memory; a step copies them layer by layer.
    "none": everything is in the devices' memory."""
    sync_batch_norm: bool = True
    """BatchNorm over the rows of all devices; false: each device's own, under manual partitioning."""
    compiler: CompilerTable = "auto"
    """Options of XLA's compiler: a preset ("default"; "overlap" hides more communication where XLA's default does not;
    "auto": "overlap" on several GPUs), or a table of XLA's options, such as
    { xla_gpu_enable_while_loop_double_buffering = true }. Those that the devices' compiler does not know are left out,
    and named."""
    overlap: BoolOrAuto = "auto"
    """Send each scanned layer's weights and gradient while other layers are computed, under manual partitioning; false:
    all layers' together. "auto": the faster one by an estimate."""
    devices: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Virtual CPU devices in this process, instead of what the machine has."""
    mesh: dict[str, int] = Field(default={DATA: -1})
    """Devices along an axis: data, replica (slow links, outermost), any others for the model, the last on the fastest
    links. One may be -1: what the others leave. Left out, data is -1."""
    rules: dict[str, Rule] = Field(default={})
    """For the model's own axes: the mesh axis that each dimension of the parameters of this path is sharded over (`*`
    matches slashes too), "" for none: ["", "model"]. The first pattern that matches counts."""
    model: SerializeAsAny[Model]
    data: Annotated[Data, Field(validate_default=True)] = Data()
    eval: dict[str, EvalSet] = Field(default={})
    """Further data sets to evaluate on."""
    loss: LossTable = LossTable()
    optimizer: Optimizer = Optimizer()
    train: Train
    wire: WireTable = WireTable()
    local_steps: LocalStepsTable = LocalStepsTable()
    track: Track = Track()
    guard: Guard = Guard()
    evaluate: Evaluate = Evaluate()
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
    def _of_its_size(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        return (model_table(table.get("name")) or AnyModel).model_validate(table)

    @field_validator("data", "loss", "optimizer", mode="before")
    @classmethod
    def _of_its_name(cls, table: Any, info: ValidationInfo) -> Any:
        schema = chosen_tables({info.field_name or "": table}).get(info.field_name or "")
        return table if schema is None else schema.model_validate(table)

    @field_validator("data")
    @classmethod
    def _whole_context(cls, data: Data, info: ValidationInfo) -> Data:
        model = info.data.get("model")
        if model is None or model.entry.learns != "text" or data.name or data.length:
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
        """The kind of data: "text", "images" or "features"; "own": a plug-in's data set."""
        return "own" if self.data.name else self.model.entry.learns or "own"

    @property
    def in_bits(self) -> bool:
        """Whether the loss is a cross-entropy in nats a token, which is shown in bits too."""
        return self.loss.name is None and self.model.entry.learns == "text"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def disagreements(experiment: Experiment) -> Iterator[str]:
    """Yield a line for every rule between keys that is broken."""
    if problems := list(_plugin(experiment)):  # the other rules need these names
        yield from problems
        return
    yield from _size(experiment)
    yield from _lengths(experiment)
    yield from unused(experiment.optimizer)
    yield from (_own_data if experiment.kind == "own" else _data)(experiment)
    yield from metric_problems(experiment)
    yield from _rules(experiment)
    yield from _wire(experiment)
    if experiment.overlap is True and experiment.partitioning == "auto":
        yield 'overlap = true is for partitioning = "manual", where jdp sends; given "auto": remove one of the keys'
    for rules in (_local_steps, _noise_scale, _guard):
        yield from rules(experiment)
    is_gpt = isinstance(experiment.model.config, GPTConfig)
    if experiment.train.init_names != "jdp" and (experiment.train.init_from is None or not is_gpt):
        yield "train.init_names is for a GPT's weights from a safetensors file, train.init_from: give one, or remove it"
    if experiment.train.init_adapter is not None and (experiment.train.init_from is None or not is_gpt):
        yield "train.init_adapter updates the weights of a GPT, train.init_from: give these, or remove it"
    yield from experiment.train.export_problems(experiment.model)
    if experiment.sample and not (experiment.kind == "text" and is_gpt):
        yield f"[sample] is text written by a GPT; model.name = {experiment.model.name!r} writes none: remove the table"


def _plugin(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between the names in several tables and the plug-in that registered them."""
    for table in TABLES:
        name = getattr(experiment, table.key).name
        entry = table.entries.get(name) if name else None
        if entry and entry.by and not entry.registered_by(experiment.plugin):
            yield f"{table.key}.name = {name!r} is registered by {entry.by}; given no --plugin {entry.by}: add it"
    model, learns = experiment.model.name, experiment.model.entry.learns
    if learns is None and experiment.data.name is None:
        yield f"model.name = {model!r} learns a plug-in's data set; given none: name it, data.name{_names(DATASETS)}"
    if learns is None and experiment.loss.name is None:
        yield f"model.name = {model!r} has a plug-in's loss; given none: name it, loss.name{_names(LOSSES)}"
    if experiment.data.name and experiment.eval:
        yield f"[eval.NAME] is read by jdp; given beside data.name = {experiment.data.name!r}: remove the table"


def _names(table: Table) -> str:
    names = [repr(name) for name, entry in table.entries.items() if entry.by]
    return f" = {' or '.join(names)}" if names else ""


def _size(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong with a model that no machine holds, or whose tracing would not end."""
    config, name = experiment.model.config, experiment.model.name
    if not isinstance(config, ModelConfig):
        return
    if (count := parameter_lower_bound(config)) > MOST_PARAMETERS:
        power = int((count.bit_length() - 1) * math.log10(2))
        yield f"model has more than 10^{power} parameters, which no machine holds: lower the sizes in [model]"
    if (layers := traced_layers(config)) > MOST_TRACED:
        scanned = " (scan = true has no such limit)" if hasattr(config, "scan") else ""
        rule = f"model.name = {name!r} takes at most {MOST_TRACED:,} layers, as they are compiled one by one"
        yield f"{rule}; given {layers:,}{scanned}"


def _wire(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between [wire] and what places the collectives."""
    wire, lossy = experiment.wire, experiment.wire.gradients in ("topk", "powersgd")
    used = wire.gradients or wire.weights or wire.buckets
    if used and experiment.partitioning == "auto":
        yield '[wire] is for partitioning = "manual", where jdp issues the collectives; given "auto": remove that key'
    for name, scheme in (("fraction", "topk"), ("rank", "powersgd")):
        if getattr(wire, name) != WireTable.model_fields[name].default and wire.gradients != scheme:
            yield f'wire.{name} is a setting of wire.gradients = "{scheme}": give that, or remove wire.{name}'
    if lossy and experiment.strategy == "zero3":
        yield f'wire.gradients = "{wire.gradients}" needs error feedback, and zero3 has none: take zero2, or "int8"'
    if lossy and not wire.error_feedback:
        yield f'wire.gradients = "{wire.gradients}" needs wire.error_feedback = true; given false: remove that key'


def _local_steps(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between [local_steps] and the mesh, the partitioning, [wire] and offload."""
    wire, given = experiment.wire, experiment.local_steps
    if given.steps is None:
        if (given.lr, given.momentum) != (1.0, 0.0):
            yield "local_steps.lr and .momentum are of rounds, and local_steps.steps is none: give it, or remove them"
        return
    if experiment.mesh.get(REPLICA, 1) == 1:
        yield "[local_steps] needs replicas, each taking steps by itself: give mesh.replica, 2 or more, or -1"
    if wire.gradients or wire.weights or wire.buckets:
        yield "[local_steps] and [wire] do not go together: remove one of the tables"
    if experiment.partitioning == "auto":
        yield '[local_steps] is for partitioning = "manual"; given "auto": remove that key'
    if experiment.offload is not None:
        yield "[local_steps] keeps an optimizer on every replica's devices: remove it, or offload"


def _noise_scale(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between train.noise_scale and what it measures."""
    if not experiment.train.noise_scale:
        return
    if experiment.strategy == "zero3":
        yield "train.noise_scale needs each device's own gradient, which zero3 never has: take zero2, or remove it"
    if experiment.partitioning == "auto":
        yield 'train.noise_scale is for partitioning = "manual"; given "auto": remove one of the keys'
    if experiment.local_steps.steps is not None:
        yield "train.noise_scale and [local_steps] do not go together: remove one of them"


def _guard(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between the keys of [guard] and those of [train]."""
    after, most = experiment.guard.roll_back_after, experiment.train.max_skips_in_a_row
    if after > most:
        yield (
            f"guard.roll_back_after must be at most train.max_skips_in_a_row = {most}, after which the run stops; "
            f"given {after}: lower it, or raise the other"
        )


def _lengths(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between the lengths in several tables."""
    size = getattr(experiment.model.config, "image_size", math.inf) if experiment.kind == "images" else math.inf
    padding = experiment.data.crop_padding if experiment.kind == "images" else 0
    warmup, steps = experiment.optimizer.warmup_steps, experiment.train.steps
    if padding >= size:
        yield f"data.crop_padding must be less than model.image_size = {size}; given {padding}: lower it"
    if warmup > steps:
        yield f"optimizer.warmup_steps must be at most train.steps = {steps}; given {warmup}: lower it, or train longer"


def _data(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between the model and its data, as far as it shows without reading it."""
    data, kind, name = experiment.data, experiment.kind, experiment.model.name
    for twice in sorted(data.mixture.keys() & experiment.eval.keys()):
        yield f"eval.{twice} and data.mixture.{twice} are both evaluated as eval_{twice}: rename one"
    if data.source is None and not data.mixture:
        yield "data.source is none, and there is no [data.mixture.NAME] in its place: give one of them"
    if data.source is not None and data.mixture:
        yield 'data.source and [data.mixture.NAME] exclude each other: remove one (or source = "none")'
    if data.mixture and data.heldout is not None:
        yield f"data.heldout is for one source, and there is [data.mixture.NAME]; given {data.heldout!r}: remove it"
    context = getattr(experiment.model, "context", math.inf)
    if kind == "text" and data.length > context:
        yield f"data.length must be at most model.context = {context}; given {data.length}: lower it, or raise that"
    if kind == "text":
        yield from _tokens(experiment)
    fix, why = _TAKES[kind]
    tables = {
        "data.source": data.source,
        **{f"eval.{one}.source": table.source for one, table in experiment.eval.items()},
    }
    tables |= {f"data.mixture.{one}.source": text.source for one, text in data.mixture.items()}
    other_words = {word for words in _WORDS.values() for word in words} - {*_WORDS[kind]}
    for key, given in tables.items():
        for source in (given,) if isinstance(given, str) else given or ():
            if source in other_words:
                yield f"{key} must fit model.name = {name!r}: {why}; given {cut(repr(source))}, which is not {fix}"
    for key, given in _unread(data, OTHERS_KEYS[kind]):
        yield f"data.{key} is not used by model.name = {name!r}, as {why}; given {given}: remove it"


def _tokens(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong between the keys of rows of ids, and what needs their tokenizer."""
    data = experiment.data
    for key in ("weights", "labels", "attention_mask"):
        if getattr(data, key) is not None and data.ids is None:
            yield f'data.{key} is of rows of ids; given no data.ids: give it, such as ids = "input_ids"'
    if data.weights is not None and data.labels is not None:
        yield "data.weights and data.labels both say which tokens count: remove one"
    if data.ids is not None and data.field is not None:
        yield "data.field names a column of text, and data.ids one of token ids: remove one"
    if experiment.sample and not data.knows_text:
        what = "ids" if data.ids else f"an {ARRAYS} of tokens"
        yield f"[sample] needs the tokenizer that made the tokens; given {what}: name data.tokenizer, or leave it out"
    if data.ids is None and len(data.sources) > 1 and any(source.endswith(ARRAYS) for source in data.sources):
        yield f"data.source is an {ARRAYS} of tokens, which stands alone; given {len(data.sources)} sources: name one"


def _own_data(experiment: Experiment) -> Iterator[str]:
    """Yield the keys of [data] that a plug-in's data set does not have."""
    data = experiment.data
    own = DATASETS.entries[data.name or ""].keys
    if data.source is not None:
        yield f"data.name = {data.name!r} is in place of data.source; given both: remove one"
    for key, given in _unread(data, [key for key in OTHERS_KEYS["own"] if key not in (*own, "source")]):
        yield f"data.{key} is not used by data.name = {data.name!r}; given {given}: remove it"


def _unread(data: Data, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys whose value is not the default, with that value in words."""
    for key in keys:
        if getattr(data, key) != Data.model_fields[key].default:
            yield key, cut(repr(getattr(data, key)))


def _rules(experiment: Experiment) -> Iterator[str]:
    """Yield what is wrong with rules that name an axis that the mesh does not have, or `replica`."""
    for pattern, entries in experiment.rules.items():
        flat = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        for axis in sorted(flat - set(experiment.mesh)):
            axes = ", ".join(experiment.mesh)
            yield f'rules."{pattern}" must name axes of [mesh], which are {axes}; given {axis!r}: add it to [mesh]'
        if REPLICA in flat & set(experiment.mesh):
            yield (
                f'rules."{pattern}" must name data or the model\'s own axes; given `replica`, which carries the batch '
                "only: name another"
            )
