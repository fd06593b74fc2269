"""The table [model]: a size by name, or the config.json in a folder of Hugging Face's, with any field of it changed."""

import dataclasses
import functools
import operator
import types
import typing
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, create_model, model_validator
from pydantic_core import PydanticKnownError

from jdp.experiment.schema.fields import Section, Single, Whole
from jdp.models.configs.gpt import GPTConfig
from jdp.models.configs.sizes import SIZES, ModelConfig

HF = "hf:"
"""Prefix of a folder with the config.json of a GPT-2 or Llama, in place of the name of a size."""


def size_named(name: str) -> ModelConfig:
    """Return the configuration that a name stands for.

    Args:
        name: of a size, or "hf:FOLDER".

    Raises:
        KeyError: there is no such size.
        ValueError: there is no such folder, or no config.json of a GPT-2 or Llama in it.
    """
    if not name.startswith(HF):
        return SIZES[name]
    from jdp.checkpoint.safetensors import gpt_config_from_hf  # late: it imports Orbax, which takes a second

    return gpt_config_from_hf(name.removeprefix(HF))


def _model_name(name: str) -> str:
    if name.startswith(HF):
        try:
            size_named(name)
        except ValueError as error:
            raise ValueError(f"must lead to the config.json of a GPT-2 or Llama: {error}".rstrip(".")) from None
    elif name not in SIZES:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{size}'" for size in (*SIZES, f"{HF}…"))})
    return name


class Model(Section):
    """[model]: what to train. The size named, with any of its fields changed."""

    name: Annotated[str, AfterValidator(_model_name)]
    """Which size to start from, or "hf:FOLDER" for what the config.json of a GPT-2 or Llama there says; any of its
    fields may be given beside it."""

    @property
    def config(self) -> ModelConfig:
        """The resolved configuration, for `jdp.models`."""
        kind = GPTConfig if self.name.startswith(HF) else type(SIZES[self.name])
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @model_validator(mode="after")
    def _obeys_its_own_rules(self) -> Self:
        assert self.config  # the constructor checks; its ValueError is the message
        return self


class AnyModel(Model):
    """A [model] whose name is missing or unknown: nothing else about it is reported."""

    model_config = ConfigDict(extra="allow")


def model_table(name: object) -> type[Model] | None:
    """Return the schema of [model] for a size: its configuration's fields, with the size's values as the defaults.

    Args:
        name: what stands at model.name.

    Returns:
        The schema; None if there is no such size.
    """
    try:
        size = size_named(name) if isinstance(name, str) else None
    except (KeyError, ValueError):
        return None
    return None if size is None else _table(size)


@functools.cache
def _table(size: ModelConfig) -> type[Model]:
    hints = typing.get_type_hints(type(size))
    fields: dict[str, Any] = {
        field.name: (_limited(hints[field.name]), getattr(size, field.name)) for field in dataclasses.fields(size)
    }
    return create_model("ModelOfSize", __base__=Model, **fields)


def _limited(hint: Any) -> Any:
    """Return a field's type with its numbers limited to the 32 bits of devices."""
    if hint in (int, float):
        return Annotated[hint, Whole if hint is int else Single]
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_limited, inner))
    return tuple[_limited(inner[0]), ...] if typing.get_origin(hint) is tuple else hint
