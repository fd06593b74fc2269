"""The help of a command, kept on disk: its imports take a quarter of a second of processor time, each time."""

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jdp.base.disk_cache import Cache, default_folder


def show(name: str) -> int:
    """Print a command's help: the kept one if jdp's files and the terminal are the same, else a new one."""
    cache = Cache(default_folder() / "help", limit_bytes=2**20, names=r"[0-9a-f]{64}\.txt", contents="")
    terminal = (shutil.get_terminal_size(), sys.stdout.isatty(), sys.stdout.encoding, os.environ.get("TERM"))
    key = Cache.key(name, sys.version, repr(terminal), *_stamps()) + ".txt"
    text = cache.load(key, lambda file: file.read().decode())
    if text is None:
        recorded = _Recorded(sys.stdout)
        with contextlib.redirect_stdout(recorded), contextlib.suppress(SystemExit):
            importlib.import_module(f"jdp.cli.{name}").run(["--help"])
        recorded.flush()
        text = recorded.kept.getvalue().decode(recorded.encoding)
        cache.store(key, lambda file: file.write(text.encode()))
    sys.stdout.write(text)
    return 0


class _Recorded(io.TextIOWrapper):
    """Keeps what is printed; it reports the terminal and the encoding of the stream that it replaces."""

    def __init__(self, stream: TextIO) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding=stream.encoding, errors=stream.errors, newline="")
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal


def _stamps() -> Iterator[str]:
    """Yield each file of jdp and tyro with its size and time: the help depends on them."""
    tyro = importlib.util.find_spec("tyro")
    folders = [Path(__file__).parents[1], *([Path(tyro.origin).parent] if tyro and tyro.origin else [])]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found = path.stat()
            yield f"{path} {found.st_size} {found.st_mtime_ns}"
