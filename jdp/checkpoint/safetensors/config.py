"""The `config.json` that Hugging Face's libraries write beside weights, and the model types that `GPT` computes.

The same tensors make another model with another epsilon, rotary base or activation, which shapes do not show. So
`gpt_config_from_hf` builds a configuration from that file. An import with Hugging Face's names refuses weights whose
configuration differs from the model's (`differences`). An export writes the file (`written`).

`FAMILIES` is the table of model types. `Family.keys` are read into fields of `GPTConfig` and written from them. A
missing key has the default of `transformers` (5.23). Values that a GPT cannot have are refused. So are unknown keys,
unless they are empty or do not change the computation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jdp.base.errors import public
from jdp.base.toml import cut
from jdp.base.tree_paths import matches
from jdp.base.user_path import user_path
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.safetensors.files import read_json
from jdp.models import GPTConfig, ModelConfig

NAME = "config.json"
_UPDATES = frozenset(("lora_rank", "lora_alpha"))
_START = frozenset(("position_std", "zero_init", "norm_momentum"))
_INERT = _UPDATES | _START | {"lora_targets", "dropout", "scan", "remat", "attention", "image_size"}
"""Fields that do not change the computation with trained weights (LoRA's begin at zero)."""


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
    """Return the differences of the configuration beside the weights at `path`; empty if there is no such file.

    More tokens do not count if the vocabulary `may_grow`.
    """
    stored = read(path)
    if stored is not None and may_grow and stored.vocab_size < config.vocab_size:
        stored = replace(stored, vocab_size=config.vocab_size)
    return [] if stored is None else compared(stored, config)


def compared(stored: ModelConfig, config: ModelConfig) -> list[str]:
    """Return the differences of weights' configuration from a model's: "norm_eps = 1e-06 (given 1e-05)", ...

    Another context does not count with rotary positions.
    """
    skipped = _INERT | {"mlp_width"}  # which the weights' shapes tell: a ViT's is None by default
    if isinstance(stored, GPTConfig) and isinstance(config, GPTConfig):
        stored, config, skipped = _resolved(stored), _resolved(config), _INERT
        skipped = skipped | {"context"} if config.positions == "rotary" else skipped
        skipped = skipped - _UPDATES if stored.lora_rank is not None else skipped
    differing = _differing(stored, config, skipped)
    return [f"{name} = {_toml(wanted)} (given {_toml(value)})" for name, (wanted, value) in differing.items()]


def written(config: GPTConfig, dtype: str, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the `config.json` of a model: the original's if it computes the same.

    Otherwise the first model type that does, with the original's keys that do not change the computation. With rotary
    positions the longer of both contexts is written.
    """
    kinds, tables = list(FAMILIES), list[tuple[str, Mapping[str, Any]]]()
    inert: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # override the model type's defaults
    if original is not None:
        kind = str(original["model_type"])
        kinds, inert = [kind, *kinds], {key: value for key, value in original.items() if matches(key, _INERT_KEYS)}
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
        found = _differing(stored, given, _INERT)
        if not found:
            return keys
        differing[family.name] = [f"{name} = {_toml(value)}" for name, (_, value) in found.items()]
    nearest = min(differing, key=lambda name: len(differing[name]))
    raise CheckpointError(
        f"Hugging Face has no model type with this model's choices; {nearest}, the nearest, does not have "
        f"{', '.join(differing[nearest])}. Export the weights alone: export_safetensors."
    )


def check_written(config: GPTConfig) -> None:
    """Raise CheckpointError if no model type computes the same as this model with its updates added."""
    written(replace(config, lora_rank=None, lora_targets=None), "float32")


def _differing(stored: ModelConfig, given: ModelConfig, skipped: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field that differs between two resolved configurations of a class."""
    pairs = {one.name: (getattr(stored, one.name), getattr(given, one.name)) for one in fields(stored)}
    return {name: pair for name, pair in pairs.items() if name not in skipped and pair[0] != pair[1]}


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


# The table of model types.


_Value = TypeVar("_Value", bool, int, float)
_RULES = {bool: "true or false", int: "a whole number", float: "a finite number"}


@dataclass(frozen=True)
class Table:
    """The keys of a file, read by type; each method raises CheckpointError for another type."""

    file: Path  # for errors
    keys: Mapping[str, Any]  # the table
    place: str = ""  # of the table in the file, ending with a dot

    def value(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return a boolean, a whole number or (float) any number; without a default it is required."""
        value: Any = default if self.keys.get(key) is None else self.keys[key]
        # An int may exceed every float.
        fits = type(value) in (int, float) and -1e30 < value < 1e30 if kind is float else type(value) is kind
        if not fits:
            raise self.wrong(key, _RULES[kind], value)
        return kind(value)

    def choice(self, key: str, among: Mapping[str, Any], default: str | None = None) -> Any:
        value = default if self.keys.get(key) is None else self.keys[key]
        if not isinstance(value, str) or value not in among:
            raise self.wrong(key, " or ".join(among), value)
        return among[value]

    def require(self, key: str, *allowed: object) -> None:
        """Raise CheckpointError unless the value is one of these; the first is the default."""
        value = self.keys.get(key, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.wrong(key, " or ".join(map(json.dumps, allowed)), value)

    def wrong(self, key: str, rule: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {self.place}{key} must be {rule} for a model that jdp builds; given "
            f"{cut(json.dumps(value))}. Use such a model, or correct the file."
        )


_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_OPTIONAL = ("kv_heads", "head_dim", "mlp_width", "window")
"""Fields that may be null."""
_INERT_KEYS = (
    *("_*", "*_token_id", "*_token_ids", "*dropout", "*_pdrop", "summary_*", "transformers*", "unsloth*", "output_*"),
    *("model_type", "architectures", "torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
    *("pretraining_tp", "id2label", "label2id", "task_specific_params", "tokenizer_class", "return_dict", "n_ctx"),
    *("gradient_checkpointing", "reorder_and_upcast_attn", "is_llama_config", "chunk_size_feed_forward"),
)
"""Patterns of keys that do not change the computation."""


@dataclass(frozen=True)
class Family:
    name: str  # in its authors' spelling
    architecture: str  # the class of `transformers`
    keys: Mapping[str, str]  # key -> field of `GPTConfig`
    # field -> the value for a file without its key, which also sets the type; None: a whole number
    defaults: Mapping[str, Any]
    activations: Mapping[str, str]  # word in the file -> activation; the first of several words is written
    always: Mapping[str, object]  # fields with the same value in all its models
    # key -> the values that a GPT can have; the first is the default
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    unused: tuple[str, ...] = ()  # keys without effect on models with these values

    @property
    def rotary(self) -> bool:
        return self.always["positions"] == "rotary"

    def read(self, table: Table) -> dict[str, Any]:
        for key, allowed in self.only.items():
            table.require(key, *allowed)
        found = dict[str, Any]()
        for key, name in self.keys.items():
            default = self.defaults[name]
            if name == "activation":
                found[name] = table.choice(key, self.activations, default)
            elif name in _OPTIONAL and table.keys.get(key, default) is None:
                found[name] = None
            else:
                found[name] = table.value(key, int if default is None else type(default), default)
        found |= self.always
        if self.rotary:
            found |= _read_rope(table, found["context"])
        known = {*self.keys, *self.only, *self.unused, "quantization_config", *(_ROPE_KEYS if self.rotary else ())}
        for key, value in table.keys.items():
            if value and key not in known and not matches(key, _INERT_KEYS):
                raise CheckpointError(
                    f"{table.file}: {key} = {cut(json.dumps(value))} is not a known option of {self.name}. If the "
                    "model computes the same without it, remove it from the file; else use another model."
                )
        return found

    def written(self, config: GPTConfig) -> dict[str, Any]:
        words = [word for word, activation in self.activations.items() if activation == config.activation]
        values = {"kv_heads": config.key_value_heads, "head_dim": config.head_width, "mlp_width": config.hidden_width}
        values |= {"activation": words[0] if words else None}
        keys: dict[str, Any] = {key: values.get(name, getattr(config, name)) for key, name in self.keys.items()}
        keys |= {key: allowed[0] for key, allowed in self.only.items() if allowed[0] is not None}
        if self.rotary:
            scaling = {"rope_type": "llama3", **{key: getattr(config, field) for field, key in _SCALING.items()}}
            keys |= {"rope_theta": config.rope_theta, "rope_scaling": None if config.rope_factor is None else scaling}
        return keys


_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
"""Field -> key of Llama 3.1's scaling."""


def _read_rope(table: Table, context: int) -> dict[str, Any]:
    """Return the rotary fields: from rope_parameters, or in older files from rope_theta and rope_scaling."""
    place = next((key for key in ("rope_scaling", "rope_parameters") if table.keys.get(key)), "rope_scaling")
    keys = table.keys.get(place) or {}
    if not isinstance(keys, dict):
        raise table.wrong(place, "a table", keys)
    inner = Table(table.file, keys, f"{place}.")
    for each in (table, inner):
        each.require("partial_rotary_factor", None, 1.0, 1)
    found: dict[str, Any] = {"rope_theta": inner.value("rope_theta", float, table.value("rope_theta", float, 10_000.0))}
    key = "type" if "rope_type" not in inner.keys and "type" in inner.keys else "rope_type"
    if inner.choice(key, {"default": False, "llama3": True}, "default"):
        *factors, original = _SCALING.items()
        found |= {field: inner.value(key, float) for field, key in factors}
        found[original[0]] = inner.value(original[1], int, context)
    return found


_GELUS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
}
_SILU = {"silu": "swiglu", "swish": "swiglu"}
_GPT2_KEYS = {
    "vocab_size": "vocab_size", "n_positions": "context", "n_layer": "layers", "n_embd": "width", "n_head": "heads",
    "n_inner": "mlp_width", "activation_function": "activation", "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied",
}  # fmt: skip
_LLAMA_KEYS = {
    "vocab_size": "vocab_size", "max_position_embeddings": "context", "num_hidden_layers": "layers",
    "hidden_size": "width", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "intermediate_size": "mlp_width", "hidden_act": "activation", "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}  # fmt: skip
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "width": 4096, "layers": 32, "heads": 32, "kv_heads": None, "head_dim": None, "activation": "silu",
    "norm_eps": 1e-6, "tied": False,
}  # fmt: skip
_QWEN_DEFAULTS: Mapping[str, Any] = {
    **_LLAMA_DEFAULTS, "vocab_size": 151_936, "context": 32_768, "mlp_width": 22_016, "kv_heads": 32,
}  # fmt: skip
_LLAMA: Mapping[str, object] = {"positions": "rotary", "norm": "rms", "bias": False}
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}
_NO_WINDOW: Mapping[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
_WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT-2", "GPT2LMHeadModel", _GPT2_KEYS,
        {
            "vocab_size": 50_257, "context": 1024, "layers": 12, "width": 768, "heads": 12, "mlp_width": None,
            "activation": "gelu_new", "norm_eps": 1e-5, "tied": True,
        },
        _GELUS,
        {"positions": "learned", "norm": "layer", "bias": True},
        {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    ),
    "llama": Family(
        "Llama", "LlamaForCausalLM", _LLAMA_KEYS,
        {**_LLAMA_DEFAULTS, "vocab_size": 32_000, "context": 2048, "mlp_width": 11_008}, _SILU, _LLAMA,
        {**_NO_BIAS, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", {**_LLAMA_KEYS, "sliding_window": "window"},
        {
            **_LLAMA_DEFAULTS, "vocab_size": 32_000, "context": 4096 * 32, "mlp_width": 14_336, "kv_heads": 8,
            "window": 4096,
        },
        _SILU, _LLAMA,
    ),
    "qwen2": Family(
        "Qwen2", "Qwen2ForCausalLM", _LLAMA_KEYS,
        _QWEN_DEFAULTS, _SILU,
        {**_LLAMA, "qkv_bias": True},
        _NO_WINDOW,
        unused=_WINDOW_KEYS,
    ),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", _LLAMA_KEYS,
        {**_QWEN_DEFAULTS, "head_dim": 128}, _SILU,
        {**_LLAMA, "qk_norm": True},
        {**_NO_BIAS, **_NO_WINDOW},
        unused=_WINDOW_KEYS,
    ),
}  # fmt: skip
"""model_type -> its family; a model of several families is written as the first."""
