"""Products of a loss that are made in float8, found in its trace: those of activations and a weight.

Each value is followed from the inputs: does it depend on parameters, does it depend on the batch? In a product
(`dot_general`) with a weight, one operand depends on parameters alone, the other on the batch. It is made in float8
(`flax_nnx.fp8.fp8_product`) if

- operands and result are bfloat16, and it names no `precision`. A float32 result, as of the logits in jdp's models, is
  meant to have more digits than bfloat16, not fewer.
- it has no batch dimensions, and the weight's two sizes divide by 16, as cuBLASLt wants. The number of rows is padded.

Attention's products have no weight, and embeddings are no products. A `jax.custom_vjp` function is left as it is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jdp.base.notices import notice
from jdp.core.flax_nnx.fp8 import fp8_product
from jdp.core.sharding.traced_mesh import scaling_weights, traced_device
from jdp.core.tracing.graph import PLAIN, REMATERIALISED, bodies, carried, run, traced_like, with_bodies
from jdp.core.tracing.jaxprs import bind, traced_at, user_line

_WEIGHT, _BATCH = 1, 2
_MULTIPLE = 16

Sources = Sequence[int]
"""For each value what it depends on: the sum of `_WEIGHT` and `_BATCH`, or 0."""


def with_fp8_products(function: Callable[..., Any], weights: Any, state: Any, batch: Any, key: Any) -> Any:
    """Return `function(weights, state, batch, key)` with its products of activations and weights in float8."""
    arguments = (weights, state, batch, key)
    with scaling_weights():
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    source = {0: _WEIGHT, 2: _BATCH}
    sources = [source.get(i, 0) for i, tree in enumerate(arguments) for _ in jax.tree.leaves(tree)]
    rewriter = _Rewriter()
    results = rewriter.run(closed, jax.tree.leaves(arguments), sources)
    rewriter.report()
    return jax.tree.unflatten(jax.tree.structure(shape), results)


@dataclass(frozen=True)
class _Rewriter:
    """Runs programs with products of weights in float8: `made`, and `left` in bfloat16, whose sizes do not divide."""

    made: list[JaxprEqn] = field(default_factory=list[JaxprEqn])
    left: list[JaxprEqn] = field(default_factory=list[JaxprEqn])

    def run(self, program: ClosedJaxpr, args: Sequence[Any], sources: Sources) -> list[Any]:
        """Return the outputs of a program for `args`, which depend on `sources`."""
        known = _followed(program.jaxpr, sources)

        def operation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            of_operands = _of(eqn.invars, known)
            if eqn.primitive.name == "dot_general" and _is_candidate(eqn, of_operands):
                return [self._product(eqn, operands, of_operands)]
            if inner := _inside(eqn, of_operands):
                return bind(with_bodies(eqn, [self._rewritten(*each) for each in inner]), operands)
            return bind(eqn, operands)

        return run(program, args, operation)

    def report(self) -> None:
        """Report once products that are not in float8, or a device without it."""
        if not self.made:
            notice(
                'precision="fp8": no product of the loss is in float8. It takes products of activations and a weight, '
                f"both bfloat16, with a bfloat16 result, and sizes of the weight that divide by {_MULTIPLE}; "
                'precision="bf16" computes the same'
            )
            return
        if self.left:
            notice(
                f'precision="fp8": {len(self.left)} products with a weight stay in bfloat16, such as that of '
                f"{user_line(self.left[0])}: float8 takes weights of two sizes that divide by {_MULTIPLE}, and no "
                "batch dimensions"
            )
        device = traced_device()
        if not has_fp8(device):
            notice(
                f'precision="fp8": {device.device_kind} has no float8 units that jdp knows of. Products are rounded '
                'as on a device with them (H100 and later) and multiplied in a wider type: precision="bf16" is faster'
            )

    def _product(self, eqn: JaxprEqn, operands: list[Any], sources: Sources) -> Any:
        (left, right), (left_dims, right_dims) = operands, eqn.params["dimension_numbers"][0]
        weight, contracted = (left, left_dims) if sources[0] == _WEIGHT else (right, right_dims)
        summed = math.prod(weight.shape[dim] for dim in contracted)
        if any(eqn.params["dimension_numbers"][1]) or summed % _MULTIPLE or weight.size // summed % _MULTIPLE:
            self.left.append(eqn)
            return bind(eqn, operands)[0]
        self.made.append(eqn)
        with traced_at(eqn):
            return fp8_product(left, right, eqn.params["dimension_numbers"], has_fp8(traced_device()))

    def _rewritten(self, program: ClosedJaxpr, sources: Sources) -> ClosedJaxpr:
        count = len(self.made)
        new = traced_like(program, lambda *args: self.run(program, args, sources))
        return program if len(self.made) == count else new


def _followed(jaxpr: Jaxpr, sources: Sources) -> dict[Any, int]:
    """Return what each variable of a jaxpr depends on whose inputs depend on `sources`."""
    known = dict(zip(jaxpr.invars, sources, strict=True))
    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _of_results(eqn, _of(eqn.invars, known)), strict=True))
    return known


def _of_results(eqn: JaxprEqn, sources: Sources) -> Sources:
    """Return what the results of an operation depend on."""
    inner = _inside(eqn, sources)
    if not inner:
        return [_joined(sources)] * len(eqn.outvars)
    index = sources[:1] if eqn.primitive.name == "cond" else []
    return [_joined([*index, *each]) for each in zip(*map(_of_outputs, inner), strict=True)]


def _inside(eqn: JaxprEqn, sources: Sources) -> list[tuple[ClosedJaxpr, Sources]]:
    """Return the programs that a scan, a condition or a call runs, and what their inputs depend on in some round."""
    if eqn.primitive.name == "while":
        return []
    rounds, where = list(sources), carried(eqn)
    while True:
        inner = bodies(eqn, rounds, PLAIN | REMATERIALISED)
        before = rounds[where]
        if not before:
            return [*inner]
        rounds[where] = [a | b for a, b in zip(before, _of_outputs(inner[0]), strict=False)]
        if before == rounds[where]:
            return [*inner]


def _of_outputs(inside: tuple[ClosedJaxpr, Sources]) -> Sources:
    program, sources = inside
    return _of(program.jaxpr.outvars, _followed(program.jaxpr, sources))


def _of(atoms: Sequence[Any], known: dict[Any, int]) -> list[int]:
    return [0 if isinstance(atom, Literal) else known.get(atom, 0) for atom in atoms]


def _joined(sources: Sources) -> int:
    return functools.reduce(operator.or_, sources, 0)


def _is_candidate(eqn: JaxprEqn, sources: Sources) -> bool:
    """Return True if a product is one of activations and a weight, all bfloat16, and asks for nothing else."""
    values: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    dtypes = {value.dtype for value in values}
    with_weight = _WEIGHT in sources and any(source & _BATCH for source in sources)
    return with_weight and dtypes == {jnp.dtype(jnp.bfloat16)} and _names_no_precision(eqn)


def _names_no_precision(eqn: JaxprEqn) -> bool:
    given = eqn.params["precision"]
    default = given is None or given == (jax.lax.Precision.DEFAULT,) * 2
    return default and eqn.params.get("out_sharding") is None


def has_fp8(device: Any) -> bool:
    """Return True for NVIDIA GPUs of compute capability 8.9 (Ada), 9.0 (Hopper) and later."""
    if device.platform not in ("gpu", "cuda"):
        return False
    try:
        return tuple(map(int, device.compute_capability.split("."))) >= (8, 9)
    except (AttributeError, ValueError):  # not NVIDIA's
        return False
