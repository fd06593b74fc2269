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

An `Option` is a key with a value of its own, read into a field of `GPTConfig` and written from it. A key that is left
out has the default of `transformers` (5.23). Values that a GPT cannot have are refused. So are unknown keys, unless
they are empty or do not change the computation (`INERT`).
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
class Option:
    """A key of `config.json` and its field of `GPTConfig`.

    Attributes:
        key, field: their names.
        default: the value for a file without the key. Its type is that of all values; None: a whole number.
        words: word in the file -> value of the field; the first of several words is written.
    """

    key: str
    field: str
    default: Any = None
    words: Mapping[str, str] | None = None

    def read(self, table: Table) -> Any:
        """Return the field's value."""
        if self.words is not None:
            return table.choice(self.key, self.words, self.default)
        if self.field in ("kv_heads", "head_dim", "mlp_width"):
            return table.count_or_none(self.key, self.default)
        read = {bool: table.flag, float: table.number, int: table.count}[type(self.default)]
        return read(self.key, self.default)

    def written(self, value: object) -> object:
        """Return the entry of the file for a value of the field."""
        if self.words is None:
            return value
        return next((word for word, meaning in self.words.items() if meaning == value), None)


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        only: key -> the values that a GPT can have; the first is the default.
        windows: which layers have a window: none (""), "always" all, with "flag" or by "pattern" those that keys say.
    """

    name: str  # as its authors write it
    architecture: str  # the class of `transformers`
    options: tuple[Option, ...]  # keys that are fields
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
        found: dict[str, Any] = {each.field: each.read(table) for each in self.options} | {**self.always}
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

    def _check_known(self, table: Table) -> None:
        known = {*(each.key for each in self.options), *self.only, *_WINDOW_KEYS[self.windows], "quantization_config"}
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
        values = {"kv_heads": config.key_value_heads, "head_dim": config.head_width, "mlp_width": config.hidden_width}
        keys: dict[str, Any] = {
            each.key: each.written(values.get(each.field, getattr(config, each.field))) for each in self.options
        }
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


def _llama_options(
    *, vocabulary: int, context: int, width: int, hidden: int, layers: int = 32, heads: int = 32,
    kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False,
    act: tuple[str, Mapping[str, str], str] = ("hidden_act", _SILU, "silu"),
) -> tuple[Option, ...]:  # fmt: skip
    """Return the options that Llama has, with a family's defaults."""
    return (
        Option("vocab_size", "vocab_size", vocabulary),
        Option("max_position_embeddings", "context", context),
        Option("num_hidden_layers", "layers", layers),
        Option("hidden_size", "width", width),
        Option("num_attention_heads", "heads", heads),
        Option("num_key_value_heads", "kv_heads", kv_heads),
        Option("head_dim", "head_dim", head_dim),
        Option("intermediate_size", "mlp_width", hidden),
        Option(act[0], "activation", act[2], act[1]),
        Option("rms_norm_eps", "norm_eps", 1e-6),
        Option("tie_word_embeddings", "tied", tied),
    )


_LLAMA: Mapping[str, object] = {"positions": "rotary", "norm": "rms", "bias": False}
_GEMMA: Mapping[str, object] = {**_LLAMA, "norm": "rms_plus_one", "scale_embedding": True}
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT-2",
        "GPT2LMHeadModel",
        (
            Option("vocab_size", "vocab_size", 50_257),
            Option("n_positions", "context", 1024),
            Option("n_layer", "layers", 12),
            Option("n_embd", "width", 768),
            Option("n_head", "heads", 12),
            Option("n_inner", "mlp_width"),
            Option("activation_function", "activation", "gelu_new", _GELUS),
            Option("layer_norm_epsilon", "norm_eps", 1e-5),
            Option("tie_word_embeddings", "tied", True),
        ),
        {"positions": "learned", "norm": "layer", "bias": True},
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    "llama": Family(
        "Llama",
        "LlamaForCausalLM",
        _llama_options(vocabulary=32_000, context=2048, width=4096, hidden=11_008),
        _LLAMA,
        {**_NO_BIAS, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        "Mistral",
        "MistralForCausalLM",
        _llama_options(vocabulary=32_000, context=4096 * 32, width=4096, hidden=14_336, kv_heads=8),
        _LLAMA,
        windows="always",
    ),
    "qwen2": Family(
        "Qwen2",
        "Qwen2ForCausalLM",
        _llama_options(vocabulary=151_936, context=32_768, width=4096, hidden=22_016, kv_heads=32),
        {**_LLAMA, "qkv_bias": True},
        windows="flag",
    ),
    "qwen3": Family(
        "Qwen3",
        "Qwen3ForCausalLM",
        _llama_options(vocabulary=151_936, context=32_768, width=4096, hidden=22_016, kv_heads=32, head_dim=128),
        {**_LLAMA, "qk_norm": True},
        _NO_BIAS,
        windows="flag",
    ),
    "gemma": Family(
        "Gemma",
        "GemmaForCausalLM",
        _llama_options(
            vocabulary=256_000, context=8192, width=3072, hidden=24_576, layers=28, heads=16, kv_heads=16, head_dim=256,
            tied=True, act=("hidden_act", _GEGLU, "gelu_pytorch_tanh"),
        ),
        _GEMMA,
        {
            **_NO_BIAS,
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (None, False),
        },
    ),
    "gemma3_text": Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        _llama_options(
            vocabulary=262_208, context=131_072, width=2304, hidden=9216, layers=26, heads=8, kv_heads=4, head_dim=256,
            tied=True, act=("hidden_activation", {"gelu_pytorch_tanh": "geglu"}, "gelu_pytorch_tanh"),
        ),
        {**_GEMMA, "qk_norm": True, "post_norm": True},
        {
            **_NO_BIAS,
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        windows="pattern",
    ),
}  # fmt: skip
"""model_type -> its family; a model that several compute is written as the first."""
