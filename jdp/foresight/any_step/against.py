"""The bound for any jitted step: a strategy's row for its parameters, or a number of bytes.

The row is the contract's (`traffic/theory.py`) for one microbatch, with B bytes of parameters and N devices that share
the batch. Gradients and gathered weights count in the parameters' dtype:

    ddp           all-reduce B                        2(N-1)/N · B on the wire
    zero1, zero2  reduce-scatter B, all-gather B      2(N-1)/N · B
    zero3         reduce-scatter B, all-gather 2·B    3(N-1)/N · B at most

Bytes on the wire are those of the ring algorithms (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.tree_paths import matches
from jdp.base.words import is_integer, nearest
from jdp.core.sharding.placement import axes_of, bytes_per_device
from jdp.core.sharding.strategy import strategy
from jdp.foresight.any_step.relocate import Relocated
from jdp.foresight.any_step.traced import Argument
from jdp.foresight.traffic.theory import ring_bytes


@dataclass(frozen=True)
class Bound:
    """The bytes that a device may send."""

    wire_bytes: float  # a step
    words: str  # whose bytes these are: "of zero3 for 12 MiB of parameters", "that were given"
    over_batch: bool  # only collectives along the batch's axes count


def bound(against: str | float, parameters: Sequence[Argument] | None, moved: Relocated) -> Bound:
    """Return the bytes that a device may send."""
    if not isinstance(against, str):
        if isinstance(against, bool) or not math.isfinite(against) or against < 0:
            raise UserError(
                f"against is a strategy's name or the bytes that a device may send a step; given {against!r}. Pass "
                "'zero3' or 500e6."
            )
        return Bound(float(against), "that were given", over_batch=False)
    row, mesh = strategy(against), moved.mesh
    if parameters is None:
        raise UserError(
            f"Comparing with a strategy requires the parameters; given against={against!r} and no params. Name the "
            "arguments: params=0, params='model' or params='state/params/*'."
        )
    devices = math.prod(mesh.shape[axis] for axis in moved.batch_axes)
    size = 0
    for each in parameters:  # an array's shard of the model's own axes, gathered along the batch's
        entries = each.sharding.spec if each.sharding is not None else ()
        own = {axis for entry in entries for axis in axes_of(entry)} - {*moved.batch_axes}
        size += bytes_per_device(each.shape, each.dtype, math.prod(mesh.shape[axis] for axis in own))
    kinds = (
        ["reduce-scatter", *["all-gather"] * (2 if row.gather == "use" else 1)] if row.shard_state else ["all-reduce"]
    )
    wire = sum(ring_bytes(kind, size, devices) for kind in kinds)
    return Bound(wire, f"of {row.name} for {format_bytes(size)} of parameters", over_batch=True)


def chosen(params: int | str | Sequence[str] | None, arguments: Sequence[Argument]) -> list[Argument] | None:
    """Return the floating-point arrays that `params` names; None if it is None."""
    if params is None:
        return None
    if is_integer(params):
        named = [each for each in arguments if each.number == params]
    else:
        patterns = [params] if isinstance(params, str) else [*params]  # pyright: ignore[reportGeneralTypeIssues]
        wanted = [*patterns, *(f"{pattern}/*" for pattern in patterns)]
        named = [each for each in arguments if matches(each.path, wanted)]
    found = [each for each in named if jnp.issubdtype(each.dtype, jnp.floating)]
    if not found:
        first = list(dict.fromkeys(each.path for each in arguments))
        hint = nearest(str(params), first, cutoff=0.3)
        raise UserError(
            f"params names floating-point arguments of the step, such as {first[0]}; given {params!r}, which none "
            f"matches{hint}"
        )
    return found
