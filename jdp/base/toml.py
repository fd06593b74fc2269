"""Values and keys as TOML writes them, exactly."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it: text, a number, true or false, or an array or inline table of these."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic string, and JSON's
        case list() | tuple():
            return f"[{', '.join(map(toml_value, cast('list[Any]', value)))}]"
        case Mapping():
            return f"{{{', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)


def toml_key(key: str) -> str:
    """Return a key as TOML writes it: bare, or in quotes if it has characters that a bare key may not have."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
