"""The table [model]: a size by name, or the config.json in a folder of Hugging Face's, with any field of it changed."""

import functools
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict

from jdp.base.notices import notice_anywhere
from jdp.base.user_path import user_path
from jdp.experiment.schema.fields import NONE, Section
from jdp.experiment.schema.registered import Entry, Table, section
from jdp.models.configs.gpt import GPTConfig
from jdp.models.configs.mlp import MLPConfig
from jdp.models.configs.sizes import SIZES, ModelConfig

HF = "hf:"
"""Prefix of a folder with the config.json of a model of Hugging Face's, in place of the name of a size."""
TOKENIZER = "tokenizer.json"


def _build(config: ModelConfig, rngs: Any) -> Any:
    from jdp.models.sizes import build  # late: it imports JAX

    return build(config, rngs=rngs)


@functools.cache
def _own(name: str, config: ModelConfig) -> Entry:
    """Return the entry of a model of jdp's own."""
    learns = "text" if isinstance(config, GPTConfig) else "features" if isinstance(config, MLPConfig) else "images"
    return Entry(name, config, _build, learns=learns)


_FROM_HF = Entry(HF, GPTConfig, _build, learns="text")
MODELS = Table("model", entries={name: _own(name, config) for name, config in SIZES.items()})


def model_entry(name: str) -> Entry:
    """Return the entry of a name: a size, a plug-in's model, or "hf:FOLDER". Raises KeyError or ValueError."""
    if not name.startswith(HF):
        return MODELS.entries[name]
    from jdp.checkpoint.safetensors.hugging_face_config import gpt_config_from_hf  # late: Orbax takes a second

    return _own(HF, gpt_config_from_hf(user_path(name.removeprefix(HF))))


def _model_name(name: str) -> str:
    if not name.startswith(HF):
        return MODELS.check(name, f"{HF}…")
    try:
        model_entry(name)
    except ValueError as error:
        raise ValueError(f"must lead to the config.json of a model that jdp builds: {error}".rstrip(".")) from None
    return name


class Model(Section):
    """[model]: what to train. The size named, with any of its fields changed."""

    name: Annotated[str, AfterValidator(_model_name)]
    """Which size to start from, or "hf:FOLDER" for what the config.json of a model of Hugging Face's
    there says, or a model that the plug-in registers; any of its fields may be given beside it."""

    @property
    def entry(self) -> Entry:
        """The entry of the name. The folder of an "hf:" may be gone: all its fields are here."""
        return _FROM_HF if self.name.startswith(HF) else MODELS.entries[self.name]

    @property
    def config(self) -> Any:
        """The resolved configuration: a `ModelConfig`, or the dataclass of a plug-in's model."""
        return self.entry.values(self)


class AnyModel(Model):
    """A [model] whose name is missing or unknown: nothing else about it is reported."""

    model_config = ConfigDict(extra="allow")


def model_table(name: object) -> type[Model] | None:
    """Return the schema of [model] for a name: its configuration's fields, with the size's values as the defaults."""
    try:
        entry = model_entry(name) if isinstance(name, str) else None
    except (KeyError, ValueError):
        return None
    return None if entry is None else cast("type[Model]", section(entry, Model))


def take_tokenizer(table: dict[str, Any]) -> None:
    """Put the tokenizer of the model's folder into `data.tokenizer`, where that is not given; report what is read."""
    model, data = table.get("model"), table.get("data", {})
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str) or not name.startswith(HF) or not isinstance(data, dict) or "tokenizer" in data:
        return
    if data.get("name", NONE) != NONE:  # a plug-in's data set
        return
    folder = name.removeprefix(HF).rstrip("/")
    if _has_tokenizer(folder):
        table["data"] = {**data, "tokenizer": folder}
        notice_anywhere(f"data.tokenizer = {folder!r}, the model's own: its folder has a {TOKENIZER}")
    else:
        notice_anywhere(
            f"model.name = {name!r}: its folder has no {TOKENIZER}, so text is read as bytes, which the weights of a "
            "trained model do not know; name a data.tokenizer"
        )


def _has_tokenizer(folder: str) -> bool:
    try:
        return (user_path(folder) / TOKENIZER).is_file()
    except (ValueError, OSError):  # what is wrong with the folder is reported where the model is read
        return False
