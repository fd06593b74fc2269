"""Values that may change during a run: one value, or pairs of a step and a value."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PlainValidator
from pydantic_core import PydanticKnownError

from jdp.base.by_step import pairs
from jdp.experiment.schema.fields import Single, Whole


def _of_each(check: Callable[..., Any], each: str) -> Callable[[Any], Any]:
    """Return a validator of a value, or of pairs, by the check of one value."""

    def checked(given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return check(given, one=True)
        steps, values = pairs(given)  # pyright: ignore[reportUnknownArgumentType]
        try:
            return tuple((step, check(value, one=False)) for step, value in zip(steps, values, strict=True))
        except (PydanticKnownError, ValueError):  # it is about a value in the pairs, which are shown
            raise ValueError(f"must have values that are {each}") from None

    return checked


def _size(given: Any, *, one: bool, least: int = 1) -> int:
    if type(given) is not int:
        raise PydanticKnownError("int_type")
    if given < least:
        raise PydanticKnownError("greater_than_equal", {"ge": least})
    return Whole.func(given)  # pyright: ignore[reportCallIssue]


def _length(given: Any, *, one: bool) -> int:
    return _size(given, one=one, least=0 if one else 1)


def _weight(given: Any, *, one: bool) -> float:
    if type(given) not in (int, float):
        raise PydanticKnownError("float_type")
    if not given == given or abs(given) == float("inf"):
        raise PydanticKnownError("finite_number")
    if one and given <= 0:
        raise PydanticKnownError("greater_than", {"gt": 0.0})
    if given < 0:
        raise PydanticKnownError("greater_than_equal", {"ge": 0})
    return Single.func(float(given))  # pyright: ignore[reportCallIssue]


_WHOLE = "whole numbers of 1 or more"
Pairs = tuple[tuple[int, int], ...]
Sizes = Annotated[Annotated[int, Field(ge=1)] | Pairs, PlainValidator(_of_each(_size, _WHOLE))]
Lengths = Annotated[Annotated[int, Field(ge=0)] | Pairs, PlainValidator(_of_each(_length, _WHOLE))]
Weights = Annotated[
    Annotated[float, Field(gt=0)] | tuple[tuple[int, float], ...],
    PlainValidator(_of_each(_weight, "numbers of 0 or more")),
]
