"""The model types of Hugging Face that `jdp.models.GPT` computes, with the keys of their `config.json`: a table.

| model_type | differs from Llama in                        | its own keys                                       |
|------------|----------------------------------------------|----------------------------------------------------|
| gpt2       | learned positions, layer norms, biases, gelu | n_embd, n_layer, ...                               |
| llama      |                                              | rope_scaling of Llama 3.1                          |
| mistral    | a window in all layers                       | sliding_window                                     |
| qwen2      | biases of queries, keys and values           | use_sliding_window, max_window_layers, layer_types |
| qwen3      | norms of query and key heads                 | as Qwen2                                           |

`Family.keys` are read into fields of `GPTConfig` and written from them. A missing key has the default of `transformers`
(5.23). Values that a GPT cannot have are refused. So are unknown keys, unless they are empty or do not change the
computation (`INERT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.safetensors.config_table import Table, shortened
from jdp.models import GPTConfig

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_WINDOW_KEYS = {
    "": (),
    "always": ("sliding_window",),
    "flag": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
INERT = (
    *("_*", "*_token_id", "*_token_ids", "*dropout", "*_pdrop", "summary_*", "transformers*", "unsloth*", "output_*"),
    *("model_type", "architectures", "torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
    *("pretraining_tp", "id2label", "label2id", "task_specific_params", "tokenizer_class", "return_dict", "n_ctx"),
    *("gradient_checkpointing", "reorder_and_upcast_attn", "is_llama_config", "chunk_size_feed_forward"),
)
"""Patterns of keys that do not change the computation."""

REFUSED = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), "it chooses among experts"),
    "phi3": "it has queries, keys and values in one matrix",
}


def is_inert(key: str) -> bool:
    """Return True if a key of `config.json` does not change the computation."""
    return any(fnmatchcase(key, pattern) for pattern in INERT)


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        keys: the keys that are fields of `GPTConfig`.
        defaults: field -> the value for a file without its key, which also sets the type; None: a whole number.
        activations: word in the file -> activation; the first of several words is written.
        only: key -> the values that a GPT can have; the first is the default.
        windows: layers with a window: none (""), all ("always"), or all if the keys say so ("flag").
    """

    name: str  # in its authors' spelling
    architecture: str  # the class of `transformers`
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    activations: Mapping[str, str]
    always: Mapping[str, object]  # fields with the same value in all its models
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    windows: Literal["", "always", "flag"] = ""

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary."""
        return self.always["positions"] == "rotary"

    def read(self, table: Table) -> dict[str, Any]:
        """Return the arguments of `GPTConfig`."""
        for key, allowed in self.only.items():
            table.require(key, *allowed)
        found: dict[str, Any] = {name: self._read_field(table, key, name) for key, name in self.keys.items()}
        found |= self.always
        if self.windows:
            found["window"] = self._read_window(table, found["layers"])
        if self.rotary:
            found |= _read_rope(table, found["context"])
        self._check_known(table)
        return found

    def _read_field(self, table: Table, key: str, name: str) -> Any:
        default = self.defaults[name]
        if name == "activation":
            return table.choice(key, self.activations, default)
        if name in ("kv_heads", "head_dim", "mlp_width"):
            return table.count_or_none(key, default)
        return {bool: table.flag, float: table.number, int: table.count}[type(default)](key, default)

    def _check_known(self, table: Table) -> None:
        known = {*self.keys, *self.only, *_WINDOW_KEYS[self.windows], "quantization_config"}
        known |= {*_ROPE_KEYS} if self.rotary else set[str]()
        for key, value in table.keys.items():
            if value and key not in known and not is_inert(key):
                raise CheckpointError(
                    f"{table.file}: {key} = {shortened(value)} is not a known option of {self.name}. If the model "
                    "computes the same without it, remove it from the file; else use another model."
                )

    def _read_window(self, table: Table, layers: int) -> int | None:
        """Return the window, which a GPT has in every layer or in none."""
        window = table.count_or_none("sliding_window", 4096)
        if window is None or self.windows == "always":
            return window
        if not table.flag("use_sliding_window", False):
            return None
        if (kinds := table.keys.get("layer_types")) is not None:
            for kind, found in (("sliding_attention", window), ("full_attention", None)):
                if isinstance(kinds, list) and len(kinds) == layers and all(each == kind for each in kinds):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                    return found
            raise table.wrong(
                "layer_types", f"one kind for all {layers} layers, sliding_attention or full_attention", kinds
            )
        first = table.count("max_window_layers", 28)  # layers before it have no window
        if 0 < first < layers:
            raise table.wrong("max_window_layers", "0, or the number of layers: all have the window, or none", first)
        return None if first else window

    def written(self, config: GPTConfig) -> dict[str, Any]:
        """Return the keys of a `config.json` for a model of this family."""
        words = [word for word, activation in self.activations.items() if activation == config.activation]
        values = {"kv_heads": config.key_value_heads, "head_dim": config.head_width, "mlp_width": config.hidden_width}
        values |= {"activation": words[0] if words else None}
        keys: dict[str, Any] = {key: values.get(name, getattr(config, name)) for key, name in self.keys.items()}
        keys |= {key: allowed[0] for key, allowed in self.only.items() if allowed[0] is not None}
        if self.rotary:
            keys |= {"rope_theta": config.rope_theta, "rope_scaling": _written_scaling(config)}
        if self.windows:
            keys["sliding_window"] = config.window
        if self.windows == "flag":
            keys |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
            keys["layer_types"] = ["full_attention" if config.window is None else "sliding_attention"] * config.layers
        return keys


def _read_rope(table: Table, context: int) -> dict[str, Any]:
    """Return the rotary fields: from rope_parameters, or in older files from rope_theta and rope_scaling."""
    inner = table.inner("rope_scaling", "rope_parameters")
    for each in (table, inner):
        each.require("partial_rotary_factor", None, 1.0, 1)
    return {
        "rope_theta": inner.number("rope_theta", table.number("rope_theta", 10_000.0)),
        **_scaling(inner, context),
    }


def _scaling(table: Table, context: int) -> dict[str, Any]:
    """Return the fields of Llama 3.1's scaling; none without it."""
    key = "type" if "rope_type" not in table.keys and "type" in table.keys else "rope_type"
    if not table.choice(key, {"default": False, "llama3": True}, "default"):
        return {}
    return {
        "rope_factor": table.number("factor"),
        "rope_low_freq_factor": table.number("low_freq_factor"),
        "rope_high_freq_factor": table.number("high_freq_factor"),
        "rope_original_context": table.count("original_max_position_embeddings", context),
    }


def _written_scaling(config: GPTConfig) -> dict[str, Any] | None:
    if config.rope_factor is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_context,
    }


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


def _llama(**defaults: Any) -> dict[str, Any]:
    """Return the defaults of Llama or a relative; they share width 4096 and 32 layers and heads."""
    common = {"width": 4096, "layers": 32, "heads": 32, "kv_heads": None, "head_dim": None}
    return {**common, "activation": "silu", "norm_eps": 1e-6, "tied": False, **defaults}


_LLAMA: Mapping[str, object] = {"positions": "rotary", "norm": "rms", "bias": False}
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}

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
        "Llama", "LlamaForCausalLM", _LLAMA_KEYS, _llama(vocab_size=32_000, context=2048, mlp_width=11_008), _SILU,
        _LLAMA,
        {**_NO_BIAS, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", _LLAMA_KEYS,
        _llama(vocab_size=32_000, context=4096 * 32, mlp_width=14_336, kv_heads=8), _SILU,
        _LLAMA,
        windows="always",
    ),
    "qwen2": Family(
        "Qwen2", "Qwen2ForCausalLM", _LLAMA_KEYS,
        _llama(vocab_size=151_936, context=32_768, mlp_width=22_016, kv_heads=32), _SILU,
        {**_LLAMA, "qkv_bias": True},
        windows="flag",
    ),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", _LLAMA_KEYS,
        _llama(vocab_size=151_936, context=32_768, mlp_width=22_016, kv_heads=32, head_dim=128), _SILU,
        {**_LLAMA, "qk_norm": True},
        _NO_BIAS,
        windows="flag",
    ),
}  # fmt: skip
"""model_type -> its family; a model of several families is written as the first."""
