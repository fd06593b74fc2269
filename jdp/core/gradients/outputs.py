"""What a loss returns beside its value (`has_aux`): arrays with a row for each example, and arrays without.

The loss may be called on parts of the batch. Rows then come back from each part; an array without rows is returned only
where every part has the same. Which is which is read from the loss traced for two numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jdp.base.tree_paths import path_of
from jdp.core.batch import batch_rows
from jdp.core.gradients.loss_call import LossWithAux
from jdp.core.gradients.spec import GradientSpec
from jdp.core.state import AnyState
from jdp.core.types import Batch, PyTree

FIX = (
    "A sum over examples belongs into the metrics of jdp.Loss; else call the loss once on the whole batch: "
    "partitioning='auto' and accumulate=1."
)


def with_outputs(
    spec: GradientSpec, within: Callable[..., Any], calls: int, state: AnyState, batch: Batch
) -> GradientSpec:
    """Return `spec` with a loss that returns its aux too, each array marked as rows or not."""
    rows, loss = batch_rows(batch) // calls, spec.loss_fn
    assert isinstance(loss, LossWithAux)
    trace = _Trace(spec, loss, within, state, batch)
    jaxpr, shapes = trace(rows)
    found = jax.tree.leaves_with_path(shapes)
    try:
        larger, shapes_of_more = trace(2 * rows)
    except Exception as error:  # the user's own code, at a size that it may not expect
        raise ValueError(
            "Which arrays of aux have a row for each example is read from the loss traced for two numbers of rows; "
            f"given a loss that takes {rows} rows and not {2 * rows} ({type(error).__name__}: {str(error)[:200]}). "
            "Write it for any number of rows."
        ) from error
    other = jax.tree.leaves(shapes_of_more)
    by_row = tuple(
        len(few.shape) > 0 and (few.shape[0], many.shape) == (rows, (2 * rows, *few.shape[1:]))
        for (_, few), many in zip(found, other, strict=True)
    )
    for number, ((path, few), many) in enumerate(zip(found, other, strict=True)):
        if calls == 1 or by_row[number]:
            continue
        name = f"aux[{path_of(path)!r}]" if path else "aux"
        if few.shape != many.shape:
            raise ValueError(
                f"An array of aux that grows with the batch has the rows as its first dimension; given {name}, "
                f"{list(few.shape)} for {rows} rows and {list(many.shape)} for {2 * rows}. Reshape it to [rows, ...]."
            )
        if trace.varies(jaxpr, larger, number):
            raise ValueError(
                f"An array of aux without rows must be the same for every part of the batch; given {name} of shape "
                f"{list(few.shape)}, which depends on the rows of each of {calls} parts. {FIX}"
            )
    return replace(spec, loss_fn=replace(loss, by_row=by_row, structure=jax.tree.structure(shapes)))


@dataclass(frozen=True)
class _Trace:
    """Traces a loss for a number of rows, on shapes alone."""

    spec: GradientSpec
    loss: LossWithAux
    within: Callable[..., Any]
    state: AnyState
    batch: Batch

    def __call__(self, rows: int) -> tuple[Any, PyTree]:
        """Return the jaxpr of aux and its shapes."""
        total = batch_rows(self.batch)

        def probe(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> PyTree:
            adapter = self.spec.adapter
            model = params if adapter is None else adapter.merge(params, model_state, key)
            return jax.tree.map(jnp.asarray, self.loss.both(model, batch, key)[1])

        def part(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct((rows * leaf.shape[0] // total, *leaf.shape[1:]), dtype)

        return jax.make_jaxpr(self.within(probe), return_shape=True)(
            self.spec.settings.precision.working_shapes(self.state.params),
            jax.tree.map(_shape, self.state.model_state),
            jax.tree.map(part, self.batch),
            _shape(self.state.rng),
        )

    def varies(self, closed: Any, larger: Any, number: int) -> bool:
        """Return whether an output depends on model state, the batch or the key, or on how many rows there are."""
        kept = [i == number for i in range(len(closed.jaxpr.outvars))]
        (needed, used), (of_more, _) = (partial_eval.dce_jaxpr(each.jaxpr, kept) for each in (closed, larger))
        return any(used[len(jax.tree.leaves(self.state.params)) :]) or str(needed) != str(of_more)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def rows_that_mix(together: list[Any], apart: list[Any], chunks: Any, tolerance: float) -> str | None:
    """Describe the first difference between rows of aux computed together and apart; None if there is none.

    Of whole numbers, most must differ: rounding decides some of them, such as an argmax of equal values.

    Args:
        together: NumPy arrays, whose rows are those of `chunks`, sorted.
        apart: the same [chunks, rows of a chunk, ...].
        chunks: integers [chunks, rows of a chunk].
        tolerance: of the largest absolute value.
    """
    rows = chunks.ravel()
    places = np.searchsorted(np.sort(rows), rows)
    for one, parts in zip((x[places] for x in together), apart, strict=True):
        several = parts.reshape(one.shape)
        if jnp.issubdtype(one.dtype, jnp.floating):
            finite = np.isfinite(one) & np.isfinite(several)
            gap, size = np.where(finite, abs(one - several), 0), np.where(finite, abs(one), 0)
            differs = gap.max(initial=0) > tolerance * size.max(initial=0)
        else:
            differs = np.mean(one != several) > 0.5
        if differs:
            return f"rows of aux are others in a call on {len(rows)} rows than in {len(chunks)} calls on parts of them"
    return None
