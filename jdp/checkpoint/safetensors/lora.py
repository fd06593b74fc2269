"""Adds LoRA's updates to their kernels: a plain model for other libraries."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.errors import UserError
from jdp.base.public import public
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.format.trees import check_values
from jdp.checkpoint.safetensors.transfer import weights_of
from jdp.core.sharding.host_memory import on_device
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.models import GPTConfig


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
