"""The bytes of a file, plain or compressed: `book.txt.gz` and `rows.jsonl.zst` are read as `book.txt`, `rows.jsonl`.

A few kilobytes can unpack to gigabytes. `check_growth` refuses what has more than 200 times the size of its file, as
no text does, once it exceeds 256 MiB.
"""

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jdp.base.formatting import format_bytes
from jdp.base.user_path import check_regular
from jdp.data.sources.optional_packages import optional

_COMPRESSED = (".gz", ".zst")
_PIECE = 2**18  # bytes that are read at a time
_ZSTD_PIECE = 2**12  # of zstandard, which makes up to 32,768 times as many of it, and returns them at once
_MOST_WINDOW = 2**31  # bytes; `zstd --long=31`, where the library's default stops at 2²⁷

MOST_GROWTH = 200
"""A file's content has at most so many times its bytes, or `ALWAYS_READ`."""
ALWAYS_READ = 2**28


def check_growth(content: int, path: Path) -> None:
    """Raise ValueError if so many bytes of content are out of all proportion to the file they come from."""
    if content > ALWAYS_READ and content > MOST_GROWTH * (size := path.stat().st_size):
        raise ValueError(
            f"a data file must unpack to at most {MOST_GROWTH} times its size, or {format_bytes(ALWAYS_READ)}; given "
            f"{path} of {format_bytes(size)}, which has {format_bytes(content)} or more: write it anew, uncompressed"
        )


def is_compressed(path: str | os.PathLike[str]) -> bool:
    """Return True if a file is compressed, by its name."""
    return os.fspath(path).endswith(_COMPRESSED)


def plain_name(path: str | os.PathLike[str]) -> str:
    """Return the file's name without the suffix of its compression."""
    name = Path(path).name
    return name.removesuffix(Path(name).suffix) if is_compressed(name) else name


def read_bytes(path: Path) -> bytes:
    """Return all of a file, decompressed if its name ends with .gz or .zst."""
    return b"".join(stream_bytes(path))


def stream_bytes(path: Path) -> Iterator[bytes]:
    """Yield a file piece by piece, decompressed if its name ends with .gz or .zst; raise ValueError if it is
    incomplete.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            if not is_compressed(path):
                yield from _pieces(file)
                return
            total = 0
            for piece in _decompressed(file, path):
                total += len(piece)
                check_growth(total, path)
                yield piece
    except (gzip.BadGzipFile, EOFError, zlib.error, struct.error) as error:
        raise ValueError(
            f"a compressed file must be complete; given {path}: {error}; fetch or write it again"
        ) from error
    except OSError as error:
        raise ValueError(unreadable(error, path)) from error


def unreadable(error: OSError, path: Path | None = None) -> str:
    """Return the message for a file or directory that the system refuses to read."""
    return (
        f"all of the data must be readable; given {path or error.filename}, {error.strerror or error}: "
        "fix its permissions, or leave it out"
    )


def _pieces(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if not os.fstat(file.fileno()).st_size:
        raise EOFError("the file is empty")
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as plain:
            yield from _pieces(plain)
    else:
        yield from _zstd_pieces(file, path)


def _zstd_pieces(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Decompress frame by frame: the package's own reader takes a frame that breaks off for the end."""
    zstandard = optional("zstandard", str(path))
    content = file.read(_ZSTD_PIECE)
    while content:
        frame = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj()
        while not frame.eof:
            if not content:
                raise EOFError("it ends in the middle of a frame")
            try:
                yield frame.decompress(content)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            content = frame.unused_data if frame.eof else file.read(_ZSTD_PIECE)
        content = content or file.read(_ZSTD_PIECE)
