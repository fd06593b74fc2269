"""The loss with its noise drawn by global row: what draws per example draws the rows of the global draw.

Where the loss is called on some rows of the batch only (`BatchKey`), it is traced for these rows (the local program).
If that draws, it is also traced for the whole batch (the global program). Both make the same draws in the same order. A
draw of the same shape in both is shared by all examples: it is the same on every device. A draw is by global row if one
dimension counts local rows in the one program and global rows in the other. A dimension that counts rows × n (examples
flattened into tokens) is taken to have the rows first.

What is numbered by row (`fold_in(rng, i)` for `i` of `arange(rows)`) gets the numbers of the global rows. So `split`,
`gamma` and loops that draw until a sample is accepted are right too.

Every other draw is made by each device for itself: good noise, which depends on the mesh and is reported with its
source line. An example is a scan along the rows that splits its key at each. Others are draws whose shape has no one
dimension of the rows, and draws inside a function with a custom gradient. If the programs differ in what they draw (a
Python loop over rows), a draw is by row if the rows lead, else the same on every device. This is reported too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.core.gradients.loss_call import Sums, TracedLoss
from jdp.core.gradients.loss_program import LossProgram, Programs
from jdp.core.random.match_draws import GlobalProgram, differs
from jdp.core.random.replay import BY_ROW, Replay, Value
from jdp.core.random.row_keys import BatchKey
from jdp.core.types import Batch, PyTree


@dataclass(frozen=True)
class RowwiseLoss:
    """A `TracedLoss` that takes a `BatchKey` as well as a key, and is traced once for arguments of the same shapes.

    Attributes:
        loss: the loss.
        programs: its programs; they are added to.
        form: as in `Programs.of`.
    """

    loss: TracedLoss
    programs: Programs = field(default_factory=Programs)
    form: Hashable = None

    def __call__(self, operands: PyTree, model_state: PyTree, batch: Batch, key: Any) -> tuple[Sums, PyTree]:
        """Return the sums over the rows of `batch`, and the model state afterwards."""
        arguments = (operands, model_state, batch, key.key if isinstance(key, BatchKey) else key)
        local = self.program(arguments)
        if not isinstance(key, BatchKey) or not local.draws:
            return local(*arguments)
        full = self._for_all_rows(arguments, key.total)
        if full is not None and not differs(local.closed.jaxpr, full.closed.jaxpr):
            return local(*arguments)
        flat = list(map(Value, jax.tree.leaves(arguments)))
        reference = None if full is None else GlobalProgram(full.closed.jaxpr, full.closed.consts, [None] * len(flat))
        results = Replay(key).run(local.closed.jaxpr, local.closed.consts, flat, reference)
        return jax.tree.unflatten(jax.tree.structure(local.shape), [value.array for value in results])[0]

    def program(self, arguments: tuple[Any, ...], rows: int | None = None) -> LossProgram:
        """Return the program of a call with these arguments, or with a batch of so many rows."""
        if rows is None:
            return self.programs.of(self.loss, arguments, self.form)
        operands, model_state, batch, key = arguments
        other = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return self.programs.of(self.loss, (operands, model_state, other, key), self.form)

    def _for_all_rows(self, arguments: tuple[Any, ...], total: int) -> LossProgram | None:
        """Return the program for the whole batch; None where the loss cannot be traced for so many rows."""
        try:
            return self.program(arguments, total)
        except Exception as error:  # the user's own code, at a size that it may not expect
            notice(
                f"noise may depend on the mesh: the loss does not take the whole batch of {total} rows "
                f"({type(error).__name__}: {str(error)[:200]}), so its draws are read by their shapes: without leading "
                f"rows they are the same on every device; {BY_ROW}"
            )
            return None
