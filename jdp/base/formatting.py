"""Numbers with units as text, in three digits; tables and long lists of names; numbers for JSON.

Also HTML tables for a notebook, and text for a terminal: without control characters, wrapped to its width.
"""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TextIO


def format_bytes(count: float) -> str:
    """Return bytes as text, in powers of 1024: "31.2 GiB", "640 KiB"."""
    return _scaled(count, ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")), f"{count:.0f} B")


def format_seconds(seconds: float) -> str:
    """Return seconds as text: "1.24 s", "87.3 ms", "40 µs"."""
    return _scaled(seconds, ((1.0, " s"), (1e-3, " ms")), f"{seconds * 1e6:.3g} µs")


def format_rate(per_second: float) -> str:
    """Return a number per second as text, in powers of 1000: 12345 -> "12.3k"."""
    return _scaled(per_second, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")), f"{per_second:.3g}")


def format_percent(fraction: float) -> str:
    """Return a fraction as per cent: "87 %"; near the ends "0.4 %" and "99.6 %", so that only 0 is "0 %"."""
    near_an_end = 0 < fraction < 0.0995 or 0.9905 < fraction < 1
    return f"{100 * fraction:.1f} %" if near_an_end else f"{100 * fraction:.0f} %"


def finite_or_none(value: Any) -> Any:
    """Return `value`, or None (JSON's null) for a float that is NaN or infinite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def align_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of text, each column as wide as its widest cell."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return names as a list that stays short: "a, b, c and 4 more"."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _scaled(value: float, units: tuple[tuple[float, str], ...], small: str) -> str:
    """Return `value` in the largest of `units` (size, name) that it reaches, in three digits; else `small`."""
    for unit, name in units:
        scaled = value / unit
        if abs(scaled) >= 0.9995:
            return f"{scaled:.0f}{name}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{name}"
    return small


def html_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return HTML without scripts: a title, and a table whose first row has the headings."""
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return f"<p>{escape(title)}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 without the tab and the line break; a terminal obeys most of them."""


def escaped(text: str) -> str:
    r"""Escape control characters, except tabs and line breaks, as Python does: "\x1b"."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def for_stream(text: str, stream: TextIO) -> str:
    """Return text for a stream such as sys.stderr: on a terminal `escaped`, and wrapped to the width between words."""
    if not stream.isatty():
        return text
    return wrapped(escaped(text), os.get_terminal_size(stream.fileno()).columns or 80)


def wrapped(text: str, width: int) -> str:
    """Wrap each line of a text between words; continuation lines are indented."""
    wrapper = textwrap.TextWrapper(max(width, 20), subsequent_indent="    ", expand_tabs=False)
    wrapper.replace_whitespace = wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(line if len(line) <= width else wrapper.fill(line) for line in text.split("\n"))
