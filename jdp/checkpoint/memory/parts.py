"""The parts of arrays in the hosts' memory: which process writes which, which are also sent, and how they are read.

An array's parts are the shards of its sharding: a grid. Each host writes every part on its devices, once. A part on a
single host is also sent to the next host, so losing a host loses nothing. Under `ddp`, or with replicas on other hosts,
nothing is sent.

To read a generation, each process verifies the parts that it needs from this host, and publishes the numbers of missing
parts. One process of a host that has a missing part puts its bytes into a buffer. The devices add up the buffers of all
processes; at each byte all but one are zero.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.machine import portions
from jdp.checkpoint.errors import DamagedError
from jdp.checkpoint.memory.host import Part, packed, unpacked
from jdp.core.cluster.barrier import from_every_process
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on
from jdp.core.types import Device

_Box = tuple[tuple[int, int], ...]
"""Start and stop index of each dimension."""
_Slices = tuple[slice, ...]
_Route = tuple[tuple[int, int], ...]
"""Pairs of places in the mesh: a device, and a device of the next host."""
_AT_ONCE = 2**26
"""Bytes that the devices add up at once; one part may be larger."""
_SENT_AT_ONCE = 2**28
"""Bytes that a device receives at once; one part may be larger."""
_THREADS = 4


@dataclass(frozen=True)
class Grid:
    """An array's shape and dtype, the shape of its parts, and the number of its first part."""

    dtype: str
    shape: Sequence[int]
    chunk: Sequence[int]
    first: int

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(size // part for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def part_bytes(self) -> int:
        return math.prod(self.chunk) * np.dtype(self.dtype).itemsize

    def number(self, index: _Slices) -> int:
        place = [(each.start or 0) // part for each, part in zip(index, self.chunk, strict=True)]
        return self.first + (int(np.ravel_multi_index(place, self.counts)) if place else 0)


@dataclass(frozen=True)
class Layout:
    """The parts of all arrays, and this process' share of the writing. A part is a path, its number and a device."""

    grids: Mapping[str, Grid]  # by path, in the order of the parts' numbers
    total: int  # number of parts
    own: Sequence[tuple[str, int, Device]]  # that this process writes from its devices
    kept: Sequence[tuple[str, int, Device]]  # of the previous host, that this process keeps
    sent: Sequence[str]  # paths of the arrays with parts to send
    alone: Sequence[str]  # paths of the arrays with parts on one host that no other host gets
    route: _Route
    host_bytes: int  # of one generation on the fullest host


def layout(arrays: Mapping[str, Any], hosts: Sequence[int], me: int) -> Layout:
    """Return the layout of arrays, real or abstract; `hosts` has for each process the first process of its host."""
    grids, first = dict[str, Grid](), 0
    for path, x in arrays.items():
        chunk = x.shape if isinstance(x, np.ndarray) else x.sharding.shard_shape(x.shape)
        grids[path] = Grid(str(x.dtype), x.shape, chunk, first)
        first += math.prod(grids[path].counts)
    mesh = next((x.sharding.mesh for x in arrays.values() if _is_on_mesh(x)), None)
    route = () if mesh is None else _route(mesh, hosts)
    own, kept = list[tuple[str, int, Device]](), list[tuple[str, int, Device]]()
    sent, unsent = list[str](), list[str]()
    filled = dict.fromkeys(hosts, 0)
    for path, x in arrays.items():
        grid = grids[path]
        parts: dict[Device, int] = (
            {device: grid.number(index) for device, index in x.sharding.devices_indices_map(x.shape).items()}
            if hasattr(x, "sharding")
            else dict.fromkeys(jax.devices(), grid.first)  # a NumPy array is on every process
        )
        holders: dict[int, dict[int, Device]] = {}  # part -> host -> device to read it from
        for device, number in parts.items():
            holders.setdefault(number, {}).setdefault(hosts[device.process_index], device)
        alone = {number for number, found in holders.items() if len(found) == 1}
        for number, found in holders.items():
            for host, device in found.items():
                filled[host] += grid.part_bytes
                if device.process_index == me:
                    own.append((path, number, device))
        if not alone:
            continue
        if not (route and _is_on_mesh(x) and x.sharding.mesh == mesh):
            unsent += [path] if len(filled) > 1 else []
            continue
        sent.append(path)
        devices, taken = x.sharding.mesh.devices.flatten().tolist(), set[tuple[int, int]]()
        for source, target in route:
            number, device = parts[devices[source]], devices[target]
            host = hosts[device.process_index]
            if number in alone and (host, number) not in taken:
                taken.add((host, number))
                filled[host] += grid.part_bytes
                if device.process_index == me:
                    kept.append((path, number, device))
    return Layout(grids, first, own, kept, sent, unsent, route, max(filled.values(), default=0))


def _is_on_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding) and isinstance(x.sharding.mesh, Mesh)


def _route(mesh: Mesh, hosts: Sequence[int]) -> _Route:
    """Return each device with the device on the next host that keeps its parts; () on one host."""
    devices = list(mesh.devices.flat)
    places = sorted(range(len(devices)), key=lambda place: (hosts[devices[place].process_index], place))
    counts = [hosts[device.process_index] for device in devices]
    step = max(map(counts.count, set(counts)))
    pairs = [(place, places[(i + step) % len(places)]) for i, place in enumerate(places)]
    apart = all(counts[source] != counts[target] for source, target in pairs)
    return tuple(pairs) if apart else ()


def received(arrays: Mapping[str, Any], paths: Sequence[str], route: _Route) -> Iterator[tuple[str, jax.Array]]:
    """Yield each of these arrays with its parts moved to the next host: a device gets its source's part in `route`."""
    for group in portions(paths, lambda path: arrays[path].addressable_shards[0].data.nbytes, _SENT_AT_ONCE):
        sent = tuple(arrays[path] for path in group)
        mesh = sent[0].sharding.mesh
        with tracing_on(mesh):
            moved = _permuted(on_device(sent), mesh, tuple(x.sharding.spec for x in sent), route)
        yield from zip(group, moved, strict=True)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _permuted(
    arrays: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[PartitionSpec, ...], route: _Route
) -> tuple[jax.Array, ...]:
    def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(shard, mesh.axis_names, route) for shard in shards)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(*arrays)


# Reading.


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


class Generation:
    """A generation that is complete over all hosts, as a `content.Source`."""

    def __init__(
        self, head: Mapping[str, Any], parts: Mapping[int, Part], suppliers: Mapping[int, Collection[int]], folder: Path
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
