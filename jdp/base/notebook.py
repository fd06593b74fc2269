"""Tables that a notebook shows in place of an object's `repr`."""

from collections.abc import Sequence
from html import escape


def html_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return HTML without scripts: a title, and a table whose first row has the headings."""
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)]
    return f"<p>{escape(title)}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
