"""Policies of `jax.checkpoint`: the values that the backward pass of a layer keeps, or computes again."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jdp.base.errors import UserError
from jdp.base.words import Rematerialise
from jdp.core.reading import ELEMENTWISE, REDUCTIONS, every_eqn

Remat = Rematerialise | Callable[..., bool] | None

ATTENTION = "attention"
"""The mark (`jax.ad_checkpoint.checkpoint_name`) of the operands and results of attention and its projections, of the
statistics of its softmax, and of the sum that its output enters."""
EXCEPT_MLP = "dots_except_mlp"
STATISTICS = "statistics"
"""The name of a norm's statistics: one or two numbers a row."""
_FUSED = "dot_product_attention_fwd_wrapper"  # cuDNN's attention in jax: its output, and the statistics of its softmax
_GATHERS = {"all_gather", "sharding_constraint", "optimization_barrier"}
_SHAPE_ONLY = {"reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "concatenate"}
_CHEAP = ELEMENTWISE | REDUCTIONS | _GATHERS | _SHAPE_ONLY | {"iota", "random_bits", "random_wrap", "random_unwrap"}


def remat_policy(remat: Remat) -> Callable[..., bool]:
    """Return a checkpoint policy that keeps no gathered weights."""
    policies = {
        None: _save_activations,
        "dots": _save_products,
        EXCEPT_MLP: _save_attention,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    if not callable(remat) and remat not in policies:
        names = ", ".join(f'"{name}"' for name in policies if name)
        raise UserError(f"remat is None, {names} or a checkpoint policy; given {remat!r}. Name one.")
    policy = remat if callable(remat) else policies[remat]
    if remat is None:  # it excludes gathered weights itself
        return policy
    return lambda prim, *args, **params: prim.name not in _GATHERS and bool(policy(prim, *args, **params))


def _save_activations(prim: Any, *operands: Any, **params: Any) -> bool:
    """Keep the block's results, but neither gathered weights nor reshaped or widened copies of them.

    A narrowing cast is kept: the backward pass needs its result, and its operand is twice as large.
    """
    if prim.name == "convert_element_type":
        return params["new_dtype"].itemsize < operands[0].dtype.itemsize
    return prim.name not in _GATHERS and prim.name not in _SHAPE_ONLY


def _save_products(prim: Any, *operands: Any, **params: Any) -> bool:
    """Keep the products with weights, and the results of attention, from which its backward pass starts.

    Products with batch dimensions are attention's own, [length, length] a head: cheaper to compute again than to read.
    """
    if prim.name == "dot_general":
        _, batch = params["dimension_numbers"]
        return not any(batch)
    return _save_attention(prim, **params)


def keep_costly(prim: Any, *_: Any, **params: Any) -> bool:
    """Keep everything except gathered weights and values that cost little to compute again.

    Convolutions, fused attention, custom kernels, collectives and embeddings' rows are thus computed once.
    """
    if prim.name == "dot_general":
        return _save_products(prim, **params)
    return prim.name not in _CHEAP


def _save_attention(prim: Any, *_: Any, **params: Any) -> bool:
    """Keep marked values, and cuDNN's attention, which jax does not mark."""
    return prim.name == _FUSED or _is_marked(prim, params, ATTENTION, STATISTICS)


def _is_marked(prim: Any, params: Mapping[str, Any], *names: str) -> bool:
    return prim.name == "name" and params["name"] in names


def check_marks(program: Any) -> None:
    if not any(_is_marked(eqn.primitive, eqn.params, ATTENTION) for eqn in every_eqn(program.jaxpr)):
        raise UserError(
            f'remat = "{EXCEPT_MLP}" keeps values that the block marks by jax.ad_checkpoint.checkpoint_name(x, '
            f'"{ATTENTION}"); given a block without a mark. Mark the results of attention and its projections, or give '
            '"dots" or "full".'
        )
