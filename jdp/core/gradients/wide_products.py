"""Matrix products whose 16-bit results are only turned to float32: they are made in float32.

These are the gradients of weights, which are reduced or stacked in float32, and what else a layer only returns so.
Tensor cores sum in float32 in any case. Rounded to 16 bits and turned to float32 afterwards, a gradient loses digits,
and on GPUs a kernel reads and writes all of it. What is carried from layer to layer keeps its rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jdp.core.tracing.graph import Operation, Value
from jdp.core.tracing.jaxprs import bind

_SAME_ELEMENTS = ("transpose", "reshape", "squeeze", "copy")


def wide_products(
    operations: Sequence[Operation], results: Collection[Value], carried: Collection[Value]
) -> set[Operation]:
    """Return the products among `operations` of which `results` are the float32 form, and nothing else is used or
    `carried`.
    """
    users: dict[Value, list[Operation]] = {}
    for operation in operations:
        for value in operation.operands:
            users.setdefault(value, []).append(operation)

    def is_widened(value: Value) -> bool:
        if value in results or value in carried or len(used := users.get(value, [])) != 1:
            return False
        [user] = used
        if user.name == "convert_element_type" and user.eqn.params["new_dtype"] == jnp.float32:
            return is_result(user.results[0])
        return user.name in _SAME_ELEMENTS and is_widened(user.results[0])

    def is_result(value: Value) -> bool:
        used = users.get(value, [])
        if value in carried:
            return False
        return value in results or (len(used) == 1 and used[0].name in _SAME_ELEMENTS and is_result(used[0].results[0]))

    return {each for each in operations if _is_16_bit_product(each) and is_widened(each.results[0])}


def _is_16_bit_product(operation: Operation) -> bool:
    """Return True for a product of 16-bit operands, not made of float8: XLA knows those by a result of 16 bits."""
    if operation.name != "dot_general" or operation.eqn.params["precision"] is not None:
        return False
    dtypes = {value.aval.dtype for value in (*operation.operands, *operation.results)}
    made_of = [x.aval.dtype for value in operation.operands for x in _converted(value)]
    return (
        len(dtypes) == 1
        and dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}
        and all(dtype.itemsize > 1 for dtype in made_of)
    )


def _converted(value: Value) -> list[Value]:
    """Return what a value was converted and scaled from, itself included."""
    found, waiting = list[Value](), [value]
    while waiting:
        found.append(each := waiting.pop())
        if each.maker is not None and each.maker.name in ("convert_element_type", "mul", "div", *_SAME_ELEMENTS):
            waiting += each.maker.operands
    return found


def bind_wide(product: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Evaluate a product, its result in float32."""
    return bind(product.replace(params={**product.params, "preferred_element_type": jnp.dtype(jnp.float32)}), operands)
