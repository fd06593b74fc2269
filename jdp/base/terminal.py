"""Output for a terminal: without control characters, in lines of its width; and output that ends no run.

A terminal is closed, the reader of a pipe exits, the disk of a log file is full. Then a write to stdout or stderr
fails, anywhere in the program: in a progress bar, a notice, a library. The stream itself catches the error, and leads
to /dev/null from then on: the program goes on.
"""

import contextlib
import io
import os
import re
import select
import sys
import textwrap
from collections.abc import Generator
from typing import Any, TextIO

_NUMBERS = {"stdout": 1, "stderr": 2}


class _Lasting(io.FileIO):
    """The file of a stream, which is /dev/null after the first write that fails."""

    def write(self, data: Any, /) -> int:
        """Write all of `data`; of a stream that does not block, wait for its reader."""
        left = memoryview(data).cast("B")
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                self._drop(error)
                break
            if written is None:
                select.select([], [self], [])
            left = left[written or 0 :]
        return len(data)

    def _drop(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        name = next(name for name, number in _NUMBERS.items() if number == self.fileno())
        with contextlib.suppress(OSError):
            os.write(2, f"jdp: {name} cannot be written ({error.strerror}): the run goes on without it\n".encode())


@contextlib.contextmanager
def lasting(name: str) -> Generator[None]:
    """Have writes to "stdout" or "stderr" never fail while in `with`; other streams, as of a notebook, stay."""
    stream: Any = getattr(sys, name)
    try:
        known = stream.fileno() == _NUMBERS[name]
    except (OSError, AttributeError):  # a stream in memory
        known = False
    if not known:
        yield
        return
    stream.flush()
    file = _Lasting(_NUMBERS[name], "w", closefd=False)
    buffered = file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file)  # as with `python -u`
    same = {what: getattr(stream, what) for what in ("encoding", "errors", "line_buffering", "write_through")}
    lasts = io.TextIOWrapper(buffered, **same)  # pyright: ignore[reportArgumentType]
    setattr(sys, name, lasts)
    try:
        yield
    finally:
        lasts.flush()
        setattr(sys, name, stream)


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
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    wrapper = textwrap.TextWrapper(max(width, 20), subsequent_indent="    ", expand_tabs=False)
    wrapper.replace_whitespace = wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(line)
