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
loops. Two rounds make one of the new loop, because what a round gathers for the next can then take the memory of what
the round before gathered; with one, XLA copies a layer's weights and gradient in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jdp.core.tracing.collectives import is_gather, is_reduction
from jdp.core.tracing.jaxprs import (
    bind,
    eqns_after,
    eqns_before,
    every_eqn,
    inner_jaxprs,
    inputs_of,
    outputs_of,
    scan_counts,
    traced_at,
)

_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}
_COLLECTIVES = {"all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all", "shard_map"}

Values = dict[Any, Any]
"""The value of each variable of a jaxpr."""


def pipelined(function: Callable[..., Any], after: Sequence[Any] = ()) -> Callable[..., Any]:
    """Return a function with the results of `function` whose layer loops gather one layer ahead."""

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _has_layer_loop(closed.jaxpr):
            return function(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _run_in_turn(closed, jax.tree.leaves(args), after))

    return run


def _has_layer_loop(jaxpr: Jaxpr) -> bool:
    """Return True if a scan in `jaxpr` gathers or reduces parameters."""
    return any(
        _is_marked(inner) if eqn.primitive.name == "scan" else _has_layer_loop(inner)
        for eqn in jaxpr.eqns
        for inner in inner_jaxprs(eqn)
    )


def _is_marked(jaxpr: Jaxpr) -> bool:
    """Return True if `jaxpr` gathers or reduces parameters."""
    return any(is_gather(eqn) or is_reduction(eqn) or any(map(_is_marked, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def _run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, its layer loops rebuilt and the calls around their collectives inlined."""
    values: Values = {**_paired(closed.jaxpr.constvars, closed.consts), **_paired(closed.jaxpr.invars, args)}
    for eqn in closed.jaxpr.eqns:
        values |= _paired(eqn.outvars, _results(eqn, _read(eqn.invars, values), _Last()))
    return _read(closed.jaxpr.outvars, values)


def _run_in_turn(closed: ClosedJaxpr, args: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr as `_run` does, its collectives outside of loops in turn with those of the loops."""
    eqns = closed.jaxpr.eqns
    values: Values = {**_paired(closed.jaxpr.constvars, closed.consts), **_paired(closed.jaxpr.invars, args)}
    scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    after_any = eqns_after(eqns, outputs_of(scans))
    reducing = [
        eqn for eqn in scans if any(is_reduction(each) for inner in inner_jaxprs(eqn) for each in every_eqn(inner))
    ]
    after_loops, last = eqns_after(eqns, outputs_of(reducing)), _Last(after)
    for eqn in _in_turn(eqns, {id(eqn) for eqn in eqns if is_gather(eqn)} - after_any):
        operands = _read(eqn.invars, values)
        is_collective = eqn.primitive.name in _COLLECTIVES
        before = last.gathered if is_gather(eqn) else last.reduced if id(eqn) in after_loops else []
        if is_collective and before and (is_gather(eqn) or is_reduction(eqn)):
            operands, _ = jax.lax.optimization_barrier((operands, before))
        results = _results(eqn, operands, last)
        if is_collective and is_reduction(eqn) and id(eqn) not in after_loops:
            last.early += results
        values |= _paired(eqn.outvars, results)
    return _read(closed.jaxpr.outvars, values)


def _in_turn(eqns: Sequence[JaxprEqn], movable: set[int]) -> list[JaxprEqn]:
    """Return the operations with those whose ids are in `movable` right before the first that takes their results, and
    reductions as soon as what they take is there.
    """
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    users: dict[int, list[JaxprEqn]] = {}
    for eqn in eqns:
        for maker in {id(makers[var]): makers[var] for var in inputs_of([eqn]) if var in makers}.values():
            users.setdefault(id(maker), []).append(eqn)
    ordered: dict[int, JaxprEqn] = {}

    def add(eqn: JaxprEqn) -> None:
        if id(eqn) in ordered:
            return
        for var in inputs_of([eqn]):
            if var in makers:
                add(makers[var])
        ordered[id(eqn)] = eqn
        for user in users.get(id(eqn), ()):
            if is_reduction(user) and all(var not in makers or id(makers[var]) in ordered for var in inputs_of([user])):
                add(user)

    for eqn in eqns:
        if id(eqn) not in movable:
            add(eqn)
    for eqn in eqns:
        add(eqn)
    return list(ordered.values())


@dataclass
class _Last:
    """What the last loop gathered and reduced last, and what was reduced before the backward loop.

    XLA joins collectives that may begin at once, and begins none before all can; and it gathers at the start of the
    step what is taken only after the loop, where there is nothing to compute yet. So one kind waits for the other.
    `before` is `after` of `pipelined`.
    """

    before: Sequence[Any] = ()
    gathered: list[Any] = field(default_factory=list[Any])
    reduced: list[Any] = field(default_factory=list[Any])
    early: list[Any] = field(default_factory=list[Any])

    def empty(self, length: int, avals: Iterable[Any]) -> list[jax.Array]:
        """Return zeros for `length` arrays of each kind, stacked."""
        zero = jnp.zeros(())
        if self.before:
            zero, _ = jax.lax.optimization_barrier((zero, list(self.before)))
        return [jnp.full((length, *aval.shape), zero.astype(aval.dtype)) for aval in avals]


def _evaluate(eqns: Iterable[JaxprEqn], values: Values) -> None:
    """Add the results of `eqns` to `values`."""
    for eqn in eqns:
        values |= _paired(eqn.outvars, bind(eqn, _read(eqn.invars, values)))


def _results(eqn: JaxprEqn, operands: list[Any], last: _Last) -> list[Any]:
    """Evaluate one operation; a loop changes what came last."""
    if any(map(_is_marked, inner_jaxprs(eqn))):
        with traced_at(eqn):
            if eqn.primitive.name == "scan":
                return _scan(eqn, operands, last)
            if eqn.primitive.name in _CALLS and not eqn.params.get("prevent_cse"):
                inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                return _run(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()), operands)
    if eqn.primitive.name == "scan" and last.before:
        with traced_at(eqn):
            return _in_order(eqn.params["jaxpr"], eqn, operands, last)
    return bind(eqn, operands)


def _scan(eqn: JaxprEqn, operands: list[Any], last: _Last) -> list[Any]:
    """Run a scan whose rounds gather or reduce, one layer ahead and one behind where it can be."""
    first, carried = scan_counts(eqn)
    inner, length, reverse = eqn.params["jaxpr"], eqn.params["length"], eqn.params["reverse"]
    body = jax.make_jaxpr(lambda *args: _run(inner, args))(*(_like(var.aval) for var in inner.jaxpr.invars))
    parts = _Parts.of(body, first, carried)
    if length > 1 and (parts.ahead or parts.behind):
        return _Loop(parts, operands, length, reverse).run(last)

    return _in_order(body, eqn, operands, last)


def _in_order(body: ClosedJaxpr, eqn: JaxprEqn, operands: list[Any], last: _Last) -> list[Any]:
    """Run a scan round by round, with another jaxpr as its body; `last` says when its stacks take memory."""
    (first, carried), length, reverse = scan_counts(eqn), eqn.params["length"], eqn.params["reverse"]
    end = first + carried

    def step(k: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        index = length - 1 - k if reverse else k
        slices = [jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in operands[end:]]
        out = _run(body, [*operands[:first], *state[0], *slices])
        pairs = zip(state[1], out[carried:], strict=True)
        return out[:carried], [jax.lax.dynamic_update_index_in_dim(stack, new, index, 0) for stack, new in pairs]

    stacks = last.empty(length, (var.aval for var in body.jaxpr.outvars[carried:]))
    carry, stacks = jax.lax.fori_loop(0, length, step, (operands[first:end], stacks))
    return [*carry, *stacks]


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


@dataclass(frozen=True)
class _Parts:
    """A scan's body in three parts: ahead, main, behind; see the file's docstring.

    Attributes:
        body: the whole, every gather and reduction an operation of its own.
        constants, carried, sliced: its inputs by kind: the same in every round, from round to round, of the round.
        ahead, main, behind: the operations of each part.
        gathered: what other parts take of `ahead`'s results.
        kept: what `behind` takes of the round.
    """

    body: ClosedJaxpr
    constants: list[Any]
    carried: list[Any]
    sliced: list[Any]
    ahead: list[JaxprEqn]
    main: list[JaxprEqn]
    behind: list[JaxprEqn]
    gathered: list[Any]
    kept: list[Any]

    @staticmethod
    def of(body: ClosedJaxpr, first: int, carried: int) -> _Parts:
        """Split a scan's body with `first` constants and `carried` carried inputs."""
        eqns, inputs, outputs = body.jaxpr.eqns, body.jaxpr.invars, body.jaxpr.outvars
        constants, state, sliced = inputs[:first], inputs[first : first + carried], inputs[first + carried :]
        of_layer, of_state = eqns_after(eqns, sliced), eqns_after(eqns, state)
        gathers = [e for e in eqns if is_gather(e) and id(e) in of_layer - of_state]
        ahead = eqns_before(eqns, outputs_of(gathers))
        carries_on = eqns_before(eqns, outputs[:carried])
        reductions = [e for e in eqns if is_reduction(e) and id(e) not in carries_on | ahead]
        behind = eqns_after(eqns, outputs_of(reductions)) | set(map(id, reductions))
        first_part, last_part = ([e for e in eqns if id(e) in part] for part in (ahead, behind))
        main = [e for e in eqns if id(e) not in ahead | behind]
        used = {*inputs_of(main), *inputs_of(last_part), *(var for var in outputs if not isinstance(var, Literal))}
        given = {*constants, *body.jaxpr.constvars, *outputs_of(last_part)}
        gathered = [var for var in outputs_of(first_part) if var in used]
        kept = [var for var in inputs_of(last_part) if var not in given]
        return _Parts(body, constants, state, sliced, first_part, main, last_part, gathered, kept)


@dataclass(frozen=True)
class _State:
    """Where a loop is.

    Attributes:
        carry, stacks: of the scan.
        kept: what the next reductions take.
        gathered: for the next round.
        sent: what was reduced last, in this round or the one before it; [] where a loop begins.
    """

    carry: list[Any]
    stacks: list[Any]
    kept: list[Any]
    gathered: list[Any]
    sent: list[Any]

    @property
    def carried(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """What goes from one pair of rounds to the next."""
        return self.carry, self.stacks, self.kept, self.gathered

    @staticmethod
    def of(carried: tuple[list[Any], list[Any], list[Any], list[Any]]) -> _State:
        """Return the state where a pair of rounds begins."""
        carry, stacks, kept, gathered = carried
        return _State(carry, stacks, kept, gathered, [])


@dataclass(frozen=True)
class _Loop:
    """A scan rebuilt: its parts, its operands, its number of rounds, and whether they run from the last slice on."""

    parts: _Parts
    operands: list[Any]
    length: int
    reverse: bool

    def run(self, before: _Last) -> list[Any]:
        """Return what the scan returns: what is carried, and the stacked results. Update what came last before."""
        parts, last, begin = self.parts, self.length - 1, 0
        first = len(parts.constants)
        gathered = self._ahead(0, before.gathered)
        stacks = before.empty(self.length, (var.aval for var in parts.body.jaxpr.outvars[len(parts.carried) :]))
        state = _State(self.operands[first : first + len(parts.carried)], stacks, [], gathered, [])
        if parts.behind:
            state, begin = self._main(0, replace(state, gathered=self._ahead(1, gathered)), gathered), 1
            if before.early:
                state = replace(state, kept=jax.lax.optimization_barrier((state.kept, before.early))[0])
        if (last - begin) % 2:
            state, begin = self._round(begin, state), begin + 1

        def pair(i: Any, carried: Any) -> Any:
            state = self._round(begin + 2 * i, _State.of(carried))
            return self._round(begin + 2 * i + 1, state).carried

        if last > begin:
            state = _State.of(jax.lax.fori_loop(0, (last - begin) // 2, pair, state.carried))
        before.gathered = state.gathered or before.gathered
        state = self._behind(last - 1, state) if parts.behind else state
        state = self._behind(last, self._main(last, state, state.gathered))
        before.reduced = state.sent or before.reduced
        return [*state.carry, *state.stacks]

    def _round(self, k: Any, state: _State) -> _State:
        """Gather for round k + 1, reduce what round k - 1 kept, compute round k."""
        gathered = self._ahead(k + 1, state.gathered)
        reduced = self._behind(k - 1, state)
        return replace(self._main(k, reduced, state.gathered), gathered=gathered)

    def _ahead(self, k: Any, after: list[Any] | None = None) -> list[Any]:
        """Return what is gathered for round k, which begins when `after` is there: XLA joins what may begin at once."""
        parts = self.parts
        values = self._given(k, inputs_of(parts.ahead))
        if after:
            slices = {var: values[var] for var in parts.sliced if var in values}
            slices, _ = jax.lax.optimization_barrier((list(slices.values()), after))
            values |= _paired((var for var in parts.sliced if var in values), slices)
        _evaluate(parts.ahead, values)
        return _read(parts.gathered, values)

    def _main(self, k: Any, state: _State, gathered: list[Any]) -> _State:
        """Compute round k."""
        parts, outputs = self.parts, self.parts.body.jaxpr.outvars
        used = [*inputs_of(parts.main), *parts.kept, *outputs]
        values = {**self._given(k, used), **_paired(parts.carried, state.carry), **_paired(parts.gathered, gathered)}
        _evaluate(parts.main, values)
        stacks = self._put(k, state.stacks, {**values, **dict.fromkeys(outputs_of(parts.behind))})
        carry = _read(outputs[: len(parts.carried)], values)
        return replace(state, carry=carry, stacks=stacks, kept=_read(parts.kept, values))

    def _behind(self, k: Any, state: _State) -> _State:
        """Reduce what round k kept, after what was reduced before."""
        parts, kept = self.parts, state.kept
        if not parts.behind:
            return state
        if state.sent:
            kept, _ = jax.lax.optimization_barrier((kept, state.sent))
        values = {**self._given(k, []), **_paired(parts.kept, kept)}
        _evaluate(parts.behind, values)
        made = [var for var in dict.fromkeys(self.parts.body.jaxpr.outvars) if var in set(outputs_of(parts.behind))]
        # The barrier keeps XLA from delaying the reduction by one more round.
        sent = jax.lax.optimization_barrier(_read(made, values))
        return replace(state, stacks=self._put(k, state.stacks, _paired(made, sent)), sent=sent)

    def _put(self, k: Any, stacks: list[Any], values: Values) -> list[Any]:
        """Return the stacks with those results of round k that `values` holds."""
        index = self.length - 1 - k if self.reverse else k
        outputs = self.parts.body.jaxpr.outvars[len(self.parts.carried) :]
        new = [var.val if isinstance(var, Literal) else values.get(var) for var in outputs]
        return [
            stack if value is None else jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)
            for stack, value in zip(stacks, new, strict=True)
        ]

    def _given(self, k: Any, used: Iterable[Any]) -> Values:
        """Return the values that round k does not compute: constants, and its slices that are in `used`."""
        parts, index = self.parts, self.length - 1 - k if self.reverse else k
        values = {**_paired(parts.body.jaxpr.constvars, parts.body.consts), **_paired(parts.constants, self.operands)}
        stacks = self.operands[len(parts.constants) + len(parts.carried) :]
        needed = {var for var in used if not isinstance(var, Literal)}
        for var, stack in zip(parts.sliced, stacks, strict=True):
            if var in needed:
                values[var] = jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
        return values


def _paired(variables: Iterable[Any], values: Iterable[Any]) -> Values:
    return dict(zip(variables, values, strict=False))


def _read(atoms: Iterable[Any], values: Values) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]
