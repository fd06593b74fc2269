"""The model types of Hugging Face that `jdp.models.GPT` computes, each with the keys of its `config.json`: a table.

| model_type  | differs from Llama in                             | keys of its own                                    |
|-------------|---------------------------------------------------|----------------------------------------------------|
| gpt2        | learned positions, layer norms, biases, gelu      | n_embd, n_layer, ...                               |
| llama       |                                                   | rope_scaling of Llama 3.1                          |
| mistral     | a window in all layers                            | sliding_window                                     |
| qwen2       | biases of queries, keys and values                | use_sliding_window, max_window_layers, layer_types |
| qwen3       | norms of query and key heads                      | as Qwen2                                           |
| gemma       | scales 1 + weight, embedding × sqrt(width), geglu |                                                    |
| gemma3_text | as Gemma; norms of query and key heads and after  | sliding_window, layer_types,                       |
|             | each half; windows, with wavelengths of their own | rope_local_base_freq                               |

`Family.keys` are read into fields of `GPTConfig` and written from them. A key that is left out has the default of
`transformers` (5.23). Values that a GPT cannot have are refused. So are unknown keys, unless they are empty or do not
change the computation (`INERT`).
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
    "pattern": (
        *("sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq", "query_pre_attn_scalar"),
    ),
}
INERT = (
    *("_*", "*_token_id", "*_token_ids", "*dropout", "*_pdrop", "summary_*", "transformers*", "unsloth*", "output_*"),
    *("model_type", "architectures", "torch_dtype", "dtype", "use_cache", "cache_implementation", "initializer_range"),
    *("pretraining_tp", "id2label", "label2id", "task_specific_params", "tokenizer_class", "return_dict", "n_ctx"),
    *("gradient_checkpointing", "reorder_and_upcast_attn", "is_llama_config", "chunk_size_feed_forward"),
)
"""Patterns of keys that do not change the computation."""
REFUSED = {
    "gemma2": "it caps the scores of attention and the logits",
    "gemma3": 'it reads images too; its text part alone has model_type "gemma3_text"',
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), "it chooses among experts"),
    "phi3": "it has queries, keys and values in one matrix",
}


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        keys: the keys that are fields of `GPTConfig`.
        defaults: field -> the value for a file without its key. Its type is that of all values; None: a whole number.
        activations: word in the file -> activation; the first of several words is written.
        only: key -> the values that a GPT can have; the first is the default.
        windows: which layers have a window: none (""), "always" all, with "flag" or by "pattern" those that keys say.
    """

    name: str  # as its authors write it
    architecture: str  # the class of `transformers`
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    activations: Mapping[str, str]
    always: Mapping[str, object]  # fields that all its models have alike
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    windows: Literal["", "always", "flag", "pattern"] = ""

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
        if self.windows == "pattern":
            head = found["head_dim"] or found["width"] // max(found["heads"], 1)
            if table.number("query_pre_attn_scalar", 256.0) != head:
                raise table.wrong("query_pre_attn_scalar", f"head_dim({head})", table.keys.get("query_pre_attn_scalar"))
        if self.windows:
            found |= self._read_windows(table, found["layers"])
        if self.rotary:
            found |= self._read_rope(table, found["context"], local=found.get("window") is not None)
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
            if value and key not in known and not any(fnmatchcase(key, pattern) for pattern in INERT):
                raise CheckpointError(
                    f"{table.file}: {key} = {shortened(value)} is no option of {self.name} that jdp knows. If the "
                    "model computes the same without it, remove it from the file; else take another model."
                )

    def _read_windows(self, table: Table, layers: int) -> dict[str, Any]:
        """Return the window, and the layers without it."""
        window = table.count_or_none("sliding_window", 4096)
        if window is None or (self.windows == "flag" and not table.flag("use_sliding_window", False)):
            return {"window": None, "global_every": None}
        rule = "such that every layer has the window, or all but each second, third, ... one"
        every = table.count("sliding_window_pattern", 6) if self.windows == "pattern" else None
        if (kinds := table.keys.get("layer_types")) is not None and self.windows != "always":
            among = ("sliding_attention", "full_attention")
            if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in among for kind in kinds):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                raise table.wrong("layer_types", f"a list of {layers} of {' or '.join(among)}", kinds)  # pyright: ignore[reportUnknownArgumentType]
            every = kinds.index(among[1]) + 1 if among[1] in kinds else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if every and kinds != [among[(n + 1) % every == 0] for n in range(layers)] and among[0] in kinds:
                raise table.wrong("layer_types", rule, kinds)  # pyright: ignore[reportUnknownArgumentType]
        elif self.windows == "flag" and (first := table.count("max_window_layers", 28)) > 0:  # those before have none
            if first < layers:
                raise table.wrong("max_window_layers", rule, first)
            every = 1
        every = every if every and every <= layers else None
        if every == 1:
            return {"window": None, "global_every": None}
        return {"window": window, "global_every": every}

    def _read_rope(self, table: Table, context: int, *, local: bool) -> dict[str, Any]:
        """Return the rotary fields: newer files have all in rope_parameters, older rope_theta beside rope_scaling."""
        inner = table.inner("rope_scaling", "rope_parameters")
        theirs = Table(table.file, {})
        if self.windows == "pattern" and ({"full_attention", "sliding_attention"} & inner.keys.keys()):
            inner, theirs = inner.inner("full_attention"), inner.inner("sliding_attention")
        for each in (table, inner, theirs):
            each.require("partial_rotary_factor", None, 1.0, 1)
        default = 1e6 if self.windows == "pattern" else 10_000.0
        found = {
            "rope_theta": inner.number("rope_theta", table.number("rope_theta", default)),
            **_scaling(inner, context),
        }
        if self.windows == "pattern" and local:
            if _scaling(theirs, context):
                raise theirs.wrong("rope_type", "default", theirs.keys.get("rope_type"))
            theta = theirs.number("rope_theta", table.number("rope_local_base_freq", 10_000.0))
            found["rope_local_theta"] = theta
        return found

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
        if self.windows in ("flag", "pattern"):
            every = config.global_every or config.layers + 1
            local = [config.window is not None and (n + 1) % every > 0 for n in range(config.layers)]
            keys["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
        if self.windows == "pattern":
            keys |= {"sliding_window": config.window or config.context, "query_pre_attn_scalar": config.head_width}
            keys["rope_local_base_freq"] = config.rope_local_theta or config.rope_theta
        return keys


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
# "gelu" in the files of Gemma always was the tanh form
_GEGLU: Mapping[str, str] = dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast"), "geglu")
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
_GEMMA3_KEYS = {"hidden_activation" if key == "hidden_act" else key: name for key, name in _LLAMA_KEYS.items()}


def _llama(**defaults: Any) -> dict[str, Any]:
    """Return the defaults of Llama or a relative; width 4096 and 32 layers and heads are theirs in common."""
    common = {"width": 4096, "layers": 32, "heads": 32, "kv_heads": None, "head_dim": None}
    return {**common, "activation": "silu", "norm_eps": 1e-6, "tied": False, **defaults}


_LLAMA: Mapping[str, object] = {"positions": "rotary", "norm": "rms", "bias": False}
_GEMMA: Mapping[str, object] = {**_LLAMA, "norm": "rms_plus_one", "scale_embedding": True}
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}
_GEMMAS = {"head_dim": 256, "activation": "gelu_pytorch_tanh", "tied": True}

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
    "gemma": Family(
        "Gemma", "GemmaForCausalLM", _LLAMA_KEYS,
        _llama(
            vocab_size=256_000, context=8192, width=3072, mlp_width=24_576, layers=28, heads=16, kv_heads=16, **_GEMMAS
        ),
        _GEGLU,
        _GEMMA,
        {
            **_NO_BIAS, "hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": (None, False)
        },
    ),
    "gemma3_text": Family(
        "Gemma 3", "Gemma3ForCausalLM", _GEMMA3_KEYS,
        _llama(
            vocab_size=262_208, context=131_072, width=2304, mlp_width=9216, layers=26, heads=8, kv_heads=4, **_GEMMAS
        ),
        {"gelu_pytorch_tanh": "geglu"},
        {**_GEMMA, "qk_norm": True, "post_norm": True},
        {
            **_NO_BIAS, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        windows="pattern",
    ),
}  # fmt: skip
"""model_type -> its family; a model that several compute is written as the first."""
