"""Which dtype the weights rest in, the model computes in, and the gradients are reduced in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdp.core.types import PyTree

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The three dtypes of mixed precision; "fp32" or "bf16" each.

    Attributes:
        params: the master weights and the optimizer state, as `init` made them; they stay in it.
        compute: the working copy of the weights: what is gathered, and what the model multiplies with. Batches are
            handed over as they are; the loss and its weight are always summed in float32.
        reduce: the gradients while they are summed over devices and microbatches. `partitioning="auto"` cannot choose
            it: there XLA reduces in whatever dtype the backward pass produced.
    """

    params: str = "fp32"
    compute: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        for field in ("params", "compute", "reduce"):
            if getattr(self, field) not in DTYPES:
                raise ValueError(f"Precision.{field} is one of {', '.join(DTYPES)}; got {getattr(self, field)!r}.")

    @staticmethod
    def of(precision: str | Precision) -> Precision:
        """ "fp32", or "bf16" (fp32 master weights, bf16 compute and wire, fp32 reduction), or a `Precision`."""
        if isinstance(precision, Precision):
            return precision
        if precision not in DTYPES:
            raise ValueError(f"precision is {', '.join(DTYPES)} or a jdp.Precision; got {precision!r}.")
        return Precision(compute=precision)

    def check_params(self, params: PyTree) -> None:
        """Raise ValueError if a weight does not rest in `params`: it would be trained in a dtype nobody asked for."""
        wanted = DTYPES[self.params]
        for path, leaf in jax.tree.leaves_with_path(params):
            if leaf.dtype != wanted:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"Precision.params is {self.params}, but {name} rests in {leaf.dtype}. Initialise it in "
                    f"{self.params}, or pass precision=jdp.Precision(params=..., compute=..., reduce=...)."
                )

    def working_shapes(self, params: PyTree) -> PyTree:
        """The shapes of the working copy: floating-point leaves in `compute`, others as they are."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype if floating else leaf.dtype)

        return jax.tree.map(shape, params)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(DTYPES[self.compute])

    @property
    def reduce_dtype(self) -> jnp.dtype:
        return jnp.dtype(DTYPES[self.reduce])
