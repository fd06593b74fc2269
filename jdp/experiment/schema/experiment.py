"""The whole experiment file.

The constructor checks everything that depends neither on the devices nor on the data. `jdp.experiment.file` checks
the devices, `jdp.experiment.data` the data.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.base.errors import UserError
from jdp.base.words import DtypeName, Encoding, Offload, Partitioning, PrecisionName, StrategyName
from jdp.core.sharding.axes import DATA, REPLICA, check_axes
from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.data import Data, EvalSet
from jdp.experiment.schema.fields import CompilerTable, PackageName, Rule, RunName, Section, named
from jdp.experiment.schema.model import Model, UnknownModel, model_table
from jdp.experiment.schema.rules import broken_rules
from jdp.experiment.schema.train import ACCURACY, Guard, LossTable, Optimizer, Sample, Train

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
