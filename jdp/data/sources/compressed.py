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
    return os.fspath(path).endswith(_COMPRESSED)


def plain_name(path: str | os.PathLike[str]) -> str:
    """The file's name without what says how it is compressed."""
    name = Path(path).name
    return name.removesuffix(Path(name).suffix) if is_compressed(name) else name


def read_bytes(path: Path) -> bytes:
    """All of a file, decompressed where its name says so.

    Raises:
      ValueError: it cannot be read, or is not whole; names it.
    """
    try:
        check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(error, path) from error
    if not is_compressed(path):
        return content
    try:
        if not content:
            raise EOFError("the file is empty")
        return gzip.decompress(content) if path.suffix == ".gz" else _from_zstandard(content, path)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(f"a compressed file must be whole, got {path}: {error}; fetch or write it again") from error


def unreadable(error: OSError, path: Path | None = None) -> ValueError:
    """What to raise for a file or directory that the system refuses."""
    return ValueError(
        f"all of the data must be readable, got {path or error.filename}, {error.strerror or error}: "
        "mend its permissions, or leave it out"
    )


def _from_zstandard(content: bytes, path: Path) -> bytes:
    """All frames, one after another: the package's own reader takes a frame that breaks off for the end."""
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
