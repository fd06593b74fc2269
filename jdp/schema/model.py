"""The table [model]: a size by name, with any field of its configuration changed."""

import dataclasses
import functools
import typing
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, create_model, model_validator
from pydantic_core import PydanticKnownError

from jdp.models.sizes import SIZES, ModelConfig
from jdp.schema.kinds import Section


def _model_name(name: str) -> str:
    if name not in SIZES:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{size}'" for size in SIZES)})
    return name


class Model(Section):
    """[model]: what to train. The size named, with any of its fields changed."""

    name: Annotated[str, AfterValidator(_model_name)]
    """Which size to start from; any of its fields may be given beside it."""

    @property
    def config(self) -> ModelConfig:
        """The resolved configuration, for `jdp.models`."""
        kind = type(SIZES[self.name])
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    @model_validator(mode="after")
    def _obeys_its_own_rules(self) -> Self:
        assert self.config  # the constructor checks, and its ValueError is the message
        return self


class AnyModel(Model):
    """Stands in for a [model] whose name is missing or unknown, so that this is the only thing said about it."""

    model_config = ConfigDict(extra="allow")


@functools.cache
def model_table(name: str) -> type[Model]:
    """The [model] table for the size `name`: its configuration's fields, with the size's values as the defaults."""
    size = SIZES[name]
    hints = typing.get_type_hints(type(size))
    fields: dict[str, Any] = {
        field.name: (hints[field.name], getattr(size, field.name)) for field in dataclasses.fields(size)
    }
    return create_model(f"Model_{name}", __base__=Model, **fields)
