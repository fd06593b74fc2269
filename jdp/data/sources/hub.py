"""Rows that `datasets` reads: files (JSON, parquet, CSV, Arrow, pictures, WebDataset), and data sets of the hub.

`datasets` keeps them as Arrow files in its cache, mapped into memory and read on demand. A source is one split: if a
folder or a data set has several, the source must name one; files of no split beside them are refused.

`datasets` runs no code of a data set (version 4 removed scripts). But a data set's card (README.md, or the JSON beside
it) may name any file of this disk, and `datasets` would read it. So files outside the data set's folder are refused.
"""

import glob
import importlib
import json
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
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # beside the pictures of an imagefolder
_ROWS_OF_SPLIT = re.compile(r"(?P<split>[^\[\]]*)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_STREAM_ROWS = 1024  # read at a time


@dataclass(frozen=True, eq=False)
class HubRows:
    name: str  # of the data set, with its split
    identity: str  # identifies the content
    size: int | None  # in bytes; None: unknown before reading
    tables: Iterable[Any]  # `pyarrow.Table`s in order, to read once
    columns: tuple[str, ...]


def hub_rows(source: str) -> HubRows:
    """Return the rows of the source's split; "hf-stream:…" fetches rows as they are read.

    `datasets` keeps nothing of a stream on disk. Its order is that of its files. Its SPLIT may be a range of rows,
    "train[:100000]", but not a percentage, because the number of rows is unknown.
    """
    if source.startswith(STREAM):
        return _stream(source)
    split, data = hub_data(source)
    # Selected or shuffled rows are a list of indices beside the table: copy them to a table.
    data = data.flatten_indices() if data._indices is not None else data
    table = data.data.table
    name = f"{source} (split {split})"
    return HubRows(name, f"{source} {split} {data._fingerprint}", table.nbytes, [table], tuple(table.column_names))


def hub_data(source: str) -> tuple[str, Any]:
    """Return the name of a source's split, and its rows, a `datasets.Dataset`."""
    datasets, given = optional("datasets", source), HubSource.of(source)
    assert given is not None, source
    return _reading(source, lambda: _load(datasets, given, source))


def _stream(source: str) -> HubRows:
    datasets, given = optional("datasets", source), HubSource.of(source)
    assert given is not None, source
    match = _ROWS_OF_SPLIT.fullmatch(given.split or "")
    start, stop = (int(match[key]) if match and match[key] else None for key in ("start", "stop"))
    if match is None or (stop is not None and stop <= (start or 0)):
        raise UserError(
            f"a range of a stream must count rows, such as train[:100000]; given {given.split} in {source}: count rows"
        )
    builder = _reading(source, lambda: _builder(datasets, given, source))
    splits: Mapping[str, Any] = _reading(source, builder.as_streaming_dataset)
    by_name = {str(name): rows for name, rows in splits.items()}
    split = _chosen(by_name, match["split"], source)
    rows = by_name[split]
    rows = rows.skip(start) if start else rows
    rows = rows.take(stop - (start or 0)) if stop is not None else rows
    files = (builder.config.data_files or {}).get(split, ())
    # A hub file's address has its revision; a local file's metadata has its time.
    identity = f"{source} {builder.config_id} {[str(file) for file in files]} {getattr(files, 'origin_metadata', None)}"
    columns = _reading(source, lambda: rows.column_names or list(next(iter(rows.take(1)), {})))
    return HubRows(f"{source} (split {split})", identity, None, _tables(rows, source), tuple(columns))


def _tables(rows: Any, source: str) -> Iterator[Any]:
    batches = _reading(source, lambda: rows.with_format("arrow").iter(batch_size=_STREAM_ROWS))
    while (table := _reading(source, lambda: next(batches, None))) is not None:
        yield table


def _reading(source: str, read: Callable[[], T]) -> T:
    """Call `read`, and raise UserError in place of the errors of `datasets`."""
    try:
        return read()
    except UserError:
        raise
    except Exception as error:  # network, permissions, builders: each raises its own kinds
        cause = error.__cause__ or error
        words = cut(" ".join(str(cause).split()).rstrip(".") or type(cause).__name__, 400)
        parts = HubSource.of(source)
        is_path = parts is not None and parts.is_path
        fix = "fix its name or its content" if is_path else "fix its name, log in to the hub, or check the network"
        raise UserError(f"rows must be readable by `datasets`; given {source}: {words}; {fix}") from error


def _chosen(splits: Mapping[str, Any], split: str | None, source: str) -> str:
    """Return the split of this name, or the only split."""
    if not split and len(splits) > 1:
        lines = ", ".join(f'"{source}:{name}"' for name in splits)
        raise UserError(f"a source is one split; {source} has {', '.join(splits)}: write one of {lines}")
    if split and split not in splits:
        raise UserError(f"{source} must name an existing split, one of {', '.join(splits)}: use one of these")
    return split or next(iter(splits))


def _load(datasets: Any, given: HubSource, source: str) -> tuple[str, Any]:
    """Return the name and the rows of the given split of a data set, or of its only split."""
    folder = None if given.builder or "://" in given.path else user_path(given.path)
    if folder is not None and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
        parts = [folder]
        if (listed := folder / "dataset_dict.json").exists():
            parts = [folder / name for name in json.loads(listed.read_bytes())["splits"]]
        for part in parts:
            named = json.loads((part / "state.json").read_bytes())["_data_files"]
            check_files((str(part / entry["filename"]) for entry in named), folder)
        loaded = datasets.load_from_disk(str(folder))
        splits: dict[str, Any] = loaded if isinstance(loaded, dict) else {given.split or TRAIN: loaded}
    else:
        builder = _builder(datasets, given, source)
        builder.download_and_prepare()
        if given.split is not None:
            return given.split, builder.as_dataset(split=given.split)
        splits = {str(name): data for name, data in builder.as_dataset().items()}
    split = _chosen(splits, given.split, source)
    return split, splits[split]


def _builder(datasets: Any, given: HubSource, source: str) -> Any:
    """Return `load_dataset`'s builder, after checking the files that it would read."""
    if given.builder is not None:
        files = given.path if "://" in given.path else _data_files(datasets, given, given.builder, source)
        return datasets.load_dataset_builder(given.builder, data_files=files)
    path = user_path(given.path)
    if path.exists() or path.is_absolute():
        folder, builder = path, datasets.load_dataset_builder(str(path))
    else:
        owner_and_name, config = given.path.split("/")[:2], given.path.split("/")[2:]
        folder, builder = None, datasets.load_dataset_builder("/".join(owner_and_name), *config[:1])
    check_files((str(file) for files in (builder.config.data_files or {}).values() for file in files), folder)
    return builder


def check_files(files: Iterable[str], folder: Path | None) -> None:
    """Check that the files that a data set names are in its folder, or, on the hub (None), not on this disk."""
    for file in (file.rpartition("::")[2] for file in files):
        is_remote = "://" in file and not file.startswith("file://")
        if folder is None:
            is_own = is_remote
        else:
            path = Path(os.path.normpath(Path(file.removeprefix("file://")).absolute()))
            roots = (folder.absolute(), folder.resolve())
            is_own = not is_remote and any(path.is_relative_to(os.path.normpath(root)) for root in roots)
        if not is_own:
            place = "on this disk" if folder is None else f"outside of the folder {folder}"
            raise UserError(
                f"a data set must name its own files; given {cut(file, 200)}, which is {place}: name that file as a "
                "separate source"
            )


# Files of a builder.


def _data_files(datasets: Any, given: HubSource, builder: str, source: str) -> Any:
    """Return a builder's files for `datasets`: those of one split, with size and time of each."""
    path, by_split = user_path(given.path), defaultdict[str, list[str]](list)
    # Below this folder, names of files and folders name their split.
    base = path if path.is_dir() else next(folder for folder in path.parents if not glob.has_magic(str(folder)))
    for file in _files(path, builder):
        parts = Path(file).relative_to(base).parts  # a picture's own name is not a split
        by_split[_split_of(parts[:-1] if builder == "imagefolder" else parts)].append(str(Path(file).absolute()))
    if not by_split:
        raise UserError(
            f"{builder} reads {', '.join(BUILDERS[builder])} files; given {source}, looked for at {path.absolute()}, "
            "where there are none: fix the path, or use another builder"
        )
    loose = by_split.pop(_NO_SPLIT, [])
    if loose and by_split:
        raise UserError(
            f"either all file names in a folder name a split, or none does; given {source} with {len(loose)} "
            f"such as {loose[0]} beside {', '.join(by_split)}: select files by a folder or a glob"
        )
    splits = by_split or {TRAIN: loose}
    chosen = _chosen(splits, (given.split or "").partition("[")[0], source)
    files = splits[chosen]
    for file in files:
        check_regular(file)
    times = [(f"{stat.st_size} {stat.st_mtime_ns}",) for stat in map(os.stat, files)]
    return datasets.data_files.DataFilesDict({chosen: datasets.data_files.DataFilesList(files, times)})


def _files(path: Path, builder: str) -> list[str]:
    """Return the files of a path: a file, a glob, or a directory with files of the builder, at any depth."""
    if path.is_dir():
        suffixes = BUILDERS[builder]
        ends = (*suffixes, *(suffix + packed for suffix in suffixes for packed in COMPRESSED))
        extra = _METADATA if builder == "imagefolder" else ()
        return sorted(
            folder + os.sep + name
            for folder, name in walk(path)
            if (name.lower().endswith(ends) or name in extra) and not name.startswith(".")
        )
    return [str(path)] if path.is_file() else sorted(filter(os.path.isfile, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - may be many


def _split_of(parts: Iterable[str]) -> str:
    """Return the split that a part of a path names, as in train-00000.parquet and val/cat/1.jpg; else ""."""
    for part in parts:
        words = {word.lower() for word in _WORD.findall(part)}
        for split, names in _SPLITS.items():
            if words & {*names}:
                return split
    return _NO_SPLIT


_LOOKS = {
    "ids": ("input_ids", "token_ids", "ids"),
    "weights": ("loss_mask", "loss_weights", "weights", "assistant_masks", "completion_mask"),
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
}
"""Key -> usual names of the column."""


def check_columns(name: str, columns: Sequence[str], read: Mapping[str, str]) -> None:
    """Raise ValueError for a missing column of `read` (by key); report unread ones that look like ids or weights."""
    for key, column in read.items():
        if column not in columns:
            shown = ", ".join(columns[:20]) + ", …" * (len(columns) > 20)
            fix = "name one of these"
            if ids := [column for column in columns if key == "field" and column in _LOOKS["ids"]]:
                fix = f'write ids = "{ids[0]}" for token ids, or name a column of text'
            elif {"messages", "conversations"} & {*columns}:
                fix = "convert chats to ids with experiments/prepare/chats_to_ids.py, or name another column"
            raise UserError(f'{key} = "{column}" must be a column; given {name} with {shown}: {fix}')
    unread = {key: column for key, names in _LOOKS.items() for column in columns if column in names and key not in read}
    if {"weights", "labels"} & read.keys() or "weights" in unread:  # labels say the same
        unread.pop("labels", None)
    if "labels" in read:
        unread.pop("weights", None)
    if unread and ("ids" in read or "ids" in unread):
        lines = ", ".join(f'{key} = "{column}"' for key, column in unread.items())
        is_not = "is not" if len(unread) == 1 else "are not"
        notice(f"{name}: {', '.join(unread.values())} {is_not} read; to read, write {lines}")


def optional(package: str, needed_by: str, *, extra: str = "hf") -> Any:
    """Import a package. Raises UserError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise UserError(
            f"{needed_by} needs the package {error.name}, which is not installed: pip install '.[{extra}]'"
        ) from error
