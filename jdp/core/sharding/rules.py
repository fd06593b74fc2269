"""The form of a plan's rules, pairs of a path pattern and a `PartitionSpec`, and whether a spec fits a shape."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jdp.base.errors import UserError
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.placement import axes_of, shards


def checked_rules(rules: Any, mesh_axes: Sequence[str]) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the rules as a tuple of pairs, after checking their types and the axes that they name."""
    example = 'rules=[("*/kernel", PartitionSpec(None, "model"))]'
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        raise UserError(
            f"A plan's rules are a sequence of pairs, as in {example}; given {rules!r}. Give a list of pairs."
        )
    pairs: list[tuple[str, PartitionSpec]] = []
    for rule in rules:  # pyright: ignore[reportUnknownVariableType]
        match rule:
            case (str() as pattern, PartitionSpec() as spec):
                pass
            case _:
                raise UserError(
                    f"A rule is a pair of a path pattern and a PartitionSpec, as in {example}; given {rule!r}. Give "
                    "a PartitionSpec."
                )
        for entry in spec:
            axes: Any = entry if isinstance(entry, tuple | list) else () if entry is None else (entry,)
            if not all(isinstance(axis, str) for axis in axes):
                raise UserError(
                    f"A dimension in a rule is None, an axis or a tuple of axes; the rule for {pattern!r} has "
                    f"{entry!r}. Write None for a dimension that is not sharded."
                )
        for axis in (axis for entry in spec for axis in axes_of(entry)):
            if axis not in mesh_axes:
                raise UserError(
                    f"A rule may name axes of the mesh only, {tuple(mesh_axes)}; "
                    f"the rule for {pattern!r} names {axis!r}. Add that axis to the mesh, or change the rule."
                )
            if axis == REPLICA:
                raise UserError(
                    f"The `{axis}` axis carries the batch only: nothing is sharded over it; the rule for {pattern!r} "
                    f"names it. Use `{DATA}`, or an axis of the model's own."
                )
        pairs.append((pattern, spec))
    return tuple(pairs)


def check_fits(path: str, shape: tuple[int, ...], spec: PartitionSpec, source: str, sizes: Mapping[str, int]) -> None:
    """Check a parameter's spec against its shape; `source` ("the …") is what gave the spec. Raises ValueError."""
    if len(spec) > len(shape):
        raise UserError(
            f"A spec has at most one entry for each dimension; {spec} of {source} has {len(spec)}, and {path} has "
            f"shape {list(shape)}. Leave out entries."
        )
    named, subject = [axis for entry in spec for axis in axes_of(entry)], f"T{source[1:]}"
    if len(set(named)) < len(named):
        raise UserError(f"{subject} names an axis once; {spec} for {path} does not. Remove one.")
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
        pieces = shards((entry,), sizes)
        if size % pieces:
            raise UserError(
                f"{subject} must shard dimensions that divide: dimension {dim} of {path} {list(shape)} "
                f"is {size}, and {spec} splits it into {pieces}. Change the size, or the mesh "
                f"({factors(sizes)}), or the rule: Plan(rules=...) goes before metadata."
            )
