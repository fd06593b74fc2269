"""Arrays of a checkpoint, read into the memory in which they stay.

Nearly all the time of a restore goes into memory that is touched for the first time. So the ranges of each shard are
read once, into an array of NumPy's: large ones lie on large pages, and a CPU device takes them over without a copy.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.checkpoint.format.chunk_table import Chunks, Range

_AT_ONCE = 2**30
"""Bytes that a process reads at once; one array may be larger."""
_PIECE = 2**24
"""Bytes of one call that reads straight into an array."""
_COPIED = 2**22
"""Bytes of one call whose rows are copied from: little enough that the memory is used again and again."""
_ALIGNED = 64
"""Arrays that begin at a multiple of this many bytes are not copied by a CPU device."""
_THREADS = 4
_Box = tuple[tuple[int, int], ...]
"""Of each dimension the first index, and the one after the last."""


@dataclass(frozen=True)
class _Piece:
    """A range of bytes to read, and the part of an array that it fills.

    Attributes:
        found: the range.
        rows: the shape of its elements; None: they are those of `onto`, in order.
        box: where `onto` begins and ends in `rows`.
        onto: the elements to fill, a view of an array.
    """

    found: Range
    rows: tuple[int, ...] | None
    box: _Box
    onto: np.ndarray


def fits(chunks: Chunks | None, leaf: Any) -> bool:
    """Return True if a stored array is read here onto a leaf: it has the leaf's elements, as plain bytes."""
    if chunks is None or (chunks.shape, chunks.dtype) != (tuple(leaf.shape), np.dtype(leaf.dtype)):
        return False
    size = math.prod(chunks.chunk) * chunks.dtype.itemsize
    return all(found.size == size for found in chunks.ranges.values())


def read_arrays(arrays: Path, stored: Mapping[str, Chunks], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read stored arrays onto the shardings of these leaves, by path; onto a NumPy array, as one."""
    read, begun, held = dict[str, Any](), deque[tuple[str, Any, dict[_Box, np.ndarray], list[Future[None]]]](), 0

    def finish() -> int:
        path, leaf, parts, filled = begun.popleft()
        for each in filled:
            each.result()
        read[path] = _array(leaf, parts)
        return _bytes(parts)

    with ExitStack() as stack, ThreadPoolExecutor(_THREADS) as pool:
        files = _Files(arrays, stack)
        for path, leaf in wanted.items():
            parts = _memory(leaf)
            while begun and held + _bytes(parts) > _AT_ONCE:
                held -= finish()
            filled = [pool.submit(_fill, files[piece.found.file], piece) for piece in _pieces(stored[path], parts)]
            begun.append((path, leaf, parts, filled))
            held += _bytes(parts)
        while begun:
            finish()
    return read


def ranges(stored: Mapping[str, Chunks], wanted: Mapping[str, Any]) -> Iterator[Range]:
    """Yield the ranges of files that `read_arrays` reads in this process."""
    for path, leaf in wanted.items():
        yield from (piece.found for piece in _pieces(stored[path], _memory(leaf)) if piece.found.known is None)


def _memory(leaf: Any) -> dict[_Box, np.ndarray]:
    """Return memory without values for each distinct shard of this process; for a NumPy array, for all of it."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray):
        return {tuple((0, size) for size in shape): np.empty(shape, leaf.dtype)}
    boxes = sorted({_box(index, shape) for index in leaf.sharding.addressable_devices_indices_map(shape).values()})
    dtype = np.dtype(leaf.dtype)
    sizes = [math.prod(stop - start for start, stop in box) * dtype.itemsize for box in boxes]
    begins = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
    raw = np.empty(begins[-1] + _ALIGNED, np.uint8)  # of all shards together, as its pages may then be large
    raw = raw[-raw.ctypes.data % _ALIGNED :]
    return {
        box: raw[begin : begin + size].view(dtype).reshape([stop - start for start, stop in box])
        for box, begin, size in zip(boxes, begins, sizes, strict=False)
    }


def _pieces(chunks: Chunks, parts: Mapping[_Box, np.ndarray]) -> Iterator[_Piece]:
    """Yield what to read for these parts of a stored array."""
    for part, array in parts.items():
        steps = [range(start // size, -(-stop // size)) for (start, stop), size in zip(part, chunks.chunk, strict=True)]
        for number in itertools.product(*steps):
            begins = [i * size for i, size in zip(number, chunks.chunk, strict=True)]
            box = tuple(
                (max(start - begin, 0), min(stop - begin, size))
                for (start, stop), begin, size in zip(part, begins, chunks.chunk, strict=True)
            )
            within = tuple(
                slice(begin + first - start, begin + last - start)
                for (start, _), begin, (first, last) in zip(part, begins, box, strict=True)
            )
            name = ".".join(map(str, number)) or "0"
            yield from _split(chunks.ranges[name], chunks.chunk, box, array[within or ...])


def _split(found: Range, shape: tuple[int, ...], box: _Box, onto: np.ndarray) -> Iterator[_Piece]:
    """Yield the pieces of a box in a chunk of that shape."""
    size = onto.dtype.itemsize
    if not shape:
        yield _Piece(found, None, (), onto)
        return
    (start, stop), *others = box
    row = math.prod(shape[1:]) * size
    if onto.flags.c_contiguous and all(each == (0, full) for each, full in zip(others, shape[1:], strict=True)):
        step = max(1, _PIECE // max(row, 1))
        for i in range(start, stop, step):
            part = onto[i - start : min(i + step, stop) - start]
            yield _Piece(_within(found, i * row, part.nbytes), None, (), part)
    elif row > _COPIED:
        for i in range(start, stop):
            yield from _split(_within(found, i * row, row), shape[1:], tuple(others), onto[i - start])
    else:
        step = max(1, _COPIED // row)
        for i in range(start, stop, step):
            count = min(step, stop - i)
            part = onto[i - start : i - start + count]
            yield _Piece(_within(found, i * row, count * row), (count, *shape[1:]), ((0, count), *others), part)


def _within(found: Range, offset: int, size: int) -> Range:
    known = None if found.known is None else found.known[offset : offset + size]
    return Range(found.file, found.offset + offset, size, known)


def _fill(handle: int, piece: _Piece) -> None:
    """Read a piece into its array."""
    onto = piece.onto
    if piece.rows is None:
        _read(handle, piece.found, onto.reshape(-1).view(np.uint8))
        return
    rows = np.empty(piece.rows, onto.dtype)
    _read(handle, piece.found, rows.reshape(-1).view(np.uint8))
    onto[...] = rows[tuple(slice(*each) for each in piece.box)]


def _read(handle: int, found: Range, onto: np.ndarray) -> None:
    if found.known is not None:
        onto[...] = np.frombuffer(found.known, np.uint8)
        return
    done = 0
    while done < found.size:
        count = os.preadv(handle, [onto[done:].data], found.offset + done)
        if not count:
            raise EOFError(f"{found.file} ends before {found.offset + found.size:,}")
        done += count


class _Files(dict[str, int]):
    """Files below a folder by name, opened when they are asked for; "" is none."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__({"": -1})
        self._folder, self._stack = folder, stack

    def __missing__(self, name: str) -> int:
        self[name] = self._stack.enter_context((self._folder / name).open("rb", buffering=0)).fileno()
        return self[name]


def _array(leaf: Any, parts: Mapping[_Box, np.ndarray]) -> Any:
    """Return the array of these parts, with the sharding of a leaf."""
    if isinstance(leaf, np.ndarray):
        return next(iter(parts.values()))
    shape = tuple(leaf.shape)
    return jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: parts[_box(index or (), shape)], dtype=leaf.dtype
    )


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Box:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _bytes(parts: Mapping[_Box, np.ndarray]) -> int:
    return sum(each.nbytes for each in parts.values())
