"""Checks of a plan's rules, pairs of a path pattern and a `PartitionSpec`, and of specs against shapes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jdp.base.errors import UserError
from jdp.core.sharding.axes import REPLICA, factors
from jdp.core.sharding.placement import axes_of, shards


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
