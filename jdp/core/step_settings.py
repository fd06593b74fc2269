"""The settings of a step, checked before anything is traced: their values, and their combinations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

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
            rule = "accumulate is the number of microbatches, at least 1"
            raise UserError(f"{rule}; given {self.accumulate!r}. Give an integer.")
        if self.requested not in ("auto", "manual", None):
            rule = 'partitioning is "auto", "manual" or None (jdp chooses)'
            raise UserError(f"{rule}; given {self.requested!r}. Leave it out.")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            rule = "clip_norm is a positive norm, or None"
            raise UserError(f"{rule}; given {self.clip_norm!r}. Give a number, such as 1.0.")
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


def checked_numbers(argnums: int | Sequence[int], wrt: Any) -> tuple[int, ...]:
    """Return the numbers of the differentiated models."""
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not numbers or not all(is_integer(n) and n >= 0 for n in numbers) or len(set(numbers)) < len(numbers):
        rule = "argnums is the number of a model, from 0, or several different numbers"
        raise UserError(f"{rule}; given {argnums!r}. Write 0, or (0, 1).")
    if wrt is not None and len(numbers) > 1:
        fix = "Make a gradient for each model, or pass frozen parameters as another model"
        raise UserError(f"wrt selects parameters of one model; given argnums={numbers}. {fix}.")
    return numbers
