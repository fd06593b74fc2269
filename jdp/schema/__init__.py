"""The keys of an experiment file: strict, frozen models, each field with the one line that `jdp train --help` shows.

kinds.py      the kinds of value
model.py      [model]
data.py       [data], [data.mixture.NAME], [eval.NAME]
optimizer.py  [optimizer]
train.py      [train], [sample]
track.py      [track]
agree.py      rules between tables
here          the whole file

A constructor that returns has checked everything that can be checked without counting devices or reading data; what
needs the count is in `jdp.experiment`, what needs the data in `jdp.open_data`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from jdp.mesh import DATA, REPLICA
from jdp.schema.agree import Kind, disagreements, eval_metrics, kind_of
from jdp.schema.data import Data, EvalSet, Ingredient
from jdp.schema.kinds import NONE, AxisSize, Rule, RunName, Section, named
from jdp.schema.model import AnyModel, Model, model_table
from jdp.schema.optimizer import USED_BY, Optimizer
from jdp.schema.track import Track
from jdp.schema.train import Sample, Train
from jdp.toml import LONGEST, cut

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
