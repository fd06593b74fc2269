"""Layer loops that gather one layer ahead and reduce one behind, so that no layer waits for its own collectives.

A differentiated loss is traced, and each scan whose rounds gather weights (`gathers.parameter_scope`) or reduce their
gradients (`gathers.reduction_scope`) is rebuilt. A round is three parts:

    ahead    what gathers need of a layer's shards alone, and the gathers
    main     the layer's computation
    behind   the reductions, and what only they need

    before   for k in range(n):     g = ahead(k)     c, h = main(c, g, k)       y[k] = behind(h)
    after    g = ahead(0)
             g, (c, h) = ahead(1), main(c, g, 0)
             for k in range(1, n - 1):                                         # two at a time
                 g, y[k - 1], (c, h) = ahead(k + 1), behind(h), main(c, g, k)  # none waits for another
             y[n - 2], (c, h) = behind(h), main(c, g, n - 1)
             y[n - 1] = behind(h)

The same operations run on the same values, and the same bytes are sent: nothing is gathered past either end. A device
holds one more layer's working copy, and one more layer's gradient. This is done to the trace, after differentiation,
because then everything that JAX can put into a scan works: any rematerialisation, state that layers change, nested
loops. Two rounds make one of the new loop: each then gathers into the memory that the round before it used. With one,
XLA copies a layer's weights and gradient in each round. A scan that is unrolled has all rounds one after the other, and
nothing that is stacked between its forward and its backward pass is copied. Products that are weights' gradients are
made in float32 (`wide_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from jdp.core.gradients.layer_parts import SMALL, Parts, bytes_of, inputs_of, results_of
from jdp.core.gradients.wide_products import bind_wide
from jdp.core.tracing.collectives import is_gather, is_reduction
from jdp.core.tracing.graph import Env, Operation, Value, after, called, evaluate, known, read, run, traced_like
from jdp.core.tracing.jaxprs import bind, every_eqn, scan_counts, traced_at

_COLLECTIVES = {"all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all", "shard_map"}


def pipelined(function: Callable[..., Any], after: Sequence[Any] = ()) -> Callable[..., Any]:
    """Return a function with the results of `function` whose layer loops gather one layer ahead."""

    def pipelined_function(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if not any(eqn.primitive.name == "scan" and _runs_marked(eqn) for eqn in every_eqn(closed.jaxpr)):
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _run_in_turn(closed, jax.tree.leaves(args), after))

    return pipelined_function


def _is_marked(jaxpr: Jaxpr) -> bool:
    """Return True if `jaxpr` gathers or reduces parameters."""
    return any(is_gather(eqn) or is_reduction(eqn) for eqn in every_eqn(jaxpr))


def _runs_marked(eqn: JaxprEqn) -> bool:
    return any(map(_is_marked, jaxprs_in_params(eqn.params)))


def _run(closed: ClosedJaxpr, args: Sequence[Any], in_loop: bool = False) -> list[Any]:
    """Evaluate a jaxpr, its layer loops rebuilt and the calls around their collectives inlined."""
    return run(closed, args, lambda eqn, operands: _results(eqn, operands, _Last(), in_loop))


def _run_in_turn(closed: ClosedJaxpr, args: Sequence[Any], begin_after: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr as `_run` does, its collectives outside of loops in turn with those of the loops."""
    graph = read(closed, ())
    operations, env = graph.operations, Env(zip(graph.inputs, args, strict=True))
    scans = [each for each in operations if each.name == "scan"]
    after_any = after(operations, results_of(scans))
    reducing = [
        each for each in scans if any(any(map(is_reduction, every_eqn(x))) for x in jaxprs_in_params(each.eqn.params))
    ]
    after_loops, last = after(operations, results_of(reducing)), _Last(begin_after)

    def evaluated(operation: Operation, operands: list[Any]) -> list[Any]:
        eqn, is_collective = operation.eqn, operation.name in _COLLECTIVES
        earlier = last.gathered if is_gather(eqn) else last.reduced if operation in after_loops else []
        if is_collective and earlier and (is_gather(eqn) or is_reduction(eqn)):
            operands, _ = jax.lax.optimization_barrier((operands, earlier))
        results = _results(eqn, operands, last)
        if is_collective and is_reduction(eqn) and operation not in after_loops:
            last.early += results
        return results

    movable = {each for each in operations if is_gather(each.eqn)} - after_any
    evaluate(_in_turn(operations, movable), env, evaluated)
    return _known(graph.outputs, env)


def _in_turn(operations: Sequence[Operation], movable: Collection[Operation]) -> list[Operation]:
    """Return the operations with those in `movable` right before the first that takes their results, and reductions as
    soon as their operands are there.
    """
    makers = {each: list(dict.fromkeys(x.maker for x in each.operands if x.maker is not None)) for each in operations}
    users: dict[Operation, list[Operation]] = {}
    for each in operations:
        for maker in makers[each]:
            users.setdefault(maker, []).append(each)
    ordered: dict[Operation, None] = {}

    def add(operation: Operation) -> None:
        if operation in ordered:
            return
        for maker in makers[operation]:
            add(maker)
        ordered[operation] = None
        for user in users.get(operation, ()):
            if is_reduction(user.eqn) and all(maker in ordered for maker in makers[user]):
                add(user)

    for each in (*(each for each in operations if each not in movable), *operations):
        add(each)
    return list(ordered)


@dataclass
class _Last:
    """What the last loop gathered and reduced last; reductions before the backward loop (`early`); `layers` by stack.

    XLA joins collectives that may begin at once, and begins none before all can. It also gathers weights that are used
    after the loop at the start of the step, where there is nothing to compute yet. So one kind waits for the other.
    """

    before: Sequence[Any] = ()
    gathered: list[Any] = field(default_factory=list[Any])
    reduced: list[Any] = field(default_factory=list[Any])
    early: list[Any] = field(default_factory=list[Any])
    layers: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict[int, tuple[Any, list[Any]]])

    def stacked(self, layers: list[Any]) -> Any:
        """Return the results of an unrolled loop's rounds as one array, and remember them."""
        stack = jnp.stack(layers)
        self.layers[id(stack)] = stack, layers
        return stack

    def layer(self, stack: Any, k: Any) -> Any:
        """Return one of an array's slices."""
        if id(stack) in self.layers and isinstance(k, int):
            return self.layers[id(stack)][1][k]
        return jax.lax.dynamic_index_in_dim(stack, k, 0, keepdims=False)

    def empty(self, length: int, avals: Iterable[Any]) -> list[jax.Array]:
        """Return zeros for `length` arrays of each kind, stacked."""
        zero = jnp.zeros(())
        if self.before:
            zero, _ = jax.lax.optimization_barrier((zero, list(self.before)))
        return [jnp.full((length, *aval.shape), zero.astype(aval.dtype)) for aval in avals]


def _results(eqn: JaxprEqn, operands: list[Any], last: _Last, in_loop: bool = False) -> list[Any]:
    """Evaluate one operation; a loop changes what came last. In a loop, `_Loop` keeps what is rematerialised apart."""
    if eqn.primitive.name == "scan" and not eqn.params["length"]:  # there is nothing to slice
        return bind(eqn, operands)
    if _runs_marked(eqn):
        with traced_at(eqn):
            if eqn.primitive.name == "scan":
                return _scan(eqn, operands, last)
            if (in_loop or not eqn.params.get("prevent_cse")) and (inner := called(eqn)) is not None:
                return _run(inner, operands, in_loop)
    if eqn.primitive.name == "scan" and (last.before or _is_unrolled(eqn)):
        with traced_at(eqn):
            return _in_order(eqn.params["jaxpr"], eqn, operands, last)
    return bind(eqn, operands)


def _scan(eqn: JaxprEqn, operands: list[Any], last: _Last) -> list[Any]:
    """Run a scan whose rounds gather or reduce, one layer ahead and one behind where it can be."""
    inner, length, reverse = eqn.params["jaxpr"], eqn.params["length"], eqn.params["reverse"]
    body = traced_like(inner, lambda *args: _run(inner, args, in_loop=True))
    parts = Parts.of(body, *scan_counts(eqn))
    if length > 1 and (parts.small or parts.ahead or parts.behind):
        return _Loop(parts, operands, length, reverse, _is_unrolled(eqn), last).run()
    return _in_order(body, eqn, operands, last)


def _is_unrolled(scan: JaxprEqn) -> bool:
    return scan.params["unroll"] >= scan.params["length"]


def _in_order(body: ClosedJaxpr, eqn: JaxprEqn, operands: list[Any], last: _Last) -> list[Any]:
    """Run a scan round by round, with another jaxpr as its body; `last` says when its stacks take memory."""
    (first, carried), length, reverse = scan_counts(eqn), eqn.params["length"], eqn.params["reverse"]
    end = first + carried
    if _is_unrolled(eqn):
        carry, rounds = operands[first:end], list[list[Any]]()
        for k in reversed(range(length)) if reverse else range(length):
            out = _run(body, [*operands[:first], *carry, *(last.layer(x, k) for x in operands[end:])])
            carry = out[:carried]
            rounds.insert(0 if reverse else k, out[carried:])
        return [*carry, *(last.stacked(list(layers)) for layers in zip(*rounds, strict=True))]

    def step(k: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        index = length - 1 - k if reverse else k
        slices = [jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in operands[end:]]
        out = _run(body, [*operands[:first], *state[0], *slices])
        pairs = zip(state[1], out[carried:], strict=True)
        return out[:carried], [jax.lax.dynamic_update_index_in_dim(stack, new, index, 0) for stack, new in pairs]

    stacks = last.empty(length, body.out_avals[carried:])
    carry, stacks = jax.lax.fori_loop(0, length, step, (operands[first:end], stacks))
    return [*carry, *stacks]


class _State(NamedTuple):
    """Where a loop is.

    Attributes:
        carry, stacks: of the scan.
        kept: what the next reductions take.
        gathered: for the next round.
        sent: what was reduced last, in this round or the one before it; nothing where a pair of rounds begins.
    """

    carry: list[Any]
    stacks: list[Any]
    kept: list[Any]
    gathered: list[Any]
    sent: Sequence[Any] = ()


@dataclass(frozen=True)
class _Loop:
    """A scan rebuilt: its parts, its operands, its number of rounds, and whether they run from the last slice on.

    If it is unrolled, its stacks are dicts, index -> array, while it runs. `last` has what came last, and the
    stacks of loops before; `once` what is gathered for all rounds, stacked.
    """

    parts: Parts
    operands: list[Any]
    length: int
    reverse: bool
    unrolled: bool
    last: _Last
    once: Env = field(default_factory=dict[Value, Any])

    def run(self) -> list[Any]:
        """Return what the scan returns: what is carried, and the stacked results. Update what came last came."""
        parts, came, last, begin = self.parts, self.last, self.length - 1, 0
        first = len(parts.constants)
        self.once.update(self._gathered_once(came.gathered))
        gathered = self._ahead(0, came.gathered)
        outputs = parts.outputs[len(parts.carried) :]
        stacks = [{} for _ in outputs] if self.unrolled else came.empty(self.length, (x.aval for x in outputs))
        state = _State(self.operands[first : first + len(parts.carried)], stacks, [], gathered)
        if parts.behind:
            state, begin = self._main(0, state._replace(gathered=self._ahead(1, gathered)), gathered), 1
            if came.early:
                state = state._replace(kept=jax.lax.optimization_barrier((state.kept, came.early))[0])
        while begin < last and (self.unrolled or (last - begin) % 2):
            state, begin = self._apart(self._round(begin, state)), begin + 1

        def pair(i: Any, carried: Any) -> Any:
            state = self._round(begin + 2 * i, _State(*carried))
            return tuple(self._round(begin + 2 * i + 1, state)[:4])

        if last > begin:
            state = _State(*jax.lax.fori_loop(0, (last - begin) // 2, pair, tuple(state[:4])))
        came.gathered = state.gathered or came.gathered
        state = self._behind(last - 1, state) if parts.behind else state
        state = self._behind(last, self._main(last, state, state.gathered, state.sent))
        came.reduced = list(state.sent) or came.reduced
        if self.unrolled:
            return [*state.carry, *(came.stacked([x[k] for k in range(self.length)]) for x in state.stacks)]
        return [*state.carry, *state.stacks]

    def _apart(self, state: _State) -> _State:
        """Keep XLA from joining or delaying collectives of several rounds of an unrolled loop."""
        if not self.unrolled:
            return state
        moving = state.carry, state.kept, state.gathered, list(state.sent)
        carry, kept, gathered, sent = jax.lax.optimization_barrier(moving)
        return _State(carry, state.stacks, kept, gathered, sent)

    def _round(self, k: Any, state: _State) -> _State:
        """Gather for round k + 1, reduce what round k - 1 kept, compute round k."""
        gathered = self._ahead(k + 1, state.gathered)
        reduced = self._behind(k - 1, state)
        return self._main(k, reduced, state.gathered, reduced.sent, gathered)._replace(gathered=gathered)

    def _gathered_once(self, earlier: Sequence[Any]) -> Env:
        """Return what is small, gathered for all rounds at once, after `earlier` is there."""
        parts = self.parts
        stacks = {value: stack for value, stack in self._stacks().items() if value in set(inputs_of(parts.small))}
        if not stacks:
            return {}
        arrays, _ = jax.lax.optimization_barrier((list(stacks.values()), list(earlier)))

        def gather(slices: list[Any]) -> list[Any]:
            env = {**_paired(parts.constants, self.operands), **_paired(stacks, slices)}
            evaluate(parts.small, env)
            return _known(parts.gathered_once, env)

        return _paired(parts.gathered_once, jax.vmap(gather)(arrays))

    def _stacks(self) -> Env:
        """Return what the scan takes slices of."""
        first = len(self.parts.constants) + len(self.parts.carried)
        return _paired(self.parts.sliced, self.operands[first:])

    def _ahead(self, k: Any, earlier: list[Any]) -> list[Any]:
        """Return what is gathered for round k, after `earlier` is there: XLA joins what may begin at once."""
        parts = self.parts
        env = self._given(k, inputs_of(parts.ahead), earlier)[0]
        evaluate(parts.ahead, env)
        return _known(parts.gathered, env)

    def _main(self, k: Any, state: _State, gathered: list[Any], *meanwhile: Sequence[Any]) -> _State:
        """Compute round k, in which arrays are sent `meanwhile`.

        XLA's scheduler counts kernels, not their seconds, and would hide a collective behind the smallest: so large
        products of an unrolled backward pass wait for them.
        """
        parts, outputs = self.parts, self.parts.outputs
        waiting = dict(zip(parts.waiting, meanwhile, strict=False)) if self.unrolled and parts.behind else {}

        def evaluated(operation: Operation, operands: list[Any]) -> Sequence[Any]:
            results = bind_wide(operation.eqn, operands) if operation in parts.wide else bind(operation.eqn, operands)
            if sent := waiting.get(operation):
                results, _ = jax.lax.optimization_barrier((results, list(sent)))
            return results

        used = [*inputs_of(parts.main), *parts.kept, *outputs]
        # What is computed again is not merged with the first time, nor computed before the gradient is there.
        given, carry = self._given(k, used, state.carry if self.unrolled else (), SMALL)
        env = {**given, **_paired(parts.carried, carry or state.carry), **_paired(parts.gathered, gathered)}
        evaluate(parts.main, env, evaluated)
        stacks = self._put(k, state.stacks, env, set(outputs) - set(parts.reduced))
        carry = _known(outputs[: len(parts.carried)], env)
        return state._replace(carry=carry, stacks=stacks, kept=_known(parts.kept, env))

    def _behind(self, k: Any, state: _State) -> _State:
        """Reduce what round k kept, after what was reduced before."""
        parts, kept = self.parts, state.kept
        if not parts.behind:
            return state
        if state.sent:
            kept, _ = jax.lax.optimization_barrier((kept, list(state.sent)))
        env = {**self._given(k, [])[0], **_paired(parts.kept, kept)}
        evaluate(parts.behind, env)
        # The barrier keeps XLA from delaying the reduction by one more round.
        sent = jax.lax.optimization_barrier(_known(parts.reduced, env))
        return state._replace(stacks=self._put(k, state.stacks, _paired(parts.reduced, sent), parts.reduced), sent=sent)

    def _put(self, k: Any, stacks: list[Any], env: Env, made: Collection[Value]) -> list[Any]:
        """Return the stacks with those results of round k that are in `made`."""
        index = self.length - 1 - k if self.reverse else k

        def put(stack: Any, x: Any) -> Any:
            return {**stack, index: x} if self.unrolled else jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)

        return [
            put(stack, known(value, env)) if value in made else stack
            for stack, value in zip(stacks, self.parts.outputs[len(self.parts.carried) :], strict=True)
        ]

    def _given(
        self, k: Any, used: Iterable[Value], earlier: Sequence[Any] = (), above: int = 0
    ) -> tuple[Env, list[Any]]:
        """Return the values that round k does not compute, constants and its slices that are in `used`, those above
        some bytes after `earlier` is there; and `earlier`.
        """
        parts, index = self.parts, self.length - 1 - k if self.reverse else k
        stacks = {value: stack for value, stack in {**self._stacks(), **self.once}.items() if value in set(used)}
        whole = {value: x for value, x in stacks.items() if self.unrolled and id(x) not in self.last.layers}

        taken = {value: x if value in whole else self.last.layer(x, index) for value, x in stacks.items()}
        if earlier:
            waiting = {value: x for value, x in taken.items() if bytes_of(value) > above}
            arrays, earlier = jax.lax.optimization_barrier((list(waiting.values()), list(earlier)))
            taken |= _paired(waiting, arrays)
        slices = {value: self.last.layer(x, index) if value in whole else x for value, x in taken.items()}
        return {**_paired(parts.constants, self.operands), **slices}, list(earlier)


def _known(values: Iterable[Value], env: Env) -> list[Any]:
    return [known(value, env) for value in values]


def _paired(values: Iterable[Value], arrays: Iterable[Any]) -> Env:
    return dict(zip(values, arrays, strict=False))
