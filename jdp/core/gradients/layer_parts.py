"""The body of a layer loop in parts: what gathers its weights ahead, its computation, what reduces its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jax.extend.core import ClosedJaxpr

from jdp.core.gradients.wide_products import wide_products
from jdp.core.tracing.collectives import is_gather, is_reduction
from jdp.core.tracing.graph import Operation, Value, after, before, read

SMALL = 2**16
"""Bytes of a gathered norm or bias, at most. Each by itself would be a slice and a cast in each layer."""


@dataclass(frozen=True)
class Parts:
    """A scan's body in three parts: ahead, main, behind; see `pipeline.py`.

    Attributes:
        constants, carried, sliced: its inputs by kind: the same in every round, from round to round, of the round.
        outputs: its results.
        small: the operations that gather norms and biases, and take nothing that larger gathers compute; they are done
            once, for all layers.
        ahead, main, behind: the operations of each part.
        gathered_once: what other parts take of `small`'s results.
        gathered: what they take of `ahead`'s.
        wide: products of `main` that are made in float32.
        waiting: the products of `main` whose results wait for what is reduced, and for what is gathered, meanwhile.
        kept: what `behind` takes of the round.
        reduced: results that `behind` makes.
    """

    constants: list[Value]
    carried: list[Value]
    sliced: list[Value]
    outputs: list[Value]
    small: list[Operation]
    ahead: list[Operation]
    main: list[Operation]
    behind: list[Operation]
    wide: set[Operation]
    waiting: list[Operation]
    gathered_once: list[Value]
    gathered: list[Value]
    kept: list[Value]
    reduced: list[Value]

    @staticmethod
    def of(body: ClosedJaxpr, first: int, carried: int) -> Parts:
        """Split a scan's body with `first` constants and `carried` carried inputs."""
        graph = read(body, ())
        operations, inputs, outputs = graph.operations, graph.inputs, graph.outputs
        constants, state, sliced = inputs[:first], inputs[first : first + carried], inputs[first + carried :]
        of_layer = after(operations, sliced) - after(operations, state)
        ahead, _ = before(results_of(each for each in operations if is_gather(each.eqn) and each in of_layer))
        others = {*before(outputs[:carried])[0], *ahead}
        reductions = {each for each in operations if is_reduction(each.eqn) and each not in others}
        last = after(operations, results_of(reductions)) | reductions
        behind = [each for each in operations if each in last]
        main = [each for each in operations if each not in last.union(ahead)]
        used = {*inputs_of(main), *inputs_of(behind), *outputs}
        small, ahead = _small_apart(ahead)
        gathered_once = [value for value in results_of(small) if value in used.union(inputs_of(ahead))]
        gathered = [value for value in results_of(ahead) if value in used]
        kept = [value for value in inputs_of(behind) if value not in constants]
        reduced = [value for value in dict.fromkeys(outputs) if value.maker in last]
        wide = wide_products(main, [*kept, *outputs[carried:]], outputs[:carried])
        waiting = _waiting([each for each in before(outputs[:carried])[0] if each.name == "dot_general"])
        return Parts(
            *(constants, state, sliced, outputs, small, ahead, main, behind),
            *(wide, waiting, gathered_once, gathered, kept, reduced),
        )


def _small_apart(ahead: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the operations, of those of all gathers, that small gathers need which share none with large ones; and the
    others.
    """
    large, _ = before(x for x in results_of(ahead) if x.aval.ndim > 1 or bytes_of(x) > SMALL)
    with_large = after(ahead, results_of(large)).union(large)
    small, _ = before(results_of(each for each in ahead if is_gather(each.eqn) and each not in with_large))
    once = set(small)
    return small, [each for each in ahead if each not in once]


def bytes_of(value: Value) -> int:
    return math.prod(value.aval.shape) * value.aval.dtype.itemsize


def _waiting(products: Sequence[Operation]) -> list[Operation]:
    """Return the matrix products by which a half, and nine tenths, of their multiplications are done."""
    done = list(accumulate(map(_multiplications, products)))
    return [next(each for each, n in zip(products, done, strict=True) if n >= s * done[-1]) for s in (0.5, 0.9) if done]


def _multiplications(product: Operation) -> int:
    (contracted, _), _ = product.eqn.params["dimension_numbers"]
    left, [result] = product.operands[0].aval, product.results
    return math.prod(result.aval.shape) * math.prod(left.shape[i] for i in contracted)


def inputs_of(operations: Sequence[Operation]) -> list[Value]:
    """Return the values that operations take and do not make, in order, without the program's constants."""
    taken, made = (value for each in operations for value in each.operands), set(results_of(operations))
    return list(dict.fromkeys(value for value in taken if value not in made and value.constant is None))


def results_of(operations: Iterable[Operation]) -> list[Value]:
    return [value for each in operations for value in each.results]
