"""Report steps and gradients that are made anew in each round of a loop: each traces and compiles again."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.core.gradients.loss_call import LossWithAux

_MADE = set[int]()


def report_remade(noun: str, loss_fn: Any, settings: tuple[Any, ...], given: Any) -> None:
    """Report once if an equal step or gradient was called before, with arguments of the same shapes."""
    leaves, treedef = jax.tree.flatten(given)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    try:
        key = hash((noun, _code(loss_fn), repr(settings), treedef, *shapes))
    except TypeError:  # an optimizer or a model with a part that has no hash
        return
    if key in _MADE:
        notice(
            f"the same {noun} was made again, and compiles again: make it once, before the loop, and call it in each "
            "round"
        )
    _MADE.add(key)


def _code(value: Any, depth: int = 4) -> Hashable:
    """Return what is equal for a function that is defined again, by the same line and with the same values."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, LossWithAux) and depth:
        return _code(value.fn, depth - 1)
    if isinstance(value, partial) and depth:
        parts = value.func, *value.args, *value.keywords.values()
        return tuple(_code(part, depth - 1) for part in parts)
    if isinstance(value, FunctionType) and depth:
        cells = value.__closure__ or ()
        return value.__code__, *(_code(cell.cell_contents, depth - 1) for cell in cells)
    return id(value)
