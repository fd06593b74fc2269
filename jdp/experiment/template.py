"""The text of a new experiment: the keys of one that jdp ships, each below what `jdp train --help` says of it.

The shipped one's note comes first: data and how to get it, hardware, cost, what to expect.
"""

import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from jdp.base.toml import toml_key, toml_value
from jdp.experiment.file import describe
from jdp.experiment.keys import Key, Schemas, table_keys
from jdp.experiment.schema.experiment import Experiment, model_table
from jdp.experiment.shipped import beside_clone, shipped

_WIDTH = 120
_SENTENCE = re.compile(r"(?<!\bal)\.(?=\s|$)")
_VALUES = {"int", "float", "text", "table"}
"""Words of a key's type that are no values to choose from."""


def template(start: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the text of an experiment with the keys of a shipped one, and its table.

    Args:
        start: name of the shipped experiment.
        name: of the new run.
    """
    text = shipped()[start].read_text(encoding="utf-8")
    table = beside_clone(tomllib.loads(text)) | {"name": name}
    head = f"# Made by `jdp new` from jdp's {start}. Every key, with its type and default: jdp train --help"
    note = text.partition("\n\n")[0].replace(f"experiments/{start}.toml", f"{name}.toml")
    return "\n".join([head, "", note, "", *_Commented(table).lines(table, ())]) + "\n", table


class _Commented:
    """Writes tables with comments.

    Args:
        root: the table of the whole file.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._schemas = Schemas(Experiment, {"model": model_table(root.get("model"))})
        self._described = {key.name: key for _, keys in reversed(describe()) for key in keys}  # a GPT's before a ViT's

    def lines(self, table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
        """Yield the lines of a table: its keys, then the tables in it."""
        keys = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
        if path and keys:
            yield ""
            yield from _comment(next((self._described[name] for name in self._described if _is_free(name, path)), None))
            yield f"[{'.'.join(map(toml_key, path))}]"
        for key, value in keys.items():
            described = self._key((*path, key))
            yield from _comment(described)
            choices = f"  # {described.type}" if described and _is_choice(described.type) else ""
            yield f"{toml_key(key)} = {toml_value(value)}{choices}"
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from self.lines(value, (*path, key))

    def _key(self, path: tuple[str, ...]) -> Key | None:
        """Return a key as `--help` shows it; None for a free one, such as an axis of [mesh]."""
        schema = self._schemas.at(path[:-1])
        of_table = {key.name: key for key in table_keys(schema)} if schema else {}
        return of_table.get(path[-1]) or self._described.get(".".join(path))


def _is_free(name: str, path: tuple[str, ...]) -> bool:
    """Return True if a key's name stands for all keys of the table at `path`: mesh.AXIS of [mesh]."""
    table, _, key = name.rpartition(".")
    return table == ".".join(path) and key.isupper()


def _is_choice(kind: str) -> bool:
    words = kind.split("|")
    return len(words) > 1 and " " not in kind and not _VALUES & {*words}


def _comment(key: Key | None) -> list[str]:
    """Return the first sentence about a key, in lines."""
    text = _SENTENCE.split(key.description, maxsplit=1)[0] if key else ""
    return textwrap.wrap(text[:1].upper() + text[1:], _WIDTH, initial_indent="# ", subsequent_indent="# ")
