"""Reads a generation: this host's parts from its memory, other parts from the hosts that have them.

1. Each process verifies the parts that it needs from this host, and publishes the numbers of missing parts.
2. For each missing part, one process of a host that has it puts the bytes into its buffer.
3. The devices add up the buffers of all processes: at each byte all but one are zero.

`read_parts` puts parts of any grid onto the shards of any sharding; `received` sends each device's parts to a device of
the next host.
"""

from __future__ import annotations

import base64
import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.checkpoint.errors import DamagedError
from jdp.checkpoint.memory.generation import Index, Part
from jdp.checkpoint.memory.layout import Grid
from jdp.core.cluster.barrier import from_every_process
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.traced_mesh import tracing_on

_ALIGNED = 64
"""A CPU device does not copy arrays that begin at a multiple of this number of bytes."""
_Box = tuple[tuple[int, int], ...]
"""Start and stop index of each dimension."""
_Slices = tuple[slice, ...]


def part_numbers(grid: Grid, leaf: Any) -> set[int]:
    """Return the numbers of the parts that the shards of a leaf in this process need."""
    return {number for box in _boxes(leaf) for number, _, _ in _overlaps(grid, box)}


def assembled(grid: Grid, leaf: Any, parts: Mapping[int, np.ndarray]) -> Any:
    """Return the array of these parts (number -> bytes) with a leaf's sharding; a NumPy array for a NumPy leaf."""
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
    """Return uninitialised memory for each shard: in one block, for large pages; aligned, to avoid copies."""
    shapes = [[stop - start for start, stop in box] for box in boxes]
    ends = list(itertools.accumulate(-(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape in shapes))
    raw = np.empty(ends[-1] + _ALIGNED, np.uint8)
    raw = raw[-raw.ctypes.data % _ALIGNED :]
    return {
        box: raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for box, begin, shape in zip(boxes, [0, *ends], shapes, strict=False)
    }


def _boxes(leaf: Any) -> list[_Box]:
    """Return the distinct shards of this process; the whole array for a NumPy array."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray):
        return [tuple((0, size) for size in shape)]
    return sorted({_box(index, shape) for index in leaf.sharding.addressable_devices_indices_map(shape).values()})


def _box(index: _Slices, shape: tuple[int, ...]) -> _Box:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _overlaps(grid: Grid, box: _Box) -> Iterator[tuple[int, _Slices, _Slices]]:
    """Yield each part that a box overlaps: its number, and the overlap in the part and in the box."""
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


_AT_ONCE = 2**26
"""Bytes that the devices add up at once."""
_THREADS = 4


@dataclass
class Generation:
    """A generation that is complete over all hosts, as a `content.Source`.

    Attributes:
        index: the index of one process, for the entries that all share.
        parts: number -> part, of this host.
        suppliers: process that represents its host -> parts on that host, bool [total].
        folder: the folder in memory.
    """

    index: Index
    parts: Mapping[int, Part]
    suppliers: Mapping[int, np.ndarray]
    folder: Path
    fetched: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    from_others: int = 0  # bytes

    def table(self) -> dict[str, Any]:
        """Return the table of leaves, as in a checkpoint."""
        return dict(self.index.table)

    def record(self) -> dict[str, Any]:
        """Return the JSON object saved with the state."""
        return dict(self.index.record)

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch the parts of these arrays, and read them onto the leaves. Raises DamagedError on every process."""
        grids = self.index.grids
        needed = {number for path, leaf in wanted.items() for number in part_numbers(grids[path], leaf)}
        if problem := self._fetch(sorted(needed - self.fetched.keys())):
            raise DamagedError(f"The state in memory is damaged: {problem}.", problem)
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(lambda path: assembled(grids[path], wanted[path], self.fetched), wanted)
            return dict(zip(wanted, read, strict=True))

    def _fetch(self, needed: Sequence[int]) -> str:
        """Fetch these parts; return the damaged part, or "". Every process calls this."""
        problem = self._verify([number for number in needed if number in self.parts])
        lacking = [number for number in needed if number not in self.parts]
        for said in from_every_process(
            "parts of a state in memory", f"{problem}\n{encoded(lacking, self.index.total)}"
        ):
            problem, _, asked = said.partition("\n")
            if problem:
                return problem
            lacking = sorted({*lacking, *np.flatnonzero(decoded(asked, self.index.total)).tolist()})
        return self._exchange(lacking, {*needed} - self.parts.keys()) if lacking else ""

    def _verify(self, numbers: Sequence[int]) -> str:
        """Map these parts of this host; return the first changed part, or ""."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for number, content in zip(numbers, pool.map(lambda n: self.parts[n].content(), numbers), strict=True):
                if content is None:
                    return f"part {number} in {self.parts[number].file} has changed"
                self.fetched[number] = content
        return ""

    def _exchange(self, numbers: Sequence[int], mine: set[int]) -> str:
        """Send these parts to all processes; keep `mine`. Return the damaged part, or ""."""
        me = jax.process_index()
        supplier = {
            number: min(process for process, has in self.suppliers.items() if has[number]) for number in numbers
        }
        own = [number for number in numbers if supplier[number] == me and number not in self.fetched]
        problem = next(filter(None, from_every_process("parts that a host has alone", self._verify(own))), "")
        if problem:
            return problem
        grids = list(self.index.grids.values())
        places = np.searchsorted([grid.first for grid in grids], numbers, "right")
        sizes = {number: grids[int(place) - 1].part_bytes for number, place in zip(numbers, places, strict=True)}
        self.fetched |= {number: np.empty(sizes[number], np.uint8) for number in numbers if number in mine}
        self.from_others += sum(sizes[number] for number in mine if number in sizes)
        for window in _windows(sizes):
            buffer = np.zeros(-(-sum(stop - start for _, start, stop in window) // 4) * 4, np.uint8)
            for number, start, stop, at in _placed(window):
                if supplier[number] == me:
                    buffer[at : at + stop - start] = self.fetched[number][start:stop]
            buffer = _added(buffer)
            for number, start, stop, at in _placed(window):
                if number in mine:
                    self.fetched[number][start:stop] = buffer[at : at + stop - start]
        return ""


def encoded(numbers: Iterable[int], total: int) -> str:
    """Return a set of part numbers as a short text."""
    has = np.zeros(total, bool)
    has[list(numbers)] = True
    return base64.b85encode(zlib.compress(np.packbits(has).tobytes())).decode()


def decoded(text: str, total: int) -> np.ndarray:
    """Return the parts in a text of `encoded`: bool [total]."""
    bits = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    return np.unpackbits(bits)[:total].astype(bool)


def _windows(sizes: Mapping[int, int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield spans of parts (number, start, stop), at most `_AT_ONCE` bytes together."""
    window, held = list[tuple[int, int, int]](), 0
    for number, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + _AT_ONCE - held)
            window.append((number, start, stop))
            held, start = held + stop - start, stop
            if held == _AT_ONCE:
                yield window
                window, held = [], 0
    if window:
        yield window


def _placed(window: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield each span with its place in the buffer."""
    at = 0
    for number, start, stop in window:
        yield number, start, stop, at
        at += stop - start


def _added(buffer: np.ndarray) -> np.ndarray:
    """Return the sum of the buffers of all processes; at each byte all but one are zero."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",))
    rows, whole = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
    words = buffer.view(np.uint32)
    stacked = jax.make_array_from_process_local_data(rows, words[None], (mesh.size, words.size))
    return np.asarray(_sum(stacked, whole).addressable_data(0)).view(np.uint8)


@functools.partial(jax.jit, static_argnums=1)
def _sum(rows: jax.Array, onto: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(rows.sum(axis=0, dtype=np.uint32), onto)


_RECEIVED_AT_ONCE = 2**28
"""Bytes that a device receives at once; one part may be larger."""


def received(
    arrays: Mapping[str, Any], paths: Sequence[str], route: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, jax.Array]]:
    """Yield each of these arrays with its parts moved to the next host: a device gets its source's part in `route`."""
    some, held = list[str](), 0
    for path in paths:
        x = arrays[path]
        size = x.addressable_shards[0].data.nbytes
        if some and held + size > _RECEIVED_AT_ONCE:
            yield from zip(some, _sent([arrays[each] for each in some], route), strict=True)
            some, held = [], 0
        some.append(path)
        held += size
    if some:
        yield from zip(some, _sent([arrays[each] for each in some], route), strict=True)


def _sent(arrays: Sequence[Any], route: tuple[tuple[int, int], ...]) -> Sequence[jax.Array]:
    mesh = arrays[0].sharding.mesh
    specs = tuple(x.sharding.spec for x in arrays)
    with tracing_on(mesh):
        return _permuted(on_device(tuple(arrays)), mesh, specs, route)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _permuted(
    arrays: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[PartitionSpec, ...], route: tuple[tuple[int, int], ...]
) -> tuple[jax.Array, ...]:
    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(shard, mesh.axis_names, route) for shard in shards)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(*arrays)
