"""A model of Hugging Face's, "hf:FOLDER", reads text by the tokenizer of its folder, unless the file names another."""

from __future__ import annotations

from typing import Any

from jdp.base.notices import notice_anywhere
from jdp.experiment.schema.fields import NONE
from jdp.experiment.schema.model import HF

TOKENIZER = "tokenizer.json"


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
    from jdp.data.sources.in_bucket import local_path  # late: `--help` needs none of it

    try:
        return (local_path(folder, only=lambda file: file == TOKENIZER) / TOKENIZER).is_file()
    except (ValueError, OSError):  # what is wrong with the folder is reported where the model is read
        return False
