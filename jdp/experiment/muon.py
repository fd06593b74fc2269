"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for a model's hidden matrices, and AdamW for the rest.

The momentum of a matrix [m, n] is orthogonalized, and scaled by 0.2 · sqrt(max(m, n)) (Liu et al. 2025,
arXiv:2502.16982, section 2.2). Its elements then have the root mean square of AdamW's updates. So one rate and one
weight decay serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any

import jax
import optax

from jdp.base.formatting import listed
from jdp.base.notices import notice
from jdp.base.tree_paths import path_of
from jdp.core.update.muon import scale_by_muon
from jdp.experiment.matrices import is_vector, matrix_dimensions, matrix_sizes

RMS = 0.2
"""Root mean square of an update by AdamW, as the paper measured it."""


def muon(
    rate: optax.Schedule,
    adamw: optax.GradientTransformation,
    decay: optax.GradientTransformation,
    shapes: Mapping[str, tuple[int, ...]],
    **settings: Any,
) -> optax.GradientTransformation:
    """Return Muon for the hidden matrices and `adamw` for the other parameters.

    `decay` adds the decayed weights, `settings` are those of `scale_by_muon`, and `shapes` those of all
    parameters by path, which tell stacked layers even where norms are frozen.
    """

    rule = partial(_rule, shapes, rate, adamw, decay, settings)

    def init(params: Any) -> Any:
        _report(params, matrix_dimensions(params, shapes))
        return rule(params).init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return rule(updates if params is None else params).update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _rule(
    shapes: Mapping[str, tuple[int, ...]],
    rate: optax.Schedule,
    adamw: optax.GradientTransformation,
    decay: optax.GradientTransformation,
    settings: Mapping[str, Any],
    params: Any,
) -> optax.GradientTransformation:
    """Return the optimizer for parameters of these shapes."""
    dims = matrix_dimensions(params, shapes)
    masked = jax.tree.map(lambda _, dim: optax.MaskedNode() if dim is None else dim, params, dims)
    step = scale_by_muon(weight_dimension_numbers=masked, **settings)
    hidden = optax.chain(step, _scaled(masked), decay, optax.scale_by_learning_rate(rate))
    labels = jax.tree.map(lambda _, dim: "adamw" if dim is None else "muon", params, dims)
    return optax.partition({"muon": hidden, "adamw": adamw}, labels)


def _scaled(dims: Any) -> optax.GradientTransformation:
    """Return the scaling of orthogonal matrices to AdamW's root mean square."""

    def scaled(update: jax.Array, dim: Any) -> jax.Array:
        return RMS * sqrt(max(matrix_sizes(update.shape, dim)[1:])) * update

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates, dims))


def _report(params: Any, dims: Any) -> None:
    """Report how many matrices go by Muon, and which other leaves but biases and scales by AdamW."""
    leaves, treedef = jax.tree.flatten_with_path(params)
    found = list(zip(leaves, treedef.flatten_up_to(dims), strict=True))
    hidden = [matrix_sizes(leaf.shape, dim)[0] for (_, leaf), dim in found if dim is not None]
    others = [path_of(path) for (path, _), dim in found if dim is None]
    outer = [path for path in others if not is_vector(path)]
    notice(
        f"muon: {sum(hidden)} matrices in {len(hidden)} leaves; adamw: {len(others)} leaves"
        + (f", of them no bias or scale: {listed(outer, 6)}" if outer else "")
    )
