"""The strategies: rows of one table, and everything that differs between them.

|       | params, optimizer state | gradient accumulator     | gradients are reduced | working copy is gathered |
|-------|-------------------------|--------------------------|-----------------------|--------------------------|
| ddp   | replicated              | replicated               | once per step         | never                    |
| zero1 | sharded over `data`     | replicated               | once per step         | once per step            |
| zero2 | sharded                 | sharded                  | per microbatch        | once per step            |
| zero3 | sharded                 | sharded                  | per microbatch        | per layer, at each use   |

ddp: Li et al. 2020 (arXiv:2006.15704). zero1-3: the stages of Rajbhandari et al. 2019 (arXiv:1910.02054); here every
stage keeps its fp32 master weights sharded at rest and gathers a working copy in compute dtype, as PyTorch FSDP's
SHARD_GRAD_OP (zero2) and FULL_SHARD (zero3) do, so one checkpoint layout serves all of them.
"""

from dataclasses import dataclass
from typing import Literal

from jdp.core.hints import nearest
from jdp.core.words import StrategyName


@dataclass(frozen=True)
class Strategy:
    """One row of the table of strategies.

    Attributes:
        name: the word the user writes.
        shard_state: True if parameters and optimizer state are sharded over `data` between steps.
        reduce_each_microbatch: True if gradients are reduce-scattered at every microbatch into a sharded accumulator;
            False if they are summed locally and reduced once per step.
        gather: when the working copy of a sharded parameter is gathered: "never", once per "step", or at each "use".
    """

    name: StrategyName
    shard_state: bool
    reduce_each_microbatch: bool
    gather: Literal["never", "step", "use"]


STRATEGIES: dict[StrategyName, Strategy] = {
    row.name: row
    for row in (
        Strategy("ddp", shard_state=False, reduce_each_microbatch=False, gather="never"),
        Strategy("zero1", shard_state=True, reduce_each_microbatch=False, gather="step"),
        Strategy("zero2", shard_state=True, reduce_each_microbatch=True, gather="step"),
        Strategy("zero3", shard_state=True, reduce_each_microbatch=True, gather="use"),
    )
}


def strategy(name: str) -> Strategy:
    """Return the row of the strategy with this name.

    Raises:
        ValueError: no strategy has that name; the message offers the nearest.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    hint = nearest(str(name), STRATEGIES, cutoff=0.3) or ". Choose one of these."
    raise ValueError(f"The strategy is one of {', '.join(STRATEGIES)}; given {name!r}{hint}")
