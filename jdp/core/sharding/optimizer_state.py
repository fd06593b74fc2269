"""Which parameter a leaf of the optimizer's state belongs to, and what of that parameter's specs fits it.

By structure: an optimizer maps over the parameters, so its state holds trees of the parameters' own structure, whatever
wraps them (`chain`, `masked`, `multi_transform`, ...). A leaf in such a tree has the parameter's path inside its own
path; then the shapes decide:
- equal: it mirrors the parameter (moments, averages, accumulated gradients);
- dimensions missing or of size 1 (adafactor's factored moments, sm3's), or more of them in front (the history of
  lbfgs): the spec's entries of the dimensions that are left;
- else (a second-order block [k, k]): its own shape decides, and the reason says so.

`optax.tree_map_params` finds the same trees by running the optimizer's `init` on a placeholder (a test holds one
against the other). It fails on an `init` that looks at shapes or names a parameter, and does not tell which leaf
belongs to which parameter; the paths do both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from jax.sharding import PartitionSpec

from jdp.core.sharding.mesh import DATA
from jdp.core.sharding.placement import Placement, axes_of, spec_entry

NOWHERE = PartitionSpec()


@dataclass(frozen=True)
class Kin:
    """What a leaf of the optimizer's state has of a parameter.

    Attributes:
        rest, compute: the parameter's specs, as far as they fit.
        reason: in words.
        whole: nothing more is to be sharded: it mirrors the parameter, or it is a scalar.
    """

    rest: PartitionSpec
    compute: PartitionSpec
    reason: str
    whole: bool = False


def kinship(path: str, shape: tuple[int, ...], params: Mapping[str, Placement]) -> Kin:
    """Find the parameter that the leaf at `path` (in the optimizer's state) belongs to, and what fits of its specs."""
    if not shape:
        return Kin(NOWHERE, NOWHERE, "replicated: a scalar", whole=True)
    parameter = _owner(path, shape, params)
    if parameter is None:
        return Kin(NOWHERE, NOWHERE, "it belongs to no parameter")
    if parameter.shape == shape:
        return Kin(parameter.rest, parameter.compute, f"mirrors params/{parameter.path}", whole=True)
    dims = _dims(shape, parameter)
    if dims is None:
        return Kin(NOWHERE, NOWHERE, f"its own shape: {list(parameter.shape)} of params/{parameter.path} is another")
    rest, compute = (_only(spec, dims) for spec in (parameter.rest, parameter.compute))
    left = [dim for dim in dims if dim is not None]
    return Kin(rest, compute, f"dimensions {left} of params/{parameter.path}")


def _owner(path: str, shape: tuple[int, ...], params: Mapping[str, Placement]) -> Placement | None:
    """The parameter whose path is part of `path`: of those at its end, or nearest to it, the longest.

    Wrappers may also take the parameters apart: lookahead's optimizer sees `w` where the parameters have `fast/w`.
    """
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        for start in range(end):
            if found := params.get("/".join(parts[start:end])):
                return found
    if lone := params.get(""):  # the parameters are one array
        return lone
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        for name, parameter in params.items():
            if parameter.shape == shape and name.endswith(f"/{tail}"):
                return parameter
    return None


def _dims(shape: tuple[int, ...], parameter: Placement) -> tuple[int | None, ...] | None:
    """Of each dimension of a leaf, the parameter's dimension it is; None for one of the leaf's own."""
    whole = parameter.shape
    extra = len(shape) - len(whole)
    if extra > 0:
        return (*(None,) * extra, *range(len(whole))) if shape[extra:] == whole else None
    if extra == 0:
        kept = tuple(dim if size == whole[dim] else None for dim, size in enumerate(shape))
        fits = all(dim is not None or size == 1 for dim, size in zip(kept, shape, strict=True))
        return kept if fits and math.prod(shape) > 1 else None
    fitting = [dims for dims in combinations(range(len(whole)), len(shape)) if tuple(whole[d] for d in dims) == shape]
    return max(fitting, key=lambda dims: _is_cut(parameter, dims), default=None)


def _is_cut(parameter: Placement, dims: tuple[int, ...]) -> bool:
    """Whether the dimension that is sharded over `data` is among them: of dimensions alike, keep that one."""
    return any(DATA in axes_of(spec_entry(parameter.rest, dim)) for dim in dims)


def _only(spec: PartitionSpec, dims: tuple[int | None, ...]) -> PartitionSpec:
    entries = [None if dim is None else spec_entry(spec, dim) for dim in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
