"""What is saved, a train state or any other tree: its leaves by path, and the number it is saved under."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jdp.base.numbers import is_integer
from jdp.base.tree_paths import path_of
from jdp.checkpoint.errors import CheckpointError
from jdp.core import flax_nnx
from jdp.core.init.trees import check_keys
from jdp.core.state import TrainState
from jdp.core.types import PyTree

_FIELDS = ("step", "params", "opt_state", "model_state", "rng", "skipped", "sync")


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds of a tree, or what a tree takes of one.

    A train state has fields of its own; any other tree is one field, `tree`, with dicts of arrays for its modules.

    Attributes:
        holder: has the fields as attributes.
        fields: their names.
        back: filled fields by name -> a tree like the given one.
    """

    holder: Any
    fields: Sequence[str]
    back: Callable[[dict[str, PyTree]], Any]

    @staticmethod
    def of(tree: Any) -> Content:
        """Return the content of a train state, or of any other tree, real or abstract."""
        if isinstance(tree, TrainState):
            return Content(tree, _FIELDS, lambda filled: replace(tree, **filled))
        check_keys(tree)
        arrays, back = flax_nnx.plain(tree)
        return Content(SimpleNamespace(tree=arrays), ("tree",), lambda filled: back(filled["tree"]))

    def filled(self, leaves: Mapping[str, Any]) -> Any:
        """Return a tree like the given one with other leaves, by path."""
        return self.back(fill(self.holder, self.fields, leaves))

    @property
    def leaves(self) -> dict[str, Any]:
        """The leaves by path; numbers of Python as arrays of NumPy. Raises CheckpointError for what is no array."""
        return {path: _as_array(path, leaf) for path, leaf in leaves_of(self.holder, self.fields).items()}


def _as_array(path: str, leaf: Any) -> Any:
    if hasattr(leaf, "dtype"):
        return leaf
    if isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    raise CheckpointError(
        f"A checkpoint holds a tree of arrays and numbers; {path} is {leaf!r}. Leave it out: text goes into `record`."
    )


def leaves_of(state: Any, fields: Sequence[str]) -> dict[str, Any]:
    """Return the leaves of these fields of a state by path, such as "params/layers/kernel"."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path({name: getattr(state, name) for name in fields}):
        if (name := path_of(path)) in leaves:
            raise ValueError(f"Every leaf of a state needs a path of its own; two have {name}. Rename one.")
        leaves[name] = leaf
    return leaves


def fill(state: Any, fields: Sequence[str], leaves: Mapping[str, Any]) -> dict[str, PyTree]:
    """Return fields of a state by name, with their leaves replaced by those of the same paths."""
    trees = {name: getattr(state, name) for name in fields}

    def filled(path: Any, leaf: Any) -> Any:
        value = leaves[path_of(path)]
        return type(leaf)(value) if isinstance(leaf, bool | int | float) else value

    return jax.tree.map_with_path(filled, trees)


def number_of(state: Any, step: Any) -> int:
    """Return the number under which a state or a tree is saved."""
    if isinstance(state, TrainState):
        own = int(state.consumed)
        if step not in (None, own):
            raise ValueError(
                f"A train state is saved under the number of batches that it has consumed, {own}; given step={step!r}. "
                "Leave step out."
            )
        return own
    if not is_integer(step) or step < 0:
        raise ValueError(
            f"A tree is saved under a number of its own, 0 or more; given step={step!r}. Write "
            "checkpoints.save(tree, step=1000)."
        )
    return int(step)
