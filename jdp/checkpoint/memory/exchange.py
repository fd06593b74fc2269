"""Reads a generation: this host's parts from its memory, other parts from the hosts that have them.

Each process verifies the parts that it needs from this host, and publishes the numbers of missing parts. One process of
a host that has a missing part puts its bytes into a buffer. The devices add up the buffers of all processes; at each
byte all but one are zero. `received` sends each device's parts to a device of the next host.
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.machine import portions
from jdp.checkpoint.errors import DamagedError
from jdp.checkpoint.memory.generation import Part, packed, unpacked
from jdp.checkpoint.memory.layout import Grid
from jdp.core.cluster.barrier import from_every_process
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.traced_mesh import tracing_on

_Box = tuple[tuple[int, int], ...]
"""Start and stop index of each dimension."""
_Slices = tuple[slice, ...]


def part_numbers(grid: Grid, leaf: Any) -> set[int]:
    """Return the numbers of the parts that the shards of a leaf in this process need."""
    return {number for box in _boxes(leaf) for number, _, _ in _overlaps(grid, box)}


def assembled(grid: Grid, leaf: Any, parts: Mapping[int, np.ndarray]) -> Any:
    """Return the array of these parts (number -> bytes) with a leaf's sharding; a NumPy array for a NumPy leaf."""
    shape = tuple(leaf.shape)
    shards = {box: np.empty([stop - start for start, stop in box], leaf.dtype) for box in _boxes(leaf)}
    for box, shard in shards.items():
        for number, inside, onto in _overlaps(grid, box):
            shard[onto] = parts[number].view(leaf.dtype).reshape(grid.chunk)[inside]
    if isinstance(leaf, np.ndarray):
        return next(iter(shards.values()))
    return jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: shards[_box(index or (), shape)], dtype=leaf.dtype
    )


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
"""Bytes that the devices add up at once; one part may be larger."""
_RECEIVED_AT_ONCE = 2**28
"""Bytes that a device receives at once; one part may be larger."""
_THREADS = 4


class Generation:
    """A generation that is complete over all hosts, as a `content.Source`."""

    def __init__(
        self,
        head: Mapping[str, Any],
        parts: Mapping[int, Part],
        suppliers: Mapping[int, Collection[int]],
        folder: Path,
    ) -> None:
        """Make it from the entries of its index, this host's parts, and the parts on the host of each process."""
        self.folder, self._head, self._parts, self._suppliers = folder, head, parts, suppliers
        self._grids = {path: Grid(*fields) for path, fields in head["grids"].items()}
        self._fetched = dict[int, np.ndarray]()
        self.from_others = 0  # bytes

    def table(self) -> dict[str, Any]:
        return dict(self._head["table"])

    def record(self) -> dict[str, Any]:
        return dict(self._head["record"])

    def arrays(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch the parts of these arrays, and read them onto the leaves. Raises DamagedError on every process."""
        needed = {number for path, leaf in wanted.items() for number in part_numbers(self._grids[path], leaf)}
        if problem := self._fetch(needed - self._fetched.keys()):
            raise DamagedError(f"The state in memory is damaged: {problem}.", problem)
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(lambda path: assembled(self._grids[path], wanted[path], self._fetched), wanted)
            return dict(zip(wanted, read, strict=True))

    def _fetch(self, needed: set[int]) -> str:
        """Fetch these parts; return the damaged part, or "". Every process calls this."""
        me, lacking = jax.process_index(), needed - self._parts.keys()
        said = packed([self._verify(needed & self._parts.keys()), sorted(lacking)])
        problems, asked = zip(*map(unpacked, from_every_process("parts of a state in memory", said)), strict=True)
        numbers = sorted(set().union(*asked))
        if any(problems) or not numbers:
            return next(filter(None, problems), "")
        suppliers = {n: min(process for process, has in self._suppliers.items() if n in has) for n in numbers}
        own = self._verify({n for n in numbers if suppliers[n] == me} - self._fetched.keys())
        if problem := next(filter(None, from_every_process("parts that a host has alone", own)), ""):
            return problem
        grids = list(self._grids.values())
        places = np.searchsorted([grid.first for grid in grids], numbers, "right")
        sizes = {n: grids[int(place) - 1].part_bytes for n, place in zip(numbers, places, strict=True)}
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",))
        rows, whole = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
        for group in portions(numbers, sizes.__getitem__, _AT_ONCE):
            sent = [self._fetched[n] if suppliers[n] == me else np.zeros(sizes[n], np.uint8) for n in group]
            buffer = np.concatenate(sent)
            stacked = jax.make_array_from_process_local_data(rows, buffer[None], (mesh.size, buffer.size))
            added = np.asarray(_sum(stacked, whole).addressable_data(0))
            parts = np.split(added, np.cumsum([sizes[n] for n in group])[:-1])
            self._fetched |= {n: part.copy() for n, part in zip(group, parts, strict=True) if n in lacking}
        self.from_others += sum(sizes[n] for n in lacking)
        return ""

    def _verify(self, numbers: Collection[int]) -> str:
        """Map these parts of this host; return the first changed part, or ""."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for number, content in zip(numbers, pool.map(lambda n: self._parts[n].content(), numbers), strict=True):
                if content is None:
                    return f"part {number} in {self._parts[number].file} has changed"
                self._fetched[number] = content
        return ""


@functools.partial(jax.jit, static_argnums=1)
def _sum(rows: jax.Array, onto: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(rows.sum(axis=0, dtype=np.uint8), onto)


def received(
    arrays: Mapping[str, Any], paths: Sequence[str], route: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, jax.Array]]:
    """Yield each of these arrays with its parts moved to the next host: a device gets its source's part in `route`."""
    for group in portions(paths, lambda path: arrays[path].addressable_shards[0].data.nbytes, _RECEIVED_AT_ONCE):
        sent = tuple(arrays[path] for path in group)
        mesh = sent[0].sharding.mesh
        with tracing_on(mesh):
            moved = _permuted(on_device(sent), mesh, tuple(x.sharding.spec for x in sent), route)
        yield from zip(group, moved, strict=True)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _permuted(
    arrays: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[PartitionSpec, ...], route: tuple[tuple[int, int], ...]
) -> tuple[jax.Array, ...]:
    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(shard, mesh.axis_names, route) for shard in shards)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(*arrays)
