"""JSON files beside weights. Keys are read by type: an error names file, key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jdp.base.user_path import check_regular
from jdp.checkpoint.errors import CheckpointError, write_error

_Value = TypeVar("_Value", bool, int, float)
_RULES = {bool: "true or false", int: "a whole number", float: "a finite number"}


@dataclass(frozen=True)
class Table:
    """The keys of a file, read by type; each method raises CheckpointError for another type."""

    file: Path  # for errors
    keys: Mapping[str, Any]  # the table
    place: str = ""  # of the table in the file, ending with a dot

    def value(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """Return a boolean, a whole number or (float) any number; without a default it is required."""
        value = self._or_default(key, default)
        # An int may exceed every float.
        fits = type(value) in (int, float) and -1e30 < value < 1e30 if kind is float else type(value) is kind
        if not fits:
            raise self.wrong(key, _RULES[kind], value)
        return kind(value)

    def choice(self, key: str, among: Mapping[str, Any], default: str | None = None) -> Any:
        value = self._or_default(key, default)
        if not isinstance(value, str) or value not in among:
            raise self.wrong(key, " or ".join(among), value)
        return among[value]

    def require(self, key: str, *allowed: object) -> None:
        """Raise CheckpointError unless the value is one of these; the first is the default."""
        value = self.keys.get(key, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.wrong(key, " or ".join(map(json.dumps, allowed)), value)

    def inner(self, *keys: str) -> Table:
        """Return the table at the first of these keys that has one, else an empty table."""
        for key in keys:
            value = self.keys.get(key)
            if isinstance(value, dict) and value:
                return Table(self.file, value, f"{self.place}{key}.")
            if value:
                raise self.wrong(key, "a table", value)
        return Table(self.file, {}, f"{self.place}{keys[0]}.")

    def _or_default(self, key: str, default: object) -> Any:
        value = self.keys.get(key)
        return default if value is None else value

    def wrong(self, key: str, rule: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {self.place}{key} must be {rule} for a model that jdp builds; given {shortened(value)}. "
            "Use such a model, or correct the file."
        )


def read_json(file: Path) -> Any:
    """Return the content of a JSON file; None if there is no such file."""
    try:
        if file.exists():
            check_regular(file)
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: it is not JSON ({str(error)[:100]}). Copy or download it again."
        ) from error


def write_json(file: Path, keys: Mapping[str, Any]) -> None:
    try:
        file.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise write_error(f"{file} was not written", error) from error


def shortened(value: object) -> str:
    """Return a value as JSON, cut to 100 characters."""
    given = json.dumps(value)
    return given if len(given) <= 100 else given[:100] + " …"
