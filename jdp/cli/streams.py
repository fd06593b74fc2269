"""Keep a run alive if stdout or stderr fails.

If a terminal is closed, the reader of a pipe exits, or the disk of a log file is full, a write to stdout or stderr
fails anywhere in the program: in a progress bar, a notice, a library. The stream then catches the error, continues on
/dev/null, and the program goes on.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Generator
from typing import Any

_NUMBERS = {"stdout": 1, "stderr": 2}


class _Lasting(io.FileIO):
    """The file of a stream; after the first failed write it is /dev/null."""

    def write(self, data: Any, /) -> int:
        """Write all of `data`; on a non-blocking stream, wait for its reader."""
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
    """Make writes to "stdout" or "stderr" never fail while in `with`; a notebook's streams are not changed."""
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
