"""The dtypes of the master weights, of the model's computation, and of the gradients while they are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.errors import UserError, public
from jdp.base.tree_paths import path_of
from jdp.base.words import DtypeName, PrecisionName
from jdp.core.types import PyTree

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The three dtypes of mixed precision, each "fp32" (float32) or "bf16" (bfloat16).

        >>> half = jdp.Precision(compute="bf16", reduce="bf16")  # gradients sent in 2 bytes an element
        >>> train_step = jdp.make_train_step(loss_fn, plan, precision=half, partitioning="manual")
        >>> state, metrics = train_step(state, batch)

    Attributes:
        params: dtype of the master weights, and so of the optimizer state. `init` must return parameters of this dtype.
            "bf16" halves their memory, but small updates are rounded away.
        compute: dtype of the working copy of the weights, which is gathered and which the model multiplies with.
            Batches are not cast; the loss and its weight are always summed in float32. "bf16" is usual on GPUs and
            TPUs.
        reduce: dtype of the gradients while they are summed over devices and microbatches. "bf16" halves the bytes
            sent, for slow links. It has no effect under `partitioning="auto"`, where XLA reduces in the dtype of the
            backward pass.

    Raises:
        ValueError: one of the dtypes is neither "fp32" nor "bf16".
    """

    params: DtypeName = "fp32"
    compute: DtypeName = "fp32"
    reduce: DtypeName = "fp32"

    @public()
    def __post_init__(self) -> None:
        for field, given in vars(self).items():
            if given not in DTYPES:
                raise UserError(f"Precision.{field} is one of {', '.join(DTYPES)}; given {given!r}. Name one.")

    @staticmethod
    def of(precision: PrecisionName | Precision) -> Precision:
        """Return the `Precision` with a short name.

        Args:
            precision: "fp32"; "bf16" (fp32 master weights, bf16 compute and gathers, fp32 reduction); or a `Precision`,
                which is returned unchanged.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(precision, Precision):
            return precision
        if precision not in DTYPES:
            raise UserError(f"precision is {', '.join(DTYPES)} or a jdp.Precision; given {precision!r}. Name one.")
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
                fix = "or pass precision=jdp.Precision(params=..., compute=..., reduce=...)"
                if leaf.dtype == jnp.float64:  # the default dtype if 64 bits are enabled
                    fix = "or unset JAX_ENABLE_X64 (in jax.config: jax_enable_x64)"
                given = f"Precision.params is {self.params}, but {path_of(path)} is {leaf.dtype}"
                raise UserError(f"{given}. Initialise it in {self.params}, {fix}.")

    def working_shapes(self, params: PyTree) -> PyTree:
        """Return the working copy as `jax.ShapeDtypeStruct`: floating-point leaves in `compute`, others unchanged.

        Args:
            params: a pytree of parameters, real or abstract.
        """

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
