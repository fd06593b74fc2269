"""The matrix products of a compiled program: in dots, convolutions, calls of libraries, and fused attention.

They are also inside fusions and calls. The sizes of a library's product (cuBLAS, cuDNN) follow from shapes.

Fused attention is a call to cuDNN. Per score (a query and a key that it sees) and element of a head, the forward pass
multiplies and adds twice: q·k, p·v. The backward pass does so five times: the scores again, and the gradients of p, v,
q and k (Dao 2023, arXiv:2307.08691, 4.1). Exponentials are added: at width 128 they take half as long as the products,
and kernels hide little of that (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, 3.1). Compared with 30 rates of
cuDNN 9 on an H100 (figures 5 and 6 of that paper), times are within 19 %, 6 % in the median. Width 256 is up to 20 %
too fast. Two measured calls are within 6 %.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jdp.foresight.program.module import Instruction, Program, bits, ints

Shape = tuple[str, tuple[int, ...]]  # element type, dimensions


@dataclass(frozen=True)
class Product:
    """`batch` products of [m, k] with [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str  # XLA's type of the multiplication; "vector": full float32, not on tensor cores
    passes: int = 1  # multiplications, if the algorithm splits operands into several of a narrower type

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


LIBRARY_PRODUCTS = ("__cublas$", "__cudnn$conv")


def products(step: Instruction, computation: str, program: Program) -> Iterator[Product]:
    """Yield the products of one execution of an instruction of `computation`; not of a loop's body."""
    operands = _operands(step, computation, program)
    if step.opcode in ("dot", "scaled-dot"):
        (left_type, left), (right_type, right) = operands[:2]
        batch = math.prod(left[d] for d in ints(step.attribute("lhs_batch_dims") or ""))
        k = math.prod(left[d] for d in ints(step.attribute("lhs_contracting_dims") or ""))
        m, n = (math.prod(shape) // max(1, batch * k) for shape in (left, right))
        yield Product(batch, m, n, k, *_arithmetic(step, left_type, right_type))
    elif step.opcode == "convolution":
        yield _convolution(step, operands[1], step.shapes[0])
    elif step.opcode == "custom-call" and (target := custom_call_target(step)).startswith(LIBRARY_PRODUCTS):
        yield _library(step, target, operands)
    for name in step.called.get("calls", ()):
        for inner in program[name]:
            yield from products(inner, name, program)


def custom_call_target(step: Instruction) -> str:
    """Return the target of a custom call, such as "__cublas$gemm"; "" if the text lacks it."""
    match = re.search(r'custom_call_target="([^"]*)"', step.line)
    return match[1] if match else ""


def _operands(step: Instruction, computation: str, program: Program) -> list[Shape]:
    return [shape for name in step.operands for shape in program.by_name[computation][name].shapes[:1]]


_ALGORITHM = re.compile(r"\balgorithm=dot_(any_f8|[a-z]+\d+)_\w+?(?:_x(\d))?\b")
_ALGORITHM_TYPES = {"any_f8": "f8e4m3fn", "tf32": "f32", "f32": "vector"}


def _arithmetic(step: Instruction, *operands: str) -> tuple[str, int]:
    """Return the type of a product's multiplication (the algorithm's, else the wider operand's), and its passes.

    XLA:GPU rounds float32 operands to TF32 for the tensor cores, unless the highest precision was requested.
    """
    if (match := _ALGORITHM.search(step.bare)) is not None:
        return _ALGORITHM_TYPES.get(match[1], match[1]), int(match[2] or 1)
    widest = max(operands, key=bits)
    highest = "highest" in (step.attribute("operand_precision") or "")
    return "vector" if widest == "f32" and highest else widest, 1


def _convolution(step: Instruction, kernel: Shape, output: Shape) -> Product:
    """Return a convolution as a product, by group: output positions × (kernel size × features) × features."""
    match = re.search(r"\bdim_labels=\w+_(\w+)->", step.bare)
    features = kernel[1][match[1].index("o")] if match else kernel[1][-1]
    groups = int(step.attribute("feature_group_count") or 1)
    dilated = re.search(r"\blhs_dilate=([\dx]+)", step.bare)
    zeros = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
    k = max(1, math.prod(kernel[1]) // features // zeros)
    return Product(groups, math.prod(output[1]) // features, features // groups, k, *_arithmetic(step, kernel[0]))


def _library(step: Instruction, target: str, operands: list[Shape]) -> Product:
    """Return the product that a library call replaces; `step` writes its result first, then a workspace."""
    result = step.shapes[0]
    if target == "__cudnn$convBackwardFilter":  # (input, gradient of the output) -> gradient of the kernel
        return _convolution(step, result, operands[1])
    if target == "__cudnn$convBackwardInput":  # (gradient of the output, kernel) -> gradient of the input
        return _convolution(step, operands[1], operands[0])
    if target.startswith("__cudnn$conv"):
        return _convolution(step, operands[1], result)
    (left, lhs), (right, rhs) = operands[:2]
    batch = math.prod(rhs[:-2])
    # The sizes are b·m·k, b·k·n and b·m·n: lhs · rhs / result = b·k².
    k = math.isqrt(math.prod(lhs) * math.prod(rhs) // max(1, math.prod(result[1]) * batch))
    m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
    return Product(batch, m, n, k, *_arithmetic(step, left, right))


ATTENTION_TARGET = "__cudnn$fmha"


@dataclass(frozen=True)
class Attention:
    """One call of a fused kernel, forward or backward."""

    heads: int  # query heads of all sequences: batch x heads
    queries: int  # of a sequence
    keys: int  # of a sequence
    width: int  # elements of a head of queries and keys
    value_width: int  # elements of a head of values
    dtype: str  # XLA's name of the operands' type
    causal: bool = False  # a query sees no later keys
    window: int = 0  # most keys that a query sees; 0 for all
    backward: bool = False

    @property
    def seen(self) -> float:
        """Mean number of keys that a query sees."""
        window = min(self.window or self.keys, self.keys)
        return window - window**2 / (2 * self.keys) if self.causal else window

    @property
    def scores(self) -> float:
        return self.heads * self.queries * self.seen

    @property
    def flops(self) -> int:
        per_score = 3 * self.width + 2 * self.value_width if self.backward else self.width + self.value_width
        return round(2 * self.scores * per_score)

    @property
    def pass_bytes(self) -> int:
        """Memory traffic of the backward pass' other kernels, which sum the queries' gradient in float32.

        One multiplies the result with its gradient and clears the sums; another rounds them to the operands' type.
        """
        bytes_of_query = 4 * self.value_width + 10 * self.width
        return self.heads * self.queries * bytes_of_query if self.backward else 0


# Constants fitted to the rates in the module's docstring.
_PRODUCT_EFFICIENCY = 0.8  # share of the dense peak that the products reach between exponentials
# overhead of a block of queries, in keys: filling the pipeline with the first keys, and writing the result
_RAMP_KEYS = 90.0
# further keys with a causal mask: blocks on the diagonal are computed whole, and blocks of queries that see few keys
# finish early
_DIAGONAL_KEYS = 200.0
# time of the backward pass / its products and exponentials: several cores add to the queries' gradient in memory
_BACKWARD_FACTOR = 1.37


def attention(step: Instruction, computation: str, program: Program) -> Attention | None:
    """Return an instruction as a call of cuDNN's attention, else None; packed sequences count as one sequence a row."""
    if step.opcode != "custom-call" or not (target := custom_call_target(step)).startswith(ATTENTION_TARGET):
        return None
    operands = _operands(step, computation, program)  # queries, keys, values come first
    sizes = re.search(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]', step.line)
    if sizes is None or len(operands) < 3:
        return None
    batch, heads, queries, keys = ints(sizes[1])
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', step.line)
    return Attention(
        heads=batch * heads,
        queries=queries,
        keys=keys,
        width=operands[0][1][-1],
        value_width=operands[2][1][-1],
        dtype=operands[0][0],
        causal=re.search(r'"mask_type":\s*"\w*CAUSAL', step.line) is not None,
        window=int(window[1]) if window else 0,
        backward="Backward" in target,
    )


def attention_seconds(call: Attention, peak_flops: float, exponentials: float) -> float:
    core = call.flops / (_PRODUCT_EFFICIENCY * peak_flops) + call.scores / exponentials
    ramp = _RAMP_KEYS + _DIAGONAL_KEYS * call.causal
    return core * (1 + ramp / call.seen) * (_BACKWARD_FACTOR if call.backward else 1.0)
