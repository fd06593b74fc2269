"""What a step asks to send, told by its own trace, before any compiler has seen it: ZeRO-3's gathers, first of all.

The gather boundary (`accumulate.gather_with_reduced_grad`) names each gather after its parameter, and `TracedLoss`
those at the top of the loss besides. A trace without its dead code then holds one operation for every gather that the step asks for: in a
layer loop one going forward and, where the backward pass needs the weight, one more; at the top one, which is kept for
the backward pass. Operations in a scan count as often as it runs.

Collectives that the loss itself issues stand in the trace too, each with its line, which XLA drops where it joins them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jdp.core.gradients.jaxprs import inner_jaxprs

_AT_TOP = "gather_at_top"
_NAMED = re.compile(r"gather\[([^\]]*)\]")
_GATHERS = ("all_gather", "sharding_constraint")  # by hand; and what XLA makes a gather of
_KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def at_top() -> AbstractContextManager[Any]:
    """What is gathered inside is gathered at the top of the loss, for all of it."""
    return jax.named_scope(_AT_TOP)


def named(path: str) -> AbstractContextManager[Any]:
    """What is gathered inside is this parameter."""
    return jax.named_scope(f"gather[{quote(path, safe='/')}]")


@dataclass(frozen=True)
class Gathered:
    """What a step gathers of one parameter, in one place.

    Attributes:
        path: of the parameter, such as "layers/mlp/up/kernel".
        at_top: at the top of the loss and kept until the backward pass is done with it; else where a layer loop uses
            it, and dropped again.
        elements: how many a device receives or holds already, a step: of every gather, of every microbatch.
        payload_bytes: the same in bytes, in the dtype that is sent.
    """

    path: str
    at_top: bool
    elements: int
    payload_bytes: int


@dataclass(frozen=True)
class Issued:
    """A collective that stands in the trace as one.

    Attributes:
        kind: of collective, as XLA calls it.
        dims: of its result, on a device.
        source_lines: "file:line" of the calls that led to it, innermost first.
    """

    kind: str
    dims: tuple[int, ...]
    source_lines: tuple[str, ...]


@dataclass(frozen=True)
class TracedCollectives:
    """What a traced step asks to send.

    Attributes:
        gathered: every parameter that ZeRO-3 gathers, in the order of first use; none under other strategies.
        issued: every other collective that is issued by hand.
    """

    gathered: tuple[Gathered, ...]
    issued: tuple[Issued, ...]


def read_collectives(traced: jax.stages.Traced) -> TracedCollectives:
    """Read a step's trace."""
    jaxpr = traced.jaxpr.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    sums: dict[tuple[str, bool], tuple[int, int]] = {}
    issued: dict[Issued, None] = {}
    for eqn, times, name in _walk(live, 1, ""):
        if match := _NAMED.search(name):
            result = eqn.outvars[0].aval
            sharding = eqn.params.get("sharding")  # of a constraint, whose result is global
            shape = result.shape if sharding is None else sharding.shard_shape(result.shape)
            elements = times * math.prod(shape)
            key = unquote(match[1]), _AT_TOP in name
            before = sums.get(key, (0, 0))
            sums[key] = (before[0] + elements, before[1] + elements * result.dtype.itemsize)
        elif eqn.primitive.name in _KINDS:
            frames = eqn.source_info.traceback.frames if eqn.source_info.traceback is not None else ()
            source_lines = tuple(f"{frame.file_name}:{frame.line_num}" for frame in frames)
            for each in eqn.outvars:
                issued.setdefault(Issued(_KINDS[eqn.primitive.name], tuple(each.aval.shape), source_lines))
    return TracedCollectives(tuple(Gathered(*key, *counts) for key, counts in sums.items()), tuple(issued))


def _walk(jaxpr: Any, times: int, around: str) -> Iterator[tuple[Any, int, str]]:
    """(operation, how often it runs, its name) of all that may send; `around` is the name of what holds the jaxpr."""
    for eqn in jaxpr.eqns:
        name = f"{around}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in _GATHERS or eqn.primitive.name in _KINDS:
            yield eqn, times, name
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in inner_jaxprs(eqn):
            yield from _walk(inner, times * rounds, name)
