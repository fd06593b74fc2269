"""The content of a checkpoint, and how it is read onto a target.

A checkpoint is a folder with three items:

- `state`: the arrays by path ("params/layers/kernel");
- `leaves`: a small JSON table of their shapes and dtypes, and the versions that wrote them;
- `record`: any small JSON object.

It holds nothing of meshes, strategies or processes, nor of the kinds of containers. Reading takes a target, whose
leaves give the path, shape, dtype and sharding of each array; only those are read into memory. Reading has four phases:

1. Compare the small files with their checksums, then the table with the target, leaf by leaf.
2. Compare the files of the arrays with their checksums; from a bucket, fetch and compare the blocks that are needed.
3. Read the arrays.
4. Put them into the target's tree.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jdp.base.bucket import RemoteError
from jdp.base.notices import warn
from jdp.base.tree_paths import matches
from jdp.checkpoint.errors import CheckpointError, DamagedError, reading
from jdp.checkpoint.format import checksums, committing
from jdp.checkpoint.format.arrays import fits, ranges, read_arrays
from jdp.checkpoint.format.checksums import COMMITTED
from jdp.checkpoint.format.chunk_table import Chunks, InMemory, Partial, Range, Source, chunk_table
from jdp.checkpoint.format.committing import METADATA
from jdp.checkpoint.format.padding import at_rest_as, converting, described_flat, flat_leaves, own_shape, stored_flat
from jdp.checkpoint.format.sync_state import PREFIX, Read, read_optimizer_state, read_sync
from jdp.checkpoint.format.trees import (
    Content,
    check_kept,
    check_sharding,
    fill,
    ignored_names,
    leaves_of,
    needed_but_ignored,
    text_of,
    to_json,
)
from jdp.core.cluster.barrier import from_every_process
from jdp.core.sharding.padded import Flat
from jdp.core.state import TrainState
from jdp.core.types import PyTree

FORMAT = 1
FORMAT_FLAT = 2
"""Of a checkpoint in which leaves are stored flat and padded, which a reader of format 1 does not know."""
_ARRAYS = "state/"
_FOR_INFERENCE = ("params", "model_state")
_HOURS = 4 * 3600.0  # a share of the largest checkpoints takes longer to read than processes wait elsewhere


def item_handlers() -> dict[str, Any]:
    """Return Orbax' handler of each item."""
    return {
        "state": committing.array_handler(),
        "leaves": ocp.JsonCheckpointHandler(),
        "record": ocp.JsonCheckpointHandler(),
    }


def save_arguments(state: Any, record: Mapping[str, Any]) -> tuple[ocp.args.Composite, bool]:
    """Return Orbax' arguments (arrays, table of leaves, record), and True if the arrays are copies.

    Then a step may take the state over before Orbax has begun.
    """
    arrays, table = arrays_and_table(state)
    copies = committing.snapshot(arrays)
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays if copies is None else copies),
        leaves=ocp.args.JsonSave(table),
        record=ocp.args.JsonSave(to_json(record, "record")),
    )
    return items, copies is not None


def arrays_and_table(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state by path, as they are stored, and the table of its leaves."""
    leaves = Content.of(state).leaves
    flat = flat_leaves(state, leaves)
    own: str = importlib.import_module("jdp").__version__
    versions = {"jdp": own, "jax": jax.__version__, "orbax-checkpoint": ocp.__version__}
    table = {"format": FORMAT, "leaves": _describe(leaves, flat), "written_by": versions}
    if flat:
        table |= {"format": FORMAT_FLAT, "flat": described_flat(flat)}
    return {path: jax.random.key_data(x) if _is_key(x) else x for path, x in leaves.items() if x.size}, table


def is_checkpoint(folder: Path) -> bool:
    """Return True if `folder` holds a checkpoint that was written to its end."""
    return (folder / COMMITTED).is_file() and (folder / "leaves").is_dir() and (folder / "state").is_dir()


def read_state(source: Source, target: Any) -> Any:
    """Read a complete state, or any other tree, each leaf onto the sharding of `target`'s."""
    folder = source.folder
    content = Content.of(target)
    wanted, (saved, stored) = content.leaves, _read_table(source)
    _check_kind(saved, content.fields, folder)
    flat = flat_leaves(target, wanted)
    read, saved_at_rest = _reader(source, stored, flat), at_rest_as(saved, flat)
    converted = read_optimizer_state(saved_at_rest, wanted, read, str(folder))
    (sync, own), (_, saved), (saved_sync, _) = map(_split_sync, (wanted, saved, saved_at_rest))
    described = _describe(own, flat)
    _check_match({**saved, **{path: described[path] for path in converted}}, described, folder)
    arrays = read({path: leaf for path, leaf in own.items() if path not in converted}) | converted
    arrays |= read_sync(saved_sync, sync, read, str(folder))
    given = {path: _as_given(wanted[path], array) for path, array in arrays.items()}
    return content.filled(given)


def _as_given(leaf: Any, array: jax.Array) -> Any:
    """Return an array that was read, not committed to its devices if the target's is not."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        if _is_key(leaf):
            words = jax.numpy.asarray(np.asarray(jax.random.key_data(array)))
            return jax.random.wrap_key_data(words, impl=_key_impl(leaf))
        return jax.numpy.asarray(np.asarray(array))
    return array


def _split_sync(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of `TrainState.sync`, and the others."""
    sync = {path: leaf for path, leaf in leaves.items() if path.startswith(PREFIX)}
    return sync, {path: leaf for path, leaf in leaves.items() if path not in sync}


def read_params(source: Source, target: PyTree, *, missing: Sequence[str] = (), ignore: Sequence[str] = ()) -> PyTree:
    """Read parameters and model state onto a train state, or parameters onto a tree of them, and nothing else."""
    folder = source.folder
    is_state = isinstance(target, TrainState)
    fields, state = (_FOR_INFERENCE, target) if is_state else (("params",), SimpleNamespace(params=target))
    wanted = leaves_of(state, fields)
    table, stored = _read_table(source)
    _check_kind(table, fields, folder)
    saved = {path: kind for path, kind in table.items() if path.partition("/")[0] in fields}
    ignored = ignored_names({path: (_path_in_field(path),) for path in saved}, ignore, folder)
    saved = {path: kind for path, kind in saved.items() if path not in ignored}
    kept = {path: leaf for path, leaf in wanted.items() if path not in saved and matches(_path_in_field(path), missing)}
    for path in sorted(ignored & (wanted.keys() - kept.keys())):
        raise needed_but_ignored(_path_in_field(path))
    check_kept(kept, folder)
    wanted = {path: leaf for path, leaf in wanted.items() if path not in kept}
    flat = flat_leaves(target, wanted)
    _check_match(saved, _describe(wanted, flat), folder, params_only=True)
    filled = fill(state, fields, {**kept, **_reader(source, stored, flat)(wanted)})
    return replace(target, **filled) if is_state else filled["params"]


def read_record(source: Source) -> dict[str, Any]:
    """Read the JSON object that was saved beside the arrays, which reading the state has verified."""
    folder, fix, _, memory = source
    if memory is not None:
        return dict(memory.record)
    return _require_object(_restore(folder, fix, record=ocp.args.JsonRestore())["record"], folder / "record", fix)


def check_metrics(folder: Path) -> None:
    """Check the metrics beside a checkpoint."""
    found = checksums.verify(folder, lambda name: name == METADATA or name.startswith("metrics/"))
    if found.status == "damaged":
        raise DamagedError(f"{folder} is damaged: {found.problem}. Move it away.", found.problem)
    file = folder / "metrics" / "metrics"
    try:
        metrics = json.loads(file.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        metrics = None
    if not isinstance(metrics, dict) or not all(x is None or isinstance(x, int | float) for x in metrics.values()):
        raise DamagedError(
            f"{file} is damaged: it must be a JSON object of numbers. Remove that file: the checkpoint is then one "
            "without metrics.",
            "metrics/metrics is no JSON object of numbers",
        )


def _read_table(source: Source) -> tuple[dict[str, str], dict[str, Flat]]:
    """Verify the small files; read the table, path -> "float32[4, 8]", and the leaves stored flat and padded."""
    folder, fix, _, memory = source
    if memory is not None:
        return dict(memory.table["leaves"]), stored_flat(memory.table)
    _require_verified(folder, fix, lambda name: not name.startswith(_ARRAYS))
    table = _require_object(_restore(folder, fix, leaves=ocp.args.JsonRestore())["leaves"], folder / "leaves", fix)
    if table.get("format") not in (FORMAT, FORMAT_FLAT):
        raise CheckpointError(
            f"{folder} was written by another version of jdp, in format {table.get('format')}; this one reads formats "
            f"{FORMAT} and {FORMAT_FLAT}. Restore it with the version that wrote it."
        )
    return _require_object(table.get("leaves"), folder / "leaves", fix), stored_flat(table)


def _require_verified(folder: Path, fix: str, wanted: Callable[[str], bool], *, alone: bool = False) -> None:
    """Check that files of a checkpoint are as they were saved; one without checksums is accepted, and reported.

    Every process calls this, and all raise the same error. Each reads a share of the files; with `alone` all.
    """
    share = (0, 1) if alone else (jax.process_index(), jax.process_count())
    found = checksums.verify(folder, wanted, process=share[0], processes=share[1])
    if found.status == "unverified":
        warn(
            f"{folder} has no checksums, as a version of jdp before these saved it: if its files have changed since, "
            "that may go unseen"
        )
    _raise_together(folder, fix, found.problem)


def _raise_together(folder: Path, fix: str, problem: str, failed: Exception | None = None) -> None:
    """Raise DamagedError on every process if one has found a problem, RemoteError if the bucket has `failed` one."""
    own = json.dumps([problem, "" if failed is None else str(failed)])
    for text in from_every_process("the checksums of a checkpoint", own, seconds=_HOURS):
        damage, failure = json.loads(text)
        if damage:
            raise DamagedError(f"{folder} is damaged: {damage}. {fix}.", damage)
        if failure:
            raise RemoteError(failure)


def _require_object(value: Any, file: Path, fix: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        problem = f"{file.name} has no JSON object"
        raise DamagedError(f"{file} is damaged: a JSON object is missing. {fix}.", problem)
    return value


def _reader(source: Source, stored: Mapping[str, Flat], flat: Mapping[str, Flat]) -> Read:
    """Return the function that reads arrays of a checkpoint; it first verifies the files of all of them.

    Of files that are fetched in parts, and of a state in memory, it verifies the parts that it needs.
    """
    folder, fix, partial, memory = source
    if memory is not None:
        return converting(lambda wanted: _read_memory(source, memory, wanted), stored, flat)
    tables: list[Mapping[str, Chunks]] = []
    apart = {} if partial is None else partial.files

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        if not tables:
            _require_verified(
                folder, fix, lambda name: name.startswith(_ARRAYS) and name not in apart, alone=partial is not None
            )
            if partial is None:
                with reading(str(folder), fix):
                    tables.append(chunk_table(folder / _ARRAYS))
        if partial is not None:
            _fetch_parts(folder, fix, partial, wanted, tables)
        return _read_arrays(folder, wanted, fix, tables[0])

    return converting(read, stored, flat)


def _read_memory(source: Source, memory: InMemory, wanted: Mapping[str, Any]) -> dict[str, Any]:
    some = {path: stored_form(leaf, path) for path, leaf in wanted.items() if leaf.size}
    if problem := memory.fetch(ranges(memory.chunks, some)):
        raise DamagedError(f"The state in memory is damaged: {problem}. {source.fix}.", problem)
    return _read_arrays(source.folder, wanted, source.fix, memory.at_hand)


def _fetch_parts(
    folder: Path, fix: str, partial: Partial, wanted: Mapping[str, Any], tables: list[Mapping[str, Chunks]]
) -> None:
    """Fetch the ranges of the arrays of these paths. Every process calls this, and all raise the same error."""
    failed = None
    try:
        with reading(str(folder), fix):
            if not tables:
                tables.append(chunk_table(folder / _ARRAYS, partial.fetch))
            some = {path: stored_form(leaf, path) for path, leaf in wanted.items() if leaf.size}
            if all(fits(tables[0].get(path), leaf) for path, leaf in some.items()):
                partial.fetch(ranges(tables[0], some))
            else:  # Orbax reads them
                partial.fetch(Range(name.removeprefix(_ARRAYS), 0, size) for name, size in partial.files.items())
    except (DamagedError, RemoteError) as error:
        failed = error
    _raise_together(folder, fix, failed.problem if isinstance(failed, DamagedError) else "", failed)


def _read_arrays(folder: Path, wanted: Mapping[str, Any], fix: str, chunks: Mapping[str, Chunks]) -> dict[str, Any]:
    """Read the arrays of these paths onto the shardings of these leaves; those without elements are not stored.

    Orbax reads those of which the bytes are not those of the elements: compressed ones, of old checkpoints.
    """
    shapes = {path: stored_form(leaf, path) for path, leaf in wanted.items()}
    arrays: dict[str, Any] = {
        path: x if isinstance(x, np.ndarray) else jax.device_put(jax.numpy.zeros(x.shape, x.dtype), x.sharding)
        for path, x in shapes.items()
        if not x.size
    }
    some = {path: x for path, x in shapes.items() if x.size}
    plain = {path: x for path, x in some.items() if fits(chunks.get(path), x)}
    with reading(str(folder), fix):
        arrays |= read_arrays(folder / _ARRAYS, chunks, plain)
    if others := {path: x for path, x in some.items() if path not in plain}:
        onto = ocp.checkpoint_utils.construct_restore_args(others)
        arguments = ocp.args.PyTreeRestore(others, restore_args=onto, partial_restore=True)
        arrays |= _restore(folder, fix, state=arguments)["state"]
    keys = {path: leaf for path, leaf in wanted.items() if _is_key(leaf)}
    return arrays | {path: jax.random.wrap_key_data(arrays[path], impl=_key_impl(leaf)) for path, leaf in keys.items()}


def _restore(folder: Path, fix: str, **items: Any) -> Any:
    handler, meeting = ocp.CompositeCheckpointHandler(**item_handlers()), committing.multiprocessing_options()
    with reading(str(folder), fix), ocp.Checkpointer(handler, multiprocessing_options=meeting) as reader:
        return reader.restore(folder, args=ocp.args.Composite(**items))


def stored_form(leaf: Any, path: str) -> Any:
    """Return the shape, dtype and sharding in which a leaf is stored; a typed key is stored as its uint32 words.

    Of an array of NumPy's an array of NumPy's: read as JAX', it would have 32 bits.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(leaf.shape, leaf.dtype)
    check_sharding(leaf, path)
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _describe(leaves: Mapping[str, Any], flat: Mapping[str, Flat]) -> dict[str, str]:
    """Return the dtype and own shape of each leaf as text: path -> "float32[4, 8]"."""
    return {path: text_of(leaf.dtype, own_shape(leaf.shape, flat.get(path))) for path, leaf in leaves.items()}


def _check_kind(saved: Iterable[str], fields: Sequence[str], folder: Path) -> None:
    """Raise CheckpointError where a train state was saved and a tree is wanted, or the other way round."""
    is_tree = {path.partition("/")[0] for path in saved} == {"tree"}
    if is_tree == ("tree" in fields):
        return
    if is_tree:
        raise CheckpointError(
            f"A train state is read from a checkpoint of one, and so are its parameters; {folder} holds another tree. "
            "Read it whole: jdp.restore(path, target), onto a tree like the one that was saved."
        )
    raise CheckpointError(
        f"A checkpoint is restored onto what it holds; {folder} holds a train state, and a tree is wanted. Pass "
        "jdp.abstract_state(...), or read the parameters alone: jdp.restore_params(path, params)."
    )


def _check_match(
    saved: Mapping[str, str], wanted: Mapping[str, str], folder: Path, *, params_only: bool = False
) -> None:
    """Raise CheckpointError for the first leaf that differs, parameters first.

    With `params_only` the error also offers `ignore`, which `restore_params` takes.
    """
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
    unread = f", leave it unread (ignore=({_path_in_field(path)!r},))" if params_only and path not in wanted else ""
    raise CheckpointError(
        f"A checkpoint is restored into the same model and optimizer; {has}. Nothing is cast or reshaped: build the "
        f"model as it was saved{unread}, or choose another checkpoint ({len(differing)} of {len(saved)} leaves differ)."
    )


def _path_in_field(path: str) -> str:
    """Return a leaf's path without the name of its field."""
    return path.partition("/")[2]


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(rng: Any) -> Any:
    """Return the PRNG implementation of a typed key, abstract or not."""
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), rng)
    return implementations[0]
