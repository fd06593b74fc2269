"""A train state or other tree to save: its leaves by path, its number, and checks before writing or reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.base.errors import UserError
from jdp.base.notices import warn
from jdp.base.tree_paths import check_keys, matches, path_of
from jdp.base.words import is_integer
from jdp.checkpoint.errors import CheckpointError
from jdp.core import flax_nnx
from jdp.core.batch import check_state
from jdp.core.state import TrainState
from jdp.core.types import PyTree

_FIELDS = ("step", "params", "opt_state", "model_state", "rng", "skipped")


@dataclass(frozen=True)
class Content:
    """The leaves of a tree that a checkpoint holds, or of some of its fields.

    A train state has its own fields; any other tree is one field, `tree`, with dicts of arrays for its modules.
    """

    fields: Mapping[str, PyTree]  # name -> tree
    back: Callable[[dict[str, PyTree]], Any]  # new fields by name -> a tree like the given one

    @staticmethod
    def of(tree: Any) -> Content:
        if isinstance(tree, TrainState):
            # Numbers that a user set in a state, such as a learning rate, get the dtype that a step gives them.
            leaves, treedef = jax.tree.flatten(tree)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, bool | int | float | np.generic | np.ndarray):
                    leaves[index] = np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
            return Content.of_state(treedef.unflatten(leaves), _FIELDS)
        check_keys(tree)
        arrays, back = flax_nnx.plain(tree)
        return Content({"tree": arrays}, lambda filled: back(filled["tree"]))

    @staticmethod
    def of_state(state: TrainState, fields: Sequence[str]) -> Content:
        return Content({name: getattr(state, name) for name in fields}, lambda filled: replace(state, **filled))

    def filled(self, leaves: Mapping[str, Any]) -> Any:
        """Return a tree like the given one with new leaves, by path."""

        def filled(path: Any, leaf: Any) -> Any:
            value = leaves[path_of(path)]
            return type(leaf)(value) if isinstance(leaf, bool | int | float) else value

        return self.back(jax.tree.map_with_path(filled, dict(self.fields)))

    @property
    def leaves(self) -> dict[str, Any]:
        """The leaves by path, such as "params/layers/kernel"; Python's numbers as NumPy arrays."""
        leaves: dict[str, Any] = {}
        for path, leaf in jax.tree.leaves_with_path(dict(self.fields)):
            if (name := path_of(path)) in leaves:
                raise UserError(f"Every leaf of a state needs its own path; two have {name}. Rename one.")
            leaves[name] = _as_array(name, leaf)
        return leaves


def _as_array(path: str, leaf: Any) -> Any:
    if hasattr(leaf, "dtype"):
        return leaf
    if isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    raise CheckpointError(
        f"A checkpoint holds a tree of arrays and numbers; {path} is {leaf!r}. Leave it out: text goes into `record`."
    )


def text_of(dtype: Any, shape: Sequence[int]) -> str:
    """Return the dtype and shape of a leaf in a checkpoint's table: "float32[4, 8]"."""
    return f"{dtype}{list(shape)}"


def number_of(state: Any, step: Any) -> int:
    if isinstance(state, TrainState):
        own = int(state.consumed)
        if step not in (None, own):
            raise UserError(
                f"A train state is saved under the number of batches that it has consumed, {own}; given step={step!r}. "
                "Leave out step."
            )
        return own
    if isinstance(state, tuple) and any(isinstance(entry, TrainState) for entry in state):
        check_state(state, "checkpoints.save(state)")
    if not is_integer(step) or step < 0:
        raise UserError(
            f"A tree is saved under a step number, 0 or more; given step={step!r}. Write "
            "checkpoints.save(tree, step=1000)."
        )
    return int(step)


# Checks before anything is written or read.


def to_json(value: Any, name: str) -> Any:
    """Return `value` after a round trip through JSON: numbers of NumPy and JAX become Python's, tuples lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise CheckpointError(f"{name} must be JSON, whose keys are text; {odd[0]!r} is not. Write str(...).")
        return {key: to_json(inner, f"{name}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 and value.dtype.kind in "biufU":
        return value.item()
    raise CheckpointError(
        f"{name} must be JSON: text, numbers, lists, objects, None; it is {type(value).__name__} {str(value)[:50]!r}. "
        "Put arrays into the state, or use .tolist() for small ones."
    )


def check_values(leaves: Mapping[str, Any]) -> None:
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"Only arrays can be written; {path} is abstract, {text_of(leaf.dtype, leaf.shape)} without values. "
                "Pass a state from jdp.init_state, a train step or jdp.restore."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"Only arrays can be written; {path} was donated to a train step, which reused its memory. "
                "Write the state that the step returned, or make the step with donate=False."
            )


def ignored_names(names: Mapping[str, Sequence[str]], ignore: Sequence[str], file: Path) -> set[str]:
    """Return the arrays of a file that `ignore` matches, and report their number."""
    ignored: dict[str, None] = {}
    for pattern in (ignore,) if isinstance(ignore, str) else ignore:
        matched = [path for path, known in names.items() if any(matches(name, pattern) for name in known)]
        if not matched:
            some = ", ".join(known[-1] for known in list(names.values())[:5]) + ", …" * (len(names) > 5)
            raise CheckpointError(
                f"Every pattern of `ignore` must match an array in the file; {pattern!r} matches none in {file}, "
                f"which has {some or 'none'}. Fix or remove the pattern."
            )
        ignored.update(dict.fromkeys(matched))
    if ignored:
        first = next(iter(ignored))
        warn(f"{file}: `ignore` skips {len(ignored)} of {len(names)} arrays; the first is {first}")
    return set(ignored)


def needed_but_ignored(path: str) -> CheckpointError:
    return CheckpointError(
        f"`ignore` must not skip arrays that the model needs; the model has {path}. Remove it from `ignore`, or add "
        f"{path!r} to `missing` to keep the target's value."
    )


def check_kept(kept: Mapping[str, Any], file: Path) -> None:
    """Check the leaves that keep the target's values because `file` lacks them."""
    for path, leaf in kept.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{file} lacks {path}; `missing` keeps the target's value, but the target is abstract: pass a real "
                "state (jdp.init_state)."
            )


def check_sharding(leaf: Any, path: str) -> None:
    if getattr(leaf, "sharding", None) is None:
        raise UserError(f"Every leaf of a target needs a sharding; {path} has none. Use jdp.abstract_state(...).")
