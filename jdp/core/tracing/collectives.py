"""The collectives that a step issues, read from its trace before it is compiled: ZeRO-3's gathers above all.

The gather boundary (`boundary.gather_with_reduced_grad`) names each gather after its parameter, and `TracedLoss` marks
those at the top of the loss. A trace without its dead code has one operation for each gather. A weight is gathered once
at the top of the loss, or in a layer loop once in each pass that needs it. Operations in a scan count as often as it
runs.

Collectives of the loss itself have their source lines in the trace. XLA drops those when it combines collectives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jdp.core.tracing.jaxprs import source_lines

UPDATE = "optimizer_update"
"""The name, in XLA's names of operations, of the optimizer's update."""
_AT_TOP = "gather_at_top"
_PARAMETER = re.compile(r"gather\[([^\]]*)\]")
_REDUCTION = re.compile(r"reduce\[([^\]]*)\]")
_GATHERS = ("all_gather", "sharding_constraint")  # issued by hand; and what XLA makes a gather of
_KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def top_scope() -> AbstractContextManager[Any]:
    """Mark the gathers traced inside as made at the top of the loss, for all of it."""
    return jax.named_scope(_AT_TOP)


def parameter_scope(path: str) -> AbstractContextManager[Any]:
    """Mark the gather traced inside as that of the parameter at `path`."""
    return jax.named_scope(f"gather[{quote(path, safe='/')}]")


def reduction_scope(path: str) -> AbstractContextManager[Any]:
    """Mark what is traced inside as the reduction of the gradient of the parameter at `path`."""
    return jax.named_scope(f"reduce[{quote(path, safe='/')}]")


def update_scope() -> AbstractContextManager[Any]:
    """Mark what is traced inside as the optimizer's update."""
    return jax.named_scope(UPDATE)


def is_gather(eqn: Any) -> bool:
    """Return True if the operation was traced in a `parameter_scope`."""
    return _PARAMETER.search(str(eqn.source_info.name_stack)) is not None


def gathers_at_use(eqn: Any) -> bool:
    """Return True if an operation is, or is part of, the gather of a weight where the loss uses it."""
    inside = jaxprs_in_params(eqn.params) if "custom_vjp" in eqn.primitive.name else ()
    at_top = _AT_TOP in str(eqn.source_info.name_stack)
    return at_top or any(any(map(is_gather, inner.eqns)) for inner in inside)


def is_reduction(eqn: Any) -> bool:
    """Return True if the operation was traced in a `reduction_scope`."""
    return _REDUCTION.search(str(eqn.source_info.name_stack)) is not None


@dataclass(frozen=True)
class Gathered:
    """What a step gathers of one parameter, in one place.

    Attributes:
        path: of the parameter, such as "layers/mlp/up/kernel".
        at_top: True if it is gathered at the top of the loss and kept for the backward pass, False if in a layer loop.
        elements: on a device after each gather, its own shard included, summed over the gathers of a step.
        payload_bytes: of those elements, in the dtype that is sent.
    """

    path: str
    at_top: bool
    elements: int
    payload_bytes: int


@dataclass(frozen=True)
class Issued:
    """A collective in the trace: XLA's name, the shape of its result on a device, and "file:line" of its calls."""

    kind: str
    dims: tuple[int, ...]
    source_lines: tuple[str, ...]


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a traced step: parameters that ZeRO-3 gathers, by first use, and all that are not gathers."""

    gathered: tuple[Gathered, ...]
    issued: tuple[Issued, ...]


def read_collectives(traced: jax.stages.Traced) -> TracedCollectives:
    """Read the collectives of a step from its trace, dead code left out."""
    jaxpr = traced.jaxpr.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    sums: dict[tuple[str, bool], tuple[int, int]] = {}
    issued: dict[Issued, None] = {}
    for eqn, times, scope in _walk(live, 1, ""):
        if match := _PARAMETER.search(scope):
            result = eqn.outvars[0].aval
            sharding = eqn.params.get("sharding")  # of a constraint, whose result is global
            shape = result.shape if sharding is None else sharding.shard_shape(result.shape)
            elements = times * math.prod(shape)
            key = unquote(match[1]), _AT_TOP in scope
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + elements, before[1] + elements * result.dtype.itemsize)
        elif eqn.primitive.name in _KINDS:
            lines = tuple(line.rpartition(" (")[0] for line in source_lines(eqn))
            for each in eqn.outvars:
                issued.setdefault(Issued(_KINDS[eqn.primitive.name], tuple(each.aval.shape), lines))
    return TracedCollectives(tuple(Gathered(*key, *counts) for key, counts in sums.items()), tuple(issued))


def reduced_by_layer(jaxpr: Any) -> dict[str, int]:
    """Return for each parameter how many elements a trace reduces, all rounds and uses together; {} without a loop."""
    sums: dict[str, Counter[str]] = {}
    rounds = 1
    for eqn, times, scope in _walk(jaxpr, 1, ""):
        if match := _REDUCTION.search(scope):
            kinds = sums.setdefault(unquote(match[1]), Counter())
            kinds[eqn.primitive.name] += times * math.prod(eqn.invars[0].aval.shape)
            rounds = max(rounds, times)
    return {path: max(kinds.values()) for path, kinds in sums.items()} if rounds > 1 else {}


@dataclass(frozen=True)
class Sent:
    """A gather of a weight or a reduction of a gradient: XLA's name, mesh axes, and bytes on a device.

    `payload` is what all members of a group have together of a gather's result, and what one puts into a reduction;
    `result_bytes` is what a device gets.
    """

    kind: str
    axes: tuple[str, ...]
    payload: int
    result_bytes: int
    reduces: bool

    def stacked(self, layers: int) -> Sent:
        """Return the same for the stacked leaves of so many layers."""
        return replace(self, payload=layers * self.payload, result_bytes=layers * self.result_bytes)


@dataclass(frozen=True)
class Round:
    """What a layer loop sends in each of its rounds, or a trace outside of its loops (`loop` None, one round)."""

    loop: Any
    rounds: int
    sent: tuple[Sent, ...]


def sent_by_round(jaxpr: Any) -> list[Round]:
    """Return what each loop of a trace gathers and reduces in its own rounds, and first what is sent outside."""
    found: dict[int, Round] = {}

    def visit(jaxpr: Any, loop: Any, rounds: int, outer: str) -> None:
        for eqn in jaxpr.eqns:
            scope = f"{outer}/{eqn.source_info.name_stack}"
            reduces = _REDUCTION.search(scope) is not None
            if eqn.primitive.name in _KINDS and (reduces or _PARAMETER.search(scope)):
                before = found.get(id(loop), Round(loop, rounds, ()))
                found[id(loop)] = replace(before, sent=(*before.sent, *_sent(eqn, reduces)))
            is_loop = eqn.primitive.name == "scan"
            for inner in jaxprs_in_params(eqn.params):
                own = (eqn, rounds * eqn.params["length"]) if is_loop else (loop, rounds)
                visit(inner, *own, scope)

    found[id(None)] = Round(None, 1, ())
    visit(jaxpr, None, 1, "")
    return list(found.values())


def _sent(eqn: Any, reduces: bool) -> Iterator[Sent]:
    """Yield what an operation sends, one for each array."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    for operand, result in zip(eqn.invars, eqn.outvars, strict=False):
        sizes = [x.aval.size * x.aval.dtype.itemsize for x in (operand, result)]
        kind = _KINDS[eqn.primitive.name]
        yield Sent(kind, axes, sizes[kind == "all-gather"], sizes[1], reduces)


def _walk(jaxpr: Any, times: int, outer: str) -> Iterator[tuple[Any, int, str]]:
    """Yield (operation, how often it runs, its name scope) of collectives, below the scope `outer`."""
    for eqn in jaxpr.eqns:
        scope = f"{outer}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in _GATHERS or eqn.primitive.name in _KINDS:
            yield eqn, times, scope
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            yield from _walk(inner, times * rounds, scope)
