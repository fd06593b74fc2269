"""The content of a checkpoint: the leaves of a train state or other tree by path, and how they are read onto a target.

It is independent of meshes, strategies, processes and container types. Reading compares the checkpoint's table of
leaves with a target, whose leaves give the path, shape, dtype and sharding of each array, and reads only these.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdp.base.errors import UserError
from jdp.base.notices import warn
from jdp.base.tree_paths import check_keys, matches, path_of
from jdp.base.words import is_integer
from jdp.checkpoint.errors import CheckpointError
from jdp.core import flax_nnx
from jdp.core.batch import check_state
from jdp.core.state import TrainState
from jdp.core.types import PyTree

FORMAT = 1
_FIELDS = ("step", "params", "opt_state", "model_state", "rng", "skipped")
_FOR_INFERENCE = ("params", "model_state")


class Source(Protocol):
    """A checkpoint to read: a folder, or copies in the hosts' memory. Every process calls each method."""

    folder: Path  # for messages

    def table(self) -> dict[str, Any]: ...  # verified

    def record(self) -> dict[str, Any]: ...

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify and read stored arrays onto leaves in `stored_form` that have elements, by path."""
        ...


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
        leaves = by_path(dict(self.fields))
        for path, leaf in leaves.items():
            if hasattr(leaf, "dtype"):
                continue
            if not isinstance(leaf, bool | int | float):
                raise CheckpointError(
                    f"A checkpoint holds a tree of arrays and numbers; {path} is {leaf!r}. Leave it out: text goes "
                    "into `record`."
                )
            leaves[path] = np.asarray(leaf)
        return leaves


def by_path(*trees: PyTree) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, leaf in (pair for tree in trees for pair in jax.tree.leaves_with_path(tree)):
        if (path := path_of(key)) in leaves:
            raise UserError(f"Every leaf of a state needs its own path; two have {path}. Rename one.")
        leaves[path] = leaf
    return leaves


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
        check_state(state, "checkpoints.save(state)")  # a step's whole result: the error says how to take it apart
    if not is_integer(step) or step < 0:
        raise UserError(
            f"A tree is saved under a step number, 0 or more; given step={step!r}. Write "
            "checkpoints.save(tree, step=1000)."
        )
    return int(step)


def arrays_and_table(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state by path, in their stored form, and the table of its leaves."""
    leaves = Content.of(state).leaves
    own: str = importlib.import_module("jdp").__version__
    versions = {"jdp": own, "jax": jax.__version__, "orbax-checkpoint": ocp.__version__}
    table = {"format": FORMAT, "leaves": _describe(leaves), "written_by": versions}
    return {path: jax.random.key_data(x) if _is_key(x) else x for path, x in leaves.items() if x.size}, table


# Reading.


def read_state(source: Source, target: Any) -> Any:
    """Read a complete state, or any other tree, each leaf onto the sharding of the target's."""
    content = Content.of(target)
    wanted, saved = content.leaves, _read_table(source, content.fields)
    _check_match(saved, _describe(wanted), source.folder)
    return content.filled(_read_arrays(source, wanted))


def read_params(source: Source, target: PyTree, *, missing: Sequence[str] = (), ignore: Sequence[str] = ()) -> PyTree:
    """Read only parameters and model state onto a train state, or only parameters onto a tree of them."""
    folder = source.folder
    content = Content({"params": target}, lambda filled: filled["params"])
    if isinstance(target, TrainState):
        content = Content.of_state(target, _FOR_INFERENCE)
    wanted, table = content.leaves, _read_table(source, content.fields)
    saved = {path: kind for path, kind in table.items() if path.partition("/")[0] in content.fields}
    ignored = ignored_names({path: (_path_in_field(path),) for path in saved}, ignore, folder)
    saved = {path: kind for path, kind in saved.items() if path not in ignored}
    kept = {path: leaf for path, leaf in wanted.items() if path not in saved and matches(_path_in_field(path), missing)}
    for path in sorted(ignored & (wanted.keys() - kept.keys())):
        raise needed_but_ignored(_path_in_field(path))
    check_kept(kept, folder)
    wanted = {path: leaf for path, leaf in wanted.items() if path not in kept}
    _check_match(saved, _describe(wanted), folder, params_only=True)
    return content.filled({**kept, **_read_arrays(source, wanted)})


def _read_table(source: Source, fields: Collection[str]) -> dict[str, str]:
    """Read the table of leaves, path -> "float32[4, 8]".

    Raises CheckpointError if `fields` are a train state's and the checkpoint has another tree, or the reverse.
    """
    table, folder = source.table(), source.folder
    if table.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} was written by another version of jdp, in format {table.get('format')}; this version "
            f"reads format {FORMAT}. Restore it with the version that wrote it."
        )
    saved: dict[str, str] = table["leaves"]
    is_tree = {path.partition("/")[0] for path in saved} == {"tree"}
    if is_tree and "tree" not in fields:
        raise CheckpointError(
            f"A train state and its parameters are read from a checkpoint of a train state; {folder} holds another "
            "tree. Read it whole: jdp.restore(path, target), onto a tree like the saved one."
        )
    if "tree" in fields and not is_tree:
        raise CheckpointError(
            f"The target must be of the saved kind; {folder} holds a train state, and the target is another tree. Pass "
            "jdp.abstract_state(...), or read the parameters alone: jdp.restore_params(path, params)."
        )
    return saved


def _read_arrays(source: Source, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the arrays at these paths onto the leaves' shardings; arrays without elements are not stored."""
    shapes = {path: stored_form(leaf, path) for path, leaf in wanted.items()}
    arrays = source.arrays({path: x for path, x in shapes.items() if x.size})
    for path, leaf in wanted.items():
        if not leaf.size:
            x = shapes[path]
            empty = jax.numpy.zeros(x.shape, x.dtype)
            arrays[path] = x if isinstance(x, np.ndarray) else jax.device_put(empty, x.sharding)
        if isinstance(leaf, jax.Array) and not leaf.committed:  # the target may move to other devices, so this may too
            arrays[path] = jax.numpy.asarray(np.asarray(arrays[path]))
        if _is_key(leaf):
            implementation = list[Any]()  # `key_impl` takes no abstract key
            jax.eval_shape(lambda key, found=implementation: found.append(jax.random.key_impl(key)), leaf)
            arrays[path] = jax.random.wrap_key_data(arrays[path], impl=implementation[0])
    return arrays


def stored_form(leaf: Any, path: str) -> Any:
    """Return the shape, dtype and sharding of a leaf in storage; a typed key is stored as its uint32 words.

    A NumPy array stays a NumPy array, because reading it as a JAX array would cut it to 32 bits.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(leaf.shape, leaf.dtype)
    check_sharding(leaf, path)
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _describe(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}


def _check_match(
    saved: Mapping[str, str], wanted: Mapping[str, str], folder: Path, *, params_only: bool = False
) -> None:
    """Raise CheckpointError for the first leaf that differs, parameters first; `params_only`: suggest `ignore` too."""
    differing = [path for path in saved.keys() | wanted.keys() if saved.get(path) != wanted.get(path)]
    if not differing:
        return
    path = min(differing, key=lambda path: (not path.startswith("params/"), path))
    has = f"{folder} has {path} as {saved.get(path, 'nothing')}, and {wanted.get(path, 'nothing')} is wanted"
    if all(path.startswith("opt_state/") for path in differing):
        raise CheckpointError(
            f"A checkpoint is restored into the same optimizer; {has}. The model is the same: use the optimizer of the "
            "save, or restore only the parameters (restore_params) and start a new optimizer state."
        )
    unread = f", skip the leaf (ignore=({_path_in_field(path)!r},))" if params_only and path not in wanted else ""
    raise CheckpointError(
        f"A checkpoint is restored into the same model and optimizer; {has}. Nothing is cast or reshaped: build the "
        f"saved model{unread}, or choose another checkpoint ({len(differing)} leaves differ)."
    )


def _path_in_field(path: str) -> str:
    return path.partition("/")[2]


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# Checks before anything is written or read, also of safetensors files.


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
                f"Only arrays can be written; {path} is abstract, {leaf.dtype}{list(leaf.shape)} without values. Pass "
                "a state from jdp.init_state, a train step or jdp.restore."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"Only arrays can be written; {path} was donated to a train step, which reused its memory. "
                "Write the state that the step returned, or make the step with donate=False."
            )


def ignored_names(names: Mapping[str, Sequence[str]], ignore: Sequence[str], file: Path) -> set[str]:
    """Return the arrays of a file that `ignore` matches, and report their number."""
    for pattern in (ignore,) if isinstance(ignore, str) else ignore:
        if not any(matches(name, pattern) for known in names.values() for name in known):
            some = ", ".join(known[-1] for known in list(names.values())[:5]) + ", …" * (len(names) > 5)
            raise CheckpointError(
                f"Every pattern of `ignore` must match an array in the file; {pattern!r} matches none in {file}, "
                f"which has {some or 'none'}. Fix or remove the pattern."
            )
    ignored = [path for path, known in names.items() if any(matches(name, ignore) for name in known)]
    if ignored:
        warn(f"{file}: `ignore` skips {len(ignored)} of {len(names)} arrays; the first is {ignored[0]}")
    return {*ignored}


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
