"""Pictures in tar files, as WebDataset writes them: a sample is KEY.jpg, and its class KEY.cls or KEY.json.

1. Read the headers of each file, and of each picture its place, label and content score. This index is kept in jdp's
   cache, by the file's path, size and time: a run that is started again reads no file.
2. A picture is then read at its place. So the order is that of all data, over all samples (jdp.data.order), not file by
   file through a buffer.

A file that was cut anywhere is refused, as the end of an archive is marked.
"""

import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jdp.base.disk_cache import Cache, default_folder
from jdp.base.shorten import cut
from jdp.base.user_path import check_regular
from jdp.data.held_out import ends_score
from jdp.data.images.decode import Pictures
from jdp.data.images.from_folders import PICTURE_SUFFIXES
from jdp.data.images.from_tables import LABEL_NAMES, Columns
from jdp.data.labels import labels_of
from jdp.data.sources.compressed import unreadable

TAR = ".tar"
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_BLOCK = 512  # bytes: of a header; contents are padded to it, and two of zeros end an archive (POSIX.1, pax)
_READERS = 16  # threads: a disk serves many reads at once
_VERSION = 1  # of the index


@dataclass(frozen=True, eq=False, kw_only=True)
class TarPictures(Pictures):
    """Pictures in tar files."""

    files: tuple[str, ...]  # the tar files
    firsts: tuple[int, ...]  # the first picture of each
    starts: NDArray[np.int64]  # int64 [pictures], the place of each in its file, in bytes
    sizes: NDArray[np.int64]  # int64 [pictures], in bytes
    scored: NDArray[np.float64]  # float64 [pictures], their scores

    def name_of(self, index: int, /) -> str:
        file, start = self._place(index)
        try:
            with Path(file).open("rb") as opened:
                header = _at(opened, start - _BLOCK, start)
            return f"{file}, {tarfile.TarInfo.frombuf(header, tarfile.ENCODING, 'surrogateescape').name}"
        except (OSError, tarfile.TarError):
            return f"{file}, byte {start}"

    def content(self, index: int, /) -> bytes:
        file, start = self._place(index)
        with Path(file).open("rb") as opened:
            return _at(opened, start, start + int(self.sizes[index]))

    def score(self, index: int, /) -> float:
        return float(self.scored[index])

    def _place(self, index: int) -> tuple[str, int]:
        return self.files[bisect_right(self.firsts, index) - 1], int(self.starts[index])


@dataclass(frozen=True, eq=False)
class _Index:
    """The pictures of one file: starts and sizes int64 [n], scores float64 [n], labels [n], integers or text."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    scores: NDArray[np.float64]
    labels: NDArray[Any]


def tar_pictures(
    files: Sequence[Path], name: str, columns: Columns, *, classes: tuple[str, ...] | None = None
) -> TarPictures:
    """Return the pictures of tar files."""
    if compressed := [file for file in files if file.name.endswith(COMPRESSED_TARS)]:
        raise ValueError(
            f"tar files must not be compressed, as pictures are read where they are; given {compressed[0]}: decompress "
            "it (pictures are compressed already)"
        )
    with ThreadPoolExecutor(_READERS) as readers:
        indices = list(readers.map(partial(_index, columns=columns), files))
    firsts = np.cumsum([0, *(len(index.starts) for index in indices)])
    if not firsts[-1]:
        raise ValueError(f"tar files must hold samples, as 0001.jpg and 0001.cls; given none in {name}: give some data")
    values = [value for index in indices for value in index.labels.tolist()]
    return TarPictures(
        name=name,
        files=tuple(map(str, files)),
        firsts=tuple(firsts[:-1].tolist()),
        starts=np.concatenate([index.starts for index in indices]),
        sizes=np.concatenate([index.sizes for index in indices]),
        labels=labels_of(np.array(values, object) if len(set(map(type, values))) > 1 else values, name, names=classes),
        scored=np.concatenate([index.scores for index in indices]),
    )


def _index(path: Path, columns: Columns) -> _Index:
    """Return the index of a file, from the cache if it is there."""
    try:
        check_regular(path)
        stat = path.stat()
        cache = Cache(
            default_folder() / "tar_index", 2**30, names=r"[0-9a-f]{64}\.npz", contents="indices of tar files"
        )
        facts = (_VERSION, str(path.resolve()), stat.st_size, stat.st_mtime_ns, columns)
        entry = f"{Cache.key(repr(facts))}.npz"
        if (kept := cache.load(entry, _read)) is not None:
            return kept
        index = _scan(path, stat.st_size, columns)
    except OSError as error:
        raise ValueError(unreadable(error, path)) from error
    cache.store(entry, lambda file: np.savez(file, **vars(index)))
    return index


def _read(file: BinaryIO) -> _Index:
    with np.load(file) as arrays:
        return _Index(**{key: arrays[key] for key in ("starts", "sizes", "scores", "labels")})


def _scan(path: Path, size: int, columns: Columns) -> _Index:
    with path.open("rb") as file:
        members = groupby(_members(file, path, size), key=lambda member: _key(member.name))
        found = [_sample(file, list(group), f"{key} in {path}", columns) for key, group in members]
    starts, sizes, scores, labels = zip(*found, strict=True) if found else ((), (), (), ())
    return _Index(
        np.array(starts, np.int64),
        np.array(sizes, np.int64),
        np.array(scores, np.float64),
        np.array([str(label) for label in labels] if any(isinstance(label, str) for label in labels) else labels),
    )


def _members(file: BinaryIO, path: Path, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the files in a tar file but hidden ones. Raises ValueError if it is incomplete."""
    refused, again = f"a tar file must be complete; given {path} of {size} bytes", "fetch or write it again"
    last = "its beginning"
    archive: Any
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                last, end = cut(member.name), member.offset_data + member.size
                if member.isfile() and end > size:
                    raise ValueError(f"{refused}, it breaks off in {last}, which ends at byte {end}; {again}")
                if member.isfile() and not Path(member.name).name.startswith((".", "__")):
                    yield member
                archive.members.clear()  # there may be many
            end = archive.offset
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{refused}, {error} after {last}; {again}") from error
    file.seek(end)
    rest = file.read(2**16)
    if len(rest) < _BLOCK:
        raise ValueError(f"{refused}, it breaks off after {last}, without its end mark; {again}")
    if any(rest):
        what = "no header" if any(rest[:_BLOCK]) else "other data follow its end mark: join tar files with tar -A"
        raise ValueError(f"{refused}, byte {end}, after {last}: {what}; {again}")


def _key(name: str) -> str:
    """Return a sample's key: all of a path up to the first dot of the file's name."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"


def _sample(
    file: BinaryIO, members: list[tarfile.TarInfo], name: str, columns: Columns
) -> tuple[int, int, float, int | str]:
    """Return the start, size, score and label of one sample. Raises ValueError if it lacks its picture or label."""
    endings = {member.name.rpartition("/")[2].partition(".")[2].lower(): member for member in members}
    pictures = [end for end in endings if f".{end}".endswith(PICTURE_SUFFIXES) and columns.image in (None, end)]
    if len(pictures) != 1:
        raise ValueError(
            f"a sample of a tar file must have one picture ({', '.join(PICTURE_SUFFIXES)}); given {name.lstrip('/')} "
            f'with {", ".join(endings)}: name the one that is meant, image = "jpg" (in an experiment file data.field), '
            "or write it again, with the files of a sample side by side"
        )
    picture = endings[pictures[0]]
    at = picture.offset_data
    score = ends_score(picture.size, lambda start, stop: _at(file, at + start, at + stop))
    texts = {end: _at(file, m.offset_data, m.offset_data + m.size) for end, m in endings.items() if end != pictures[0]}
    label = _label(texts, columns.label)
    if label is None:
        raise ValueError(
            f"a sample of a tar file must have a label, a whole number or a name in KEY.cls, or as "
            f'"{columns.label or LABEL_NAMES[0]}" in KEY.json; given {name.lstrip("/")} with {", ".join(endings)}: '
            "write it again, with the files of a sample side by side"
        )
    return at, picture.size, score, label


def _label(texts: dict[str, bytes], chosen: str | None) -> int | str | None:
    """Return a sample's label: of the ending or key `chosen`; by default of .cls, else of a usual key in .json."""
    ending = chosen if chosen in texts else "cls" if chosen is None else None
    if ending is not None and ending in texts:
        text = texts[ending].decode(errors="replace").strip()
        return (int(text) if text.removeprefix("-").isdecimal() else text) if text else None
    try:
        fields = json.loads(texts["json"])
        value = next(fields[key] for key in ([chosen] if chosen else LABEL_NAMES) if key in fields)
    except (KeyError, StopIteration, TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _at(file: BinaryIO, start: int, stop: int) -> bytes:
    """Return the bytes of a file from one place to another. Raises OSError if it is shorter."""
    content = os.pread(file.fileno(), stop - start, start)
    if len(content) < stop - start:
        raise OSError(f"it ends before byte {stop}")
    return content
