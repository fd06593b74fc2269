"""The dtypes of the master weights, of the model's computation and products, and of the gradients when reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.tree_paths import path_of
from jdp.base.words import DtypeName, PrecisionName, Products
from jdp.core.types import PyTree

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SHORT = (*DTYPES, "fp8")
"""What `precision` may be called."""


@dataclass(frozen=True)
class Precision:
    """The three dtypes of mixed precision, each "fp32" (float32) or "bf16" (bfloat16).

    Attributes:
        params: of the master weights, and so of the optimizer state. `init` must return parameters of this dtype.
        compute: of the working copy of the weights, which is gathered and which the model multiplies with. Batches are
            not cast; the loss and its weight are always summed in float32.
        reduce: of the gradients while they are summed over devices and microbatches. It has no effect under
            `partitioning="auto"`, where XLA reduces in the dtype that the backward pass produced.
        products: None: products with a weight are made in the dtypes of their operands. "fp8", with compute="bf16":
            those of bfloat16 activations, bfloat16 weights and a bfloat16 result are made in float8 (e4m3; gradients
            e5m2), added up in float32, each operand with one scale for all of its elements on the device, found at each
            use. So what is rounded away below 2^-15 of the largest element depends on the mesh, and nothing else does.
            Logits stay as they are if their product asks for a float32 result (`preferred_element_type`), as those of
            jdp's models do; so does every product that names a `precision`, and what has no weight: attention,
            embeddings, convolutions. It pays on GPUs with float8 units (H100 and later).

    Raises:
        ValueError: one of the dtypes is neither "fp32" nor "bf16"; `products` is neither None nor "fp8", or "fp8" with
            another `compute` than "bf16".
    """

    params: DtypeName = "fp32"
    compute: DtypeName = "fp32"
    reduce: DtypeName = "fp32"
    products: Products | None = None

    def __post_init__(self) -> None:
        for field in ("params", "compute", "reduce"):
            if getattr(self, field) not in DTYPES:
                raise ValueError(
                    f"Precision.{field} is one of {', '.join(DTYPES)}; given {getattr(self, field)!r}. Name one."
                )
        if self.products not in (None, "fp8"):
            raise ValueError(f'Precision.products is None or "fp8"; given {self.products!r}. Leave it out.')
        if self.products and self.compute != "bf16":
            raise ValueError(
                f'Precision.products="fp8" rounds bfloat16 operands; given compute={self.compute!r}. Take "bf16".'
            )

    @staticmethod
    def of(precision: PrecisionName | Precision) -> Precision:
        """Return the `Precision` that a short name stands for.

        Args:
            precision: "fp32"; "bf16" (fp32 master weights, bf16 compute and gathers, fp32 reduction); "fp8" (the same,
                and `products` in float8); or a `Precision`, which is returned as it is.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(precision, Precision):
            return precision
        if precision == "fp8":
            return Precision(compute="bf16", products="fp8")
        if precision not in DTYPES:
            raise ValueError(f"precision is {', '.join(SHORT)} or a jdp.Precision; given {precision!r}. Name one.")
        return Precision(compute=precision)

    def check_params(self, params: PyTree) -> None:
        """Check that the master weights have the dtype `params`.

        Args:
            params: a pytree of parameters, real or abstract.

        Raises:
            ValueError: a parameter has another dtype.
        """
        for path, leaf in jax.tree.leaves_with_path(params):
            if leaf.dtype != DTYPES[self.params]:
                raise ValueError(
                    f"Precision.params is {self.params}, but {path_of(path)} rests in {leaf.dtype}. Initialise it in "
                    f"{self.params}, or pass precision=jdp.Precision(params=..., compute=..., reduce=...)."
                )

    def working_shapes(self, params: PyTree) -> PyTree:
        """Return the shapes and dtypes of the working copy: floating-point leaves in `compute`, others unchanged.

        Args:
            params: a pytree of parameters, real or abstract.

        Returns:
            A tree of `jax.ShapeDtypeStruct`.
        """

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jax.ShapeDtypeStruct(leaf.shape, self.compute_dtype if floating else leaf.dtype)

        return jax.tree.map(shape, params)

    @property
    def params_dtype(self) -> jnp.dtype:
        """`params` as a dtype."""
        return jnp.dtype(DTYPES[self.params])

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`compute` as a dtype."""
        return jnp.dtype(DTYPES[self.compute])

    @property
    def reduce_dtype(self) -> jnp.dtype:
        """`reduce` as a dtype."""
        return jnp.dtype(DTYPES[self.reduce])
