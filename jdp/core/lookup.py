"""Rows of an embedding's table, looked up in its shards.

A device looks up fewer rows than a large table has. Gathering the table, and reducing its gradient, would send mostly
rows that the device does not use. Instead the N devices along `data` exchange the T row numbers of each, and the rows:

    forward    all-gather of the numbers; each device looks all of them up in its D / N columns; all-to-all of the rows
    backward   all-to-all of the rows' gradients; each device adds them up in its columns

If the table is sharded by rows, an all-to-all of the shards makes columns of them, and another makes rows of the sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.gradients.boundary import Boundary, Weight, current_trace, gather_table
from jdp.core.reading import lookup_scope
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import traced_model_axes
from jdp.core.sharding.placement import Placement


def look_up(table: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return float32 rows [..., D] of a table [rows, D] that nothing else uses; `numbers` are integers [...].

    Rows are exchanged if a step gathers and sums in its layer loops, and a device looks up fewer rows than the table
    has. They are not in a loop, which would send shards in each turn, nor in a branch that other devices may not take.
    Gradients are summed in float32: in bfloat16 a scatter-add adds one term at a time, and stops at 256.
    """
    gathers = gather_table()
    if gathers is not None and id(table) in gathers.table and gathers.trace == current_trace():
        boundary, (_, weight, placement) = gathers.boundary, gathers.table[id(table)]
        sends = boundary.in_loops and boundary.gather is not None and placement.dim is not None and weight.seed is None
        fits = sends and not traced_model_axes() and table.shape[1] % jax.lax.axis_size(DATA) == 0
        if fits and numbers.size < len(table):
            return _exchanged(boundary, weight, placement, numbers)
    return table.astype(jnp.float32)[numbers]  # XLA fuses the cast into the lookup, without a copy


def _exchanged(boundary: Boundary, weight: Weight, placement: Placement, numbers: jax.Array) -> jax.Array:
    dtype, by_rows = boundary.precision.compute_dtype, placement.dim == 0
    count, (rows, width) = jax.lax.axis_size(DATA), placement.shape

    def forward(weight: Weight, numbers: jax.Array) -> tuple[jax.Array, Any]:
        with lookup_scope(placement.path):
            columns = weight.value.astype(dtype)
            columns = _all_to_all(columns, 1, 0) if by_rows else columns
            every = jax.lax.all_gather(numbers.reshape(-1), DATA)
            found = _all_to_all(columns[every], 0, 2)
        return found.reshape(*numbers.shape, width).astype(jnp.float32), (every, weight.slot)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[Weight, None]:
        every, slot = residuals
        with lookup_scope(placement.path):
            gradient = _all_to_all(gradient.astype(dtype).reshape(1, -1, width), 2, 0).astype(jnp.float32)
            columns = jnp.zeros((rows, width // count), jnp.float32).at[every].add(gradient)
            total = _all_to_all(columns, 0, 1) if by_rows else columns
        return Weight(None, boundary.finished(total.astype(slot.dtype), placement)), None

    if weight.slot is None:  # frozen, or in an evaluation
        return forward(weight, numbers)[0]
    rows_of = jax.custom_vjp(lambda *given: forward(*given)[0])
    rows_of.defvjp(forward, backward)
    return rows_of(weight, numbers)


def _all_to_all(x: jax.Array, split: int, concat: int) -> jax.Array:
    return jax.lax.all_to_all(x, DATA, split, concat, tiled=True)
