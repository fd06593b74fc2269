"""The `config.json` that Hugging Face's libraries write beside weights: which model the weights are of.

The same tensors make another model with another epsilon, base of the wavelengths or activation, and their shapes do not
show it. So `gpt_config_from_hf` builds a configuration from that file, and an import by the names of GPT-2 or Llama
refuses weights whose configuration differs from the model's (`differences`).

| config.json of GPT-2 | of Llama | GPTConfig |
|---|---|---|
| vocab_size | vocab_size | vocab_size |
| n_positions | max_position_embeddings | context |
| n_layer, n_embd, n_head | num_hidden_layers, hidden_size, num_attention_heads | layers, width, heads |
| | num_key_value_heads | kv_heads |
| n_inner | intermediate_size | mlp_width |
| activation_function | hidden_act | activation |
| layer_norm_epsilon | rms_norm_eps | norm_eps |
| tie_word_embeddings | tie_word_embeddings | tied |
| | rope_theta, rope_scaling (rope_parameters in newer files) | rope_theta, rope_factor, ... |

A key that is left out has the default of `transformers`. Anything that `jdp.models.GPT` cannot compute is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jdp.checkpoint.errors import CheckpointError
from jdp.core.user_path import check_regular, user_path
from jdp.models import GPTConfig

NAME = "config.json"
_GELUS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
}
_INERT = frozenset(("dropout", "scan", "remat", "attention", "lora_rank", "lora_alpha"))
"""Fields that do not change what the weights compute (LoRA's begin at zero)."""


def gpt_config_from_hf(folder: str | Path) -> GPTConfig:
    """Return the configuration, for `jdp.models.GPT`, of the GPT-2 or Llama whose `config.json` is in `folder`.

    Args:
        folder: as `huggingface_hub` downloads or `save_pretrained` writes it; or a file in it.

    Returns:
        The configuration with the longest context that the file allows, without dropout, with scanned layers;
        `dataclasses.replace` changes these.

    Raises:
        CheckpointError: there is no such file, it is damaged, or `jdp.models.GPT` cannot compute the model.
        ValueError: the path is an address such as gs://bucket/model.
    """
    path = user_path(folder)
    config = read(path)
    if config is None:
        parent = path if path.is_dir() else path.parent
        raise CheckpointError(f"{parent} has no {NAME} of a model of Hugging Face's. Give the folder that it is in.")
    return config


def read(path: Path) -> GPTConfig | None:
    """Read the `config.json` in the folder of `path`; None if there is none, or it is of no model of Hugging Face's.

    Raises:
        CheckpointError: it is damaged, or `jdp.models.GPT` cannot compute the model.
    """
    file = (path if path.is_dir() else path.parent) / NAME
    try:
        if file.exists():
            check_regular(file)
        table: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({str(error)[:100]}). Download it again.") from error
    if not isinstance(table, dict) or "model_type" not in table:
        return None
    values = _Table(file, table)
    fields_of = values.choice("model_type", {"gpt2": _gpt2, "llama": _llama})
    values.require("quantization_config", None)
    arguments = fields_of(values)
    try:
        return GPTConfig(**arguments)
    except ValueError as error:
        raise CheckpointError(f"{file} describes no model that jdp builds: {error}") from error


def differences(path: Path, config: GPTConfig) -> list[str]:
    """Return how the configuration beside the weights at `path` differs: "norm_eps = 1e-06 (given 1e-05)", ...

    Empty if there is no such file. With rotary positions another context is no difference.
    """
    stored = read(path)
    if stored is None:
        return []
    theirs, given = _resolved(stored), _resolved(config)
    skipped = _INERT | ({"context"} if given.positions == "rotary" else frozenset())
    pairs = [(field.name, getattr(theirs, field.name), getattr(given, field.name)) for field in fields(GPTConfig)]
    return [
        f"{name} = {_toml(wanted)} (given {_toml(value)})"
        for name, wanted, value in pairs
        if wanted != value and name not in skipped
    ]


def _resolved(config: GPTConfig) -> GPTConfig:
    """Return the configuration with defaults filled in, and fields that it does not use at their defaults."""
    full = replace(config, kv_heads=config.key_value_heads, mlp_width=config.hidden_width)
    unused = {"rope_theta"} if config.positions != "rotary" else set[str]()
    if config.rope_factor is None:
        unused |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_context"}
    return replace(full, **{field.name: field.default for field in fields(GPTConfig) if field.name in unused})


def _toml(value: object) -> str:
    """Return the value as an experiment file has it."""
    return "none" if value is None else json.dumps(value)


@dataclass(frozen=True)
class _Table:
    """The keys of a file, read by type; each method raises CheckpointError for a value of another type.

    Attributes:
        file: for errors.
        keys: the table.
        place: of the table in the file, with a dot at its end.
    """

    file: Path
    keys: Mapping[str, Any]
    place: str = ""

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; it must be there if it has no default."""
        value = self._or_default(key, default)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:  # an int may be past all floats
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number; it must be there if it has no default."""
        value = self._or_default(key, default)
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._or_default(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def choice(self, key: str, among: Mapping[str, Any], default: str | None = None) -> Any:
        """Return the value of `among` that a word stands for."""
        value = self._or_default(key, default)
        if not isinstance(value, str) or value not in among:
            raise self._wrong(key, " or ".join(among), value)
        return among[value]

    def require(self, key: str, *allowed: object) -> None:
        """Raise CheckpointError for any value but these, the only ones a GPT can have; the first is the default."""
        value = self.keys.get(key, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self._wrong(key, " or ".join(map(json.dumps, allowed)), value)

    def inner(self, *keys: str) -> _Table:
        """Return the table at the first of these keys that has one; an empty one if none does."""
        for key in keys:
            value = self.keys.get(key)
            if isinstance(value, dict) and value:
                return _Table(self.file, value, f"{key}.")
            if value:
                raise self._wrong(key, "a table", value)
        return _Table(self.file, {}, f"{keys[0]}.")

    def _or_default(self, key: str, default: object) -> Any:
        value = self.keys.get(key)
        return default if value is None else value

    def _wrong(self, key: str, rule: str, value: object) -> CheckpointError:
        given = json.dumps(value)
        given = given if len(given) <= 100 else given[:100] + " …"
        return CheckpointError(
            f"{self.file}: {self.place}{key} must be {rule} for a model that jdp builds; given {given}. Take a "
            "GPT-2 or Llama that has it so, or correct the file."
        )


def _gpt2(table: _Table) -> dict[str, Any]:
    table.require("scale_attn_weights", True)
    table.require("scale_attn_by_inverse_layer_idx", False)
    table.require("add_cross_attention", False)
    width = table.count("n_embd", 768)
    return {
        "vocab_size": table.count("vocab_size", 50257),
        "context": table.count("n_positions", 1024),
        "layers": table.count("n_layer", 12),
        "width": width,
        "heads": table.count("n_head", 12),
        "mlp_width": table.count("n_inner", 4 * width),
        "positions": "learned",
        "activation": table.choice("activation_function", _GELUS, "gelu_new"),
        "norm": "layer",
        "norm_eps": table.number("layer_norm_epsilon", 1e-5),
        "tied": table.flag("tie_word_embeddings", True),
        "bias": True,
    }


def _llama(table: _Table) -> dict[str, Any]:
    table.require("attention_bias", False, None)
    table.require("mlp_bias", False, None)
    width, heads = table.count("hidden_size", 4096), table.count("num_attention_heads", 32)
    table.require("head_dim", None, width // max(heads, 1))
    context = table.count("max_position_embeddings", 2048)
    return {
        "vocab_size": table.count("vocab_size", 32000),
        "context": context,
        "layers": table.count("num_hidden_layers", 32),
        "width": width,
        "heads": heads,
        "kv_heads": table.count("num_key_value_heads", heads),
        "mlp_width": table.count("intermediate_size", 11008),
        "positions": "rotary",
        "activation": table.choice("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
        "norm": "rms",
        "norm_eps": table.number("rms_norm_eps", 1e-6),
        "tied": table.flag("tie_word_embeddings", False),
        "bias": False,
        **_rope(table, context),
    }


def _rope(table: _Table, context: int) -> dict[str, Any]:
    """Return the rotary fields: newer files have all in rope_parameters, older ones rope_theta beside rope_scaling."""
    inner = table.inner("rope_scaling", "rope_parameters")
    for each in (table, inner):
        each.require("partial_rotary_factor", None, 1.0, 1)
    theta = {"rope_theta": inner.number("rope_theta", table.number("rope_theta", 10_000.0))}
    key = "type" if "rope_type" not in inner.keys and "type" in inner.keys else "rope_type"
    if not inner.choice(key, {"default": False, "llama3": True}, "default"):
        return theta
    return {
        **theta,
        "rope_factor": inner.number("factor"),
        "rope_low_freq_factor": inner.number("low_freq_factor"),
        "rope_high_freq_factor": inner.number("high_freq_factor"),
        "rope_original_context": inner.count("original_max_position_embeddings", context),
    }
