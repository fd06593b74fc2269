"""Programs are read here: the operations of jaxprs, their source lines and FLOPs, and the collectives of a step.

Collectives are read from a step's trace before it is compiled, above all the gathers of ZeRO-3. An operation in a scan
counts once for each iteration. The trace has the lines of the loss' own collectives, which XLA drops when it combines.
"""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import jax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jdp.base.tree_paths import PACKAGE

_MOVES = ("convert_element_type", "copy", "mul", "pad", "reshape", "sharding_constraint", "squeeze", "transpose")
"""Operations that only change the layout, dtype or scale of a gradient."""
ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos div eq erf erf_inv exp exp2 expm1
    floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision
    rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
"""Operations that compute each element from the operands' elements at the same position, or from scalars."""
DECOMPOSITIONS = frozenset(
    "cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal".split()  # noqa: SIM905
)
"""Operations on the last two dimensions."""
CALLS = ("jit", "closed_call", "checkpoint", "remat2", "shard_map", "custom_jvp_call", "custom_vjp_call")
"""Operations that run a jaxpr once, on their operands."""
REDUCTIONS = frozenset(
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()  # noqa: SIM905
)
_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # cuDNN's


def every_eqn(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return all operations of a jaxpr, each before those inside it."""
    return [eqn for eqn, _, _ in every_run(jaxpr)]


def every_run(jaxpr: Jaxpr, times: int = 1, outer: str = "") -> Iterator[tuple[JaxprEqn, int, str]]:
    """Yield (operation, how often it runs, its name scope) of all operations, each before those inside it."""
    for eqn in jaxpr.eqns:
        scope = f"{outer}/{eqn.source_info.name_stack}"
        yield eqn, times, scope
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            yield from every_run(inner, times * rounds, scope)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carried, _ = eqn.params["ft_in"].unpack()  # since jax 0.12
    return len(constants), len(carried)


def passed_on(jaxpr: Jaxpr) -> list[Any]:
    """Return for each output the variable that it equals, traced back through calls, loops and branches."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        for out, number in zip(eqn.outvars, _operands_passed_on(eqn), strict=True):
            if number is not None and not isinstance(operand := eqn.invars[number], Literal):
                same[out] = same.get(operand, operand)
    return [var if isinstance(var, Literal) else same.get(var, var) for var in jaxpr.outvars]


def _operands_passed_on(eqn: JaxprEqn) -> list[int | None]:
    """Return for each output of an operation the number of the operand that it equals, or None."""
    name, inner = eqn.primitive.name, list(jaxprs_in_params(eqn.params))
    if name in CALLS:
        return _passed_on_inputs(inner[0])
    if name == "cond":  # the first operand selects the branch
        inputs = [_passed_on_inputs(branch) for branch in inner]
        return [None if len({*each}) > 1 or each[0] is None else each[0] + 1 for each in zip(*inputs, strict=True)]
    if name == "scan":  # carries that do not change, and inputs that are returned
        constants, carried = scan_counts(eqn)
        inputs = _passed_on_inputs(inner[0])
        kept = [n if n == constants + place else None for place, n in enumerate(inputs[:carried])]
        return kept + [n if n is not None and n >= constants + carried else None for n in inputs[carried:]]
    if name == "while":
        constants, body = eqn.params["cond_nconsts"], eqn.params["body_jaxpr"].jaxpr
        own = eqn.params["body_nconsts"]
        inputs = _passed_on_inputs(body)
        return [constants + n if n == own + place else None for place, n in enumerate(inputs)]
    return [None] * len(eqn.outvars)


def _passed_on_inputs(jaxpr: Jaxpr) -> list[int | None]:
    """Return for each output the number of the input that it equals, or None."""
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    return [None if isinstance(var, Literal) else numbers.get(var) for var in passed_on(jaxpr)]


def places_made(jaxpr: Jaxpr) -> list[int]:
    """Return for each output the index of the operation that computes it, before moves and casts; -1 for an input."""
    made = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def place_of(var: Any) -> int:
        while not isinstance(var, Literal) and var in made:
            eqn: Any = jaxpr.eqns[made[var]]
            inputs = [x for x in eqn.invars if not isinstance(x, Literal) and x.aval.shape]
            if eqn.primitive.name not in _MOVES or len(inputs) != 1:
                return made[var]
            var = inputs[0]
        return -1

    return [place_of(var) for var in jaxpr.outvars]


def source_lines(eqn: JaxprEqn) -> list[str]:
    """Return "file:line (function)" of the calls that led to an operation, innermost first, without JAX's."""
    text = source_info_util.summarize(eqn.source_info, num_frames=sys.maxsize)
    return [re.sub(r":(\d+):\d+ ", r":\1 ", line) for line in reversed(text.splitlines())]  # without the column


def user_line(eqn: JaxprEqn) -> str:
    """Return "file:line (function)" of the innermost call outside of installed packages and jdp."""
    lines = source_lines(eqn)
    own = (line for line in lines if "site-packages" not in line and not line.startswith(f"{PACKAGE}{os.sep}"))
    return next(own, next(iter(lines), "an unknown line"))


def run(
    program: Any,
    arrays: Sequence[Any],
    operation: Callable[[JaxprEqn, list[Any]], list[Any]] | None = None,
    consts: Sequence[Any] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr, each operation by `operation` (None: `bind`); `consts` replace its constants."""
    jaxpr, own = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, own if consts is None else consts, strict=True))
    values |= zip(jaxpr.invars, arrays, strict=True)
    for eqn in jaxpr.eqns:
        operands = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        values |= zip(eqn.outvars, (operation or bind)(eqn, operands), strict=True)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


def bind(eqn: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """Apply the operation of `eqn` to other operands."""
    scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with eqn.ctx.manager, source_info_util.user_context(eqn.source_info.traceback, name_stack=scope):
        out = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def count_flops(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products and convolutions in a jaxpr: 2 for each multiplication and addition.

    A scan counts once for each iteration, a `while` loop once, and a condition as its branch with the most FLOPs.
    """
    flops = 0
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, map(count_flops, jaxprs_in_params(eqn.params))
        if name in ("dot_general", "conv_general_dilated") or name.startswith(_ATTENTION):
            flops += flops_of(eqn)
        elif name == "cond":
            flops += max(inner)
        elif name == "shard_map":  # its body is the work of one device
            manual = eqn.params.get("newly_manual_axes") or eqn.params["manual_axes"]  # its name in jax 0.10
            flops += sum(inner) * math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
        else:
            flops += sum(inner) * (eqn.params["length"] if name == "scan" else 1)
    return flops


def flops_of(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracting)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    # cuDNN's attention, with masked scores: two products forward, five backward
    queries, keys = eqn.invars[0].aval, eqn.invars[1].aval
    length = keys.shape[1 if eqn.params["layout"] == 0 else 2]  # [batch, length, heads, width], or heads first
    if name.startswith(_ATTENTION[1]):
        return 2 * 5 * length * queries.size
    return 2 * length * (queries.size + eqn.outvars[0].aval.size)


UPDATE = "optimizer_update"
"""The name scope of the optimizer's update, also in XLA's names of operations."""
AT_TOP = "gather_at_top"
"""The name scope of gathers at the top of the loss."""
_PARAMETER = re.compile(r"gather\[([^\]]*)\]")
_LOOKUP = re.compile(r"look_up\[([^\]]*)\]")
_REDUCTION = re.compile(r"reduce(_layer)?\[([^\]]*)\]")
_KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_COLLECTIVES = (*_KINDS, "sharding_constraint")  # XLA turns the last into a gather


def parameter_scope(path: str) -> AbstractContextManager[Any]:
    """Mark the gather that is traced inside with the path of its parameter."""
    return jax.named_scope(f"gather[{quote(path, safe='/')}]")


def reduction_scope(path: str, of_layer: bool) -> AbstractContextManager[Any]:
    """Mark operations as the reduction of the gradient of the parameter at `path`, or of one layer of it."""
    return jax.named_scope(f"reduce{'_layer' if of_layer else ''}[{quote(path, safe='/')}]")


def lookup_scope(path: str) -> AbstractContextManager[Any]:
    """Mark operations as an exchange of rows of the parameter at `path`."""
    return jax.named_scope(f"look_up[{quote(path, safe='/')}]")


@dataclass(frozen=True)
class Gathered:
    """The gathers of one parameter at one place of a step."""

    path: str
    at_top: bool  # gathered at the top of the loss and kept for the backward pass; False: in a layer loop
    elements: int  # on a device after each gather, including its own shard, summed over the gathers of a step
    payload_bytes: int


@dataclass(frozen=True)
class Issued:
    """A collective in the trace: XLA's name, the shape of its result on a device, and "file:line" of its calls."""

    kind: str
    dims: tuple[int, ...]
    source_lines: tuple[str, ...]


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a traced step: the parameters that ZeRO-3 gathers, by first use, and all others."""

    gathered: tuple[Gathered, ...]
    issued: tuple[Issued, ...]
    looked_up: frozenset[str] = frozenset()  # paths of the tables whose rows are exchanged (`jdp.core.lookup`)
    exchanged: Mapping[str, int] = field(default_factory=dict[str, int])  # kind -> their payload bytes a step


def read_collectives(traced: jax.stages.Traced) -> TracedCollectives:
    """Read the collectives of a step from its trace, without dead code."""
    jaxpr = traced.jaxpr.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    elements, payload = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    issued, looked_up, exchanged = dict[Issued, None](), set[str](), Counter[str]()
    for eqn, times, scope in _collectives(live):
        if match := _PARAMETER.search(scope):
            result = eqn.outvars[0].aval
            sharding = eqn.params.get("sharding")  # of a constraint, whose result is global
            shape = result.shape if sharding is None else sharding.shard_shape(result.shape)
            key = unquote(match[1]), AT_TOP in scope
            elements[key] += times * math.prod(shape)
            payload[key] += times * math.prod(shape) * result.dtype.itemsize
        elif eqn.primitive.name in _KINDS:
            if match := _LOOKUP.search(scope):
                looked_up.add(unquote(match[1]))
                result = eqn.outvars[0].aval
                exchanged[_KINDS[eqn.primitive.name]] += times * result.size * result.dtype.itemsize
            lines = tuple(line.rpartition(" (")[0] for line in source_lines(eqn))
            for each in eqn.outvars:
                issued.setdefault(Issued(_KINDS[eqn.primitive.name], tuple(each.aval.shape), lines))
    gathered = tuple(Gathered(*key, elements[key], payload[key]) for key in elements)
    return TracedCollectives(gathered, tuple(issued), frozenset(looked_up), exchanged)


def branches_of(jaxpr: Any) -> list[Any]:
    """Return the branches of all conditions in a jaxpr."""
    return [x for eqn in every_eqn(jaxpr) if eqn.primitive.name == "cond" for x in jaxprs_in_params(eqn.params)]


def gathers_by_layer(jaxpr: Any) -> bool:
    """Return True if a trace gathers a parameter in a layer loop."""
    return any(_PARAMETER.search(scope) and AT_TOP not in scope for _, _, scope in _collectives(jaxpr))


def reduced_by_layer(jaxpr: Any) -> dict[str, tuple[int, int]]:
    """Return for each parameter the elements that a trace reduces, in all layers and uses, and the number of layers.

    Return {} without layers, or if a branch of a condition reduces, because then not every call does.
    """
    sums: dict[str, Counter[str]] = {}
    layers = Counter[tuple[str, str]]()
    inside = (eqn for branch in branches_of(jaxpr) for eqn in every_eqn(branch))
    if any(_REDUCTION.search(str(eqn.source_info.name_stack)) for eqn in inside):
        return {}
    for eqn, times, scope in _collectives(jaxpr):
        if match := _REDUCTION.search(scope):
            path, kind = unquote(match[2]), eqn.primitive.name
            layers[path, kind] += times if match[1] is not None else 0
            sums.setdefault(path, Counter())[kind] += times * math.prod(eqn.invars[0].aval.shape)
    if not any(layers.values()):
        return {}
    return {path: (max(kinds.values()), max(layers[path, kind] for kind in kinds)) for path, kinds in sums.items()}


def _collectives(jaxpr: Any) -> Iterator[tuple[Any, int, str]]:
    """Return (operation, how often it runs, its name scope) of collectives."""
    return (row for row in every_run(jaxpr) if row[0].primitive.name in _COLLECTIVES)
