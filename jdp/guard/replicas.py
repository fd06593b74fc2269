"""Silent corruption: compare replicas bit for bit, and name the device that differs.

A defective device computes wrong results without an error (Hochschild et al. 2021, "Cores that don't count"; Dixit et
al. 2021, arXiv:2102.11245). The fault shows in arrays that are replicated over a mesh axis: parameters and optimizer
state under `ddp`, small leaves under ZeRO, shards over `replica`.

1. Each device adds up a mix of the bits of its shard of every leaf: 32 bits per leaf, without communication.
2. These numbers, 4 bytes per leaf and device, are gathered on every process.
3. Devices with the same part of a leaf must have the same number. The minority is at fault; if two devices differ,
   either may be at fault.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jdp.base.errors import public
from jdp.base.formatting import listed
from jdp.base.tree_paths import path_of
from jdp.core.cluster.agreement import processes_of
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on
from jdp.core.types import Device, PyTree

Table = NDArray[Any]
"""A number for every device of the mesh and every leaf: [devices, leaves]."""
SHOWN = 3  # leaves, and devices, in an error


class CorruptState(RuntimeError):
    """A device computed or stored wrong values: arrays that should be equal bit for bit are not.

        >>> wrong = [np.full(2, float(device.id == 5)) for device in jax.devices()]  # device 5 has another copy
        >>> x = jax.make_array_from_single_device_arrays((2,), plan.replicated, jax.device_put(wrong, jax.devices()))
        >>> try:
        ...     jdp.guard.check_replicas({"x": x})
        ... except jdp.guard.CorruptState as error:
        ...     print(error.differences[0].path, [device.id for device in error.differences[0].devices])
        x [5]

    Attributes:
        differences: the leaves that differ.
    """

    def __init__(self, message: str, differences: Sequence[Difference]) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Difference:
    """A leaf whose copies are not equal."""

    path: str  # of the leaf, such as "params/layers/0/kernel"
    devices: tuple[Device, ...]  # devices at fault: the minority, or without a majority all devices with this part
    agreeing: tuple[Device, ...] = ()  # the majority


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of a state, which the devices may still be computing."""

    paths: tuple[str, ...]  # of the leaves
    devices: tuple[Device, ...]  # of the mesh, in its order
    parts: Table  # for each device and leaf, the number of the device's part; equal numbers mean equal parts
    values: jax.Array  # uint32 [devices, leaves]

    def differences(self) -> list[Difference]:
        """Wait for the fingerprints, and return the leaves whose copies differ."""
        values: Table = np.asarray(jax.device_get(self.values))
        found: list[Difference] = []
        for leaf, (parts, own) in enumerate(zip(self.parts.T, values.T, strict=True)):
            one = np.zeros(parts.max() + 1, own.dtype)
            one[parts] = own
            found += [self._difference(leaf, part, own) for part in np.unique(parts[one[parts] != own]).tolist()]
        return found

    def _difference(self, leaf: int, part: int, values: Table) -> Difference:
        holders = np.flatnonzero(self.parts[:, leaf] == part)
        counts = Counter(values[holders].tolist()).most_common()
        has_majority = counts[0][1] > len(holders) / 2
        agreeing = [i for i in holders if has_majority and values[i] == counts[0][0]]
        at_fault = [i for i in holders if i not in agreeing]
        return Difference(
            self.paths[leaf], tuple(self.devices[i] for i in at_fault), tuple(self.devices[i] for i in agreeing)
        )


@public()
def check_replicas(state: PyTree, *, what: str = "the state") -> int:
    """Compare all replicas of a state bit for bit. Every process must call it.

        >>> jdp.guard.check_replicas(state)  # step, bias, its moments: the other leaves have no replicas under zero3
        7

    Args:
        state: a train state, or any pytree of arrays that `jdp.Plan` placed.
        what: the state's name in errors. Give it when a loop has several.

    Returns:
        The number of replicated leaves, which were compared.

    Raises:
        CorruptState: replicas differ; every process raises it with the same text.
    """
    taken = fingerprints(state)
    if taken is None:
        return 0
    if differences := taken.differences():
        raise CorruptState(
            f"Replicas of {what} must be equal bit for bit; {in_words(differences)}: the device, its memory or its "
            "link computed wrong, unnoticed by JAX. Nothing of it was saved. Remove or test that device's host, and "
            "run again: the newest checkpoint is from before the fault.",
            differences,
        )
    return len(taken.paths)


def fingerprints(state: PyTree) -> Fingerprints | None:
    """Have the devices compute the fingerprints of a state, without waiting for them."""
    mesh: Mesh | None = None
    chosen: list[tuple[str, jax.Array, PartitionSpec, Table]] = []
    for path, leaf in jax.tree.leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            continue
        mesh = mesh or sharding.mesh
        parts = _parts(sharding, leaf.shape)
        if sharding.mesh == mesh and leaf.size and len(np.unique(parts)) < len(parts):
            chosen.append((path_of(path), leaf, sharding.spec, parts))
    if mesh is None or not chosen:
        return None
    paths, leaves, specs, parts = zip(*chosen, strict=True)
    with tracing_on(mesh):
        values = _computed(leaves, mesh, specs, len(processes_of(mesh)) > 1)
    return Fingerprints(paths, tuple(mesh.devices.flat), np.stack(parts, axis=1), values)


def in_words(differences: Sequence[Difference]) -> str:
    """Return "device 3 (…) differs from device 0 (…) in params/kernel"."""
    first, leaves = differences[0], listed(dict.fromkeys(difference.path for difference in differences), SHOWN)
    if first.agreeing:
        return f"{_named(first.devices)} differs from {_named(first.agreeing)} in {leaves}"
    return f"{_named(first.devices)} differ from one another in {leaves}, one of them is wrong"


@functools.lru_cache(maxsize=4096)
def _parts(sharding: NamedSharding, shape: tuple[int, ...]) -> Table:
    """Return, for each device of the mesh, the number of its part of such an array."""
    indices = sharding.devices_indices_map(shape)
    numbers: dict[str, int] = {}
    devices = np.asarray(sharding.mesh.devices).flat
    return np.array([numbers.setdefault(str(indices[device]), len(numbers)) for device in devices])


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _computed(
    leaves: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[PartitionSpec, ...], everywhere: bool
) -> jax.Array:
    """Return uint32 [devices, leaves]: each device computes its row; with `everywhere`, all devices get all rows."""

    def local(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_mixed(shard) for shard in shards])[None]

    words = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in on_device(leaves)]
    rows = PartitionSpec(mesh.axis_names)
    table = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(*words)
    return jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec() if everywhere else rows))


def _mixed(shard: jax.Array) -> jax.Array:
    """Return a uint32 that changes with any single element, and with other changes with probability 1 - 2⁻³².

    Each word is mixed with its index by invertible steps (constants of Appleby's MurmurHash3), so equal changes of two
    words do not cancel in the sum.
    """
    words = words_of(shard).ravel()
    mixed = (words ^ (jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    return ((mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)).sum(dtype=jnp.uint32)


def words_of(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits >= 32:  # twice as wide: two words each
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, getattr(jnp, f"uint{bits}")).astype(jnp.uint32)


def _named(devices: Sequence[Device]) -> str:
    """Return "device 3 (cpu, number 1 of process 1)", or several."""
    shown: list[str] = []
    for device in devices[:SHOWN]:
        before = [each.process_index for each in jax.devices(device.platform) if each.id < device.id]
        number = f"number {before.count(device.process_index)} of process {device.process_index}"
        shown.append(f"device {device.id} ({device.device_kind}, {number})")
    more = f" and {len(devices) - SHOWN} more" if len(devices) > SHOWN else ""
    return (" and " if len(shown) < SHOWN else ", ").join(shown) + more
