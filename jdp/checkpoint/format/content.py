"""The content of a checkpoint, and how it is read onto a target.

A checkpoint is a folder:

- `state/` has the arrays by path ("params/layers/kernel").
- `checkpoint.json` has the table of their shapes and dtypes, the versions that wrote them, the record and the metrics.
- `checksums.json` has the size and the hash of each file.

It is independent of meshes, strategies, processes and container types. Reading compares the table with a target, whose
leaves give the path, shape, dtype and sharding of each array, and reads only these into memory.
"""

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdp.base.tree_paths import matches
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.format.trees import (
    Content,
    check_kept,
    check_sharding,
    ignored_names,
    needed_but_ignored,
    text_of,
)
from jdp.core.state import TrainState
from jdp.core.types import PyTree

FORMAT = 1
_FOR_INFERENCE = ("params", "model_state")


class Source(Protocol):
    """A checkpoint to read: a folder, or copies in the hosts' memory. Every process calls each method."""

    @property
    def folder(self) -> Path: ...  # for messages

    def table(self) -> dict[str, Any]:
        """Return the verified table of its leaves."""
        ...

    def record(self) -> dict[str, Any]:
        """Return the JSON object saved with the arrays."""
        ...

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Verify and read stored arrays onto leaves in `stored_form` that have elements, by path."""
        ...


def arrays_and_table(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state by path, in their stored form, and the table of its leaves."""
    leaves = Content.of(state).leaves
    own: str = importlib.import_module("jdp").__version__
    versions = {"jdp": own, "jax": jax.__version__, "orbax-checkpoint": ocp.__version__}
    table = {"format": FORMAT, "leaves": _describe(leaves), "written_by": versions}
    return {path: jax.random.key_data(x) if _is_key(x) else x for path, x in leaves.items() if x.size}, table


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
    return {path: text_of(leaf.dtype, leaf.shape) for path, leaf in leaves.items()}


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
        f"saved model{unread}, or choose another checkpoint ({len(differing)} of {len(saved)} leaves differ)."
    )


def _path_in_field(path: str) -> str:
    return path.partition("/")[2]


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
