"""Weights out to safetensors files and back in, tensor by tensor.

Out: a tensor is gathered from the devices, joined, turned and written before the next one is looked at, so the host
holds one at a time (and each device of several processes one whole part). In: every device's shard is a slice of the
file, so nothing is read that no device keeps.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jdp.checkpoint.content import both_ways, check_real, check_values, left_unread
from jdp.checkpoint.errors import CheckpointError, write_error
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.files import Spec, Stored
from jdp.checkpoint.safetensors.hugging_face_config import NAME as CONFIG
from jdp.checkpoint.safetensors.hugging_face_config import differences
from jdp.checkpoint.safetensors.names import Names, Part, Tensor, check_cover, file_shape, part_shape, resolve
from jdp.core.notices import notice
from jdp.core.paths import path_of
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.core.user_path import user_path

GivenNames = Names | Mapping[str, str | Tensor] | None


def export_safetensors(
    path: str | Path,
    params: PyTree,
    *,
    names: GivenNames = None,
    dtype: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights of a state, or a tree of parameters, to a safetensors file. Every process calls this; process
    0 writes.

    Args:
        path: ends with ".safetensors"; replaced if it is there.
        params: a state (its model state, such as BatchNorm statistics, goes along), or a tree of parameters.
        names: `gpt2_names(config)`, `llama_names(config)`, or a mapping from names to slash paths; None: the paths,
            with dots for slashes ("layers.attention.query.kernel"), stacked layers as they are.
        dtype: what floating-point weights are cast to, such as `jnp.bfloat16`; None: as they are.
        max_shard_bytes: more than this goes to several files, `NAME-00001-of-00003.safetensors`, with an index,
            `NAME.safetensors.index.json`. A tensor is never split.

    Raises:
        CheckpointError: the names do not fit the parameters, these are abstract, the file cannot be written, or an
            index or shards that jdp did not write are in its place: what was there stays.
    """
    path = user_path(path).absolute()
    if path.suffix != files.SUFFIX:
        raise CheckpointError(f"A safetensors file is named NAME{files.SUFFIX}; got {path.name}.")
    leaves = _leaves(params)
    check_values(leaves)
    chosen = resolve(names, leaves)
    check_cover(chosen, leaves)
    specs = {name: _spec(tensor, leaves, dtype) for name, tensor in chosen.tensors.items()}

    def value(name: str) -> np.ndarray:
        return _gathered(chosen.tensors[name], leaves).astype(specs[name].dtype, copy=False)

    if jax.process_index() == 0:
        _write(path, specs, value, max_shard_bytes)
    else:
        for name in specs:  # a gather needs every process
            value(name)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jdp.export_safetensors")


def import_safetensors(
    path: str | Path,
    target: PyTree,
    *,
    names: GivenNames = None,
    missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    check_config: bool = True,
) -> PyTree:
    """Read weights from safetensors files onto the shardings of `target`; return it with them in place.

    Only `params` (and `model_state`, where the names have it) change: on an abstract state everything else stays
    abstract, on a real one it keeps its values. A file's floating-point dtype is cast to the target's; where that loses
    bits, it is said.

    Args:
        path: a file; an index, or the name the single file would have; or a folder with `model.safetensors` or its
            index in it, as Hugging Face's have.
        target: a state, `jdp.abstract_state(...)` or real; or a tree of parameters that have shardings.
        names: as for `export_safetensors`.
        missing: path patterns (`fnmatch`) of parameters that the file may lack, such as `("*/lora_*",)`; they keep the
            values of `target`, which must be real.
        ignore: patterns of tensors in the file that are left unread, as if it lacked them: of their names, or of these
            with slashes for dots, `("*/lora_*",)`. Each must match.
        check_config: compare a `config.json` beside the weights with the model that `gpt2_names` or `llama_names` were
            made for. False: take the weights whatever it says, such as those of a model type that jdp does not know.

    Raises:
        CheckpointError: no such file, a damaged one, or one that does not fit: a `config.json` of Hugging Face's beside
            it describes another model than the one that `gpt2_names` or `llama_names` were made for, or the first
            tensor that differs; or a pattern of `ignore` matches nothing.
    """
    path = user_path(path).absolute()
    leaves = _leaves(target)
    stored = files.read(path)
    chosen = resolve(names, leaves)
    if check_config:
        _check_config(chosen, path)
    check_cover(chosen, leaves, missing)
    unread = left_unread({name: (name, name.replace(".", "/")) for name in stored}, ignore, path)
    for name in sorted(unread & chosen.tensors.keys()):
        for part in chosen.tensors[name].parts:
            if not any(fnmatch.fnmatchcase(part.path, pattern) for pattern in missing):
                raise CheckpointError(both_ways(part.path))
    stored = {name: tensor for name, tensor in stored.items() if name not in unread}
    tensors = _present(chosen, stored, leaves, missing, path)
    held: dict[str, list[tuple[Part, Tensor, Stored]]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            held.setdefault(part.path, []).append((part, tensor, stored[name]))
    _check_whole(chosen, tensors, held, path)
    check_real({leaf_path: leaf for leaf_path, leaf in leaves.items() if leaf_path not in held}, f"{path} lacks")
    filled = {path: _placed(leaf, held[path], leaves) if path in held else leaf for path, leaf in leaves.items()}
    return _with_leaves(target, filled)


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Weights by slash path: of a state, its parameters and model state, which are parts of one model."""
    parts = [tree.params, tree.model_state] if isinstance(tree, TrainState) else [tree]
    pairs = [(path_of(path), leaf) for part in parts for path, leaf in jax.tree.leaves_with_path(part)]
    leaves = dict(pairs)
    if len(leaves) < len(pairs):
        twice = next(path for path in leaves if sum(path == other for other, _ in pairs) > 1)
        raise CheckpointError(f"Every weight needs a path of its own; two have {twice}. Rename one.")
    return leaves


def _with_leaves(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    def fill(part: PyTree) -> PyTree:
        return jax.tree.map_with_path(lambda path, _: leaves[path_of(path)], part)

    if isinstance(tree, TrainState):
        return replace(tree, params=fill(tree.params), model_state=fill(tree.model_state))
    return fill(tree)


# Out.


def _spec(tensor: Tensor, leaves: Mapping[str, Any], dtype: Any) -> Spec:
    own = np.dtype(leaves[tensor.parts[0].path].dtype)
    kind = np.dtype(dtype) if dtype is not None and jnp.issubdtype(own, jnp.floating) else own
    return Spec(file_shape(tensor, leaves), kind)


def _write(path: Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray], limit: int) -> None:
    version = importlib.import_module("jdp").__version__
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, specs, value, limit, version)
    except OSError as error:
        raise write_error(f"{path} was not written", error) from error


def _gathered(tensor: Tensor, leaves: Mapping[str, Any]) -> np.ndarray:
    """A tensor as the file has it, on this host."""
    parts = [_on_host(leaves[part.path], part.layer) for part in tensor.parts]
    joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return np.swapaxes(joined, -1, -2) if tensor.transposed else joined


def _on_host(leaf: jax.Array, layer: int | None) -> np.ndarray:
    whole = None
    if not leaf.is_fully_addressable and isinstance(leaf.sharding, NamedSharding):
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # other processes hold parts of it
    if layer is not None:
        leaf = jax.jit(_layer, out_shardings=whole)(leaf, layer)
    elif whole is not None:
        leaf = jax.jit(_same, out_shardings=whole)(leaf)
    else:
        leaf = leaf.copy()  # an array keeps the host's copy of its values for as long as it lives, and the state does
    return np.asarray(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))


def _layer(leaf: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


def _same(leaf: jax.Array) -> jax.Array:
    return leaf


# In.


def _check_config(names: Names, path: Path) -> None:
    """Weights of another function have the same shapes: what lies beside them says which they are of."""
    try:
        found = differences(path, names.config) if names.config is not None else []
    except CheckpointError as error:
        raise CheckpointError(f"{error} To read the weights all the same: check_config=False.") from error
    if found:
        folder = path if path.is_dir() else path.parent
        raise CheckpointError(
            f"{folder / CONFIG} describes another model than the names were made for: it has {', '.join(found)}. Build "
            f"the model with these, or take all of it: jdp.export.gpt_config_from_hf({str(folder)!r})."
        )


def _present(
    names: Names, stored: Mapping[str, Stored], leaves: Mapping[str, Any], missing: Sequence[str], path: Path
) -> dict[str, Tensor]:
    """The tensors to read, each of the right shape; those that may be missing and are left out."""
    present: dict[str, Tensor] = {}
    for name, tensor in names.tensors.items():
        if name not in stored:
            if all(any(fnmatch.fnmatchcase(part.path, pattern) for pattern in missing) for part in tensor.parts):
                continue
            near = difflib.get_close_matches(name, stored, 1, 0.0)
            closest = f"; the closest name it has is {near[0]}" if near else "; it has no tensors"
            raise CheckpointError(
                f"{path} has no {name}, which holds {tensor.parts[0].path}{closest}. Give the names that this file has."
            )
        wanted, found = file_shape(tensor, leaves), stored[name].spec
        if wanted != found.shape:
            parts = " + ".join(part.path for part in tensor.parts)
            raise CheckpointError(
                f"{path} has {name} as {list(found.shape)}, and the model's {parts} needs {list(wanted)}. Build the "
                "model with the sizes of the file."
            )
        present[name] = tensor
    for name in stored:
        if name not in present and not any(fnmatch.fnmatchcase(name, pattern) for pattern in names.ignored):
            raise CheckpointError(
                f"{path} has {name} {stored[name].spec}, for which the model has no place. Build the model that the "
                f"file is of, or leave it unread: ignore=({name!r},)."
            )
    return present


def _check_whole(names: Names, present: Mapping[str, Tensor], held: Mapping[str, Any], path: Path) -> None:
    """What `missing` lets a file lack, it lacks altogether: no leaf is filled in part."""
    for name, tensor in names.tensors.items():
        for part in tensor.parts:
            if name not in present and part.path in held:
                raise CheckpointError(f"{path} has no {name}, but other layers of {part.path}: it is incomplete.")


def _placed(leaf: Any, held: Sequence[tuple[Part, Tensor, Stored]], leaves: Mapping[str, Any]) -> jax.Array:
    """A leaf from its tensors, each device's shard by itself."""
    path = held[0][0].path
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(f"Every leaf of a target needs a sharding; {path} has none. Take jdp.abstract_state(...).")
    by_layer = {part.layer: (part, tensor, source) for part, tensor, source in held}
    _check_cast(path, held[0][2].spec.dtype, np.dtype(leaf.dtype))

    def shard(index: Any) -> np.ndarray:
        cut = [slice(*one.indices(size)[:2]) for one, size in zip(index, leaf.shape, strict=True)]
        if None in by_layer:
            return _read(*by_layer[None], cut, leaves).astype(leaf.dtype, order="C", copy=False)
        layers = range(cut[0].start, cut[0].stop)
        stack = np.empty((len(layers), *(one.stop - one.start for one in cut[1:])), leaf.dtype)
        for row, layer in enumerate(layers):
            stack[row] = _read(*by_layer[layer], cut[1:], leaves)
        return stack

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


def _read(part: Part, tensor: Tensor, source: Stored, cut: list[slice], leaves: Mapping[str, Any]) -> np.ndarray:
    """What a file has inside `cut` of a part, in the model's orientation."""
    if len(tensor.parts) > 1:
        first = _first_column(part, tensor, leaves)
        cut = [*cut[:-1], slice(first + cut[-1].start, first + cut[-1].stop)]
    if not tensor.transposed:
        return source.read(cut)
    return np.swapaxes(source.read([*cut[:-2], cut[-1], cut[-2]]), -1, -2)


def _first_column(part: Part, tensor: Tensor, leaves: Mapping[str, Any]) -> int:
    """Where a part begins among those joined to a tensor."""
    before = tensor.parts[: tensor.parts.index(part)]
    return sum(part_shape(other, leaves)[-1] for other in before)


def _check_cast(path: str, stored: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Between floats only; and where bits are lost, that is said."""
    if stored == wanted:
        return
    if not (jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)):
        raise CheckpointError(f"Only floating-point weights are cast; {path} is {stored} in the file, {wanted} wanted.")
    if jnp.promote_types(stored, wanted) != wanted:
        notice(f"weights of {stored} are rounded to {wanted} on import, the first of them {path}")
