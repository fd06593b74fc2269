"""The loss with its noise drawn by global row: what draws per example draws the rows of the global draw.

Where the loss is called on some rows of the batch only (`BatchKey`), it is traced abstractly: for these rows (the local
program), and where that draws, for the whole batch (the global program). Both make the same draws in the same order. A
draw of the same shape in both is shared by all examples: it stays as it is, and is the same on every device. A draw
with one dimension that counts local rows in the one and global rows in the other is drawn by global row, whichever
dimension that is and however few the rows are. A dimension that counts rows × n (examples flattened into tokens) is
taken to have the rows first.

What is numbered by row (`fold_in(rng, i)` for `i` of `arange(rows)`) gets the numbers of the global rows. So `split`,
`gamma` and loops that draw until a sample is accepted are right too.

Every other draw is made by each device for itself, which is good noise that depends on the mesh, and is reported with
the source line: a scan along the rows that splits its key at each, draws whose shape has no one dimension of the rows,
draws inside a function with a gradient of its own. Where the programs differ in what they draw (a Python loop over
rows), a draw is by row if the rows lead, else the same on every device; that is reported too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.random.match_draws import GlobalProgram, differs, is_random
from jdp.core.random.replay import BY_ROW, Replay, Value
from jdp.core.random.row_keys import BatchKey
from jdp.core.types import Batch, PyTree


@dataclass(frozen=True)
class RowwiseLoss:
    """A `TracedLoss` that takes a `BatchKey` as well as a key."""

    loss: TracedLoss
    _programs: dict[Any, tuple[Any, Any, Any]] = field(default_factory=dict[Any, tuple[Any, Any, Any]])
    """Structure of the arguments -> programs: operands with seeds of rounding have other leaves than those without."""

    def __call__(self, operands: PyTree, model_state: PyTree, batch: Batch, key: Any) -> tuple[Sums, PyTree]:
        """Return the sums over the rows of `batch`, and the model state afterwards."""
        if not isinstance(key, BatchKey):
            return self.loss(operands, model_state, batch, key)
        args = (operands, model_state, batch, key.key)
        if (given := jax.tree.structure(args)) not in self._programs:
            self._programs[given] = _programs_of(self.loss, args, key.total)
        local, full, structure = self._programs[given]
        if full is not None and not differs(local.jaxpr, full.jaxpr):
            return self.loss(*args)
        flat = list(map(Value, jax.tree.leaves(args)))
        reference = None if full is None else GlobalProgram(full.jaxpr, full.consts, [None] * len(flat))
        results = Replay(key).run(local.jaxpr, local.consts, flat, reference)
        return jax.tree.unflatten(structure, [value.array for value in results])


def _programs_of(loss: TracedLoss, args: tuple[Any, ...], total: int) -> tuple[Any, Any, Any]:
    """Return the jaxprs of the loss for the batch in `args` and for `total` rows, and the structure of its result.

    The second is None where the loss cannot be traced for so many rows, and the first again where that draws nothing.
    """
    operands, model_state, batch, key = args
    local, shape = jax.make_jaxpr(loss, return_shape=True)(*args)
    if not any(map(is_random, local.eqns)):
        return local, local, jax.tree.structure(shape)
    all_rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((total, *x.shape[1:]), x.dtype), batch)
    try:
        full = jax.make_jaxpr(loss)(operands, model_state, all_rows, key)
    except Exception as error:  # the user's own code, at a size that it may not expect
        notice(
            f"noise may depend on the mesh: the loss does not take the whole batch of {total} rows "
            f"({type(error).__name__}: {str(error)[:200]}), so its draws are read by their shapes: without leading "
            f"rows they are the same on every device; {BY_ROW}"
        )
        full = None
    return local, full, jax.tree.structure(shape)
