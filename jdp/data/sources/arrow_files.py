"""Columns of parquet and Arrow files, as one `pyarrow.Table`; what is not whole is refused before it is used."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jdp.core.toml import cut
from jdp.core.user_path import check_regular
from jdp.data.sources.compressed import is_compressed, plain_name, read_bytes, unreadable
from jdp.data.sources.optional_packages import optional


def read_arrow(path: Path, choose: Callable[[Any], Sequence[str]]) -> Any:
    """The columns that `choose` picks from the file's schema. An Arrow file that is not compressed stays on the disk.

    Raises:
      ValueError: pyarrow is not installed; a file that cannot be read or is not whole; what `choose` raises.
    """
    source = _opened(path)
    parquet = plain_name(path).endswith(".parquet")
    try:
        file = _parquet(source, path) if parquet else _ipc(source, optional("pyarrow.ipc", str(path)))
        schema = file.schema_arrow if parquet else file.schema
        names = list(_names(schema, optional("pyarrow.types", str(path))))
    except Exception as error:  # a name that is no UTF-8 is not one of pyarrow's own exceptions
        raise _corrupt(path, error) from error
    chosen = list(dict.fromkeys(choose(schema)))
    if twice := next((name for name in chosen if names.count(name) > 1), None):
        raise ValueError(f'a table must have a column once, got "{cut(twice)}" {names.count(twice)} times in {path}')
    try:
        table = file.read(columns=chosen) if parquet else file.read_all().select(chosen)
        table.validate(full=True)  # offsets that lead out of the file would end the process, not raise
    except Exception as error:
        raise _corrupt(path, error) from error
    return table


def _opened(path: Path) -> Any:
    """Mapped into memory; decompressed, or empty, in memory."""
    pyarrow = optional("pyarrow", str(path))
    try:
        check_regular(path)
        if not is_compressed(path) and path.stat().st_size > 0:
            return pyarrow.memory_map(str(path))
    except OSError as error:
        raise unreadable(error, path) from error
    return pyarrow.BufferReader(read_bytes(path))


def _parquet(source: Any, path: Path) -> Any:
    return optional("pyarrow.parquet", str(path)).ParquetFile(source, page_checksum_verification=True)


def _ipc(source: Any, ipc: Any) -> Any:
    """The IPC format is a file, with a magic word and a footer, or a stream, as `datasets` writes it."""
    start = source.read_buffer(6).to_pybytes()
    source.seek(0)
    return ipc.open_file(source) if start == b"ARROW1" else ipc.open_stream(source)


def _names(fields: Iterable[Any], types: Any) -> Iterator[str]:
    """The columns' names; those of the fields inside of columns are read as well, as reading one can fail."""
    for field in fields:
        yield field.name
        if types.is_struct(field.type):
            list(_names(field.type, types))


def _corrupt(path: Path, error: Exception) -> ValueError:
    words = cut((str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__, 300)
    return ValueError(f"a data file must be whole, got {path}: {words}; fetch or write it again")
