"""The sharding of one leaf: its compute spec, its rest spec, its bytes on a device, and the reason.

The compute spec shards over the model's own axes only. The rest spec is the compute spec plus `data` on one more
dimension, which `rest_spec` chooses. ZeRO is the difference between the two.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.core.sharding.axes import DATA, REPLICA, factors

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

    def preference(dim: int) -> tuple[bool, bool, int, int]:
        stacked = dim == 0 and len(shape) >= 3
        return (not stacked, spec_entry(compute, dim) is None, shape[dim], -dim)

    pieces = [count * shards(compute[dim : dim + 1], mesh_shape) for dim in range(len(shape))]
    candidates = [dim for dim, size in enumerate(shape) if size % pieces[dim] == 0]
    if not candidates:
        return compute, f"{INDIVISIBLE} of {list(shape)} divides by {DATA}={count}"
    dim = max(candidates, key=preference)
    entries = [spec_entry(compute, i) for i in range(max(len(compute), dim + 1))]
    entries[dim] = (*axes_of(entries[dim]), DATA) if axes_of(entries[dim]) else DATA
    return PartitionSpec(*entries), f"sharded on dimension {dim}: {shape[dim]} over {DATA}={count}"


def checked_rules(rules: Any, mesh_axes: Sequence[str]) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the rules as a tuple of pairs, after checking their types and their axes."""
    example = 'rules=[("*/kernel", PartitionSpec(None, "model"))]'
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        raise UserError(f"A plan's rules are a list of pairs, as in {example}; given {rules!r}. Give a list.")
    pairs: list[tuple[str, PartitionSpec]] = []
    allowed = tuple(axis for axis in mesh_axes if axis != REPLICA)  # replicas hold the same parameters
    for rule in rules:  # pyright: ignore[reportUnknownVariableType]
        match rule:
            case (str() as pattern, PartitionSpec() as spec):
                pairs.append((pattern, spec))
            case _:
                raise UserError(f"A rule is a pair of a path pattern and a spec, as in {example}; given {rule!r}.")
        for entry in spec:
            axes: Any = entry if isinstance(entry, tuple | list) else () if entry is None else (entry,)
            if not all(axis in allowed for axis in axes):
                raise UserError(
                    f"A rule may shard a dimension over the axes {allowed}; the rule for {pattern!r} has {entry!r}. "
                    "Name one of these, several in a tuple, or None for a dimension that is not sharded."
                )
    return tuple(pairs)


def check_fits(path: str, shape: tuple[int, ...], spec: PartitionSpec, source: str, sizes: Mapping[str, int]) -> None:
    """Check a parameter's spec against its shape; `source` names the spec's origin ("the …")."""
    if len(spec) > len(shape):
        raise UserError(
            f"A spec has at most one entry for each dimension; {spec} of {source} has {len(spec)}, and {path} has "
            f"shape {list(shape)}. Leave out entries."
        )
    named, subject = [axis for entry in spec for axis in axes_of(entry)], f"T{source[1:]}"
    if len(set(named)) < len(named):
        raise UserError(f"{subject} names an axis once; {spec} for {path} does not. Remove one.")
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        if size % (pieces := shards((entry,), sizes)):
            raise UserError(
                f"{subject} must shard dimensions that divide: dimension {dim} of {path} {list(shape)} is {size}, and "
                f"{spec} splits it into {pieces}. Change the size, the mesh ({factors(sizes)}) or the rule: "
                "Plan(rules=...) overrides metadata."
            )


REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class LeafSpecs:
    """The specs of a leaf of the optimizer state; if not `final`, its dimensions may be sharded further."""

    rest: PartitionSpec
    compute: PartitionSpec
    reason: str
    final: bool = False


def specs_for_leaf(path: str, shape: tuple[int, ...], params: Mapping[str, Placement]) -> LeafSpecs:
    if not shape:
        return LeafSpecs(REPLICATED, REPLICATED, "replicated: a scalar", final=True)
    parameter = owner_of(path, params)
    if parameter is None:
        return LeafSpecs(REPLICATED, REPLICATED, "it belongs to no parameter")
    if parameter.shape == shape:
        return LeafSpecs(parameter.rest, parameter.compute, f"mirrors params/{parameter.path}", final=True)
    dims = _parameter_dims(shape, parameter)
    if dims is None:
        reason = f"its own shape: {list(parameter.shape)} of params/{parameter.path} does not fit it"
        return LeafSpecs(REPLICATED, REPLICATED, reason)
    rest, compute = (_select_dims(spec, dims) for spec in (parameter.rest, parameter.compute))
    shared = [dim for dim in dims if dim is not None]
    return LeafSpecs(rest, compute, f"dimensions {shared} of params/{parameter.path}")


def owner_of(path: str, params: Mapping[str, Placement]) -> Placement | None:
    """Return the parameter whose path is part of `path`: the nearest to its end, then the longest."""
    keys = path.split("/")
    for end in range(len(keys), 0, -1):
        for start in range(end):
            if parameter := params.get("/".join(keys[start:end])):
                return parameter
    return params.get("")  # the parameters are one array


def _parameter_dims(shape: tuple[int, ...], parameter: Placement) -> tuple[int | None, ...] | None:
    """Return for each dimension of a leaf the parameter's, or None if it has no such; None if the shapes do not fit."""
    full = parameter.shape
    extra = len(shape) - len(full)
    if extra > 0:
        return (*(None,) * extra, *range(len(full))) if shape[extra:] == full else None
    if extra == 0:
        kept = tuple(dim if size == full[dim] else None for dim, size in enumerate(shape))
        fits = all(dim is not None or size == 1 for dim, size in zip(kept, shape, strict=True))
        return kept if fits and math.prod(shape) > 1 else None

    has_data = [DATA in axes_of(spec_entry(parameter.rest, dim)) for dim in range(len(full))]
    fitting = [dims for dims in combinations(range(len(full)), len(shape)) if tuple(full[d] for d in dims) == shape]
    return max(fitting, key=lambda dims: any(has_data[dim] for dim in dims), default=None)


def _select_dims(spec: PartitionSpec, dims: tuple[int | None, ...]) -> PartitionSpec:
    """Return the entries of `spec` for `dims`, without trailing Nones."""
    entries = [None if dim is None else spec_entry(spec, dim) for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
