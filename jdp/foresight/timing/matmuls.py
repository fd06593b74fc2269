"""The matrix products and convolutions of a compiled program: their sizes and element types.

They are in dots and convolutions, also inside fusions and calls, and in library calls (cuBLAS, cuDNN, oneDNN), whose
sizes follow from the operands' shapes.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jdp.foresight.program.module import Instruction, Program, bits

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


LIBRARY_PRODUCTS = ("__cublas$", "__onednn$matmul", "__cudnn$conv")


def products(step: Instruction, computation: str, program: Program) -> Iterator[Product]:
    """Yield the products of one execution of an instruction of `computation`; not of a loop's body."""
    operands = [s for name in step.operands for s in program.by_name[computation][name].shapes[:1]]
    if step.opcode in ("dot", "scaled-dot"):
        (left_type, left), (right_type, right) = operands[:2]
        batch = math.prod(left[d] for d in _dims(step, "lhs_batch_dims"))
        k = math.prod(left[d] for d in _dims(step, "lhs_contracting_dims"))
        m, n = (math.prod(shape) // max(1, batch * k) for shape in (left, right))
        yield Product(batch, m, n, k, *_arithmetic(step, left_type, right_type))
    elif step.opcode == "convolution":
        yield _convolution(step, operands[1], step.shapes[0])
    elif step.opcode == "custom-call" and (target := custom_call_target(step)).startswith(LIBRARY_PRODUCTS):
        yield from _library(step, target, operands)
    for name in step.called.get("calls", ()):
        for inner in program[name]:
            yield from products(inner, name, program)


def custom_call_target(step: Instruction) -> str:
    """Return the target of a custom call, such as "__cublas$gemm"; "" if the text lacks it."""
    match = re.search(r'custom_call_target="([^"]*)"', step.line)
    return match[1] if match else ""


def _dims(step: Instruction, attribute: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", step.attribute(attribute) or "")]


_ALGORITHM = re.compile(r"\balgorithm=dot_(any_f8|[a-z]+\d+)_\w+?(?:_x(\d))?\b")
_ALGORITHM_TYPES = {"any_f8": "f8e4m3fn", "tf32": "f32"}


def _arithmetic(step: Instruction, *operands: str) -> tuple[str, int]:
    """Return the type of a product's multiplication (the algorithm's, else the wider operand's), and its passes.

    XLA:GPU rounds float32 operands to TF32 for the tensor cores, unless the highest precision was requested.
    """
    if (match := _ALGORITHM.search(step.bare)) is not None:
        dtype = "vector" if match[1] == "f32" else _ALGORITHM_TYPES.get(match[1], match[1])
        return dtype, int(match[2] or 1)
    widest = max(operands, key=bits)
    if widest == "f32" and "highest" in (step.attribute("operand_precision") or ""):
        return "vector", 1
    return widest, 1


def _convolution(step: Instruction, kernel: Shape, output: Shape) -> Product:
    """Return a convolution as a product, by group: output positions × (kernel size × features) × features."""
    match = re.search(r"\bdim_labels=\w+_(\w+)->", step.bare)
    features = kernel[1][match[1].index("o")] if match else kernel[1][-1]
    groups = int(step.attribute("feature_group_count") or 1)
    dilated = re.search(r"\blhs_dilate=([\dx]+)", step.bare)
    zeros = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
    k = max(1, math.prod(kernel[1]) // features // zeros)
    return Product(groups, math.prod(output[1]) // features, features // groups, k, *_arithmetic(step, kernel[0]))


def _library(step: Instruction, target: str, operands: list[Shape]) -> Iterator[Product]:
    """Yield the product that a library call replaces; `step` writes its result first, then a workspace."""
    result = step.shapes[0]
    if target == "__cudnn$convBackwardFilter":  # (input, gradient of the output) -> gradient of the kernel
        yield _convolution(step, result, operands[1])
    elif target == "__cudnn$convBackwardInput":  # (gradient of the output, kernel) -> gradient of the input
        yield _convolution(step, operands[1], operands[0])
    elif target.startswith("__cudnn$conv"):
        yield _convolution(step, operands[1], result)
    else:
        (left, lhs), (right, rhs) = operands[:2]
        batch = math.prod(rhs[:-2])
        # The sizes are b·m·k, b·k·n and b·m·n: lhs · rhs / result = b·k².
        k = math.isqrt(math.prod(lhs) * math.prod(rhs) // max(1, math.prod(result[1]) * batch))
        m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
        yield Product(batch, m, n, k, *_arithmetic(step, left, right))
