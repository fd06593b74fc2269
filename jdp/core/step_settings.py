"""The settings of a step, checked before anything is traced: their values, and their combinations."""

from dataclasses import dataclass
from typing import get_args

from jdp.base.errors import UserError
from jdp.base.words import Encoding, Partitioning, is_integer, is_number, nearest
from jdp.core.compiling.options import DEFAULT, Compiler
from jdp.core.precision import Precision

FP32 = Precision()


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a step or a gradient: the keywords of `make_train_step`, checked."""

    precision: Precision = FP32
    requested: Partitioning | None = None  # the keyword `partitioning`; "manual" with `wire`
    accumulate: int = 1
    train: bool = True  # False for an evaluation
    wire: Encoding | None = None
    check_loss: bool = True
    clip_norm: float | None = None
    donate: bool = True
    compiler: Compiler = DEFAULT

    def __post_init__(self) -> None:
        if not is_integer(self.accumulate) or self.accumulate < 1:
            raise UserError(f"accumulate is 1 or more microbatches; given {self.accumulate!r}. Give an integer.")
        if self.requested not in ("auto", "manual", None):
            raise UserError(f'partitioning is "auto", "manual" or None; given {self.requested!r}. Leave it out.')
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise UserError(f"clip_norm is a positive number or None; given {self.clip_norm!r}. Give one, such as 1.0.")
        if self.donate not in (True, False):
            raise UserError(f"donate is True, or False to keep the old state; given {self.donate!r}. Give a bool.")
        if self.wire is None:
            return
        if self.wire not in (encodings := get_args(Encoding)):
            hint = nearest(str(self.wire), encodings) or ". Give one of these."
            raise UserError(f"wire is one of {', '.join(encodings)}, or None; given {self.wire!r}{hint}")
        if self.requested == "auto":
            raise UserError('wire needs partitioning="manual"; given partitioning="auto": leave partitioning out.')
        object.__setattr__(self, "requested", "manual")
