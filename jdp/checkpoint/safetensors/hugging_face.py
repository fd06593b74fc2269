"""The names of Hugging Face's GPT-2, and of Llama and its relatives, for the parameters of `jdp.models.GPT`.

GPT-2's maps are Conv1D, [in, out] as jdp's; query, key and value are joined. Llama's are nn.Linear, [out, in], so
transposed; the rotary pairing is the same. Mistral, Qwen2 and Qwen3 have Llama's names, plus those of `qkv_bias` and
`qk_norm`. `layers/...` is index N of a stack in a scanned model, and `layers/N/...` in an unrolled one.
"""

from typing import Any

from jdp.base.errors import UserError
from jdp.base.public import public
from jdp.checkpoint.safetensors.names import Names, Part, Tensor
from jdp.models import GPTConfig


@public()
def gpt2_names(config: GPTConfig, *, prefix: str = "transformer.") -> Names:
    """Return the names of GPT-2 in Hugging Face's layout, for `export_safetensors` and `import_safetensors`.

    Args:
        config: a GPT with learned positions, either gelu, layer norms, biases, and as many key and value heads as
            query heads.
        prefix: before every name but the head's; "" for the files of openai-community/gpt2.

    Raises:
        ValueError: the configuration is of another architecture.
    """
    gelus = "gelu", "gelu_exact"
    _require(config, "GPT-2", positions="learned", activation=gelus, norm="layer", bias=True, qk_norm=False)
    if config.key_value_heads != config.heads:
        raise UserError(
            f"GPT-2 has a key and value head for each query head; given kv_heads={config.kv_heads}. Write your own "
            "names for other models."
        )
    tensors = {
        f"{prefix}wte.weight": _one("embed/tokens"),
        f"{prefix}wpe.weight": _one("embed/positions"),
        f"{prefix}ln_f.weight": _one("final_norm/scale"),
        f"{prefix}ln_f.bias": _one("final_norm/bias"),
    }
    for n in range(config.layers):
        layer = f"{prefix}h.{n}."
        for theirs, (weight, *ours) in _GPT2_MAPS.items():
            for name, part in (("weight", weight), ("bias", "bias")):
                parts = tuple(in_layer(config, n, f"{path}/{part}") for path in ours)
                tensors[f"{layer}{theirs}.{name}"] = Tensor(parts)
    constants = (f"{prefix}h.*.attn.bias", f"{prefix}h.*.attn.masked_bias")  # the causal mask
    return _names(config, tensors, f"{prefix}wte.weight", constants)


@public()
def llama_names(config: GPTConfig) -> Names:
    """Return the names of Llama in Hugging Face's layout, for `export_safetensors` and `import_safetensors`.

    Mistral, Qwen2 and Qwen3 have the same names, plus names for their further parameters.

    Args:
        config: a GPT with rotary positions, swiglu, RMS norms and no biases but those of `qkv_bias`.

    Raises:
        ValueError: the configuration is of another architecture.
    """
    _require(config, "Llama", positions="rotary", activation="swiglu", norm="rms", bias=False)
    tensors = {"model.embed_tokens.weight": _one("embed/tokens"), "model.norm.weight": _one("final_norm/scale")}
    for n in range(config.layers):
        layer = f"model.layers.{n}."
        for theirs, ours in _llama_vectors(config).items():
            tensors[f"{layer}{theirs}"] = Tensor((in_layer(config, n, ours),))
        for theirs, ours in LLAMA_MAPS.items():
            tensors[f"{layer}{theirs}.weight"] = Tensor((in_layer(config, n, f"{ours}/kernel"),), transposed=True)
    return _names(config, tensors, "model.embed_tokens.weight", ("model.layers.*.rotary_emb.inv_freq",))


@public()
def hf_names(config: GPTConfig) -> Names:
    """Return `transformers`' names for a model: `gpt2_names`, or `llama_names` with rotary positions.

    Args:
        config: a GPT that one of these supports.

    Raises:
        ValueError: the configuration is of another architecture.
    """
    return llama_names(config) if getattr(config, "positions", None) == "rotary" else gpt2_names(config)


_GPT2_MAPS = {
    "ln_1": ("scale", "attention_norm"),
    "ln_2": ("scale", "mlp_norm"),
    "attn.c_attn": ("kernel", "attention/query", "attention/key", "attention/value"),
    "attn.c_proj": ("kernel", "attention/output"),
    "mlp.c_fc": ("kernel", "mlp/up"),
    "mlp.c_proj": ("kernel", "mlp/down"),
}
"""The norms and linear maps of a layer: their names in GPT-2's files -> the name of their weight, and jdp's names."""
LLAMA_MAPS = {
    "self_attn.q_proj": "attention/query",
    "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value",
    "self_attn.o_proj": "attention/output",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "mlp.down_proj": "mlp/down",
}
"""The linear maps of a layer: their names in Llama's files -> jdp's."""


def _llama_vectors(config: GPTConfig) -> dict[str, str]:
    """Return the norms' scales and the biases of a layer: their names in the file -> jdp's."""
    vectors = {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        if config.qkv_bias:
            vectors[f"self_attn.{short}_proj.bias"] = f"attention/{name}/bias"
        if config.qk_norm and short != "v":
            vectors[f"self_attn.{short}_norm.weight"] = f"attention/{name}_norm/scale"
    return vectors


def _one(path: str) -> Tensor:
    return Tensor((Part(path),))


def in_layer(config: GPTConfig, n: int, path: str) -> Part:
    """Return layer n's part of a parameter, by its path in the layer."""
    return Part(f"layers/{path}", n) if config.scan else Part(f"layers/{n}/{path}")


def _names(config: GPTConfig, tensors: dict[str, Tensor], table: str, constants: tuple[str, ...]) -> Names:
    """Return the names with the head's: if it is tied, some files hold the embedding table twice."""
    if config.tied:
        return Names(tensors, constants, config, copies={"lm_head.weight": table}, vocabulary=(table,))
    head = {"lm_head.weight": Tensor((Part("head/kernel"),), transposed=True)}
    return Names({**tensors, **head}, constants, config, vocabulary=(table, *head))


def _require(config: Any, name: str, **fields: object) -> None:
    """Raise ValueError unless each field of the configuration has the value, or one of the tuple of values, given."""
    if not isinstance(config, GPTConfig):
        raise UserError(
            f"{name}'s names are for the parameters of a GPT, by its jdp.models.GPTConfig; given {config!r}. Write "
            "your own names for other models."
        )
    for field, wanted in fields.items():
        given = getattr(config, field)
        among = wanted if isinstance(wanted, tuple) else (wanted,)
        if given not in among:
            raise UserError(f"{name} has {field}={among[0]!r}; given {given!r}. Write your own names for other models.")
