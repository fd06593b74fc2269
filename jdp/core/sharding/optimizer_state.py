"""Find the parameter of a leaf of the optimizer state, and derive the leaf's specs from the parameter's specs.

An optimizer maps over the parameters, so its state holds trees of the parameters' structure, in any wrapper (`chain`,
`masked`, ...). The path of a leaf in such a tree contains the parameter's path, and the leaf mirrors the parameter if
the shapes are equal. If dimensions are missing or of size 1 (factored moments), or more are in front (lbfgs' history),
the leaf has the spec's entries for the common dimensions. Any other leaf is placed by its own shape.

`optax.tree_map_params` is not enough: it fails on an `init` that reads shapes or names a parameter, and it does not
return the parameter of a leaf.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from jax.sharding import PartitionSpec

from jdp.core.sharding.axes import DATA
from jdp.core.sharding.placement import Placement, axes_of, spec_entry

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

    def has_data(dims: tuple[int, ...]) -> bool:
        return any(DATA in axes_of(spec_entry(parameter.rest, dim)) for dim in dims)

    fitting = [dims for dims in combinations(range(len(full)), len(shape)) if tuple(full[d] for d in dims) == shape]
    return max(fitting, key=has_data, default=None)


def _select_dims(spec: PartitionSpec, dims: tuple[int | None, ...]) -> PartitionSpec:
    """Return the entries of `spec` for `dims`, without trailing Nones."""
    entries = [None if dim is None else spec_entry(spec, dim) for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
