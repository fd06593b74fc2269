"""`jdp.foresee` and `jdp.verify` for any jitted step: compile it for a target, and report on the program.

Its traffic is compared with a number of bytes, or with a strategy's row for one microbatch and B bytes of parameters,
in their own dtype. On N devices that share the batch, ddp, zero1 and zero2 send 2(N-1)/N · B bytes, and zero3 at most
3(N-1)/N · B.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdp.base.disk_cache import Cache
from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes, listed
from jdp.base.toml import described
from jdp.base.tree_paths import matches
from jdp.base.words import is_integer, nearest
from jdp.core.sharding.placement import Placement, axes_of, bytes_per_device
from jdp.core.sharding.strategy import strategy
from jdp.foresight.any_step.relocate import Relocated, move
from jdp.foresight.any_step.traced import Argument
from jdp.foresight.memory import CPU_PROGRAM, StepReport, caveats_on, memory_by_argument, on_target
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.targets.resolve import Target, target_of
from jdp.foresight.traffic.contract import TINY, TOLERANCE, activations, collectives_on, sent_by
from jdp.foresight.traffic.faults import symptoms
from jdp.foresight.traffic.origin import Parameters, Reading
from jdp.foresight.traffic.theory import ring_bytes


def forecast(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    target: str | Target | None = None,
    mesh: Mapping[str, int] | None = None,
    against: str | float | None = None,
    params: int | str | Sequence[str] | None = None,
    cache: bool = True,
) -> StepReport:
    """Compile any jitted step for a target, and report its memory, traffic and schedule. Nothing runs."""
    if not callable(function):
        raise UserError(
            f"The first argument is a step, jdp.verify(step, state, batch); given {described(function)}. Pass the "
            "arguments in this order."
        )
    devices = None if target is None else target_of(target)
    moved = move(function, arguments, devices, mesh)
    devices = devices or target_of(None, [each.abstract() for each in moved.traced.arguments])
    parameters = _chosen(params, moved.traced.arguments)
    limit = None if against is None else _bound(against, parameters, moved)
    compiled = moved.compile(devices, Cache.usual(cache))
    reading = _reading(compiled, moved, parameters)
    sent = sent_by(reading, collectives_on(reading))
    counted = [each for each in sent if each.over_batch or limit is None or not limit.over_batch]
    wire = sum(each.wire_bytes for each in counted)
    kept = None if limit is None else wire <= TOLERANCE * limit.wire_bytes
    breaches, excess = list[str](), 0.0 if limit is None or kept else wire - limit.wire_bytes
    for each in counted:  # most bytes first, until the rest is within the bound
        if excess <= 0:
            break
        breaches.append(str(each))
        excess -= each.wire_bytes
    leaves, named = list[tuple[str, str, bool]](), {each.path for each in parameters or ()}
    for argument in moved.traced.arguments:
        kind = "batch" if argument.number in moved.batch else "other"
        leaves.append((argument.path, "parameters" if argument.path in named else kind, argument.donated))
    held = memory_by_argument(compiled, leaves)
    placing = "no result has its shape, dtype and sharding. Return such a result (out_shardings), or do not donate it."
    signs = (*activations(sent, moved.batch_axes), *symptoms(reading, placing), *_not_donated(compiled, moved))
    notes = [*moved.notes, *caveats_on([(each.kind, each.caveats) for each in sent])]
    if limit is not None and limit.over_batch:
        notes.append("a strategy's row is for one microbatch, gradients and gathered weights in the parameters' dtype")
    notes += [CPU_PROGRAM] if devices.devices[0].platform == "cpu" else []
    return StepReport(
        **on_target(held, compiled, devices),
        name=moved.traced.name,
        kept=kept,
        mesh=dict(moved.mesh.shape),
        wire_bytes_per_device=wire,
        bound_wire_bytes_per_device=None if limit is None else limit.wire_bytes,
        bound_words="" if limit is None else limit.words,
        ratio=wire / limit.wire_bytes if limit and limit.wire_bytes else None,
        sent=sent,
        breaches=tuple(breaches),
        symptoms=signs,
        notes=tuple(dict.fromkeys(notes)),
    )


def _reading(compiled: Compiled, moved: Relocated, parameters: Iterable[Argument] | None) -> Reading:
    """Read a step; its tensors match arguments, at rest or gathered along the batch's axes."""

    def placement(argument: Argument) -> Placement:
        rest = argument.spec
        compute = PartitionSpec(*(tuple(a for a in axes_of(e) if a not in moved.batch_axes) or None for e in rest))
        return Placement(argument.path, argument.shape, str(argument.dtype), rest, compute, 0, "given")

    known = parameters or [each for each in moved.traced.arguments if each.number not in moved.batch]
    found = Parameters(tuple(placement(each) for each in known if each.shape), dict(moved.mesh.shape), True)
    donated = {number: each.path for number, each in enumerate(moved.traced.arguments) if each.donated}
    meant = [*(each.sharding for each in moved.traced.arguments), *moved.traced.out_shardings]
    offloads = any(each is not None and each.memory_kind == "pinned_host" for each in meant)
    return Reading(compiled, moved.mesh, moved.batch_axes, found, donated, offloads)


def _not_donated(compiled: Compiled, moved: Relocated) -> Iterator[str]:
    if any(each.donated for each in moved.traced.arguments):
        return
    results = Counter((v.aval.shape, v.aval.dtype) for v in moved.traced.closed.jaxpr.outvars)
    replaced = list[tuple[int, str]]()
    for number, each in enumerate(moved.traced.arguments):
        if each.number not in moved.batch and results[each.shape, each.dtype] > 0:
            results[each.shape, each.dtype] -= 1
            replaced.append((compiled.program.argument_bytes.get(number, ("", 0))[1], each.path))
    total = sum(size for size, _ in replaced)
    if total >= 0.01 * compiled.total_bytes and total > TINY:
        first = [path for _, path in sorted(replaced, reverse=True)]
        yield (
            f"Donation: no argument is donated, so {listed(first)} ({format_bytes(total)} a device) are held "
            "beside their new values. Donate them: jax.jit(step, donate_argnums=...), and use the step's results."
        )


class Bound(NamedTuple):
    wire_bytes: float  # that a device may send a step
    words: str  # whose bytes these are: "of zero3 for 12 MiB of parameters", "that were given"
    over_batch: bool  # only collectives along the batch's axes count


def _bound(against: str | float, parameters: Sequence[Argument] | None, moved: Relocated) -> Bound:
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
    for each in parameters:  # a shard along the model's own axes, gathered along the batch's axes
        of_model = {axis for entry in each.spec for axis in axes_of(entry)} - {*moved.batch_axes}
        size += bytes_per_device(each.shape, each.dtype, math.prod(mesh.shape[axis] for axis in of_model))
    transfers = 3 if row.gather == "use" else 2  # an all-reduce is a reduce-scatter and an all-gather
    wire = transfers * ring_bytes("all-gather", size, devices)
    return Bound(wire, f"of {row.name} for {format_bytes(size)} of parameters", over_batch=True)


def _chosen(params: int | str | Sequence[str] | None, arguments: Sequence[Argument]) -> list[Argument] | None:
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
        paths = [each.path for each in arguments]
        raise UserError(
            f"params names floating-point arguments of the step, such as {paths[0]}; given {params!r}, which matches "
            f"none{nearest(str(params), paths, cutoff=0.3)}"
        )
    return found
