"""Text for a terminal: without control characters, in lines of its width."""

import os
import re
import textwrap
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 without the tab and the line break; a terminal obeys most of them."""


def escaped(text: str) -> str:
    r"""Return text with control characters, other than tabs and line breaks, as Python writes them: "\x1b"."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def for_stream(text: str, stream: TextIO) -> str:
    """Return lines as a stream, such as sys.stderr, shows them: on a terminal `escaped` and wrapped to its width.

    Words longer than a line, such as paths, are left whole.
    """
    if not stream.isatty():
        return text
    return wrapped(escaped(text), os.get_terminal_size(stream.fileno()).columns or 80)


def wrapped(text: str, width: int) -> str:
    """Return each line of a text wrapped between words; what follows a break is indented."""
    wrapper = textwrap.TextWrapper(max(width, 20), subsequent_indent="    ", expand_tabs=False)
    wrapper.replace_whitespace = wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(line if len(line) <= width else wrapper.fill(line) for line in text.split("\n"))
