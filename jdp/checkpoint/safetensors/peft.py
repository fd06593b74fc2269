"""LoRA's updates in the format of Hugging Face's PEFT: `adapter_model.safetensors` beside `adapter_config.json`.

| file (base_model.model.model.layers.N.)                   | jdp (layers/)                       |
|-----------------------------------------------------------|-------------------------------------|
| self_attn.q_proj, k_proj, v_proj, o_proj                  | attention/query, key, value, output |
| mlp.gate_proj, up_proj, down_proj                         | mlp/gate, up, down                  |
| each with .lora_A.weight [r, in], .lora_B.weight [out, r] | /lora_a, /lora_b, transposed        |

Both multiply the product of the two by lora_alpha / r. Everything else that PEFT knows is refused by name: DoRA,
rank-stabilised scales, ranks by layer, biases, complete modules beside the updates, ... So is an option that this file
does not name, unless it is empty. Adapters of GPT-2 are refused: there one update serves queries, keys and values, and
jdp has three. `merge_lora` makes a plain model of any of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.notices import warn
from jdp.base.user_path import user_path
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.format.trees import check_values
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.config_table import Table, read_json, shortened, write_json
from jdp.checkpoint.safetensors.hugging_face import LLAMA_MAPS, in_layer, llama_names
from jdp.checkpoint.safetensors.names import Names, Tensor
from jdp.checkpoint.safetensors.transfer import export_weights, import_weights, weights_of
from jdp.core.sharding.host_memory import on_device
from jdp.core.state import TrainState, own_shaped
from jdp.core.types import PyTree
from jdp.models import GPTConfig

CONFIG, WEIGHTS = "adapter_config.json", f"adapter_model{files.SUFFIX}"
_ONLY: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base model's weights too
    "task_type": (None, "CAUSAL_LM"),
}
_INERT = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "lora_dropout", "inference_mode", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "megatron_core", "qalora_group_size", "layers_pattern"),
)
_EVERY = tuple(path.rpartition("/")[2] for path in LLAMA_MAPS.values())
"""The linear maps of a layer, which may have an update."""
_UPDATES = ("/lora_a", "/lora_b")
_NAME = re.compile(r"base_model\.model\.model\.layers\.\d+\.(\w+\.\w+)\.lora_[AB]\.weight")


def lora_from_peft(folder: str | Path) -> dict[str, Any]:
    """Return the rank, alpha and targets of the adapter in a folder, as arguments of `GPTConfig`.

    With the model's: `dataclasses.replace(gpt_config_from_hf(base), **lora_from_peft(folder))`.

    Args:
        folder: as PEFT's `save_pretrained` writes it.

    Raises:
        CheckpointError: there is no adapter, it is damaged, or it is none that `jdp.models.GPT` computes.
        ValueError: the path is an address such as gs://bucket/adapter.
    """
    return _read_adapter(user_path(folder).absolute())


def _read_adapter(folder: Path) -> dict[str, Any]:
    """Return the rank, alpha and targets of an adapter."""
    table = _read_config(folder)
    targets: set[str] = set()
    for name in files.read(folder / WEIGHTS):
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in LLAMA_MAPS:
            raise CheckpointError(
                f"{folder / WEIGHTS} has {shortened(name)}, which is no update of a linear map in the layers of a "
                "Llama or a relative of it (base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight, ...). Take "
                "an adapter of these alone."
            )
        targets.add(LLAMA_MAPS[found[1]].rpartition("/")[2])
    return {
        "lora_rank": table.count("r", 8),
        "lora_alpha": table.number("lora_alpha", 8),
        "lora_targets": tuple(name for name in _EVERY if name in targets),
    }


def import_peft(folder: str | Path, target: PyTree, config: GPTConfig) -> PyTree:
    """Read an adapter onto the LoRA parameters of `target`; its other weights stay as they are.

    Args:
        folder: as PEFT's `save_pretrained` writes it.
        target: a state or a tree of parameters, with values, of a model of this configuration.
        config: the model's, with `lora_rank`, `lora_alpha` and `lora_targets` as `lora_from_peft` returns them.

    Returns:
        `target` with the adapter's values.

    Raises:
        CheckpointError: there is no adapter, it is damaged, is none that `jdp.models.GPT` computes, or differs from the
            configuration or the parameters.
        ValueError: the path is an address such as gs://bucket/adapter, or the model is no Llama or relative of it.
    """
    folder = user_path(folder).absolute()
    names = check_adapter(folder, config)
    base = [path for path in weights_of(target) if not path.endswith(_UPDATES)]
    return import_weights(folder / WEIGHTS, target, names, base)


def check_adapter(folder: Path, config: GPTConfig) -> Names:
    """Return the names of a model's updates in PEFT's file."""
    names, found = _names(config), _read_adapter(folder)
    given = {field: getattr(config, field) for field in found} | {"lora_targets": _targets(config)}
    differing = [
        f"{field} = {json.dumps(value)} (given {json.dumps(given[field])})"
        for field, value in found.items()
        if value != given[field]
    ]
    if differing:
        raise CheckpointError(
            f"{folder / CONFIG} describes another adapter than the model has: {', '.join(differing)}. Build the model "
            f"with these: lora_from_peft({str(folder)!r})."
        )
    return names


def export_peft(
    folder: str | Path, params: PyTree, config: GPTConfig, *, base: str | None = None, dtype: Any = None
) -> None:
    """Write the LoRA parameters as PEFT reads them. Every process calls this; process 0 writes.

    Args:
        folder: made if there is none; files of these names in it are replaced.
        params: the parameters of a `jdp.models.GPT`, or a state.
        config: the model's, with `lora_rank`.
        base: name or folder of the model that the updates are of, for `base_model_name_or_path`; None: unknown.
        dtype: what the weights are cast to; None: no cast.

    Raises:
        CheckpointError: the parameters are not of this configuration, or a file cannot be written.
        ValueError: the path is an address such as gs://bucket/adapter, or the model has no updates, or is no Llama or
            relative of it.
    """
    folder = user_path(folder).absolute()
    names = _names(config)
    updates = {path: leaf for path, leaf in weights_of(params).items() if path.endswith(_UPDATES)}
    export_weights(folder / WEIGHTS, updates, names, dtype)
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": [name.rpartition(".")[2] for name in _targeted(config)],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, keys)


def _read_config(folder: Path) -> Table:
    """Read `adapter_config.json`."""
    keys = read_json(folder / CONFIG)
    if not isinstance(keys, dict) or "peft_type" not in keys:
        raise CheckpointError(f"{folder} has no {CONFIG} of an adapter of PEFT's. Give the folder that it is in.")
    table = Table(folder / CONFIG, keys)
    for key, allowed in _ONLY.items():
        table.require(key, *allowed)
    for key, value in table.keys.items():
        if value and key not in (*_ONLY, *_INERT):
            raise CheckpointError(
                f"{table.file}: {key} = {shortened(value)} makes another update than x @ lora_A @ lora_B * alpha / r, "
                "which is jdp's. Take an adapter without it."
            )
    if table.number("lora_dropout", 0.0):
        warn(f"{table.file} was trained with lora_dropout; jdp has none: the function is the same, training is not")
    return table


def merge_lora(params: PyTree, config: GPTConfig) -> tuple[PyTree, GPTConfig]:
    """Add each update to its kernel, and leave the updates out: a plain model, which `export_hf` writes.

    A kernel becomes kernel + lora_alpha / lora_rank * lora_a @ lora_b (arXiv:2106.09685, section 4.1), computed in
    float32 and rounded to its own dtype; it keeps its sharding.

    Args:
        params: the parameters of a `jdp.models.GPT` as nested dicts, or a state; with values.
        config: the model's, with `lora_rank`.

    Returns:
        The parameters as nested dicts, and their configuration. What no update is added to is the same array: a step
        that donates the state takes it from both.

    Raises:
        CheckpointError: the parameters are abstract, not in their own shapes, or an update has another rank.
        ValueError: the model has no updates, or the parameters none.
    """
    if config.lora_rank is None:
        raise ValueError("An update is merged into a model that has some; given lora_rank=None. Export it as it is.")
    tree = own_shaped(params.params, "params", params.static) if isinstance(params, TrainState) else params
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"An update is merged into a state, or into parameters as nested dicts; given a {type(tree).__name__}. "
            "Give one of these."
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
                    f"lora_a {list(node['lora_a'].shape)} and lora_b {list(node['lora_b'].shape)}. Give the parameters "
                    "of this configuration; of padded leaves the state, not its params."
                )
            add = jax.jit(_add, out_shardings=getattr(kernel, "sharding", None))
            rest["kernel"] = add(*(on_device(node[name]) for name in ("kernel", "lora_a", "lora_b")), scale)
        return rest

    found = plain(tree)
    if not merged:
        raise ValueError(
            "An update is merged into a model that has some; given parameters without any. Give those of this "
            "configuration."
        )
    return found, replace(config, lora_rank=None, lora_targets=None)


def _add(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)


def _names(config: GPTConfig) -> Names:
    """Return PEFT's names."""
    llama_names(config)  # refuses other architectures
    if config.lora_rank is None:
        raise ValueError("An adapter is of a model with updates; given lora_rank=None. Set lora_rank.")
    tensors: dict[str, Tensor] = {}
    for n in range(config.layers):
        for theirs, ours in _targeted(config).items():
            for part in "AB":
                name = f"base_model.model.model.layers.{n}.{theirs}.lora_{part}.weight"
                tensors[name] = Tensor((in_layer(config, n, f"{ours}/lora_{part.lower()}"),), transposed=True)
    return Names(tensors)


def _targeted(config: GPTConfig) -> dict[str, str]:
    """Return the maps that have an update: PEFT's name -> jdp's."""
    return {theirs: ours for theirs, ours in LLAMA_MAPS.items() if ours.rpartition("/")[2] in _targets(config)}


def _targets(config: GPTConfig) -> tuple[str, ...]:
    """Return `lora_targets` with its default resolved, in the order of the layer."""
    return tuple(name for name in _EVERY if config.lora_targets is None or name in config.lora_targets)
