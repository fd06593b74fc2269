"""What one checkpoint holds, and how it is read onto a target.

A checkpoint is a folder with three items: `state`, the arrays by path ("params/layers/kernel"); `leaves`, a small JSON
table of what each is; `record`, any small JSON object. It knows nothing of meshes, strategies or processes, nor of the
kinds of containers the leaves sat in: reading takes a target, whose leaves say which path, shape and dtype they want
and how they want it sharded. Only what the target asks for is read from disk.

Reading goes in that order: the table is compared with the target, leaf by leaf; then the arrays are read; then they
take their places.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdp.checkpoint.errors import CheckpointError, reading
from jdp.core.notices import notice
from jdp.core.paths import path_of
from jdp.core.state import TrainState
from jdp.core.types import PyTree

FORMAT = 1
COMMITTED = "commit_success.txt"
"""Orbax writes this file last: a folder without it is not a checkpoint."""
_FIELDS = ("step", "params", "opt_state", "model_state", "rng", "skipped")
_FOR_INFERENCE = ("params", "model_state")


def handlers() -> dict[str, Any]:
    """Orbax' handler of each item."""
    return {
        "state": ocp.PyTreeCheckpointHandler(),
        "leaves": ocp.JsonCheckpointHandler(),
        "record": ocp.JsonCheckpointHandler(),
    }


def items_of(state: TrainState, record: Mapping[str, Any]) -> ocp.args.Composite:
    """What Orbax is given to write.

    Raises:
        CheckpointError: the state is none or abstract, or the record is not JSON.
    """
    leaves = leaves_of(state, _FIELDS)
    check_values(leaves)
    table = {"format": FORMAT, "leaves": _described(leaves)}
    arrays = {path: jax.random.key_data(x) if _is_key(x) else x for path, x in leaves.items() if x.size}
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays),
        leaves=ocp.args.JsonSave(table),
        record=ocp.args.JsonSave(plain(record, "record")),
    )


def leaves_of(state: Any, fields: Sequence[str]) -> dict[str, Any]:
    """The leaves of these fields by path: "params/layers/kernel".

    Raises:
        CheckpointError: it is no state.
        ValueError: two leaves have one path.
    """
    if lacking := [name for name in fields if not hasattr(state, name)]:
        raise CheckpointError(
            f"A checkpoint holds a jdp.TrainState; a {type(state).__name__} was given, which has no {lacking[0]}. "
            "Weights alone go into a file: jdp.export.export_safetensors(path, params)."
        )
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path({name: getattr(state, name) for name in fields}):
        if (name := path_of(path)) in found:
            raise ValueError(f"Every leaf of a state needs a path of its own; two have {name}. Rename one.")
        found[name] = leaf
    return found


def is_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was written here to its end."""
    return (folder / COMMITTED).is_file() and (folder / "leaves").is_dir() and (folder / "state").is_dir()


def read_state(folder: Path, target: TrainState, fix: str) -> TrainState:
    """The whole state, every leaf with the sharding that `target`'s has; `fix` is for a damaged file."""
    wanted = leaves_of(target, _FIELDS)
    saved = _table(folder, fix)
    _check_same(saved, _described(wanted), folder)
    return _filled(target, _FIELDS, _read(folder, wanted, fix))


def read_params(
    folder: Path, target: PyTree, fix: str, *, missing: Sequence[str] = (), ignore: Sequence[str] = ()
) -> PyTree:
    """Parameters and model state onto a train state, or parameters onto a tree of their own; nothing else is read.

    Parameters that `missing` matches and the checkpoint lacks keep the target's values; of those it has, what `ignore`
    matches is taken as lacking.
    """
    fields = _FOR_INFERENCE if isinstance(target, TrainState) else ("params",)
    state = target if isinstance(target, TrainState) else _Params(target)
    wanted = leaves_of(state, fields)
    saved = {path: kind for path, kind in _table(folder, fix).items() if path.partition("/")[0] in fields}
    unread = left_unread({path: (_inside(path),) for path in saved}, ignore, folder)
    saved = {path: kind for path, kind in saved.items() if path not in unread}
    kept = {path: leaf for path, leaf in wanted.items() if path not in saved and _matches(path, missing)}
    for path in sorted(unread & (wanted.keys() - kept.keys())):
        raise CheckpointError(both_ways(_inside(path)))
    check_real(kept, f"{folder} lacks")
    wanted = {path: leaf for path, leaf in wanted.items() if path not in kept}
    _check_same(saved, _described(wanted), folder, params_only=True)
    filled = _filled(state, fields, {**kept, **_read(folder, wanted, fix)})
    return filled if isinstance(target, TrainState) else filled.params


def read_record(folder: Path, fix: str) -> dict[str, Any]:
    """The JSON object that was saved beside the arrays."""
    return _object(_restore(folder, fix, record=ocp.args.JsonRestore())["record"], folder / "record", fix)


def plain(value: Any, where: str) -> Any:
    """`value` as JSON has it and gives it back: numbers of numpy and JAX become Python's, tuples lists.

    Raises:
        CheckpointError: JSON has no such thing; `where` names it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise CheckpointError(f"{where} must be JSON, whose keys are text; {odd[0]!r} is none. Write str(...).")
        return {key: plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 and value.dtype.kind in "biufU":
        return value.item()
    raise CheckpointError(
        f"{where} must be JSON: text, numbers, lists, objects, None; it is {type(value).__name__} {str(value)[:50]!r}. "
        "Arrays belong into the state; of small ones take .tolist()."
    )


def check_metrics(folder: Path) -> None:
    """Raises CheckpointError if the metrics beside a checkpoint are damaged."""
    file = folder / "metrics" / "metrics"
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict) or not all(x is None or isinstance(x, int | float) for x in found.values()):
        raise CheckpointError(
            f"{file} is damaged: it must be a JSON object of numbers. Remove that file: the checkpoint is then one "
            "without metrics."
        )


def check_values(leaves: Mapping[str, Any]) -> None:
    """What is written has values."""
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"Only arrays can be written; {path} is abstract, {leaf.dtype}{list(leaf.shape)} without values. Give "
                "the state that jdp.init_state, a train step or jdp.restore returned."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"Only arrays can be written; {path} has been given to a train step, which took its memory over "
                "(donated it). Write the state that the step returned, or make the step with donate=False."
            )


def left_unread(names: Mapping[str, Sequence[str]], ignore: Sequence[str], where: Path) -> set[str]:
    """Of what a file has, under the names that each goes by, what `ignore` matches; that is said.

    Raises:
        CheckpointError: a pattern matches nothing.
    """
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    unread: dict[str, None] = {}
    for pattern in patterns:
        found = [path for path, known in names.items() if any(fnmatch.fnmatchcase(name, pattern) for name in known)]
        if not found:
            some = ", ".join(known[-1] for known in list(names.values())[:5]) + ", …" * (len(names) > 5)
            raise CheckpointError(
                f"Every pattern of `ignore` must match something in the file; {pattern!r} matches nothing of {where}, "
                f"which has {some or 'nothing'}. Leave it out, or mend it."
            )
        unread.update(dict.fromkeys(found))
    if unread:
        first = next(iter(unread))
        notice(f"{where}: {len(unread)} of {len(names)} arrays are left unread, as `ignore` asks; the first is {first}")
    return set(unread)


def both_ways(path: str) -> str:
    """The error where `ignore` leaves out what the model needs."""
    return (
        f"What `ignore` leaves unread the model must not need; it has {path}. Leave that out of `ignore`, or put "
        f"{path!r} into `missing` too, to keep the target's value."
    )


def check_real(kept: Mapping[str, Any], what: str) -> None:
    """Leaves that keep their values must have some."""
    for path, leaf in kept.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{what} {path}, which `missing` lets keep the target's value, but the target is abstract: "
                "pass a real state (jdp.init_state)."
            )


class _Params:
    """Bare parameters where a state is expected."""

    def __init__(self, params: PyTree) -> None:
        self.params = params


def _table(folder: Path, fix: str) -> dict[str, str]:
    table = _object(_restore(folder, fix, leaves=ocp.args.JsonRestore())["leaves"], folder / "leaves", fix)
    if table.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} was written by another version of jdp, in format {table.get('format')}; this one reads format "
            f"{FORMAT}. Restore it with the version that wrote it."
        )
    return _object(table.get("leaves"), folder / "leaves", fix)


def _object(found: Any, where: Path, fix: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is damaged: a JSON object is missing. {fix}.")
    return found


def _read(folder: Path, wanted: Mapping[str, Any], fix: str) -> dict[str, Any]:
    """The arrays of these paths, onto the shardings of these leaves; Orbax writes none without elements."""
    shapes = {path: _words(leaf, path) for path, leaf in wanted.items()}
    zeros = {path: jax.numpy.zeros(x.shape, x.dtype) for path, x in shapes.items() if not x.size}
    empty = {path: jax.device_put(x, shapes[path].sharding) for path, x in zeros.items()}
    shapes = {path: shape for path, shape in shapes.items() if path not in empty}
    if not shapes:
        return empty
    arguments = ocp.args.PyTreeRestore(
        shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes), partial_restore=True
    )
    found = _restore(folder, fix, state=arguments)["state"]
    implementations = {path: _key_impl(leaf) for path, leaf in wanted.items() if _is_key(leaf)}
    return {
        path: jax.random.wrap_key_data(x, impl=implementations[path]) if path in implementations else x
        for path, x in {**found, **empty}.items()
    }


def _restore(folder: Path, fix: str, **items: Any) -> Any:
    with reading(str(folder), fix), ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers())) as reader:
        return reader.restore(folder, args=ocp.args.Composite(**items))


def _filled(state: Any, fields: Sequence[str], leaves: Mapping[str, Any]) -> Any:
    """`state` with these leaves in these fields."""
    tree = {name: getattr(state, name) for name in fields}
    tree = jax.tree.map_with_path(lambda path, _: leaves[path_of(path)], tree)
    return replace(state, **tree) if isinstance(state, TrainState) else _Params(tree["params"])


def _words(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding to read; of a typed key, those of its words."""
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(f"Every leaf of a target needs a sharding; {path} has none. Take jdp.abstract_state(...).")
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _described(leaves: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint holds, leaf by leaf: path -> "float32[4, 8]"."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}


def _check_same(
    saved: Mapping[str, str], wanted: Mapping[str, str], folder: Path, *, params_only: bool = False
) -> None:
    """Compare leaf by leaf, parameters first, and name the first that differs; `ignore` is for parameters only."""
    differing = [path for path in saved.keys() | wanted.keys() if saved.get(path) != wanted.get(path)]
    if not differing:
        return
    path = min(differing, key=lambda path: (not path.startswith("params/"), path))
    has = f"{folder} has {path} as {saved.get(path, 'nothing')}, and {wanted.get(path, 'nothing')} is wanted"
    if all(path.startswith("opt_state/") for path in differing):
        raise CheckpointError(
            f"A checkpoint is restored into the same optimizer; {has}. The model is the same: take the optimizer it "
            "was saved with, or only the parameters (restore_params) and a fresh optimizer state."
        )
    unread = f", leave it unread (ignore=({_inside(path)!r},))" if params_only and path not in wanted else ""
    raise CheckpointError(
        f"A checkpoint is restored into the same model and optimizer; {has}. Nothing is cast or reshaped: build the "
        f"model as it was saved{unread}, or choose another checkpoint ({len(differing)} of {len(saved)} leaves differ)."
    )


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(_inside(path), pattern) for pattern in patterns)


def _inside(path: str) -> str:
    """A leaf's path in its field."""
    return path.partition("/")[2]


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(rng: Any) -> Any:
    """The PRNG implementation of a typed key, abstract or not."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), rng)
    return found[0]
