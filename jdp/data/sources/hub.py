"""Rows that `datasets` reads: files (JSON, parquet, CSV, Arrow, pictures, WebDataset), and data sets of the hub.

`datasets` keeps them as Arrow files in its cache, mapped into memory: nothing is read before it is needed. A source is
one split: where a folder or a data set has several, one must be named, and files of no split beside them are refused.

It runs no code of a data set (scripts ended with its version 4). But a data set's card (README.md, or the JSON beside
it) may name any file of this disk, and `datasets` would read it. So files outside of the data set's folder are refused.
A link in the folder is followed.
"""

import glob
import importlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jdp.base.errors import UserError
from jdp.base.hub_source import BUILDERS, COMPRESSED, STREAM, HubSource
from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.user_path import check_regular, user_path
from jdp.data.sources.files import walk

T = TypeVar("T")

TRAIN = "train"
_SPLITS = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    TRAIN: ("train", "training"),
}
_WORD = re.compile(r"[^-._ 0-9]+")  # of a file's or a folder's name, as `datasets` looks for splits in them
_NO_SPLIT = ""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # what an imagefolder has beside its pictures
_ROWS_OF_SPLIT = re.compile(r"(?P<split>[^\[\]]*)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_STREAM_ROWS = 1024  # read at a time


@dataclass(frozen=True, eq=False)
class HubRows:
    """The rows of one split."""

    name: str  # of the data set, with its split
    identity: str  # distinguishes their content from others'
    size: int | None  # in bytes; None: not known before they are read
    tables: Iterable[Any]  # `pyarrow.Table`s, one after another; they can be read once
    columns: tuple[str, ...]


def hub_rows(source: str) -> HubRows:
    """Return the rows of one split, as the source names it; of "hf-stream:…" they are fetched as they are read.

    Nothing of a stream is kept on disk by `datasets`. Its order is that of its files. Of its SPLIT a range of rows can
    be read, "train[:100000]"; a percentage cannot, as their number is not known.
    """
    if source.startswith(STREAM):
        return _stream(source)
    split, data = hub_data(source)
    # Rows that were selected or shuffled are a list of indices beside the table: made a table of their own here.
    data = data.flatten_indices() if data._indices is not None else data
    table = data.data.table
    name = f"{source} (split {split})"
    return HubRows(name, f"{source} {split} {data._fingerprint}", table.nbytes, [table], tuple(table.column_names))


def hub_data(source: str) -> tuple[str, Any]:
    """Return the name of the split that a source names, and its rows, a `datasets.Dataset`."""
    datasets, given = optional("datasets", source), _parts(source)
    splits: dict[str, Any] = _reading(source, lambda: _load(datasets, given, source))
    split = given.split or _only_split(splits, source)
    return split, splits[split]


def _parts(source: str) -> HubSource:
    given = HubSource.of(source)
    assert given is not None, source
    return given


def _stream(source: str) -> HubRows:
    datasets, given = optional("datasets", source), _parts(source)
    match = _ROWS_OF_SPLIT.fullmatch(given.split or "")
    start, stop = (int(match[key]) if match and match[key] else None for key in ("start", "stop"))
    if match is None or (stop is not None and stop <= (start or 0)):
        raise UserError(
            f"rows of a stream must be counted, as train[:100000]; given {given.split} in {source}: give a range of "
            "them"
        )
    builder = _reading(source, lambda: _builder(datasets, given, source))
    splits: Mapping[str, Any] = _reading(source, builder.as_streaming_dataset)
    by_name = {str(name): rows for name, rows in splits.items()}
    split = match["split"] or _only_split(by_name, source)
    rows = _reading(source, lambda: _pick(by_name, split))
    rows = rows.skip(start) if start else rows
    rows = rows.take(stop - (start or 0)) if stop is not None else rows
    files = (builder.config.data_files or {}).get(split, ())
    # Of a file on the hub the address has its revision; of one on this disk its time is in the metadata.
    identity = f"{source} {builder.config_id} {[str(file) for file in files]} {getattr(files, 'origin_metadata', None)}"
    columns = _reading(source, lambda: rows.column_names or list(next(iter(rows.take(1)), {})))
    return HubRows(f"{source} (split {split})", identity, None, _tables(rows, source), tuple(columns))


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
    except _SourceError:
        raise
    except Exception as error:  # network, permissions, builders: each raises its own kinds
        cause = error.__cause__ or error
        words = cut(" ".join(str(cause).split()).rstrip(".") or type(cause).__name__, 400)
        raise UserError(
            f"rows must be readable by `datasets`; given {source}: {words}; fix its name or path, log in to the hub, "
            "or look at the network"
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


class _SourceError(UserError):
    """A source that jdp refuses, with the rule."""


def _only_split(splits: Mapping[str, Any], source: str) -> str:
    """Return the only split. Raises ValueError for several."""
    if len(splits) > 1:
        lines = ", ".join(f'"{source}:{name}"' for name in splits)
        raise _SourceError(
            f"a source is one split; given {source}, which has {', '.join(splits)}: write one of {lines}"
        )
    return next(iter(splits))


def _load(datasets: Any, given: HubSource, source: str) -> dict[str, Any]:
    """Return the splits of a data set by name; only the one that is given."""
    path = user_path(given.path) if "://" not in given.path else None
    if given.builder is None and path is not None and (path / "dataset_dict.json").exists():
        names = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        for folder in names:
            _check_files([str(path / folder / file) for file in _saved_files(path / folder)], path)
        loaded = {str(name): data for name, data in datasets.load_from_disk(str(path)).items()}
        return loaded if given.split is None else {given.split: _pick(loaded, given.split)}
    if given.builder is None and path is not None and (path / "state.json").exists():
        _check_files([str(path / file) for file in _saved_files(path)], path)
        return {given.split or TRAIN: datasets.load_from_disk(str(path))}
    builder = _builder(datasets, given, source)
    builder.download_and_prepare()
    if given.split is not None:
        return {given.split: builder.as_dataset(split=given.split)}
    return {str(name): data for name, data in builder.as_dataset().items()}


def _builder(datasets: Any, given: HubSource, source: str) -> Any:
    """Return the builder that `load_dataset` would use, after checking the files that it would read."""
    if given.builder is not None:
        files = _data_files(datasets, given, source)
        return datasets.load_dataset_builder(given.builder, data_files=files)
    path = user_path(given.path)
    if path.exists() or path.is_absolute():
        folder, builder = path, datasets.load_dataset_builder(str(path))
    else:
        owner_and_name, config = given.path.split("/")[:2], given.path.split("/")[2:]
        folder, builder = None, datasets.load_dataset_builder("/".join(owner_and_name), *config[:1])
    named: Mapping[str, Iterable[Any]] = builder.config.data_files or {}
    _check_files([str(file) for files in named.values() for file in files], folder)
    return builder


# Files of a builder.


def _data_files(datasets: Any, given: HubSource, source: str) -> Any:
    """Return the files of a builder as `datasets` takes them: those of one split, with size and time of each."""
    if "://" in given.path:
        return given.path
    path, builder = user_path(given.path), given.builder or ""
    by_split, base = defaultdict[str, list[str]](list), _fixed_part(path)
    for file in _found(path, builder):
        parts = Path(file).relative_to(base).parts  # a picture's own name is no split
        by_split[_split_of(parts[:-1] if builder == "imagefolder" else parts)].append(str(Path(file).absolute()))
    if not by_split:
        raise _SourceError(
            f"{builder} reads {', '.join(BUILDERS[builder])} files; given {source}, looked for at {path.absolute()}, "
            "where there are none: fix the path, or take another builder"
        )
    loose = by_split.pop(_NO_SPLIT, [])
    if loose and by_split:
        raise _SourceError(
            f"all files of a folder belong to a split by their names, or none does; given {source} with {len(loose)} "
            f"such as {loose[0]} beside {', '.join(by_split)}: name those that are meant by a folder or a glob"
        )
    splits = by_split or {TRAIN: loose}
    chosen = (given.split or "").partition("[")[0] or _only_split(splits, source)
    if chosen not in splits:
        raise _SourceError(f"{source} names no split of its files, which are {', '.join(splits)}: write one of these")
    module, files = datasets.data_files, splits[chosen]
    for file in files:
        check_regular(file)
    times = [(f"{stat.st_size} {stat.st_mtime_ns}",) for stat in map(os.stat, files)]
    return module.DataFilesDict({chosen: module.DataFilesList(files, times)})


def _fixed_part(path: Path) -> Path:
    """Return the folder that a path or glob begins with, below which names of files say their split."""
    if path.is_dir():
        return path
    magic = next((index for index, part in enumerate(path.parts) if glob.has_magic(part)), len(path.parts) - 1)
    return Path(*path.parts[:magic])


def _found(path: Path, builder: str) -> list[str]:
    """Return the files that a path leads to: a file, a glob, or a directory's of the builder, all the way down."""
    if path.is_dir():
        suffixes = BUILDERS[builder]
        ends = (*suffixes, *(suffix + packed for suffix in suffixes for packed in COMPRESSED))
        more = _METADATA if builder == "imagefolder" else ()
        files = walk(path)
        wanted = (folder + os.sep + name for folder, name in files if name.lower().endswith(ends) or name in more)
        return sorted(file for file in wanted if not Path(file).name.startswith("."))
    if path.is_file():
        return [str(path)]
    return sorted(filter(os.path.isfile, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - may be many


def _split_of(parts: Iterable[str]) -> str:
    """Return the split that a part of a path names, as train-00000.parquet and val/cat/1.jpg do; else ""."""
    for part in parts:
        words = {word.lower() for word in _WORD.findall(part)}
        for split, names in _SPLITS.items():
            if words & {*names}:
                return split
    return _NO_SPLIT


# Files of a data set's card.


def _saved_files(folder: Path) -> list[str]:
    """Return the files that a data set names in a folder which `save_to_disk` wrote."""
    return [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]


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
            raise _SourceError(
                f"a data set must name its own files; given {cut(file, 200)}, which is {location}: take it out of the "
                "card (README.md, or the JSON beside it), or name that file as a source of its own"
            )


def _pick(splits: dict[str, Any], split: str) -> Any:
    if split not in splits:
        raise UserError(f'unknown split "{split}", there are {", ".join(splits)}')
    return splits[split]


_LOOKS = {
    "ids": ("input_ids", "token_ids", "ids"),
    "weights": ("loss_mask", "loss_weights", "weights", "assistant_masks", "completion_mask"),
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
}
"""Key -> the usual names of such columns."""


def check_columns(name: str, columns: Sequence[str], read: Mapping[str, str]) -> None:
    """Raise ValueError for a column that is not there, and report those that look like ids or weights and are not read.

    Args:
        name: of the source.
        columns: that it has.
        read: key -> the column that is read.
    """
    for key, column in read.items():
        if column not in columns:
            shown = ", ".join(columns[:20]) + ", …" * (len(columns) > 20)
            raise UserError(f'{key} = "{column}" must be a column; given {name} with {shown}: {_fix(key, columns)}')
    _report_unread(name, columns, read)


def _fix(key: str, columns: Sequence[str]) -> str:
    for column in columns:
        if key == "field" and column in _LOOKS["ids"]:
            return f'write ids = "{column}" for token ids, or name a column of text'
        if column in ("messages", "conversations"):
            return "make ids of chats, by experiments/prepare/chats_to_ids.py, or name another column"
    return "name one of these"


def _report_unread(name: str, columns: Iterable[str], read: Mapping[str, str]) -> None:
    found = {column: key for key, names in _LOOKS.items() for column in columns if column in names}
    taken = {*read, *(("weights", "labels") if {"weights", "labels"} & {*read} else ())}  # these two exclude each other
    left = {column: key for column, key in found.items() if key not in taken}
    if "weights" in left.values():
        left = {column: key for column, key in left.items() if key != "labels"}
    if left and ("ids" in read or "ids" in left.values()):
        lines = ", ".join(f'{key} = "{column}"' for column, key in left.items())
        notice(f"{name}: {', '.join(left)} {'is' if len(left) == 1 else 'are'} not read; if meant, write {lines}")


def optional(package: str, needed_by: str, *, extra: str = "hf") -> Any:
    """Import the module `package` and return it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise UserError(
            f"{needed_by} needs the package {error.name}, which is not installed: pip install '.[{extra}]'"
        ) from error
