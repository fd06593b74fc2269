"""What a source names: files on disk, and rows that `datasets` reads from files or from data sets of the hub.

`datasets` keeps them as Arrow files in its cache, mapped into memory and read on demand. A source is one split: if a
folder or a data set has several, the source must name one; files of no split beside them are refused.

`datasets` runs no code of a data set (version 4 removed scripts). But a data set's card (README.md, or the JSON beside
it) may name any file of this disk, and `datasets` would read it. So files outside the data set's folder are refused.
"""

import contextlib
import importlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.user_path import (
    BUILDERS,
    COMPRESSED,
    HF,
    STREAM,
    HubSource,
    builder_of,
    check_regular,
    matching,
    user_path,
)

PathLike = str | os.PathLike[str]

_SPLITS = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    "train": ("train", "training"),
}
_WORD = re.compile(r"[^-._ 0-9]+")  # of a file's or a folder's name, as `datasets` looks for splits in them
_ROWS_OF_SPLIT = re.compile(r"(?P<split>[^\[\]]*)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_ROWS = 1024  # read at a time


def walk(directory: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield every file that is not hidden, as text: a `Path` takes ten times the memory."""
    for folder, folders, names in os.walk(directory, onerror=refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in leave_out]
        yield from (folder + os.sep + name for name in names if not name.startswith("."))


def refuse_unreadable(error: OSError, path: PathLike | None = None) -> NoReturn:
    given = f"{path or error.filename}, {error.strerror or error}"
    raise UserError(f"all of the data must be readable; given {given}: fix its permissions, or leave it out") from error


def read_by_datasets(path: Path, file: PathLike | None = None) -> str:
    """Return the end of an error: how to write a path that jdp does not read itself; `file` is one of its files."""
    if builder := builder_of(Path(file or path).name):
        return f'write "{HF}{builder}:{path}", which `datasets` reads'
    some = ", ".join(f'"{HF}{name}:{path}"' for name in BUILDERS)
    return f"convert (or decompress) it, or write {some}: `datasets` reads these"


@dataclass(frozen=True, eq=False)
class HubRows:
    name: str  # of the data set, with its split
    identity: str  # identifies the content
    size: int | None  # in bytes; None: unknown before reading
    batches: Iterable[Any]  # `pyarrow.RecordBatch`es in order, to read once
    columns: tuple[str, ...]


def hub_rows(source: str) -> HubRows:
    """Return the rows of the source's split; "hf-stream:…" fetches rows as they are read, in the order of its files."""
    if source.startswith(STREAM):
        return _stream(source)
    split, data = hub_data(source)
    table = data.data.table
    name, columns = f"{source} (split {split})", tuple(table.column_names)
    return HubRows(name, f"{source} {split} {data._fingerprint}", table.nbytes, table.to_reader(_ROWS), columns)


def hub_data(source: str) -> tuple[str, Any]:
    """Return the name of a source's split, the given or the only one, and its rows, a `datasets.Dataset`."""
    datasets, given = _opened(source)
    folder = None if given.builder or "://" in given.path else user_path(given.path)
    with _reading(source):
        if folder is not None and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            parts = [folder]
            if (listed := folder / "dataset_dict.json").exists():
                parts = [folder / name for name in json.loads(listed.read_bytes())["splits"]]
            for part in parts:
                named = json.loads((part / "state.json").read_bytes())["_data_files"]
                check_files((str(part / entry["filename"]) for entry in named), folder)
            loaded = datasets.load_from_disk(str(folder))
            splits: dict[str, Any] = loaded if isinstance(loaded, dict) else {given.split or "train": loaded}
        else:
            builder = _builder(datasets, given, source)
            builder.download_and_prepare()
            if given.split is not None:
                return given.split, builder.as_dataset(split=given.split)
            splits = builder.as_dataset()
        split = _chosen(splits, given.split, source)
        return split, splits[split]


def _stream(source: str) -> HubRows:
    datasets, given = _opened(source)
    match = _ROWS_OF_SPLIT.fullmatch(given.split or "")
    start, stop = (int(match[key]) if match and match[key] else None for key in ("start", "stop"))
    if match is None or (stop is not None and stop <= (start or 0)):
        raise UserError(f"a range of a stream must count rows, such as train[:1000]; given {source}: count rows")
    with _reading(source):
        builder = _builder(datasets, given, source)
        splits: dict[str, Any] = builder.as_streaming_dataset()
        split = _chosen(splits, match["split"], source)
        rows = splits[split]
        rows = rows.skip(start) if start else rows
        rows = rows.take(stop - (start or 0)) if stop is not None else rows
        columns = rows.column_names or list(next(iter(rows.take(1)), {}))
    files = (builder.config.data_files or {}).get(split, ())
    # A hub file's address has its revision; a local file's metadata has its time.
    identity = f"{source} {builder.config_id} {[str(file) for file in files]} {getattr(files, 'origin_metadata', None)}"
    return HubRows(f"{source} (split {split})", identity, None, _tables(rows, source), tuple(columns))


def _tables(rows: Any, source: str) -> Iterator[Any]:
    with _reading(source):
        for table in rows.with_format("arrow").iter(batch_size=_ROWS):
            yield from table.to_batches()


def _opened(source: str) -> tuple[Any, HubSource]:
    given = HubSource.of(source)
    assert given is not None, source
    return optional("datasets", source), given


@contextlib.contextmanager
def _reading(source: str) -> Generator[None]:
    """Raise UserError in place of the errors of `datasets`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # network, permissions, builders: each raises its own kinds
        cause = error.__cause__ or error
        words = cut(" ".join(str(cause).split()).rstrip(".") or type(cause).__name__, 400)
        fix = "fix its name or its content; for data of the hub, log in or check the network"
        raise UserError(f"rows must be readable by `datasets`; given {source}: {words}; {fix}") from error


def _chosen(splits: Mapping[str, Any], split: str | None, source: str) -> str:
    """Return the split of this name, or the only split."""
    if not split and len(splits) == 1:
        return next(iter(splits))
    if split in splits:
        return str(split)
    example = f'end it with one, such as ":{next(iter(splits))}"'
    raise UserError(f"a source must be one of its splits, {', '.join(splits)}; given {source}: {example}")


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
            given = f"{cut(file, 200)}, which is {place}"
            raise UserError(f"a data set must name its own files; given {given}: name that file as a separate source")


def _data_files(datasets: Any, given: HubSource, builder: str, source: str) -> Any:
    """Return a builder's files for `datasets`: those of one split, with size and time of each."""
    path, by_split = user_path(given.path), defaultdict[str, list[str]](list)
    # Below this folder, names of files and folders name their split.
    base = path if path.is_dir() else next(folder for folder in path.parents if folder.exists())
    for file in _files(path, builder):
        parts = Path(file).relative_to(base).parts  # a picture's own name is not a split
        by_split[_split_of(parts[:-1] if builder == "imagefolder" else parts)].append(str(Path(file).absolute()))
    if not by_split:
        raise UserError(
            f"{builder} reads {', '.join(BUILDERS[builder])} files; given {source}, looked for at {path.absolute()}, "
            "where there are none: fix the path, or use another builder"
        )
    loose = by_split.pop("", [])
    if loose and by_split:
        raise UserError(
            f"either all file names in a folder name a split, or none does; given {source} with {len(loose)} "
            f"such as {loose[0]} beside {', '.join(by_split)}: select files by a folder or a glob"
        )
    splits = by_split or {"train": loose}
    chosen = _chosen(splits, (given.split or "").partition("[")[0], source)
    files = splits[chosen]
    for file in files:
        check_regular(file)
    times = [(f"{stat.st_size} {stat.st_mtime_ns}",) for stat in map(os.stat, files)]
    return datasets.data_files.DataFilesDict({chosen: datasets.data_files.DataFilesList(files, times)})


def _files(path: Path, builder: str) -> list[str]:
    """Return the files of a path: a file, a glob, or a directory with files of the builder, at any depth."""
    if path.is_dir():
        ends = tuple(suffix + packed for suffix in BUILDERS[builder] for packed in ("", *COMPRESSED))
        if builder == "imagefolder":
            ends += tuple(os.sep + name for name in ("metadata.csv", "metadata.jsonl", "metadata.parquet"))
        return sorted(file for file in walk(path) if file.lower().endswith(ends))
    return matching(path)


def _split_of(parts: Iterable[str]) -> str:
    """Return the split that a part of a path names, as in train-00000.parquet and val/cat/1.jpg; else ""."""
    for part in parts:
        words = {word.lower() for word in _WORD.findall(part)}
        for split, names in _SPLITS.items():
            if words & {*names}:
                return split
    return ""


_USUAL_NAMES = {
    "ids": ("input_ids", "token_ids", "ids"),
    "weights": ("loss_mask", "loss_weights", "weights", "assistant_masks", "completion_mask"),
    "labels": ("labels",),
    "attention_mask": ("attention_mask",),
}
"""Of columns of token ids, and of the columns beside them, by key."""


def check_columns(name: str, columns: Sequence[str], read: Mapping[str, str]) -> None:
    """Raise ValueError for a missing column of `read` (by key); report unread ones that look like ids or weights."""
    for key, column in read.items():
        if column not in columns:
            fix = "name one of these"
            if ids := [column for column in columns if key == "field" and column in _USUAL_NAMES["ids"]]:
                fix = f'write ids = "{ids[0]}" for token ids, or name a column of text'
            elif {"messages", "conversations"} & {*columns}:
                fix = "convert chats to ids with experiments/prepare/chats_to_ids.py, or name another column"
            shown = cut(", ".join(columns), 400)
            raise UserError(f'{key} = "{column}" must be a column; given {name} with {shown}: {fix}')
    usual = {key: [name for name in names if name in columns] for key, names in _USUAL_NAMES.items()}
    unread = [column for names in usual.values() for column in names if column not in read.values()]
    if unread and ("ids" in read or usual["ids"]):
        wanted = {key: names[0] for key, names in usual.items() if names and key not in read}
        if "weights" in read or "weights" in wanted:  # one excludes the other
            wanted.pop("labels", None)
        if "labels" in read:
            wanted.pop("weights", None)
        lines = ", ".join(f'{key} = "{column}"' for key, column in wanted.items())
        fix = f"; to read them, write {lines}" if lines else ""
        notice(f"{name}: columns that are not read: {', '.join(unread)}{fix}")


def optional(package: str, needed_by: str, *, extra: str = "hf") -> Any:
    """Import a package. Raises UserError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        words = f"{needed_by} needs the package {error.name}, which is not installed: pip install '.[{extra}]'"
        raise UserError(words) from error
