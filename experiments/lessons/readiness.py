"""The order in which a backward pass computes its gradients, read from its jaxpr, and buckets filled in that order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import jax

from jdp.base.tree_paths import path_of
from jdp.core.reading import count_flops


@dataclass(frozen=True)
class Ready:
    """A gradient when it is made.

    Attributes:
        path, size: its parameter, and its bytes.
        equation: the number of the jaxpr's equation that makes it.
        flops: those of the matrix products up to that equation, the forward pass included.
    """

    path: str
    size: int
    equation: int
    flops: int


def readiness(loss: Callable[[Any, Any], jax.Array], params: Any, rows: Any) -> tuple[list[Ready], int]:
    """Return the gradients in the order in which the jaxpr makes them, and the FLOPs of the whole pass.

    Args:
        loss: from (params, rows) to a scalar, without loops over layers: their gradients come out all at once.
        params, rows: real or abstract.
    """
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, rows).jaxpr
    clock = list(accumulate(count_flops(SimpleNamespace(eqns=[equation])) for equation in jaxpr.eqns))
    made_by = {made: i for i, equation in enumerate(jaxpr.eqns) for made in equation.outvars}
    paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    outputs = [(path, out.aval, made_by[out]) for path, out in zip(paths, jaxpr.outvars, strict=True)]
    ready = [Ready(path, aval.size * aval.dtype.itemsize, i, clock[i]) for path, aval, i in outputs]
    return sorted(ready, key=lambda each: each.equation), clock[-1]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together, ready when the last of them is, at `flops`."""

    paths: tuple[str, ...]
    size: int
    flops: int


def buckets(ready: Sequence[Ready], size: float) -> list[Bucket]:
    """Return buckets filled in the order of `ready`, each closed when it has `size` bytes."""
    closed, filled = list[Bucket](), list[Ready]()
    for each in ready:
        filled.append(each)
        if sum(one.size for one in filled) >= size or each is ready[-1]:
            closed.append(Bucket(tuple(one.path for one in filled), sum(one.size for one in filled), each.flops))
            filled = []
    return closed
