"""The program of a loss: the user's function is called once for each shape of its arguments, and its jaxpr handed on.

What chooses the partitioning, what proves the loss a sum over rows, and the step itself all need the program of the
same call. The first to need it traces it in the context of the step: its mesh, and under "manual" its axes. The others
read it, or run it in place of the user's function.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jdp.core.gather_rows import recording
from jdp.core.gradients.loss_call import LossWithAux, TracedLoss
from jdp.core.random.match_draws import drawing
from jdp.core.sharding.traced_mesh import noting_sizes, rows_for_sizes, traced_mesh
from jdp.core.types import PyTree


@dataclass(frozen=True, eq=False)
class LossProgram:
    """One call of a loss, traced.

    Attributes:
        loss: the function that was traced. The program keeps it alive, whose identity is part of its key.
        closed: the jaxpr; its inputs are the leaves of `arguments`, its results those of `shape`.
        arguments: (operands, model state, batch, key) as shapes.
        shape: what the function returned, as shapes: (result, extras).
        gathers_rows: True if the function called `jdp.gather_rows`.
    """

    loss: Any
    closed: Any
    arguments: tuple[Any, ...]
    shape: PyTree
    gathers_rows: bool

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return bool(drawing(self.closed.jaxpr))

    def __call__(self, *arguments: Any) -> Any:
        """Run the program; return the result of the function without extras."""
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        # A number of the program, such as the rows of a batch, is an array as where the function was called: a sum over
        # devices of a number is computed while it is traced, which would change what is compiled.
        results = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in results]
        return jax.tree.unflatten(jax.tree.structure(self.shape), results)[0]


_SHARED: ContextVar[dict[Any, LossProgram | Exception] | None] = ContextVar("jdp_shared_programs", default=None)


@contextmanager
def sharing_traces() -> Generator[None]:
    """Trace a loss once for each precision, mesh and shapes while the context lasts, however many steps have it.

    For steps that are planned together: a loss that is traced once must do the same the next time.
    """
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


class Programs:
    """The programs of a loss that one trace of a step needs."""

    def __init__(self) -> None:
        self._made: dict[Any, LossProgram | Exception] = {}

    def of(self, loss: Any, arguments: tuple[Any, ...], form: Hashable = None) -> LossProgram:
        """Return the program of a call with arrays of these shapes. Raises again what the loss raised when traced.

        `form` tells losses apart whose weights are gathered where they are used; None: they are gathered before.
        """
        shared = _SHARED.get() if form is None and isinstance(loss, TracedLoss) else None
        made = self._made if shared is None else shared
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple([(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves])
        key = form, _identity(loss), structure, shapes, _context()
        sizes = rows_for_sizes(leaves_rows(arguments[2]))
        found = made.get((key, None)) or made.get((key, sizes))
        if found is None:
            with noting_sizes() as asked:
                try:
                    found = self._traced(loss, arguments, form)
                except Exception as error:  # the user's own code
                    found = error
            made[key, sizes if asked else None] = found
        if isinstance(found, Exception):
            raise found
        return found

    def clear(self) -> None:
        """Forget all programs: their constants may belong to a trace that has ended."""
        self._made.clear()

    def _traced(self, loss: Any, arguments: tuple[Any, ...], form: Hashable) -> LossProgram:
        call: Any = lambda *arguments: (loss(*arguments), ())  # noqa: E731
        if isinstance(loss, TracedLoss) and loss.reading is None:
            call = loss.with_extras
        elif isinstance(loss, TracedLoss):
            whole = self.of(loss.without_reading, arguments, form)
            call = lambda *arguments: (loss.read(whole.closed, whole.shape, arguments), ())  # noqa: E731
        with recording() as gathered:
            closed, shape = jax.make_jaxpr(call, return_shape=True)(*arguments)
        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        return LossProgram(loss, closed, described, shape, bool(gathered))


def leaves_rows(batch: PyTree) -> int:
    """Return the rows of a batch, 1 for one without arrays."""
    leaves = jax.tree.leaves(batch)
    return leaves[0].shape[0] if leaves and leaves[0].shape else 1


def _identity(loss: Any) -> Hashable:
    """Return what the program of a loss depends on, beside its arguments and its gathers."""
    if not isinstance(loss, TracedLoss):
        return id(loss)
    fn: Any = loss.fn
    of_fn = (id(fn.fn), fn.by_row, fn.structure) if isinstance(fn, LossWithAux) else id(fn)
    return of_fn, loss.adapter, loss.sync_axes, loss.training, loss.boundary, loss.reading


def _context() -> Hashable:
    """Return what code that is being traced may look at, and jax's settings that its operations depend on."""
    config: Any = jax.config
    return (
        jax.sharding.get_abstract_mesh(),
        traced_mesh(),
        config.jax_default_matmul_precision,
        config.jax_enable_x64,
        config.jax_numpy_dtype_promotion,
    )
