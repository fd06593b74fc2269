"""The collectives of a step, read from its trace before it is compiled: above all the gathers of ZeRO-3.

An operation in a scan counts once for each iteration. The trace has the source lines of the loss' own collectives,
which XLA drops when it combines collectives.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jdp.core.reading.jaxprs import every_eqn, every_run, source_lines

UPDATE = "optimizer_update"
"""The name scope of the optimizer's update, also in XLA's names of operations."""
AT_TOP = "gather_at_top"
"""The name scope of gathers at the top of the loss."""
_PARAMETER = re.compile(r"gather\[([^\]]*)\]")
_REDUCTION = re.compile(r"reduce(_layer)?\[([^\]]*)\]")
_GATHERS = ("all_gather", "sharding_constraint")  # XLA turns the second into a gather
_KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def parameter_scope(path: str) -> AbstractContextManager[Any]:
    """Mark the gather that is traced inside with the path of its parameter."""
    return jax.named_scope(f"gather[{quote(path, safe='/')}]")


def reduction_scope(path: str, of_layer: bool) -> AbstractContextManager[Any]:
    """Mark operations as the reduction of the gradient of the parameter at `path`, or of one layer of it."""
    return jax.named_scope(f"reduce{'_layer' if of_layer else ''}[{quote(path, safe='/')}]")


@dataclass(frozen=True)
class Gathered:
    """The gathers of one parameter at one place of a step."""

    path: str
    at_top: bool  # gathered at the top of the loss and kept for the backward pass; False: in a layer loop
    elements: int  # on a device after each gather, including its own shard, summed over the gathers of a step
    payload_bytes: int


@dataclass(frozen=True)
class Issued:
    """A collective in the trace: XLA's name, the shape of its result on a device, and "file:line" of its calls."""

    kind: str
    dims: tuple[int, ...]
    source_lines: tuple[str, ...]


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a traced step: the parameters that ZeRO-3 gathers, by first use, and all others."""

    gathered: tuple[Gathered, ...]
    issued: tuple[Issued, ...]


def read_collectives(traced: jax.stages.Traced) -> TracedCollectives:
    """Read the collectives of a step from its trace, without dead code."""
    jaxpr = traced.jaxpr.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    elements, payload = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    issued: dict[Issued, None] = {}
    for eqn, times, scope in _collectives(live):
        if match := _PARAMETER.search(scope):
            result = eqn.outvars[0].aval
            sharding = eqn.params.get("sharding")  # of a constraint, whose result is global
            shape = result.shape if sharding is None else sharding.shard_shape(result.shape)
            key = unquote(match[1]), AT_TOP in scope
            elements[key] += times * math.prod(shape)
            payload[key] += times * math.prod(shape) * result.dtype.itemsize
        elif eqn.primitive.name in _KINDS:
            lines = tuple(line.rpartition(" (")[0] for line in source_lines(eqn))
            for each in eqn.outvars:
                issued.setdefault(Issued(_KINDS[eqn.primitive.name], tuple(each.aval.shape), lines))
    return TracedCollectives(tuple(Gathered(*key, elements[key], payload[key]) for key in elements), tuple(issued))


def gathers_by_layer(jaxpr: Any) -> bool:
    """Return True if a trace gathers a parameter in a layer loop."""
    return any(_PARAMETER.search(scope) and AT_TOP not in scope for _, _, scope in _collectives(jaxpr))


def reduced_by_layer(jaxpr: Any) -> dict[str, tuple[int, int]]:
    """Return for each parameter the elements that a trace reduces, in all layers and uses, and the number of layers.

    Return {} without layers, or if a branch of a condition reduces, because then not every call does.
    """
    sums: dict[str, Counter[str]] = {}
    layers = Counter[tuple[str, str]]()
    branches = [x for eqn in every_eqn(jaxpr) if eqn.primitive.name == "cond" for x in jaxprs_in_params(eqn.params)]
    if any(_REDUCTION.search(str(eqn.source_info.name_stack)) for branch in branches for eqn in every_eqn(branch)):
        return {}
    for eqn, times, scope in _collectives(jaxpr):
        if match := _REDUCTION.search(scope):
            path, kind = unquote(match[2]), eqn.primitive.name
            layers[path, kind] += times if match[1] is not None else 0
            sums.setdefault(path, Counter())[kind] += times * math.prod(eqn.invars[0].aval.shape)
    if not any(layers.values()):
        return {}
    return {path: (max(kinds.values()), max(layers[path, kind] for kind in kinds)) for path, kinds in sums.items()}


def _collectives(jaxpr: Any) -> Iterator[tuple[Any, int, str]]:
    """Yield (operation, how often it runs, its name scope) of collectives."""
    return (run for run in every_run(jaxpr) if run[0].primitive.name in _GATHERS or run[0].primitive.name in _KINDS)
