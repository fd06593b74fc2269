"""Which process writes which part of each array into its host's memory, and which parts the next host also keeps.

An array's parts are the shards of its sharding: a grid. Each host writes every part on its devices, once. A part on a
single host is also sent to the next host, so losing a host loses nothing. Under `ddp`, or with replicas on other hosts,
nothing is sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdp.core.types import Device

Index = tuple[slice, ...]


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

    def number(self, index: Index) -> int:
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
    route: tuple[tuple[int, int], ...]  # pairs of places in the mesh: a device, and a device of the next host
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
        if not route or mesh is None or not _is_on_mesh(x) or x.sharding.mesh != mesh:
            unsent += [path] if len(filled) > 1 else []
            continue
        sent.append(path)
        devices, taken = mesh.devices.flatten().tolist(), set[tuple[int, int]]()
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


def _route(mesh: Mesh, hosts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of places in the mesh: a device, and the device on the next host that keeps its parts."""
    devices = list(mesh.devices.flat)
    places = sorted(range(len(devices)), key=lambda place: (hosts[devices[place].process_index], place))
    counts = [hosts[device.process_index] for device in devices]
    step = max(map(counts.count, set(counts)))
    pairs = [(place, places[(i + step) % len(places)]) for i, place in enumerate(places)]
    apart = all(counts[source] != counts[target] for source, target in pairs)
    return tuple(pairs) if apart else ()
