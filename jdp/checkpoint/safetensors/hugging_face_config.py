"""The `config.json` that Hugging Face's libraries write beside weights: the configuration of their model.

The same tensors make another model with another epsilon, rotary base or activation, which shapes do not show. So
`gpt_config_from_hf` builds a configuration from that file, by the table in `families`. An import with Hugging Face's
names refuses weights whose configuration differs from the model's (`differences`). An export writes the file
(`written`). Anything that `jdp.models.GPT` cannot compute is refused.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jdp.base.public import public
from jdp.base.user_path import user_path
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.safetensors.config_table import Table, read_json
from jdp.checkpoint.safetensors.families import FAMILIES, is_inert
from jdp.models import GPTConfig

NAME = "config.json"
_INERT = frozenset(("dropout", "scan", "remat", "attention", "lora_rank", "lora_alpha", "lora_targets"))
"""Fields that do not change the computation (LoRA's begin at zero)."""


@public()
def gpt_config_from_hf(folder: str | Path) -> GPTConfig:
    """Return the configuration, for `jdp.models.GPT`, of the model whose `config.json` is in `folder`.

    Args:
        folder: a folder from `huggingface_hub` or `save_pretrained`, or a file in it. The model is a GPT-2, Llama,
            Mistral, Qwen2 or Qwen3.

    Returns:
        The configuration with the longest context that the file allows, without dropout, with scanned layers; change
        these with `dataclasses.replace`.

    Raises:
        CheckpointError: the file does not exist or is damaged, or `jdp.models.GPT` cannot compute the model.
        ValueError: the path is an address such as gs://bucket/model.
    """
    path = user_path(folder)
    config = read(path)
    if config is None:
        if not path.exists():
            raise CheckpointError(f"{path} is not on this machine. Download the model first, and pass its folder.")
        parent = path if path.is_dir() else path.parent
        why = ", because it has no model_type" if (parent / NAME).exists() else ""
        raise CheckpointError(f"{parent} has no {NAME} of a Hugging Face model{why}. Pass a folder that has one.")
    return config


def read(path: Path) -> GPTConfig | None:
    """Read the `config.json` in the folder of `path`; None if there is none of a Hugging Face model."""
    file = (path if path.is_dir() else path.parent) / NAME
    table = read_json(file)
    if not isinstance(table, dict) or "model_type" not in table:
        return None
    values = Table(file, table)
    family = values.choice("model_type", FAMILIES)
    values.require("quantization_config", None)
    arguments = family.read(values)
    try:
        config = GPTConfig(**arguments)
        follows = config.head_width == config.width / config.heads
        return replace(config, mlp_width=config.hidden_width, head_dim=None if follows else config.head_dim)
    except ValueError as error:
        raise CheckpointError(f"{file} describes a model that jdp cannot build: {error}") from error


def differences(path: Path, config: GPTConfig, *, may_grow: bool = True) -> list[str]:
    """Return the differences of the configuration beside the weights at `path`: "norm_eps = 1e-06 (given 1e-05)", ...

    Empty if there is no such file. Another context does not count with rotary positions, nor do more tokens if the
    vocabulary `may_grow`.
    """
    stored = read(path)
    if stored is None:
        return []
    theirs, given = _resolved(stored), _resolved(config)
    skipped = _INERT | ({"context"} if given.positions == "rotary" else frozenset())
    skipped |= {"vocab_size"} if may_grow and theirs.vocab_size < given.vocab_size else frozenset()
    return [
        f"{name} = {_toml(wanted)} (given {_toml(value)})" for name, wanted, value in _differing(theirs, given, skipped)
    ]


def written(config: GPTConfig, dtype: str, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `config.json` of a model: the original's if it computes the same.

    Otherwise the first model type that does, with the original's keys that do not change the computation. With rotary
    positions the longer of both contexts is written.
    """
    kinds, tables = list(FAMILIES), list[tuple[str, Mapping[str, Any]]]()
    inert: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # override the model type's defaults
    if original is not None:
        kind = str(original["model_type"])
        kinds, inert = [kind, *kinds], {key: value for key, value in original.items() if is_inert(key)}
        if config.positions == "rotary":
            context = FAMILIES[kind].read(Table(Path(NAME), original))["context"]
            config = replace(config, context=max(config.context, context))
        tables.append((kind, original))
    tables += [(kind, {**inert, **FAMILIES[kind].written(config)}) for kind in kinds]
    given, differing = _resolved(config), dict[str, list[str]]()
    for kind, table in tables:
        family = FAMILIES[kind]
        own = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype}
        keys = {**own, **{key: value for key, value in table.items() if key != "dtype"}, **own}
        try:
            stored = _resolved(GPTConfig(**family.read(Table(Path(NAME), keys))))
        except ValueError:  # this family's keys cannot express it
            continue
        differing[family.name] = [f"{name} = {_toml(value)}" for name, _, value in _differing(stored, given, _INERT)]
        if not differing[family.name]:
            return keys
    nearest = min(differing, key=lambda name: len(differing[name]))
    raise CheckpointError(
        f"Hugging Face has no model type with this model's choices; {nearest}, the nearest, does not have "
        f"{', '.join(differing[nearest])}. Export the weights alone: export_safetensors."
    )


def check_written(config: GPTConfig) -> None:
    """Raise CheckpointError if no model type computes the same as this model with its updates added."""
    written(replace(config, lora_rank=None, lora_targets=None), "float32")


def _differing(stored: GPTConfig, given: GPTConfig, skipped: Collection[str]) -> list[tuple[str, Any, Any]]:
    """Return (field, stored, given) for each field that differs between two resolved configurations."""
    names = [field.name for field in fields(GPTConfig) if field.name not in skipped]
    pairs = [(name, getattr(stored, name), getattr(given, name)) for name in names]
    return [(name, theirs, ours) for name, theirs, ours in pairs if theirs != ours]


def _resolved(config: GPTConfig) -> GPTConfig:
    """Return the configuration with defaults filled in, and unused fields at their defaults."""
    full = replace(config, head_dim=config.head_width, kv_heads=config.key_value_heads, mlp_width=config.hidden_width)
    unused = {"rope_theta"} if config.positions != "rotary" else set[str]()
    if config.qkv_bias and config.bias:
        unused.add("qkv_bias")
    if config.rope_factor is None:
        unused |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_context"}
    return replace(full, **{field.name: field.default for field in fields(GPTConfig) if field.name in unused})


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value)
