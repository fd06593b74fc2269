"""Data sets of the Hugging Face hub, or in its formats on a disk, as Arrow tables: one for each split, or a stream.

`datasets` keeps them as Arrow files in its cache, mapped into memory: nothing is read before it is needed. It runs no
code of a data set (scripts ended with its version 4). But a data set's card (README.md, or the JSON beside it) may name
any file of this disk, and `datasets` would read it. So files outside of the data set's folder are refused. A link in
the folder is followed.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jdp.base.notices import notice
from jdp.base.shorten import cut
from jdp.base.user_path import user_path
from jdp.data.sources.optional_packages import optional

T = TypeVar("T")

HF, STREAM = "hf:", "hf-stream:"
_ROWS_OF_SPLIT = re.compile(r"(?P<split>[^\[\]]*)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_STREAM_ROWS = 1024  # read at a time


@dataclass(frozen=True, eq=False)
class HubRows:
    """The rows of one split."""

    name: str  # of the data set, with its split
    identity: str  # distinguishes their content from others'
    size: int | None  # in bytes; None: not known before they are read
    tables: Iterable[Any]  # `pyarrow.Table`s, one after another; they can be read once


def hub_splits(source: str) -> dict[str, Any]:
    """Return split -> `pyarrow.Table`, mapped into memory."""
    return {split: _table(data) for split, data in _splits(source).items()}


def hub_rows(source: str) -> HubRows:
    """Return the rows of one split: of "hf:…", see `hub_splits`; or of "hf-stream:…", fetched as they are read.

    Nothing of a stream is kept on disk by `datasets`. Its order is that of its files. Of its SPLIT a range of rows can
    be read, "train[:100000]"; a percentage cannot, as their number is not known.
    """
    if source.startswith(STREAM):
        return _stream(source)
    splits = _splits(source)
    split = main_split(splits, source)
    table = _table(splits[split])
    return HubRows(f"{source} (split {split})", f"{source} {split} {splits[split]._fingerprint}", table.nbytes, [table])


def _splits(source: str) -> dict[str, Any]:
    datasets = optional("datasets", source)
    name, split = _name_and_split(source.removeprefix(HF))
    loaded = _reading(source, lambda: _load(datasets, name, split))
    splits = loaded if isinstance(loaded, dict) else {split or "train": loaded}
    return {str(name): data for name, data in splits.items()}


def _stream(source: str) -> HubRows:
    datasets = optional("datasets", source)
    name, given = _name_and_split(source.removeprefix(STREAM))
    match = _ROWS_OF_SPLIT.fullmatch(given or "")
    start, stop = (int(match[key]) if match and match[key] else None for key in ("start", "stop"))
    if match is None or (stop is not None and stop <= (start or 0)):
        raise ValueError(
            f"rows of a stream must be counted, as train[:100000]; given {given} in {source}: give a range of them"
        )
    builder = _reading(source, lambda: _builder(datasets, name))
    splits: Mapping[str, Any] = _reading(source, builder.as_streaming_dataset)
    by_name = {str(name): rows for name, rows in splits.items()}
    split = match["split"] or main_split(by_name, source)
    rows = _reading(source, lambda: _pick(by_name, split))
    rows = rows.skip(start) if start else rows
    rows = rows.take(stop - (start or 0)) if stop is not None else rows
    files = (builder.config.data_files or {}).get(split, ())
    # Of a file on the hub the address has its revision; of one on this disk its time is in the metadata.
    identity = f"{source} {builder.config_id} {[str(file) for file in files]} {getattr(files, 'origin_metadata', None)}"
    return HubRows(f"{source} (split {split})", identity, None, _tables(rows, source))


def _tables(rows: Any, source: str) -> Iterator[Any]:
    batches = _reading(source, lambda: rows.with_format("arrow").iter(batch_size=_STREAM_ROWS))
    while (table := _reading(source, lambda: next(batches, None))) is not None:
        yield table


def _reading(source: str, read: Callable[[], T]) -> T:
    """Return what `read` returns. Raises ValueError in place of its errors."""
    log, once = logging.getLogger("huggingface_hub.utils._http"), _SaidOnce()
    log.addFilter(once)
    try:
        return read()
    except OutsideError:
        raise
    except Exception as error:  # network, permissions, builders: each raises its own kinds
        words = cut(" ".join(str(error).split()).rstrip(".") or type(error).__name__, 400)
        raise ValueError(
            f"a Hugging Face data set must be readable; given {source}: {words}; fix its name or path, log in "
            "to the hub, or look at the network"
        ) from error
    finally:
        log.removeFilter(once)


class _SaidOnce(logging.Filter):
    """Of the lines that the hub's client writes while it tries again, for half a minute, leaves one in jdp's words."""

    def filter(self, record: logging.LogRecord) -> bool:
        words = record.getMessage()
        retries = words.startswith("Retrying in")
        if retries:
            notice("the Hugging Face hub does not answer; it is asked again for half a minute")
        return not retries and "thrown while requesting" not in words


def main_split(splits: Mapping[str, Any], source: str) -> str:
    """Return the split to train on: "train", else the only one. Raises ValueError for several without "train"."""
    if "train" not in splits and len(splits) > 1:
        raise ValueError(
            f"a data set must have the split train, or one only; given {', '.join(splits)} in {source}: "
            f"name the one that is meant, as {source}:{next(iter(splits))}"
        )
    return "train" if "train" in splits else next(iter(splits))


def _name_and_split(name_or_path: str) -> tuple[str, str | None]:
    """Split "NAME:SPLIT". A path that exists is a path, whatever is in its name."""
    if user_path(name_or_path).exists():
        return name_or_path, None
    name, _, split = name_or_path.partition(":")
    return name, split or None


def _load(datasets: Any, name: str, split: str | None) -> Any:
    """Return a data set, or a dict of them by split."""
    path = user_path(name)
    if (path / "dataset_dict.json").exists():
        for folder in json.loads((path / "dataset_dict.json").read_bytes())["splits"]:
            _check_files([str(path / folder / file) for file in _saved_files(path / folder)], path)
        return _pick(datasets.load_from_disk(str(path)), split)
    if (path / "dataset_info.json").exists() and (path / "state.json").exists():
        _check_files([str(path / file) for file in _saved_files(path)], path)
        return _pick({"train": datasets.load_from_disk(str(path))}, split)
    builder = _builder(datasets, name)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _builder(datasets: Any, name: str) -> Any:
    """Return the builder that `load_dataset` would use, after checking the files that it would read."""
    path = user_path(name)
    if path.is_file():
        folder, builder = path.parent, datasets.load_dataset_builder(str(path.parent), data_files=path.name)
    elif path.exists() or path.is_absolute():
        folder, builder = path, datasets.load_dataset_builder(str(path))
    else:
        owner_and_name, config = name.split("/")[:2], name.split("/")[2:]
        folder, builder = None, datasets.load_dataset_builder("/".join(owner_and_name), *config[:1])
    named: Mapping[str, Iterable[Any]] = builder.config.data_files or {}
    _check_files([str(file) for files in named.values() for file in files], folder)
    return builder


def _saved_files(folder: Path) -> list[str]:
    """Return the files that a data set names in a folder which `save_to_disk` wrote."""
    return [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]


class OutsideError(ValueError):
    """A data set's own card names a file outside of its folder."""


def _check_files(files: Iterable[str], folder: Path | None) -> None:
    """Check that the files which a data set names are in its folder."""
    roots = () if folder is None else (folder.absolute(), folder.resolve())
    for file in (file.rpartition("::")[2] for file in files):
        if "://" in file and not file.startswith("file://"):
            inside = folder is None
        else:
            path = Path(os.path.normpath(Path(file.removeprefix("file://")).absolute()))
            inside = any(path.is_relative_to(os.path.normpath(root)) for root in roots)
        if not inside:
            location = "on this disk" if folder is None else f"outside of the folder {folder}"
            raise OutsideError(
                f"a data set must name its own files; given {cut(file, 200)}, which is {location}: take it out of the "
                "card (README.md, or the JSON beside it), or name that file as a source of its own"
            )


def _pick(splits: dict[str, Any], split: str | None) -> Any:
    if split is not None and split not in splits:
        raise ValueError(f'unknown split "{split}", there are {", ".join(splits)}')
    return splits if split is None else splits[split]


def _table(data: Any) -> Any:
    # Rows that were selected or shuffled are a list of indices beside the table: made a table of their own here.
    plain = data.flatten_indices() if data._indices is not None else data
    return plain.data.table.replace_schema_metadata(plain.features.arrow_schema.metadata)
