"""The table [model]: a named size, or a Hugging Face config.json, with any of its fields changed."""

import dataclasses
import functools
import operator
import types
import typing
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticKnownError

from jdp.base.errors import UserError
from jdp.base.notices import notice_anywhere
from jdp.base.user_path import HF, user_path
from jdp.experiment.keys import described_fields
from jdp.experiment.schema.fields import NONE, BoolOrAuto, Single, Whole
from jdp.experiment.schema.make import Made, with_defaults
from jdp.models.configs import SIZES, GPTConfig, MLPConfig, ModelConfig, traced_layers

TOKENIZER = "tokenizer.json"
MOST_TRACED = 10_000
Learns = Literal["text", "images", "features"]
NEEDED: dict[Learns, tuple[str, ...]] = {
    "text": ("vocab_size", "context"),
    "images": ("image_size", "channels", "classes"),
    "features": ("features_in", "features_out"),
}
"""Kind of data that a user's model learns -> the model's keywords that must match jdp's data."""


def _config(name: str) -> ModelConfig:
    """Return the configuration of a name: a size, or "hf:FOLDER". Raises KeyError or ValueError."""
    if not name.startswith(HF):
        return SIZES[name]
    from jdp.checkpoint.safetensors.config import gpt_config_from_hf  # late: Orbax takes a second

    return gpt_config_from_hf(user_path(name.removeprefix(HF)))


class Model(Made):
    """[model]: the model to train: a named size, with any of its fields changed. Or `make`, a function of (rng,
    keywords) that returns an nnx.Module or a pytree of arrays."""

    name: str
    """Size to start from: a name, or "hf:FOLDER" for a folder with a Hugging Face config.json; the other keys change
    its fields."""

    _arguments: ClassVar[tuple[str, ...]] = ("rng",)

    @property
    def _config_type(self) -> type[ModelConfig]:
        return type(SIZES[self.name]) if self.name in SIZES else GPTConfig

    @property
    def config(self) -> Any:
        """The resolved configuration, a `ModelConfig`. The folder of an "hf:" may be gone: all its fields are here."""
        names = (each.name for each in dataclasses.fields(self._config_type) if each.init)
        return self._config_type(**{name: getattr(self, name) for name in names})

    @property
    def kind(self) -> Learns | None:
        """The kind of jdp's data and loss that the model learns; None: the user's own."""
        if self._config_type is GPTConfig:
            return "text"
        return "features" if self._config_type is MLPConfig else "images"

    @property
    def is_gpt(self) -> bool:
        return isinstance(self.config, GPTConfig)

    @property
    def chosen(self) -> str:
        """The key that chooses the model, and its value, for messages."""
        return f"model.make = {self.make!r}" if self.make else f"model.name = {self.name!r}"


class MadeModel(Model):
    """[model] with `make`."""

    name: str = ""
    learns: Learns | None = None
    """Kind of jdp's data and loss that the model of `make` learns; none = data.make and loss.make are given."""

    _shared: ClassVar[tuple[str, ...]] = ("learns",)

    @property
    def config(self) -> Any:
        """The keywords, with the function's defaults, as attributes."""
        assert self.make is not None
        return SimpleNamespace(**with_defaults(self.make, self._arguments, self.keywords))

    @property
    def kind(self) -> Learns | None:
        return self.learns


def _unknown_name(name: str) -> str:
    try:
        _config(name)
    except KeyError:
        known = ", ".join(f"'{known}'" for known in (*SIZES, f"{HF}…"))
        raise PydanticKnownError("literal_error", {"expected": known}) from None
    except ValueError as error:
        raise UserError(f"must lead to the config.json of a model that jdp builds: {error}".rstrip(".")) from None
    return name


class UnknownModel(Model):
    """A [model] whose name is missing or unknown: nothing else about it is reported."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, AfterValidator(_unknown_name)]


def model_table(table: object) -> type[Model] | None:
    """Return the schema of a [model]: its configuration's fields, with the size's values as the defaults."""
    if not isinstance(table, typing.Mapping):
        return None
    given = cast("typing.Mapping[str, Any]", table)
    if given.get("make", NONE) not in (None, NONE):
        return MadeModel
    name = given.get("name")
    if not isinstance(name, str):
        return None
    try:
        return _section(name, _config(name))
    except (KeyError, ValueError):
        if not name.startswith(HF):
            return None
        recorded = _section(HF, SIZES["gpt-nano"])  # a run records all fields, and the folder may be gone
        return recorded if given.keys() >= recorded.model_fields.keys() - Made.model_fields.keys() else None


@functools.cache
def _section(name: str, config: ModelConfig) -> type[Model]:
    """Return the schema of a table whose keys are the fields of a configuration, with its values as the defaults."""
    kind = type(config)
    hints, described = typing.get_type_hints(kind, include_extras=True), described_fields(kind)
    fields: dict[str, Any] = {
        each.name: (_limited(hints[each.name]), Field(getattr(config, each.name), description=described.get(each.name)))
        for each in dataclasses.fields(kind)
        if each.init
    }

    def obey_its_own_rules(table: Model) -> Model:
        config = table.config  # the dataclass checks; its ValueError is the message
        if (layers := traced_layers(config)) > MOST_TRACED:
            rule = f"A model has at most {MOST_TRACED:,} layers that are compiled separately"
            raise UserError(f"{rule}; given {layers:,}: lower them{', or set scan = true' * hasattr(config, 'scan')}")
        return table

    rules: Any = {"obey_its_own_rules": model_validator(mode="after")(obey_its_own_rules)}
    return create_model(f"Model {name}", __base__=Model, __validators__=rules, **fields)


def _limited(hint: Any) -> Any:
    """Return a field's type for the schema: numbers are limited to the 32 bits of devices."""
    if hint in (int, float):
        return Annotated[hint, Whole if hint is int else Single]
    if hint == bool | Literal["auto"]:
        return BoolOrAuto  # one message for both
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_limited, inner))
    return tuple[_limited(inner[0]), ...] if typing.get_origin(hint) is tuple else hint


def take_tokenizer(table: dict[str, Any]) -> None:
    """Set `data.tokenizer` of a valid table, unless given, to the one in the model's folder, and report it."""
    name, data = table["model"].get("name", ""), table.get("data", {})
    if not name.startswith(HF) or "tokenizer" in data or data.get("make", NONE) != NONE:
        return
    folder = name.removeprefix(HF).rstrip("/")
    if (user_path(folder) / TOKENIZER).is_file():
        table["data"] = {**data, "tokenizer": folder}
        notice_anywhere(f"data.tokenizer = {folder!r}, the model's own: its folder has a {TOKENIZER}")
    else:
        notice_anywhere(
            f"model.name = {name!r}: its folder has no {TOKENIZER}, so text is read as bytes, which the weights of a "
            "trained model do not know; name a data.tokenizer"
        )
