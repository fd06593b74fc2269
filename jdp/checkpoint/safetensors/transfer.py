"""Export weights to safetensors files and import them, tensor by tensor; merge LoRA's updates before an export.

Export gathers each tensor from the devices, joins, transposes and writes it before the next. So the host holds one
tensor at a time, and with several processes each device one complete parameter or layer. Import reads every device's
shard as a slice of the file, and nothing else.
"""

import contextlib
import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jdp.base.errors import UserError, public
from jdp.base.notices import warn
from jdp.base.tree_paths import matches, path_of
from jdp.base.user_path import user_path
from jdp.base.words import nearest
from jdp.checkpoint.content import by_path, check_kept, check_sharding, check_values, ignored_names, needed_but_ignored
from jdp.checkpoint.errors import CheckpointError, on_first_process, write_error
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.config import NAME as CONFIG
from jdp.checkpoint.safetensors.config import differences, gpt_config_from_hf, read, written
from jdp.checkpoint.safetensors.files import Stored, read_json, write_json
from jdp.checkpoint.safetensors.names import Names, Tensor, check_cover, file_shape, hf_names, part_shape, resolve
from jdp.core.cluster.barrier import meet
from jdp.core.sharding.host_memory import on_device
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.models import GPTConfig

GivenNames = Names | Mapping[str, str | Tensor] | None
MAX_SHARD_BYTES = 5_000_000_000
GENERATION = "generation_config.json"
"""Hugging Face's file beside a `config.json`: the tokens that end a text, and sampling options."""


@public()
def export_safetensors(
    path: str | Path,
    params: PyTree,
    *,
    names: GivenNames = None,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write weights to a safetensors file. Every process calls this; process 0 writes.

    Args:
        path: ends with ".safetensors"; an existing file is replaced.
        params: a tree of parameters, or a state, whose model state (such as BatchNorm statistics) is written too.
        names: `hf_names(config)`, or a mapping from names in the file to slash paths; None: the paths, with dots for
            slashes ("layers.attention.query.kernel"), and stacked layers unsplit.
        dtype: dtype of floating-point weights in the file, such as `jnp.bfloat16`; None: no cast.
        max_shard_bytes: larger exports become several files, `NAME-00001-of-00003.safetensors`, with an index,
            `NAME.safetensors.index.json`. A tensor is never split.

    Raises:
        CheckpointError: the names do not fit the parameters, or these are abstract. Or the file cannot be written, or
            an index or shards that jdp did not write are in the way; nothing was changed.
        ValueError: the path is an address such as gs://bucket/model.safetensors.
    """
    path = user_path(path).absolute()
    if path.suffix != files.SUFFIX:
        raise CheckpointError(f"A safetensors file is named NAME{files.SUFFIX}; given {path.name}. Add the suffix.")
    leaves = weights_of(params)
    check_values(leaves)
    _check_dtype(dtype)
    tensors = resolve(names, leaves)
    check_cover(tensors, leaves)
    specs = dict[str, jax.ShapeDtypeStruct]()
    for name, tensor in tensors.tensors.items():
        own = leaves[tensor.parts[0].path].dtype
        if isinstance(own, np.dtype):  # not a key of jax.random
            own = np.dtype(dtype) if dtype is not None and jnp.issubdtype(own, jnp.floating) else own.newbyteorder("=")
        specs[name] = jax.ShapeDtypeStruct(file_shape(tensor, leaves), own)

    files.check_writable(specs)

    def value(name: str) -> np.ndarray:
        return _gather(tensors.tensors[name], leaves).astype(specs[name].dtype, copy=False)

    if jax.process_index() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, specs, value, max_shard_bytes, importlib.import_module("jdp").__version__)
        except OSError as error:
            raise write_error(f"{path} was not written", error) from error
    else:
        for name in specs:  # a gather needs every process
            value(name)
    meet("the end of jdp.export_safetensors")


@public()
def export_hf(
    folder: str | Path,
    params: PyTree,
    config: GPTConfig,
    *,
    original: str | Path | None = None,
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model for `transformers`: `model.safetensors` and `config.json`. Every process calls this.

    The model type is the original's, or the first that computes the same: GPT-2, Llama, Mistral, Qwen2, Qwen3.
    Tokenizers are not written.

    Args:
        folder: created if missing. A `config.json` in it must describe this model, and is the default for `original`.
        params: the parameters of a `jdp.models.GPT`, or a state.
        config: the model's configuration.
        original: the folder of the model from which training started. Keys of its `config.json` are kept, such as
            `eos_token_id`, and the context if positions are rotary; its `generation_config.json` is copied.
        dtype: dtype of the weights in the files, such as `jnp.bfloat16`; None: that of `original`, else no cast.
        max_shard_bytes: as for `export_safetensors`.

    Raises:
        CheckpointError: no model type computes the same, or the parameters do not fit the configuration. Or a
            `config.json` of another model is in the way, or a file cannot be written.
        ValueError: the path is an address such as gs://bucket/model, or the names are not known for this configuration.
    """
    folder = user_path(folder).absolute()
    if config.lora_rank is not None:
        raise CheckpointError(
            "export_hf takes a model without LoRA updates; given "
            f"lora_rank={config.lora_rank}. Add them to the kernels first: jdp.export.merge_lora."
        )
    names, weights, file = hf_names(config), weights_of(params), folder / CONFIG
    if file.exists() and (read(folder) is None or differences(folder, config, may_grow=False)):
        raise CheckpointError(f"{file} describes another model. Export to another folder, or move that file.")
    stored, beside = read_json(file), None
    if original is not None:
        gpt_config_from_hf(original)  # refuses a folder without a model
        beside = user_path(original).absolute()
        beside = beside if beside.is_dir() else beside.parent
        stored = read_json(beside / CONFIG)
        if dtype is None and (dtype := stored.get("dtype") or stored.get("torch_dtype")) is None:
            with contextlib.suppress(CheckpointError):  # a folder without weights
                dtype = max(files.read(beside).values(), key=lambda tensor: np.prod(tensor.shape)).dtype
    _check_dtype(dtype)
    own = next((leaf.dtype for leaf in weights.values()), np.float32)
    keys = written(config, np.dtype(own if dtype is None else dtype).name, stored)
    path = folder / f"model{files.SUFFIX}"
    export_safetensors(path, params, names=names, dtype=dtype, max_shard_bytes=max_shard_bytes)

    def write_beside() -> None:
        write_json(folder / CONFIG, keys)
        if beside is not None and isinstance(generation := read_json(beside / GENERATION), dict):
            write_json(folder / GENERATION, generation)

    on_first_process(write_beside)


@public()
def merge_lora(params: PyTree, config: GPTConfig) -> tuple[PyTree, GPTConfig]:
    """Add each update to its kernel and remove the updates: a plain model for `export_hf`.

    A kernel becomes kernel + lora_alpha / lora_rank * lora_a @ lora_b (arXiv:2106.09685, section 4.1), computed in
    float32 and rounded to its own dtype; it keeps its sharding.

    Args:
        params: the parameters of a `jdp.models.GPT` as nested dicts, or a state; not abstract.
        config: the model's configuration, with `lora_rank`.

    Returns:
        The parameters as nested dicts, and their configuration. Parameters without an update share their arrays with
        `params`: a step that donates the state invalidates both.

    Raises:
        CheckpointError: the parameters are abstract, or an update has another rank.
        ValueError: the model or the parameters have no updates.
    """
    if config.lora_rank is None:
        raise UserError("merge_lora takes a model with LoRA updates; given lora_rank=None. Export the model unmerged.")
    tree = params.params if isinstance(params, TrainState) else params
    if not isinstance(tree, Mapping):
        raise UserError(
            f"merge_lora takes a state, or parameters as nested dicts; given a {type(tree).__name__}. "
            "Pass one of these."
        )
    check_values(weights_of(tree))
    scale, merged = config.lora_alpha / config.lora_rank, 0

    def plain(node: Any) -> Any:
        nonlocal merged
        if not isinstance(node, Mapping):
            return node
        rest = {name: plain(inner) for name, inner in node.items() if name not in ("lora_a", "lora_b")}
        if "lora_a" in node:
            kernel, merged = node["kernel"], merged + 1
            *stacked, width_in, width_out = kernel.shape if kernel.ndim > 1 else (0, 0)
            wanted = (*stacked, width_in, config.lora_rank), (*stacked, config.lora_rank, width_out)
            if wanted != (node["lora_a"].shape, node["lora_b"].shape):
                raise CheckpointError(
                    f"An update of rank {config.lora_rank} fits its kernel; given a kernel {list(kernel.shape)} with "
                    f"lora_a {list(node['lora_a'].shape)} and lora_b {list(node['lora_b'].shape)}. Pass the parameters "
                    "of this configuration."
                )
            add = jax.jit(_add, out_shardings=getattr(kernel, "sharding", None))
            rest["kernel"] = add(*(on_device(node[name]) for name in ("kernel", "lora_a", "lora_b")), scale)
        return rest

    found = plain(tree)
    if not merged:
        raise UserError(
            "merge_lora takes parameters with LoRA updates; given parameters without updates. Pass the parameters of "
            "this configuration."
        )
    return found, replace(config, lora_rank=None, lora_targets=None)


def _add(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)


def _check_dtype(dtype: Any) -> None:
    try:
        is_float = dtype is None or jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise CheckpointError(f"Weights are cast to a floating-point dtype; given dtype={dtype!r}. Pass jnp.bfloat16.")


def _gather(tensor: Tensor, leaves: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor in the file's form, on this host."""
    parts = list[np.ndarray]()
    for leaf, layer in ((leaves[part.path], part.layer) for part in tensor.parts):
        if not isinstance(leaf, jax.Array):
            parts.append(np.asarray(leaf if layer is None else leaf[layer]))
            continue
        # An array keeps its host copy while it lives, and the state's arrays live on.
        array = leaf.copy() if layer is None else _layer(leaf, layer)
        local = array.is_fully_addressable
        parts.append(np.asarray(array) if local else process_allgather(array, tiled=True))
    joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return np.swapaxes(joined, -1, -2) if tensor.transposed else joined


_layer = jax.jit(functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False))


def weights_of(tree: PyTree) -> dict[str, Any]:
    """Return weights by slash path; for a state, its parameters and model state."""
    leaves = by_path(tree.params, tree.model_state) if isinstance(tree, TrainState) else by_path(tree)
    for path, leaf in leaves.items():
        if not hasattr(leaf, "dtype"):
            raise CheckpointError(f"Weights are arrays; {path} is {leaf!r}. Remove it, or make it an array.")
    return leaves


# Import.


@public()
def import_safetensors(
    path: str | Path,
    target: PyTree,
    *,
    names: GivenNames = None,
    missing: Sequence[str] = (),
    ignore: Sequence[str] = (),
    check_config: bool = True,
) -> PyTree:
    """Read weights from safetensors files onto the shardings of `target`.

    Floating-point weights are cast to the target's dtype; a cast that loses bits is reported. If the vocabulary of
    `hf_names` is larger than the file's, the missing rows are the mean of the file's rows, and this is reported.

    Args:
        path: a file; an index, or the name of the single file; or a folder with `model.safetensors` or its index, as
            from Hugging Face.
        target: a state, `jdp.abstract_state(...)` or real; or a tree of parameters with shardings.
        names: `hf_names(config)`, or a mapping from names in the file to slash paths; None: the paths with dots for
            slashes.
        missing: path patterns (`fnmatch`) of parameters that the file may lack, such as `("*/lora_*",)`; they keep the
            values of `target`, which must be real.
        ignore: patterns of tensors in the file to skip: of their names, or of names with slashes for dots,
            `("*/lora_*",)`. Each must match.
        check_config: compare a `config.json` beside the weights with the model of `hf_names`. False: read the weights
            in any case, for example of an unknown model type.

    Returns:
        `target` with new `params` (and `model_state`, if the names include it). The rest of an abstract state stays
        abstract; the rest of a real state keeps its values.

    Raises:
        CheckpointError: the file does not exist or is damaged, or a tensor does not fit (the first is named). Or the
            Hugging Face `config.json` beside it describes another model than the names; or a pattern of `ignore`
            matches nothing.
        ValueError: a leaf of `target` has no sharding, or the path is an address such as gs://bucket/model.safetensors.
    """
    path = user_path(path).absolute()
    leaves, stored = weights_of(target), files.read(path)
    expected = resolve(names, leaves)
    if check_config:
        _check_config(expected, path)
    check_cover(expected, leaves, missing)
    for name in sorted(ignored_names({name: (name, name.replace(".", "/")) for name in stored}, ignore, path)):
        for part in expected.tensors[name].parts if name in expected.tensors else ():
            if not matches(part.path, missing):
                raise needed_but_ignored(part.path)
        del stored[name]
    _check_copies(expected, stored, path)
    _grow(expected, stored, leaves, path)
    sources = _sources(expected, stored, leaves, missing, path)
    check_kept({leaf_path: leaf for leaf_path, leaf in leaves.items() if leaf_path not in sources}, path)
    read = {leaf_path: _read_leaf(leaf_path, leaves[leaf_path], source) for leaf_path, source in sources.items()}

    def filled(tree: PyTree) -> PyTree:
        return jax.tree.map_with_path(lambda key, leaf: read.get(path_of(key), leaf), tree)

    if not isinstance(target, TrainState):
        return filled(target)
    return replace(target, params=filled(target.params), model_state=filled(target.model_state))


@dataclass(frozen=True)
class _Source:
    """The part of a tensor that holds a parameter, or one layer of it."""

    stored: Stored
    transposed: bool
    first: int  # start of the part in the tensor's last dim, before it is transposed

    def read(self, index: list[slice]) -> np.ndarray:
        """Read the slice `index` of the part, in the model's orientation."""
        if self.first:
            index = [*index[:-1], slice(self.first + index[-1].start, self.first + index[-1].stop)]
        if not self.transposed:
            return self.stored.read(index)
        return np.swapaxes(self.stored.read([*index[:-2], index[-1], index[-2]]), -1, -2)


def _check_config(names: Names, path: Path) -> None:
    try:
        differing = differences(path, names.config) if names.config is not None else []
    except CheckpointError as error:
        raise CheckpointError(f"{error} To read the weights anyway: check_config=False.") from error
    if differing:
        folder = path if path.is_dir() else path.parent
        raise CheckpointError(
            f"{folder / CONFIG} describes another model than the names: it has {', '.join(differing)}. "
            f"Build the model with these, or use all of it: jdp.export.gpt_config_from_hf({str(folder)!r})."
        )


def _check_copies(names: Names, stored: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if a file's head differs from the embedding table, although the model ties them."""
    for name, table in names.copies.items():
        both = [stored[each] for each in (name, table) if each in stored]
        if len(both) == 2 and not (
            both[0].shape == both[1].shape and all(map(np.array_equal, *map(files.in_rows, both)))
        ):
            raise CheckpointError(
                f"A tied model's {name} repeats {table}; {path} has other values. Set "
                f'"tie_word_embeddings" to false in its {CONFIG}, and the model reads both; or remove {name} from the '
                f"file (from Python: ignore=({name!r},))."
            )


def _grow(names: Names, stored: dict[str, Stored], leaves: Mapping[str, Any], path: Path) -> None:
    """Add the model's further rows to tensors with a row for each token, and report it."""
    for name in names.vocabulary:
        tensor, (tokens, *others) = stored.get(name), file_shape(names.tensors[name], leaves)
        if tensor is not None and 0 < tensor.shape[0] < tokens and [*tensor.shape[1:]] == others:
            stored[name] = replace(tensor, rows=tokens)
            added = f"{tokens - tensor.shape[0]} rows are added, each the mean of the file's rows"
            warn(f"{name} has {tensor.shape[0]} tokens in {path}, {tokens} in the model: {added}")


def _sources(
    names: Names, stored: Mapping[str, Stored], leaves: Mapping[str, Any], missing: Sequence[str], path: Path
) -> dict[str, dict[int | None, _Source]]:
    """Return the source of each parameter, or each layer of it, that the file has.

    The file must have exactly the model's tensors, in its shapes; not only some layers of a parameter.
    """
    sources: dict[str, dict[int | None, _Source]] = {}
    for name, tensor in names.tensors.items():
        wanted, first = file_shape(tensor, leaves), 0
        if name in stored and stored[name].shape != wanted:
            paths = " + ".join(part.path for part in tensor.parts)
            raise CheckpointError(
                f"{path} has {name} as {list(stored[name].shape)}, but the model's {paths} needs {list(wanted)}. Build "
                "the model with the sizes of the file."
            )
        for part in tensor.parts if name in stored else ():
            sources.setdefault(part.path, {})[part.layer] = _Source(stored[name], tensor.transposed, first)
            first += part_shape(part, leaves)[-1] if len(tensor.parts) > 1 else 0
    for name, tensor in names.tensors.items():
        needed = (part.path in sources or not matches(part.path, missing) for part in tensor.parts)
        if name not in stored and any(needed):
            closest = nearest(name, stored, "; its closest name is ", cutoff=0.0).rstrip("?")
            raise CheckpointError(
                f"{path} has no {name}, which holds {tensor.parts[0].path}"
                f"{closest if stored else '; it has no tensors'}. Pass the names of this file."
            )
    for name, tensor in stored.items():
        if name not in names.tensors and name not in names.copies and not matches(name, names.ignored):
            raise CheckpointError(
                f"{path} has {name} {tensor.dtype}{list(tensor.shape)}, which the model does not use. Build the "
                f"file's model, or skip the tensor: ignore=({name!r},)."
            )
    return sources


def _read_leaf(path: str, leaf: Any, sources: Mapping[int | None, _Source]) -> jax.Array:
    """Read a leaf from its tensors, by layer, onto its sharding, shard by shard."""
    check_sharding(leaf, path)
    stored, wanted = next(iter(sources.values())).stored.dtype, np.dtype(leaf.dtype)
    if stored != wanted:
        if not (jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating)):
            raise CheckpointError(
                f"Only floating-point weights are cast; {path} is {stored} in the file, {wanted} in the target. Use "
                "the same dtype."
            )
        if jnp.promote_types(stored, wanted) != wanted:
            warn(f"weights of {stored} are rounded to {wanted} on import, first {path}")

    def shard(index: Any) -> np.ndarray:
        index = [slice(*dim.indices(size)[:2]) for dim, size in zip(index, leaf.shape, strict=True)]
        if None in sources:
            return sources[None].read(index).astype(leaf.dtype, order="C", copy=False)
        layers = range(index[0].start, index[0].stop)
        stack = np.empty((len(layers), *(dim.stop - dim.start for dim in index[1:])), leaf.dtype)
        for row, layer in enumerate(layers):
            stack[row] = sources[layer].read(index[1:])
        return stack

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
