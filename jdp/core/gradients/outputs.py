"""What a loss returns beside its value (`has_aux`), if it is called on parts of the batch: rows, in their order."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jdp.base.tree_paths import path_of
from jdp.core.gradients.loss_call import LossForm, LossWithAux
from jdp.core.types import PartsError


def with_outputs(loss: LossWithAux, form: LossForm, larger: LossForm | None, rows: int) -> LossWithAux:
    """Return a loss that returns its aux too, each array marked as rows or not.

    Args:
        form: the form of the loss on `rows` rows.
        larger: its form on twice as many, if the loss is called on parts of the batch; None if it is called once.

    Raises:
        PartsError: the loss is called on parts of the batch, and an array of aux does not have its rows.
    """
    arrays = jax.tree.leaves_with_path(form.aux)
    leads = tuple(few.shape[:1] == (rows,) for _, few in arrays)
    if larger is None:
        return replace(loss, by_row=leads, structure=jax.tree.structure(form.aux))
    for (path, few), many in zip(arrays, jax.tree.leaves(larger.aux), strict=True):
        if few.shape[:1] != (rows,) or many.shape != (2 * rows, *few.shape[1:]):
            name = f"aux[{path_of(path)!r}]" if path else "aux"
            raise PartsError(
                f"each array of aux has the rows as its first dimension; given {name}, {list(few.shape)} for {rows} "
                f"rows and {list(many.shape)} for {2 * rows}: sum over rows in the metrics of jdp.Loss, keep "
                "statistics in the model"
            )
    return replace(loss, by_row=(True,) * len(arrays), structure=jax.tree.structure(form.aux))


def changed_rows(outputs: list[np.ndarray], masks: np.ndarray) -> str | None:
    """Describe rows of aux that depend on other rows; None if there are none.

    Args:
        outputs: arrays [calls, rows, ...]: of calls on rows of which some were exchanged.
        masks: bool [calls, rows]: which rows were exchanged in each call, none in the first and all in the second.
    """
    for x in outputs:
        exchanged = masks.reshape(*masks.shape, *(1,) * (x.ndim - 2))
        expected = np.where(exchanged, x[1], x[0])
        if not np.allclose(x, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(initial=0), equal_nan=True):
            return "rows of aux depend on the other rows of the call"
    return None
