"""Reads arrays from the parts of a generation, of any grid, onto the shards of any sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdp.checkpoint.memory.layout import Grid

_ALIGNED = 64
"""Arrays that begin at a multiple of this many bytes are not copied by a CPU device."""
_Box = tuple[tuple[int, int], ...]
"""Of each dimension the first index, and the one after the last."""
_Slices = tuple[slice, ...]


def part_numbers(grid: Grid, leaf: Any) -> set[int]:
    """Return the numbers of the parts that the shards of a leaf in this process need."""
    return {number for box in _boxes(leaf) for number, _, _ in _overlaps(grid, box)}


def assembled(grid: Grid, leaf: Any, parts: Mapping[int, np.ndarray]) -> Any:
    """Return the array of these parts (number -> bytes) with the sharding of a leaf; for a NumPy array, one."""
    shape, shards = tuple(leaf.shape), _memory(_boxes(leaf), np.dtype(leaf.dtype))
    for box, shard in shards.items():
        for number, inside, onto in _overlaps(grid, box):
            shard[onto] = parts[number].view(leaf.dtype).reshape(grid.chunk)[inside]
    if isinstance(leaf, np.ndarray):
        return next(iter(shards.values()))
    return jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: shards[_box(index or (), shape)], dtype=leaf.dtype
    )


def _memory(boxes: Sequence[_Box], dtype: np.dtype) -> dict[_Box, np.ndarray]:
    """Return memory without values for each shard: together, as its pages may then be large; aligned, so not copied."""
    shapes = [[stop - start for start, stop in box] for box in boxes]
    ends = list(itertools.accumulate(-(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape in shapes))
    raw = np.empty(ends[-1] + _ALIGNED, np.uint8)
    raw = raw[-raw.ctypes.data % _ALIGNED :]
    return {
        box: raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for box, begin, shape in zip(boxes, [0, *ends], shapes, strict=False)
    }


def _boxes(leaf: Any) -> list[_Box]:
    """Return the distinct shards of this process; of a NumPy array, all of it."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray):
        return [tuple((0, size) for size in shape)]
    return sorted({_box(index, shape) for index in leaf.sharding.addressable_devices_indices_map(shape).values()})


def _box(index: _Slices, shape: tuple[int, ...]) -> _Box:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _overlaps(grid: Grid, box: _Box) -> Iterator[tuple[int, _Slices, _Slices]]:
    """Yield the parts that a box overlaps: their numbers, and where the overlap is in the part and in the box."""
    steps = [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, grid.chunk, strict=True)]
    for place in itertools.product(*steps):
        begins = [i * size for i, size in zip(place, grid.chunk, strict=True)]
        spans = [
            (max(start, begin), min(stop, begin + size))
            for (start, stop), begin, size in zip(box, begins, grid.chunk, strict=True)
        ]
        inside = tuple(slice(a - begin, b - begin) for (a, b), begin in zip(spans, begins, strict=True))
        onto = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(spans, box, strict=True))
        yield grid.number(tuple(slice(begin, None) for begin in begins)), inside, onto
