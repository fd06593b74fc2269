"""The sharding of one leaf: its compute spec, its rest spec, its bytes on a device, and the reason.

The compute spec shards over the model's own axes only. The rest spec is the compute spec plus `data` on one more
dimension, which `rest_spec` chooses. ZeRO is the difference between the two.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import PartitionSpec

from jdp.base.formatting import format_bytes
from jdp.core.sharding.axes import DATA

INDIVISIBLE = "replicated: no dimension"


@dataclass(frozen=True)
class Placement:
    """The sharding of one leaf of the state, with the reason.

        >>> kernel = next(p for p in plan.placements(state) if p.path == "params/kernel")
        >>> kernel.rest, kernel.bytes_per_device
        (P('data',), 1024)
        >>> kernel.reason
        'sharded on dimension 0: 64 over data=8'

    Attributes:
        path: slash-joined path in the state, such as "params/layers/attention/query/kernel".
        shape: global shape.
        dtype: name of the dtype, such as "float32".
        rest: spec between steps.
        compute: spec while the leaf is used: `rest` without the `data` that ZeRO adds.
        bytes_per_device: bytes at rest of one device's part.
        reason: why it is sharded or replicated, in words.
        trained: True if a step changes it; False for frozen parameters (`wrt`).
        memory: "device", or "host" (`Plan.offload`).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rest: PartitionSpec
    compute: PartitionSpec
    bytes_per_device: int
    reason: str
    trained: bool = True
    memory: str = "device"

    def __repr__(self) -> str:
        used = "" if self.compute == self.rest else f", {self.compute} while used"
        held = f"{format_bytes(self.bytes_per_device)} a device" + (" in host memory" if self.on_host else "")
        kind = "" if self.trained else ", frozen"
        return f"Placement({self.path!r}, {self.array}, {self.rest} at rest{used}, {held}{kind}: {self.reason})"

    @property
    def array(self) -> str:
        """Dtype and shape, such as "float32[64, 512]"."""
        return f"{self.dtype}{[*self.shape]}"

    @property
    def is_indivisible(self) -> bool:
        """Whether it is replicated because no dimension divides by the size of `data`."""
        return self.reason.startswith(INDIVISIBLE)

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory between steps."""
        return self.memory == "host"

    @cached_property
    def dim(self) -> int | None:
        """The dimension that is sharded over `data` at rest and gathered for computing; None if there is none."""
        dims = (dim for dim, entry in enumerate(self.rest) if DATA in axes_of(entry))
        return next((dim for dim in dims if DATA not in axes_of(spec_entry(self.compute, dim))), None)


def axes_of(entry: object) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a PartitionSpec, which is None, a name, or a tuple of names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]


def spec_entry(spec: PartitionSpec, dim: int) -> object:
    """Return the entry of `spec` for dimension `dim`; None past its end, as specs may be shorter than the rank."""
    return spec[dim] if dim < len(spec) else None


def data_last(entry: object) -> object:
    """Move `data` to the end of a spec's entry, so that gathering over `data` gives a shard over the other axes."""
    axes = axes_of(entry)
    return (*(axis for axis in axes if axis != DATA), DATA) if DATA in axes and len(axes) > 1 else entry


def keep_axes(axes: set[str], entry: object) -> object:
    """Return a spec's entry without the names that are not in `axes`."""
    kept = tuple(axis for axis in axes_of(entry) if axis in axes)
    return kept[0] if len(kept) == 1 else (kept or None)


def shards(spec: Iterable[object], mesh_shape: Mapping[str, int]) -> int:
    """Return the number of shards of an array with this spec, on a mesh with these axes (axis -> size)."""
    return math.prod(mesh_shape[axis] for entry in spec for axis in axes_of(entry))


def bytes_per_device(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, pieces: int) -> int:
    """Return the bytes of one of `pieces` equal shards. Typed PRNG keys count their underlying uint32 words."""
    size = math.prod(shape)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return size * jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 4
    return size // pieces * jax.numpy.dtype(dtype).itemsize


def rest_spec(
    shape: tuple[int, ...], compute: PartitionSpec, mesh_shape: dict[str, int], min_shard_size: int
) -> tuple[PartitionSpec, str]:
    """Add `data` to one dimension of the compute spec: the largest that divides by the size of `data`.

    Dimensions that no axis of the model's shards come first, then the first of equals: a gather along the major
    dimension needs no transpose. The leading dimension of an array of rank 3 or more, perhaps layers, comes last.
    """
    count = mesh_shape[DATA]
    if count == 1:
        return compute, f"the {DATA} axis has one device"
    if 0 in shape:
        return compute, "replicated: no elements"
    if math.prod(shape) < min_shard_size:
        return compute, f"replicated: {math.prod(shape)} elements, fewer than min_shard_size={min_shard_size}"

    def divides(dim: int) -> bool:
        taken = shards(compute[dim : dim + 1], mesh_shape)
        return shape[dim] % (taken * count) == 0

    def preference(dim: int) -> tuple[bool, bool, int, int]:
        stacked = dim == 0 and len(shape) >= 3
        return (not stacked, spec_entry(compute, dim) is None, shape[dim], -dim)

    candidates = [dim for dim in range(len(shape)) if divides(dim)]
    if not candidates:
        return compute, f"{INDIVISIBLE} of {list(shape)} divides by {DATA}={count}"
    dim = max(candidates, key=preference)
    entries = [spec_entry(compute, i) for i in range(max(len(compute), dim + 1))]
    entries[dim] = (*axes_of(entries[dim]), DATA) if axes_of(entries[dim]) else DATA
    return PartitionSpec(*entries), f"sharded on dimension {dim}: {shape[dim]} over {DATA}={count}"
