"""How docstrings of jdp are read for the site: examples as code, and a line for each of several arguments."""

import re
from textwrap import dedent
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and not obj.is_alias:
            text = re.sub(r"^( *)>>> (?:.*\n?)(?:\1\S.*\n?)*", _fenced, obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^( +)(\w+(?:, \w+)+): (.*)$", _each, text, flags=re.M)


def _fenced(example: re.Match[str]) -> str:
    """Return an example as a block; indented by four, Markdown would show the fence as text."""
    return f"```pycon\n{dedent(example[0]).rstrip()}\n```\n"


def _each(line: re.Match[str]) -> str:
    return "\n".join(f"{line[1]}{name}: {line[3]}" for name in line[2].split(", "))
