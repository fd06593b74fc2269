"""The bytes of a file, plain or compressed: `book.txt.gz` and `rows.jsonl.zst` are read as `book.txt`, `rows.jsonl`."""

import gzip
import os
import struct
import zlib
from pathlib import Path

from jdp.core.user_path import check_regular
from jdp.data.sources.optional_packages import optional

_COMPRESSED = (".gz", ".zst")
_MOST_WINDOW = 2**31  # bytes; `zstd --long=31`, where the library's default stops at 2²⁷


def is_compressed(path: str | os.PathLike[str]) -> bool:
    """Return True if a file is compressed, by its name."""
    return os.fspath(path).endswith(_COMPRESSED)


def plain_name(path: str | os.PathLike[str]) -> str:
    """Return the file's name without the suffix of its compression."""
    name = Path(path).name
    return name.removesuffix(Path(name).suffix) if is_compressed(name) else name


def read_bytes(path: Path) -> bytes:
    """Return all of a file, decompressed if its name says so.

    Raises ValueError: it cannot be read, or is not whole; or the package zstandard is not installed.
    """
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(unreadable(error, path)) from error
    if not is_compressed(path):
        return content
    try:
        return _decompress(content, path)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"a compressed file must be whole; given {path}: {error}; fetch or write it again") from error


def unreadable(error: OSError, path: Path | None = None) -> str:
    """Return the message for a file or directory that the system refuses to read."""
    return (
        f"all of the data must be readable; given {path or error.filename}, {error.strerror or error}: "
        "fix its permissions, or leave it out"
    )


def _decompress(content: bytes, path: Path) -> bytes:
    if not content:
        raise EOFError("the file is empty")
    if path.suffix == ".gz":
        return gzip.decompress(content)
    # Frame by frame: the package's own reader takes a frame that breaks off for the end.
    zstandard = optional("zstandard", str(path))
    frames: list[bytes] = []
    while content:
        frame = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj()
        try:
            frames.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not frame.eof:
            raise EOFError("it ends in the middle of a frame")
        content = frame.unused_data
    return b"".join(frames)
