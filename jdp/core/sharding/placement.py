"""Where one leaf lives: its compute spec, its rest spec, its bytes on a device, and the reason.

The compute spec is what the model's own axes ask. The rest spec is the compute spec plus `data` on one more dimension;
choosing that dimension is `rest_spec`. ZeRO is the difference between the two.
"""

import math
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jdp.core.sharding.mesh import DATA


@dataclass(frozen=True)
class Placement:
    """Where one leaf of the state lives.

    Attributes:
        path: slash-joined path in the state, such as "params/layers/attention/query/kernel".
        shape: the global shape.
        dtype: its dtype's name.
        rest: how it is sharded between steps.
        compute: how it is sharded while it is used.
        bytes_per_device: bytes at rest on the device that holds most of it.
        reason: why it lives there, in words.
        trained: whether a step changes it; False for frozen parameters (`wrt`).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rest: PartitionSpec
    compute: PartitionSpec
    bytes_per_device: int
    reason: str
    trained: bool = True

    @property
    def dim(self) -> int | None:
        """The dimension sharded over `data` at rest and whole while computing; None when there is none."""
        for i, axes in enumerate(self.rest):
            if DATA in axes_of(axes) and DATA not in axes_of(spec_entry(self.compute, i)):
                return i
        return None


def axes_of(entry: object) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec: None, a name, or a tuple of names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]


def spec_entry(spec: PartitionSpec, dim: int) -> object:
    """The entry of `spec` for `dim`; specs may be shorter than the array's rank."""
    return spec[dim] if dim < len(spec) else None


def shards(spec: PartitionSpec, mesh_shape: dict[str, int]) -> int:
    """Into how many pieces `spec` cuts an array."""
    return math.prod(mesh_shape[axis] for entry in spec for axis in axes_of(entry))


def bytes_per_device(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, pieces: int) -> int:
    """Bytes of one of `pieces` equal parts. Typed PRNG keys count the words they overlay."""
    size = math.prod(shape)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return size * jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 4
    return size // pieces * jax.numpy.dtype(dtype).itemsize


def rest_spec(
    shape: tuple[int, ...], compute: PartitionSpec, mesh_shape: dict[str, int], min_shard_size: int
) -> tuple[PartitionSpec, str]:
    """Add `data` to one dimension of `compute`; return the rest spec and the reason for it.

    The dimension is the largest that divides, among those the model's own axes leave alone if there is one; the first
    of equals, because a gather along the major dimension needs no transpose. The leading dimension of an array of three
    or more comes last: it may be the stacked layers of a scan, and a layer's slice must not live on one device.
    """
    count = mesh_shape[DATA]
    if count == 1:
        return compute, "the data axis has one device"
    if math.prod(shape) < min_shard_size:
        return compute, f"replicated: {math.prod(shape)} elements, fewer than min_shard_size={min_shard_size}"

    def divides(dim: int) -> bool:
        taken = math.prod(mesh_shape[axis] for axis in axes_of(spec_entry(compute, dim)))
        return shape[dim] % (taken * count) == 0 and shape[dim] > 0

    def preference(dim: int) -> tuple[bool, bool, int, int]:
        stacked = dim == 0 and len(shape) >= 3
        return (not stacked, spec_entry(compute, dim) is None, shape[dim], -dim)

    candidates = [dim for dim in range(len(shape)) if divides(dim)]
    if not candidates:
        return compute, f"replicated: no dimension of {list(shape)} divides by data={count}"
    dim = max(candidates, key=preference)
    entries = [spec_entry(compute, i) for i in range(max(len(compute), dim + 1))]
    entries[dim] = (*axes_of(entries[dim]), DATA) if axes_of(entries[dim]) else DATA
    return PartitionSpec(*entries), f"sharded on dimension {dim}: {shape[dim]} over data={count}"
