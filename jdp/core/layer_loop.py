"""The loop over stacked layers inside of a step: a function with a derivative of its own.

It gathers one layer ahead and sums gradients one layer behind, so that no layer waits for its own collectives:

    forward    W = gather(0)        round k:  next = gather(k + 1)
                                              x, kept[k] = block(W, x);  W = next
    backward   W = gather(n - 1)    round k:  next = gather(k - 1);  d[k + 1] = reduce(dW)
                                              dW, dx = vjp(kept[k], W)(dx);  W = next

A weight that is used after the last layer, such as a head, counts as layer n. The last round forward gathers it, and
the first one backward reduces its gradient. With a `replica` axis round k also sums layer k + 2 over the replicas,
which waits for no other collective of the round.

A round's collectives do not depend on its computation, so XLA's scheduler runs both at once. A barrier ends each round:
otherwise XLA would combine or delay collectives of several rounds. Gathered weights are not stacked for the backward
pass: zero3 gathers them again, and casts are repeated. zero1 and zero2, which gather once a step, keep them.

Rounds are compiled one by one, or as a loop over pairs of rounds. The two gathers of a pair reuse each other's memory;
in a loop over single rounds XLA would copy a layer's weights and gradient in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from jdp.core.gradients.boundary import Boundary, Weight
from jdp.core.layer_order import LayerDerivative
from jdp.core.reading import AT_TOP, run
from jdp.core.sharding.mesh import traced_model_axes
from jdp.core.sharding.placement import Placement

Layer = Callable[..., Any]
"""(weights, others, carry, *outer) -> (carry, outputs)."""
Weights = tuple[list[Weight], list[Weight]]
"""The stacks of all layers, and the weights that are used after the last."""
Stacks = dict[str, Any]
"""Name -> results of the rounds: arrays [layers, ...]; if rounds are compiled one by one, number -> its results."""


class _Residuals(NamedTuple):
    """How a layer's derivative is rebuilt from its residuals: set when the forward pass is traced."""

    structure: Any  # of the derivative, a pytree of arrays
    places: list[int | None]  # of each leaf among weights, others and outer values, which are not kept; None: residual
    results: Any  # the shapes of a layer's results


@dataclass
class LayerLoop:
    boundary: Boundary
    placements: list[Placement]  # of the stacked weights
    after: list[Placement]  # of the weights that are used after the last layer
    policy: Callable[..., bool]  # as for `jax.checkpoint`: which values are kept for the backward pass
    is_unrolled: bool  # layers are compiled one by one
    count: int
    _layer: Layer = field(init=False)
    _is_ahead: bool = field(init=False)  # gathers are sent before they are needed
    _keeps: bool = field(init=False)  # gathered weights are kept for the backward pass
    _residuals: _Residuals = field(init=False)
    _derivative: LayerDerivative | None = field(init=False, default=None)

    def __call__(self, layer: Layer, weights: Weights, others: list[Any], carry: Any) -> tuple[Any, Any, list[Any]]:
        """Return, like a scan, the last layer's carry and the stacked outputs of all layers; and `after`, gathered.

        `weights` and `others` are [layers, ...]; only `weights` are gathered. The layer's closure is differentiated.
        """
        self.is_unrolled |= self.count < 3
        sends = self.boundary.gather is not None and any(placement.dim is not None for placement in self.placements)
        self._is_ahead, self._keeps = sends, sends and not self.boundary.again
        gathered, slices = jax.eval_shape(lambda w, o: (self._gather(w, 0), _at(o, 0)), weights, others)
        self._layer, carry, outer = _closed(layer, gathered, slices, carry)
        trained = (placement.trained for placement in (*self.placements, *self.after))
        if any(trained) and all(weight.slot is None for part in weights for weight in part):  # an evaluation
            return self._plain(weights, others, carry, outer)
        loop = jax.custom_vjp(self._plain)
        loop.defvjp(self._saving, self._backward, symbolic_zeros=True)
        return loop(weights, others, carry, outer)

    def _plain(self, weights: Weights, others: list[Any], carry: Any, outer: list[Any]) -> tuple[Any, Any, list[Any]]:
        def call(gathered: list[Any], others: list[Any], carry: Any) -> tuple[Any, Stacks]:
            carry, outputs = self._layer(gathered, others, carry, *outer)
            return carry, {"outputs": outputs}

        carry, stacks = self._forward(call, weights, others, carry)
        return carry, self._stacked(stacks["outputs"]), stacks["after"]

    def _saving(self, *given: Any) -> tuple[Any, Any]:
        """Return (the results of `_plain`, the values for the backward pass)."""
        weights, others, carry, outer = jax.tree.map(lambda x: x.value, given)
        if any(weight.value.perturbed for part in given[0] for weight in part):  # around a gradient of jdp's, by models
            return jax.vjp(self._plain, weights, others, carry, outer)
        checkpointed = jax.checkpoint(self._layer, policy=self.policy, prevent_cse=False)
        # XLA must see the first layer like later ones: with a carry distinct from other operands, and not a constant.
        beside = {id(x) for x in jax.tree.leaves((others, outer))}
        is_like = lambda x: isinstance(x, Tracer) and x.ndim > 0 and id(x) not in beside  # noqa: E731
        carry = jax.tree.map(lambda x: x if is_like(x) else jax.lax.optimization_barrier(x), carry)

        def call(gathered: list[Any], others: list[Any], carry: Any) -> tuple[Any, Stacks]:
            results, back = jax.vjp(checkpointed, gathered, others, carry, *outer)
            leaves, structure = jax.tree.flatten(back)
            at_hand = jax.tree.leaves(([] if self._keeps else gathered, others, outer))
            numbers = {id(x): number for number, x in enumerate(at_hand)}
            places = [numbers.get(id(x)) for x in leaves]
            self._residuals = _Residuals(structure, places, jax.tree.map(jax.typeof, results))
            residuals = [x for x, place in zip(leaves, places, strict=True) if place is None]
            return results[0], {"outputs": results[1], "residuals": residuals}

        carry, stacks = self._forward(call, weights, others, carry)
        gathered = [] if self._keeps else stacks["gathered"]
        results = carry, self._stacked(stacks["outputs"]), stacks["after"]
        return results, (weights, others, outer, stacks["residuals"], gathered)

    def _forward(self, call: Any, weights: Weights, others: list[Any], carry: Any) -> tuple[Any, Stacks]:
        """Run `call`(gathered weights, others, carry) -> (carry, results to stack) for all layers."""

        def round_(state: Any, k: Any) -> Any:
            carry, gathered, _ = state
            is_last = _is(k, self.count - 1)
            after = self._gather(weights, k + 1, gathered) if is_last else []
            following = self._gather(weights, k + 1, gathered) if self._is_ahead and not is_last else gathered
            gathered = gathered or self._gather(weights, k)
            carry, results = call(gathered, _at(others, k), carry)
            return (carry, following, after), {name: (k, x) for name, x in results.items()}

        first = self._gather(weights, 0) if self._is_ahead else []
        (carry, gathered, after), stacks = self._rounds(round_, (carry, first, []), range(self.count), {})
        return carry, {**stacks, "gathered": gathered, "after": after}

    def _backward(self, saved: Any, cotangents: Any) -> Any:
        """Return the cotangents of (weights, others, carry, outer)."""
        cotangents = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, SymbolicZero) else x, cotangents)  # pyright: ignore[reportArgumentType]
        if callable(saved):
            return saved(cotangents)
        weights, others, outer, residuals, gathered = saved
        d_carry, d_outputs, d_after = map(_floats, cotangents)
        gathers = self._is_ahead and not self._keeps

        def round_(state: Any, k: Any) -> Any:
            d_carry, gathered, d_weights, pending, d_outer = state
            following = [] if not gathers or _is(k, 0) else self._gather(weights, k - 1, (gathered, d_weights))
            reduced = self._reduce(weights, k + 1, d_weights) if d_weights else []
            finished = self._finish(k + 1 + twice, pending if twice else reduced)
            its_residuals = _at(residuals, k)
            if self.is_unrolled:  # XLA does not merge recomputation with the forward pass
                its_residuals, d_carry = jax.lax.optimization_barrier((its_residuals, d_carry))
            gathered = gathered or ([] if self._keeps else self._gather(weights, k, d_carry))
            args = (d_carry, _at(d_outputs, k)), gathered, _at(others, k), its_residuals, outer
            if self._derivative is None and not traced_model_axes():  # with model axes XLA's order hides more
                self._derivative = LayerDerivative(self._differentiated, *args)
            sends = (following, reduced, finished) if twice else (following, finished)
            derivative = partial(self._derivative, sends) if self._derivative else self._differentiated
            d_weights, d_carry, (d_others, d_here) = derivative(*args)
            results = {"others": (k, d_others)}
            if finished:
                results["weights"] = (k + 1 + twice, finished)
            pending = reduced if twice else []
            return (d_carry, following, d_weights, pending, jax.tree.map(jnp.add, d_outer, d_here)), results

        twice = self.boundary.sends_twice
        d_weights, d_outer = self._reducible(d_after, self.after), jax.tree.map(jnp.zeros_like, _floats(outer))
        state = d_carry, gathered, d_weights, [], d_outer
        slots = [weight.slot for weight in weights[0] if weight.slot is not None]
        stacks = {} if self.is_unrolled else {"weights": slots}
        order = range(self.count - 1, -1, -1)
        (d_carry, _, d_weights, pending, d_outer), stacks = self._rounds(round_, state, order, stacks, 1 + twice)
        if pending:
            self._put(stacks, "weights", 1, self._finish(1, pending))
        self._put(stacks, "weights", 0, self._finish(0, self._reduce(weights, 0, d_weights)))
        summed = iter([*(self._stacked(stacks["weights"]) if slots else []), *stacks.get("after", [])])
        d_slots = [[Weight(None, None if w.slot is None else next(summed)) for w in part] for part in weights]
        d_others = _with_floats(others, self._stacked(stacks["others"]))
        return tuple(d_slots), d_others, _with_floats(self._residuals.results[0], d_carry), _with_floats(outer, d_outer)

    def _differentiated(
        self,
        d_results: tuple[list[Any], list[Any]],
        gathered: list[Any],
        others: list[Any],
        residuals: list[Any],
        outer: list[Any],
    ) -> tuple[list[Any], list[Any], tuple[list[Any], list[Any]]]:
        """Return the cotangents of a layer's weights in the dtype of their reduction, of its carry, and of the rest."""
        structure, places, results = self._residuals
        rest, at_hand = iter(residuals), jax.tree.leaves((gathered, others, outer))
        back = jax.tree.unflatten(structure, [next(rest) if place is None else at_hand[place] for place in places])
        none = lambda shape: np.zeros(shape.shape, jax.dtypes.float0)  # noqa: E731 - the cotangent of integers
        cotangents = (_with_floats(*pair, none) for pair in zip(results, d_results, strict=True))
        d_weights, d_others, d_carry, *d_outer = back(tuple(cotangents))
        d_weights = self._reducible(d_weights, self.placements)
        return d_weights, _floats(d_carry), (_floats(d_others), _floats(d_outer))

    def _gather(self, weights: Weights, k: Any, earlier: Any = ()) -> list[Any]:
        """Gather a layer's weights once `earlier` is computed: XLA would combine gathers that may start together."""
        layer = self._layer_of(weights, k)
        values = [weight.value for weight, _ in layer]
        if earlier:
            values, _ = jax.lax.optimization_barrier((values, jax.lax.stop_gradient(earlier)))
        leading = int(not _is(k, self.count))
        with nullcontext() if leading else jax.named_scope(AT_TOP):
            pairs = zip(values, layer, strict=True)
            return [self.boundary.in_derivative(replace(each, value=x), place, leading) for x, (each, place) in pairs]

    def _reduce(self, weights: Weights, k: Any, gradients: list[Any]) -> list[Any]:
        """Sum the gradients of a layer's trained weights."""
        trained = (pair for pair in self._layer_of(weights, k) if pair[0].slot is not None)
        leading = int(not _is(k, self.count))
        return [
            self.boundary.reduced(gradient, replace(weight, value=None), placement, leading)
            for gradient, (weight, placement) in zip(gradients, trained, strict=True)
        ]

    def _finish(self, k: Any, gradients: list[Any]) -> list[Any]:
        """Sum the results of `_reduce` over the replicas."""
        is_after = _is(k, self.count)
        trained = (placement for placement in (self.after if is_after else self.placements) if placement.trained)
        pairs = zip(gradients, trained, strict=False)
        return [self.boundary.finished(x, placement, int(not is_after)) for x, placement in pairs]

    def _layer_of(self, weights: Weights, k: Any) -> list[tuple[Weight, Placement]]:
        """Return the weights of layer k; those that are used after the last layer are layer n."""
        if _is(k, self.count):
            return list(zip(weights[1], self.after, strict=True))
        return [(_at(weight, k), placement) for weight, placement in zip(weights[0], self.placements, strict=True)]

    def _reducible(self, gradients: list[Any], placements: list[Placement]) -> list[Any]:
        """Return the gradients of trained weights, in the dtype of their sums."""
        dtype, pairs = self.boundary.precision.reduce_dtype, zip(gradients, placements, strict=True)
        return [x.astype(dtype) for x, placement in pairs if placement.trained]

    def _rounds(
        self, round_: Any, state: Any, order: Sequence[int], stacks: Stacks, peeled: int = 1
    ) -> tuple[Any, Stacks]:
        """Run `round_`(state, k) -> (state, name -> (layer, results)); return the last state and the stacks.

        At least `peeled` rounds at the start differ from the others: they send less.
        """

        def one(k: Any, state: Any, stacks: Stacks) -> tuple[Any, Stacks]:
            state, results = round_(state, k)
            state, values = jax.lax.optimization_barrier((state, {name: x for name, (_, x) in results.items()}))
            stacks = dict(stacks)
            for name, x in values.items():
                self._put(stacks, name, results[name][0], x)
            return state, stacks

        def pair(i: Any, carried: Any) -> Any:
            step = order[1] - order[0]
            k = order[alone] + 2 * i * step
            return one(k + step, *one(k, *carried))

        # rounds before the pairs; after the pairs follows the last round
        alone = self.count if self.is_unrolled else peeled + (self.count - 1 - peeled) % 2
        for k in order[:alone]:
            state, stacks = one(k, state, stacks)
        if self.is_unrolled:
            return state, stacks
        if pairs := (self.count - 1 - alone) // 2:
            state, stacks = jax.lax.fori_loop(0, pairs, pair, (state, stacks))
        return one(order[-1], state, stacks)

    def _put(self, stacks: Stacks, name: str, k: Any, layer: Any) -> None:
        if _is(k, self.count):
            stacks["after"] = layer
            return
        if self.is_unrolled:
            stacks[name] = {**stacks.get(name, {}), k: layer}
            return
        if name not in stacks:
            stacks[name] = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.count, *x.shape)), layer)
        update = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, k, 0)  # noqa: E731
        stacks[name] = jax.tree.map(update, stacks[name], layer)

    def _stacked(self, stack: Any) -> Any:
        if not self.is_unrolled:
            return stack
        return jax.tree.map(lambda *layers: jnp.stack(layers), *(stack[k] for k in range(self.count)))


def _closed(layer: Layer, weights: Any, others: Any, carry: Any) -> tuple[Layer, Any, list[Any]]:
    """Return the layer with its closure as arguments, the carry in the dtypes that it returns, and the closure."""
    closed, shapes = jax.make_jaxpr(layer, return_shape=True)(weights, others, carry)
    if any(x.dtype != shape.dtype for x, shape in zip(jax.tree.leaves(carry), jax.tree.leaves(shapes[0]), strict=True)):
        carry = jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), carry, shapes[0])  # it had weak types
        closed, shapes = jax.make_jaxpr(layer, return_shape=True)(weights, others, carry)
    places = [i for i, x in enumerate(closed.consts) if isinstance(x, Tracer)]

    def with_outer(weights: Any, others: Any, carry: Any, *outer: Any) -> Any:
        consts = dict(enumerate(closed.consts)) | dict(zip(places, outer, strict=True))
        leaves = run(closed, jax.tree.leaves((weights, others, carry)), consts=list(consts.values()))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return with_outer, carry, [closed.consts[i] for i in places]


def _is(k: Any, number: int) -> bool:
    return isinstance(k, int) and k == number


def _at(stack: Any, k: Any) -> Any:
    """Return one layer of a stack."""
    if isinstance(stack, dict):
        return stack[k]
    if isinstance(k, int):
        return jax.tree.map(lambda x: jax.lax.index_in_dim(x, k, 0, keepdims=False), stack)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, k, 0, keepdims=False), stack)


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _with_floats(tree: Any, floats: Sequence[Any], other: Callable[[Any], Any] = lambda x: None) -> Any:
    """Replace the floating-point arrays of a tree by `floats`, and every other array x by `other(x)`."""
    rest = iter(floats)
    return jax.tree.map(lambda x: next(rest) if jnp.issubdtype(x.dtype, jnp.inexact) else other(x), tree)
