"""Pages from Jinja2 templates: `page.html` is the skeleton, `parts.html` has tables and shared sections.

A page loads nothing: it contains its style, script and pictures, and its content security policy makes the browser
refuse anything else. It follows the reader's light or dark setting, and works without scripts.

Text is escaped, except `Markup`. Control characters, and characters that reverse the direction of text, are shown as
`\\x1b` and `\\u202e`, so a name cannot pass for another.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds

COLOURS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "orange": "#e69f00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "grey": "#7f7f7f",
    "pale": "#c0c0c0",
    "yellow": "#f0e442",
}
"""Okabe and Ito, "Color Universal Design" (2008): distinguishable with every common colour blindness."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def page(template: str, *, title: str, **values: Any) -> str:
    """Return a page as HTML text: a template that extends `page.html` has `sections`, with a block for each."""
    return templates().get_template(template).render(title=title, **values)


@functools.cache
def templates() -> Environment:
    """Return the templates of this package, with number formats as filters."""
    environment = Environment(
        loader=PackageLoader("jdp.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[[Any], str]] = {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "rate": format_rate,
        "percent": lambda share: "–" if share is None else format_percent(share),
        "number": format_number,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "without_roots": without_roots,
    }
    environment.filters |= filters
    environment.globals["colours"] = COLOURS  # pyright: ignore[reportArgumentType]
    return environment


def format_number(value: float | None) -> str:
    """Return a metric with four digits; "–" for None."""
    return "–" if value is None else f"{value:.4g}"


def visible(value: Any) -> Any:
    """Return text with invisible characters escaped as in Python; any other value unchanged."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], value)


def without_roots(text: str) -> str:
    """Return text with paths of Python files cut to begin at their package: "flax/nnx/nn/linear.py:7"."""
    return _roots(tuple(sys.path)).sub("", text)


@functools.cache
def _roots(path: tuple[str, ...]) -> re.Pattern[str]:
    """Match the folders of Python's import path at the start of a path, longest first."""
    folders = sorted((f"{Path(folder).absolute()}/" for folder in path), key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, folders))})(?=[\w.])")
