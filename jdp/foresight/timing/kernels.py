"""The cost of one instruction of a compiled program: FLOPs, memory traffic, seconds.

`cost` counts matrix products and convolutions (`matmuls.py`), element-wise work, and the bytes that a kernel reads and
writes; a fusion reads only the elements that its result needs. `seconds` turns that into time: the slowest of tensor
cores, vector units and memory, each at `CostModel`'s share of its published peak, plus the launch.
"""

import math
from dataclasses import dataclass

from jdp.base.chips import Gpu
from jdp.foresight.program.module import Instruction, Program, array_bytes
from jdp.foresight.timing.matmuls import (
    ATTENTION_TARGET,
    LIBRARY_PRODUCTS,
    Attention,
    Product,
    attention,
    attention_seconds,
    custom_call_target,
    products,
)


@dataclass(frozen=True)
class CostModel:
    """The model's constants, for NVIDIA GPUs: the share of the published peaks (`Gpu`) that a kernel reaches.

    "Fitted" ones reproduce the measured kernel times of three forms of GPT-2 124M on an H100. A copy into another
    layout is as fast as a plain copy (Ruetsch and Micikevicius, "Optimizing Matrix Transpose in CUDA", NVIDIA 2009).
    """

    # share of the dense peak that a large matrix product reaches. Fitted; a chip has its own share for long runs
    # (`Gpu.matmul_efficiency`), because the power limit lowers the clock.
    matmul_efficiency: float = 0.75
    # the share for 8-bit operands over the share for 16-bit operands: 70.9% / 80.3% on an H100 (Bekman, "Maximum
    # Achievable Matmul FLOPS", stas00/ml-engineering, compute/accelerator/README.md, 2025)
    narrow_efficiency: float = 0.88
    # share of the peak bandwidth. Fitted (pure reading and writing reaches 0.92); XLA's CalculateHbmTime takes 0.8
    memory_efficiency: float = 0.85
    # time of a launch until all cores are busy, without the host. Fitted; XLA's kKernelLaunchOverhead is 1e-6
    kernel_seconds: float = 1.9e-6
    # rows and columns of the tile that a core computes at a time. Whole tiles in whole waves
    # over the cores: NVIDIA, "Matrix Multiplication Background User's Guide", section 3.
    tile: int = 128
    smallest_tile: int = 16  # of tensor cores; thinner products are padded to it
    # most parts of the contracted dimension, each at least a tile, if tiles are fewer than cores: XLA's autotuner tries
    # up to 16 (xla/backends/gpu/autotuner, Triton's split_k)
    split: int = 16
    # lane-cycles of exp, log, sqrt etc. relative to an addition: 16 results a clock and core against 128
    # (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0)
    special_function_cost: float = 8.0
    integer_cost: float = 2.0  # lane-cycles of integer arithmetic relative to a float addition: 64 results against 128


@dataclass(frozen=True)
class KernelCost:
    """Work of one execution of an instruction on one device."""

    products: tuple[Product, ...] = ()  # its matrix products and convolutions
    bytes: float = 0.0  # read from memory and written to it
    operations: float = 0.0  # element-wise, outside tensor cores, in elements; so are the next two
    integer_operations: float = 0.0
    special_functions: float = 0.0
    launches: int = 0  # kernels
    attention: Attention | None = None  # a call of fused attention, which has no other work

    @property
    def flops(self) -> int:
        fused = 0 if self.attention is None else self.attention.flops
        return fused + sum(product.flops for product in self.products)


def seconds(cost: KernelCost, chip: Gpu, model: CostModel) -> float:
    """Return the time of an instruction: tensor cores, vector units and memory work in parallel."""
    if not cost.launches:
        return 0.0
    lanes = chip.vector_flops / 2  # one operation a cycle and lane, where the peak counts multiply-adds as two
    vector = cost.operations + model.integer_cost * cost.integer_operations
    vector += model.special_function_cost * cost.special_functions
    matmul = sum(product_seconds(product, chip, model) for product in cost.products)
    bandwidth, passes = model.memory_efficiency * chip.memory_bandwidth, 0.0
    if (call := cost.attention) is not None:
        matmul += attention_seconds(call, _matmul_rate(call.dtype, chip), lanes / model.special_function_cost)
        passes = call.pass_bytes / bandwidth  # after the main kernel, which reads the remaining bytes
    return cost.launches * model.kernel_seconds + max(matmul, vector / lanes, cost.bytes / bandwidth) + passes


def product_seconds(product: Product, chip: Gpu, model: CostModel) -> float:
    """Return the seconds of a matrix product on the tensor cores, without reading its operands."""
    flops = product.flops * product.passes * (4 if product.dtype.startswith("c") else 1)  # complex: four real products
    rate = _matmul_rate(product.dtype, chip) * (model.narrow_efficiency if product.dtype in _NARROW else 1.0)
    cores = chip.cores
    return flops / (rate * model.matmul_efficiency * utilisation(product, cores, model))


_NARROW = ("f8e4m3fn", "f8e5m2", "s8", "u8")
_NEAREST = {"f16": "bf16", "c64": "f32", "c128": "f64", "u8": "s8", "s4": "s8", "u4": "s8"}


def _matmul_rate(dtype: str, chip: Gpu) -> float:
    """Return the FLOP/s for operands of a type; the vector units' rate if tensor cores do not support it."""
    similar = "f8e4m3fn" if dtype.startswith("f8") else _NEAREST.get(dtype, "vector")
    return chip.matmul_flops.get(dtype) or chip.matmul_flops.get(similar) or chip.vector_flops


def utilisation(product: Product, cores: int, model: CostModel) -> float:
    """Return the share of the cores' work that contributes to the result, at the best split of the contraction."""
    # as XLA's CalculateComputeTimeWithTileAndWaveQuantization, plus splits
    tiles, padded = product.batch, 1
    for size in (product.m, product.n):
        tile = min(model.tile, _round_up(size, model.smallest_tile))
        tiles *= -(-size // tile)
        padded *= tile
    useful = product.batch * product.m * product.n
    splits = (2**i for i in range(model.split.bit_length()) if i == 0 or product.k >= 2**i * model.tile)
    return max(useful / (padded * _round_up(tiles * split, cores) / split) for split in splits) if useful else 1.0


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_FREE = _NAMES | {"after-all", "add-dependency", "opt-barrier", "domain", "partition-id", "replica-id"}
_LAYOUT = {"broadcast", "reshape", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
_MOVES = {"gather", "copy", "iota", "pad", "reverse"}
_PRODUCTS = {"dot", "scaled-dot", "convolution", "fusion", "custom-call"}  # counted by `products`
_NO_ARITHMETIC = _NAMES | _LAYOUT | _MOVES | _PRODUCTS  # inside a kernel
_EXPONENTIALS = {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power", "erf"}
_SPECIAL = _EXPONENTIALS | {"rsqrt", "sqrt", "cbrt", "sine", "cosine", "tan", "divide", "atan2", "remainder"}


def cost(step: Instruction, computation: str, program: Program) -> KernelCost:
    """Return the work of one execution of an instruction of `computation`, not a loop, call or collective."""
    if step.opcode in _FREE or step.opcode.endswith("-done"):
        return KernelCost()
    inside = computation
    if step.kind in ("fusion", "async"):
        (inside,) = step.called["calls"]
    steps = (step,) if inside == computation else program[inside]
    demand = _Demand(steps, program.by_name[inside])
    fused = attention(step, computation, program)
    return KernelCost(
        products=tuple(products(step, computation, program)),
        bytes=demand.read + demand.written,
        operations=demand.operations,
        integer_operations=demand.integer_operations,
        special_functions=demand.special_functions,
        launches=3 if fused is not None and fused.backward else 1,
        attention=fused,
    )


def unknown_work(step: Instruction) -> str | None:
    """Return the name of a custom call whose FLOPs the text does not show; None for any other instruction."""
    counted = (*LIBRARY_PRODUCTS, ATTENTION_TARGET)
    if step.kind != "custom-call" or (target := custom_call_target(step)).startswith(counted):
        return None
    return target or "custom-call"


class _Demand:
    """The elements of each value that a kernel needs, from its results back to its inputs."""

    def __init__(self, steps: tuple[Instruction, ...], by_name: dict[str, Instruction]) -> None:
        self.by_name = by_name
        self.made = {step.name for step in steps if step.opcode != "parameter"}
        self.elements: dict[str, float] = {}  # name -> elements needed, by all users together
        self.in_place = set[str]()
        # bytes of the results; element-wise work for the needed elements
        self.written = self.operations = self.integer_operations = self.special_functions = 0.0
        root = next((step for step in steps if step.is_root), steps[-1])
        for name in root.operands if root.opcode == "tuple" else (root.name,):
            self.written += self._write(by_name[name])
        for step in reversed(steps):  # users before operands
            if step.name in self.made and (needed := self.elements.get(step.name, 0.0)) > 0:
                self._need(step, min(needed, _size(step)))
        # needed bytes of the inputs
        self.read = sum(self._bytes(by_name[name]) for name in self.elements if name not in self.made)

    def _bytes(self, operand: Instruction) -> float:
        size = _size(operand)
        return operand.result_bytes * min(1.0, self.elements[operand.name] / size) if size else 0.0

    def _write(self, root: Instruction) -> float:
        """Mark a result as needed; return the bytes written: of a buffer updated in place, only the update's."""
        step = self._behind_bitcasts(root)
        self.elements[root.name] = max(1, _size(root))
        if step.opcode in ("dynamic-update-slice", "scatter") and step.name in self.made:
            buffer = self._behind_bitcasts(self.by_name[step.operands[0]])
            if buffer.name not in self.made:
                self.in_place.add(step.name)
                update = self.by_name[step.operands[1 if step.opcode == "dynamic-update-slice" else -1]].result_bytes
                return update if step.opcode == "dynamic-update-slice" else 2 * update  # read, added to, written
        if root.opcode == "custom-call":  # its workspace follows the results
            results = root.shapes[:-1] if len(root.shapes) > 1 and root.shapes[-1][0] in ("u8", "s8") else root.shapes
            return sum(array_bytes(*shape) for shape in results)
        return root.result_bytes / (2 if root.is_start else 1)  # a copy-start's type holds source and result

    def _behind_bitcasts(self, step: Instruction) -> Instruction:
        while step.opcode == "bitcast" and step.name in self.made:
            step = self.by_name[step.operands[0]]
        return step

    def _need(self, step: Instruction, needed: float) -> None:
        size = _size(step)
        operands = [self.by_name[name] for name in step.operands if name in self.by_name]
        for i, operand in enumerate(operands):
            elements = self._operand_elements(step, i, _size(operand), needed, needed / size if size else 0.0)
            self.elements[operand.name] = self.elements.get(operand.name, 0.0) + elements
        if step.opcode in _NO_ARITHMETIC:
            return
        if step.opcode in ("reduce", "reduce-window") and operands:
            needed = max(needed, _size(operands[0]))
        if step.opcode in _SPECIAL:
            self.special_functions += needed
        elif step.type.startswith(("s", "u")):
            self.integer_operations += needed
        else:
            self.operations += needed

    def _operand_elements(self, step: Instruction, i: int, size: int, needed: float, share: float) -> float:
        """Return the elements of operand `i` (`size` in all) for `needed` elements, a `share`, of the result."""
        match step.opcode:
            case "slice" | "dynamic-slice" | "gather":
                return min(needed, size) if i == 0 else size
            case "dynamic-update-slice" | "scatter" if step.name in self.in_place:
                return 0 if i == 0 else size
            case "broadcast" | "pad":
                return min(needed, size)
            case "dot" | "convolution" | "sort" | "custom-call" | "fusion" | "scatter":
                return size
            case _:
                return share * size


def _size(step: Instruction) -> int:
    return sum(math.prod(dims) for _, dims in step.shapes)
