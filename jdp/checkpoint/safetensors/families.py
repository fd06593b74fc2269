"""The model types of Hugging Face that `jdp.models.GPT` computes, with the keys of their `config.json`: a table.

`Family.keys` are read into fields of `GPTConfig` and written from them. A missing key has the default of `transformers`
(5.23). Values that a GPT cannot have are refused. So are unknown keys, unless they are empty or do not change the
computation (`INERT`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.safetensors.config_table import Table, shortened
from jdp.models import GPTConfig

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_OPTIONAL = ("kv_heads", "head_dim", "mlp_width", "window")
"""Fields that may be null."""
INERT = (
    *("_*", "*_token_id", "*_token_ids", "*dropout", "*_pdrop", "summary_*", "transformers*", "unsloth*", "output_*"),
    *("model_type", "architectures", "torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
    *("pretraining_tp", "id2label", "label2id", "task_specific_params", "tokenizer_class", "return_dict", "n_ctx"),
    *("gradient_checkpointing", "reorder_and_upcast_attn", "is_llama_config", "chunk_size_feed_forward"),
)
"""Patterns of keys that do not change the computation."""


def is_inert(key: str) -> bool:
    """Return True if a key of `config.json` does not change the computation."""
    return any(fnmatchcase(key, pattern) for pattern in INERT)


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
            if value and key not in known and not is_inert(key):
                raise CheckpointError(
                    f"{table.file}: {key} = {shortened(value)} is not a known option of {self.name}. If the model "
                    "computes the same without it, remove it from the file; else use another model."
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
    inner = table.inner("rope_scaling", "rope_parameters")
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


def _llama(**defaults: Any) -> dict[str, Any]:
    """Return the defaults of Llama or a relative; they share width 4096 and 32 layers and heads."""
    common = {"width": 4096, "layers": 32, "heads": 32, "kv_heads": None, "head_dim": None}
    return {**common, "activation": "silu", "norm_eps": 1e-6, "tied": False, **defaults}


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
        "Llama", "LlamaForCausalLM", _LLAMA_KEYS, _llama(vocab_size=32_000, context=2048, mlp_width=11_008), _SILU,
        _LLAMA,
        {**_NO_BIAS, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", {**_LLAMA_KEYS, "sliding_window": "window"},
        _llama(vocab_size=32_000, context=4096 * 32, mlp_width=14_336, kv_heads=8, window=4096), _SILU,
        _LLAMA,
    ),
    "qwen2": Family(
        "Qwen2", "Qwen2ForCausalLM", _LLAMA_KEYS,
        _llama(vocab_size=151_936, context=32_768, mlp_width=22_016, kv_heads=32), _SILU,
        {**_LLAMA, "qkv_bias": True},
        _NO_WINDOW,
        unused=_WINDOW_KEYS,
    ),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", _LLAMA_KEYS,
        _llama(vocab_size=151_936, context=32_768, mlp_width=22_016, kv_heads=32, head_dim=128), _SILU,
        {**_LLAMA, "qk_norm": True},
        {**_NO_BIAS, **_NO_WINDOW},
        unused=_WINDOW_KEYS,
    ),
}  # fmt: skip
"""model_type -> its family; a model of several families is written as the first."""
