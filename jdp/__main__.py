"""The process of `jdp`, and of `python -m jdp`."""

import os
import signal
import sys
import weakref
from types import FrameType
from typing import NoReturn

_LOSING = {"<frozen importlib._bootstrap>", "_xla_gc_callback", "__del__", weakref.__file__}
"""Functions, and files of functions: an import of C++ reports another error, and Python ignores errors of callbacks."""


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C outside of a run ends the process with one line."""
    signal.signal(signal.SIGINT, _interrupt)
    from jdp.cli.main import main as command

    code = command()
    if signal.getsignal(signal.SIGINT) == _leave:  # `_interrupt` was called
        _leave()
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end the process at once where it would be lost, and at a second Ctrl-C."""
    while frame is not None:
        if not _LOSING.isdisjoint((frame.f_code.co_name, frame.f_code.co_filename)):
            _leave()
        frame = frame.f_back
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(130)  # Python would wait for XLA's threads, and sometimes crash


if __name__ == "__main__":
    sys.exit(main())
