"""The tensors of a file and their parameters: a table name -> `Tensor`, for export and import.

A tensor is one `Part` or several, joined along their last dim; a part is a complete parameter, or one layer of a
stacked parameter. A tensor may be stored transposed.

Of Hugging Face's names, GPT-2's maps are Conv1D, [in, out] as jdp's; query, key and value are joined. Llama's are
nn.Linear, [out, in], so transposed; the rotary pairing is the same. Mistral, Qwen2 and Qwen3 have Llama's names, plus
those of `qkv_bias` and `qk_norm`. `layers/...` is index N of a stack in a scanned model; unrolled, `layers/N/...`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdp.base.errors import UserError, public
from jdp.base.tree_paths import matches
from jdp.checkpoint.errors import CheckpointError
from jdp.models import GPTConfig


@dataclass(frozen=True)
class Part:
    """A parameter, or one layer of stacked parameters.

    Attributes:
        path: of the parameter, with slashes: "layers/attention/query/kernel".
        layer: index of its leading dim; None: the complete parameter.
    """

    path: str
    layer: int | None = None


@dataclass(frozen=True)
class Tensor:
    """The parameters of one tensor of a file.

    Attributes:
        parts: the parameters, joined along their last dim.
        transposed: True if the last two dims of the joined parameters are swapped in the file.
    """

    parts: tuple[Part, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """The tensors of a file, and other names that it may have.

    Attributes:
        tensors: name in the file -> tensor; each parameter, or each layer of it, exactly once.
        ignored: patterns (`fnmatch`) of names that an import does not read, such as tables of constants.
        config: the model of these names, compared with a `config.json` beside the file; None: unknown.
        copies: optional name -> the tensor that it repeats.
        vocabulary: the tensors with a row for each token; a file may have fewer rows.
    """

    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()
    config: GPTConfig | None = None
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    vocabulary: tuple[str, ...] = ()


def resolve(names: Names | Mapping[str, str | Tensor] | None, leaves: Mapping[str, Any]) -> Names:
    if isinstance(names, Names):
        return names
    table = {path.replace("/", "."): path for path in leaves} if names is None else names
    return Names({name: _one(given) if isinstance(given, str) else given for name, given in table.items()})


def check_cover(names: Names, leaves: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
    """Check that every leaf, or every layer of a leaf named by layers, is in exactly one tensor."""
    named: dict[str, list[int | None]] = {}
    for name, tensor in names.tensors.items():
        for part in tensor.parts:
            if part.path not in leaves:
                some = ", ".join([*leaves][:3]) + ", ..." * (len(leaves) > 3)
                raise CheckpointError(
                    f"The names map {name} to {part.path}, but the model has no such parameter; it has {some}. Make "
                    "the names for this model's configuration."
                )
            named.setdefault(part.path, []).append(part.layer)
    for path, leaf in leaves.items():
        layers = named.get(path, [])
        if not layers and matches(path, missing):
            continue
        by_layer = bool(leaf.shape) and None not in layers and sorted(layers) == list(range(leaf.shape[0]))  # pyright: ignore[reportArgumentType]
        if layers != [None] and not by_layer:
            raise CheckpointError(
                f"Each parameter needs one name, or one for each layer; {path} {list(leaf.shape)} has "
                f"{len(layers) or 'none'}. Add it to the names, or remove the parameter."
            )


def file_shape(tensor: Tensor, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    shapes = [part_shape(part, leaves) for part in tensor.parts]
    joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if len(shapes) > 1 else shapes[0]
    return (*joined[:-2], joined[-1], joined[-2]) if tensor.transposed else joined


def part_shape(part: Part, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    shape = tuple(leaves[part.path].shape)
    return shape if part.layer is None else shape[1:]


# Hugging Face's names.


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
    _require(config, "GPT-2", kv_heads=(config.heads, None))
    tensors = {
        f"{prefix}wte.weight": _one("embed/tokens"),
        f"{prefix}wpe.weight": _one("embed/positions"),
        f"{prefix}ln_f.weight": _one("final_norm/scale"),
        f"{prefix}ln_f.bias": _one("final_norm/bias"),
    }
    for n in range(config.layers):
        for theirs, (weight, *ours) in _GPT2_MAPS.items():
            for name, part in (("weight", weight), ("bias", "bias")):
                parts = tuple(_in_layer(config, n, f"{path}/{part}") for path in ours)
                tensors[f"{prefix}h.{n}.{theirs}.{name}"] = Tensor(parts)
    constants = (f"{prefix}h.*.attn.bias", f"{prefix}h.*.attn.masked_bias")  # the causal mask
    return _with_head(config, tensors, f"{prefix}wte.weight", constants)


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
    vectors = {"input_layernorm.weight": "attention_norm/scale", "post_attention_layernorm.weight": "mlp_norm/scale"}
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        if config.qkv_bias:
            vectors[f"self_attn.{short}_proj.bias"] = f"attention/{name}/bias"
        if config.qk_norm and short != "v":
            vectors[f"self_attn.{short}_norm.weight"] = f"attention/{name}_norm/scale"
    tensors = {"model.embed_tokens.weight": _one("embed/tokens"), "model.norm.weight": _one("final_norm/scale")}
    for n in range(config.layers):
        layer = f"model.layers.{n}."
        for theirs, ours in vectors.items():
            tensors[f"{layer}{theirs}"] = Tensor((_in_layer(config, n, ours),))
        for theirs, ours in _LLAMA_MAPS.items():
            tensors[f"{layer}{theirs}.weight"] = Tensor((_in_layer(config, n, f"{ours}/kernel"),), transposed=True)
    return _with_head(config, tensors, "model.embed_tokens.weight", ("model.layers.*.rotary_emb.inv_freq",))


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
_LLAMA_MAPS = {
    "self_attn.q_proj": "attention/query",
    "self_attn.k_proj": "attention/key",
    "self_attn.v_proj": "attention/value",
    "self_attn.o_proj": "attention/output",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "mlp.down_proj": "mlp/down",
}
"""The linear maps of a layer: their names in Llama's files -> jdp's."""


def _one(path: str) -> Tensor:
    return Tensor((Part(path),))


def _in_layer(config: GPTConfig, n: int, path: str) -> Part:
    return Part(f"layers/{path}", n) if config.scan else Part(f"layers/{n}/{path}")


def _with_head(config: GPTConfig, tensors: dict[str, Tensor], table: str, constants: tuple[str, ...]) -> Names:
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
    for key, wanted in fields.items():
        given = getattr(config, key)
        among = wanted if isinstance(wanted, tuple) else (wanted,)
        if given not in among:
            raise UserError(f"{name} has {key}={among[0]!r}; given {given!r}. Write your own names for other models.")
