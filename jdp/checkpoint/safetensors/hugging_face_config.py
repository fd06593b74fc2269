"""The `config.json` that Hugging Face's libraries write beside weights: which function the weights are of.

The same tensors make another model with another epsilon, base of the wavelengths or activation, and nothing in their
shapes tells. So the configuration is read where it lies: `gpt_config_from_hf` takes it over, and an import by the names
of GPT-2 or Llama refuses weights whose configuration differs from the model's (`differences`).

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

A key that is left out has the default of `transformers`. Anything there that a GPT here does not have is refused.
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
_ANY = frozenset(("dropout", "scan", "remat", "attention", "lora_rank", "lora_alpha"))
"""Fields that do not change what the weights compute (LoRA's begin at zero)."""


def gpt_config_from_hf(folder: str | Path) -> GPTConfig:
    """The configuration of the GPT-2 or Llama whose Hugging Face `config.json` is in `folder`, for `jdp.models.GPT`.

    Its context is the longest the file allows, its dropout 0, and its layers are scanned: `dataclasses.replace` changes
    what does not change the function.

    Args:
        folder: as `huggingface_hub` downloads or `save_pretrained` writes it; or a file in it.

    Raises:
        CheckpointError: there is no such file, it is damaged, or the model is none that `jdp.models.GPT` can be.
    """
    given = user_path(folder)
    found = read(given)
    if found is None:
        home = given if given.is_dir() else given.parent
        raise CheckpointError(f"{home} has no {NAME} of a model of Hugging Face's. Give the folder that it is in.")
    return found


def read(path: Path) -> GPTConfig | None:
    """The configuration in the folder of `path`, or None: there is none, or it is of no model of Hugging Face's.

    Raises:
        CheckpointError: as `gpt_config_from_hf`.
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
    kind = values.choice("model_type", {"gpt2": _gpt2, "llama": _llama})
    values.must("quantization_config", None)
    settings = kind(values)
    try:
        return GPTConfig(**settings)
    except ValueError as error:
        raise CheckpointError(f"{file} describes no model that jdp builds: {error}") from error


def differences(path: Path, config: GPTConfig) -> list[str]:
    """What the configuration beside the weights at `path` has otherwise: "norm_eps = 1e-06 (given 1e-05)" and so on.

    Empty where there is no such file. A shorter or longer context is none with rotary positions.
    """
    found = read(path)
    if found is None:
        return []
    theirs, given = _resolved(found), _resolved(config)
    skipped = _ANY | ({"context"} if given.positions == "rotary" else frozenset())
    pairs = [(field.name, getattr(theirs, field.name), getattr(given, field.name)) for field in fields(GPTConfig)]
    return [
        f"{name} = {_toml(wanted)} (given {_toml(value)})"
        for name, wanted, value in pairs
        if wanted != value and name not in skipped
    ]


def _resolved(config: GPTConfig) -> GPTConfig:
    """With its defaults filled in, and those that it makes no use of as they are in every configuration."""
    full = replace(config, kv_heads=config.key_value_heads, mlp_width=config.hidden_width)
    unused = {"rope_theta"} if config.positions != "rotary" else set[str]()
    if config.rope_factor is None:
        unused |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_context"}
    return replace(full, **{field.name: field.default for field in fields(GPTConfig) if field.name in unused})


def _toml(value: object) -> str:
    """As an experiment file has it."""
    return "none" if value is None else json.dumps(value)


@dataclass(frozen=True)
class _Table:
    """The keys of a file; each that is asked for has the right kind, or is one clear error."""

    file: Path
    keys: Mapping[str, Any]
    place: str = ""

    def number(self, key: str, default: float | None = None) -> float:
        """A number; of no default, one that must be there."""
        value = self._or_default(key, default)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:  # an int may be past all floats
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; of no default, one that must be there."""
        value = self._or_default(key, default)
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._or_default(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def choice(self, key: str, among: Mapping[str, Any], default: str | None = None) -> Any:
        """What one of a few words stands for."""
        value = self._or_default(key, default)
        if not isinstance(value, str) or value not in among:
            raise self._wrong(key, " or ".join(among), value)
        return among[value]

    def must(self, key: str, *allowed: object) -> None:
        """Refuse what no GPT here has: any value but these; the first is what a file that says nothing means."""
        value = self.keys.get(key, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self._wrong(key, " or ".join(map(json.dumps, allowed)), value)

    def inner(self, *keys: str) -> _Table:
        """The table at the first of these keys that has one; an empty one if none does."""
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
    table.must("scale_attn_weights", True)
    table.must("scale_attn_by_inverse_layer_idx", False)
    table.must("add_cross_attention", False)
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
    table.must("attention_bias", False, None)
    table.must("mlp_bias", False, None)
    width, heads = table.count("hidden_size", 4096), table.count("num_attention_heads", 32)
    table.must("head_dim", None, width // max(heads, 1))
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
    """The rotary fields. Newer files have all of them in rope_parameters, older ones rope_theta beside rope_scaling."""
    inner = table.inner("rope_scaling", "rope_parameters")
    for one in (table, inner):
        one.must("partial_rotary_factor", None, 1.0, 1)
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
