"""What a loss function takes, checked before it is traced."""

import inspect
from typing import Any

from jdp.base.errors import UserError


def check_loss_takes(loss_fn: Any, arguments: int, *, more: bool = False) -> None:
    """Check that a loss can be called with models, a batch and a key, by position."""
    takes = ", ".join([*(f"model_{i}" if arguments > 3 else "model" for i in range(arguments - 2)), "batch", "rng"])
    rule, fix = f"A loss is a function of ({takes})", f"Write def loss_fn({takes})"
    if not callable(loss_fn):
        raise UserError(f"{rule}; given {loss_fn!r}. {fix}.")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of what is not written in Python
        return
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    most = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    count = max(arguments, most) if more else arguments
    try:
        signature.bind(*range(count))
    except TypeError as error:
        name = getattr(inspect.unwrap(loss_fn), "__name__", type(loss_fn).__name__)
        raise UserError(
            f"{rule}, called with {count} arguments by position; given {name}{signature}. {fix}, or call a gradient "
            "with the models that its loss takes."
        ) from error
