"""JSON files beside weights. Keys are read by type: an error names file, key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdp.base.user_path import check_regular
from jdp.checkpoint.errors import CheckpointError, write_error


@dataclass(frozen=True)
class Table:
    """The keys of a file, read by type; each method raises CheckpointError for another type."""

    file: Path  # for errors
    keys: Mapping[str, Any]  # the table
    place: str = ""  # of the table in the file, ending with a dot

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; without a default it is required."""
        value = self._or_default(key, default)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:  # an int may be past all floats
            raise self.wrong(key, "a finite number", value)
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number; without a default it is required."""
        return self._typed(key, default, int, "a whole number")

    def count_or_none(self, key: str, default: int | None) -> int | None:
        """Return a whole number, or None for null."""
        return None if self.keys.get(key, default) is None else self.count(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return self._typed(key, default, bool, "true or false")

    def _typed(self, key: str, default: object, kind: type, rule: str) -> Any:
        value = self._or_default(key, default)
        if type(value) is not kind:
            raise self.wrong(key, rule, value)
        return value

    def choice(self, key: str, among: Mapping[str, Any], default: str | None = None) -> Any:
        """Return the value of `among` for a word."""
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
        """Return the error for a value that breaks a rule."""
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
    """Write a JSON file."""
    try:
        file.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise write_error(f"{file} was not written", error) from error


def shortened(value: object) -> str:
    """Return a value as JSON, cut to 100 characters."""
    given = json.dumps(value)
    return given if len(given) <= 100 else given[:100] + " …"
