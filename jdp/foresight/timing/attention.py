"""Fused attention: the calls to cuDNN in a compiled program, their FLOPs and their time.

Per score (a query and a key that it sees) and element of a head, the forward pass multiplies and adds twice: q·k, p·v.
The backward pass does so five times: the scores again, and the gradients of p, v, q and k (Dao 2023, arXiv:2307.08691,
4.1). Exponentials are added: at width 128 they take half as long as the products, and kernels hide little of that
(Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, 3.1). Compared with 30 rates of cuDNN 9 on an H100 (figures 5 and
6 of that paper), times are within 19 %, 6 % in the median. Width 256 is up to 20 % too fast. Two measured calls are
within 6 %.
"""

import re
from dataclasses import dataclass

from jdp.foresight.program.module import Instruction, Program
from jdp.foresight.timing.matmuls import custom_call_target

TARGET = "__cudnn$fmha"


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
    backward: bool = False  # the backward pass

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

        One multiplies the result with its gradient and clears the sums; another rounds them to the operands' type. The
        call's workspace holds the sums and a number a query: 25,559,296 bytes for 8 x 12 heads of 1024 x 64.
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
    if step.opcode != "custom-call" or not (target := custom_call_target(step)).startswith(TARGET):
        return None
    operands = [shape for name in step.operands for shape in program.by_name[computation][name].shapes[:1]]
    sizes = re.search(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]', step.line)
    if sizes is None or len(operands) < 3:
        return None
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", sizes[1]))
    mask = re.search(r'"mask_type":\s*"(\w+)"', step.line)
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', step.line)
    return Attention(
        heads=batch * heads,
        queries=queries,
        keys=keys,
        width=operands[0][1][-1],  # queries, keys, values come first
        value_width=operands[2][1][-1],
        dtype=operands[0][0],
        causal=mask is not None and "CAUSAL" in mask[1],
        window=int(window[1]) if window else 0,
        backward="Backward" in target,
    )


def attention_seconds(call: Attention, peak_flops: float, exponentials: float) -> float:
    core = call.flops / (_PRODUCT_EFFICIENCY * peak_flops) + call.scores / exponentials
    ramp = _RAMP_KEYS + _DIAGONAL_KEYS * call.causal
    return core * (1 + ramp / call.seen) * (_BACKWARD_FACTOR if call.backward else 1.0)
