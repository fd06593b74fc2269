"""The strategies: rows of one table, and everything that differs between them.

|       | params, optimizer state | gradient accumulator     | gradients are reduced | working copy is gathered |
|-------|-------------------------|--------------------------|-----------------------|--------------------------|
| ddp   | replicated              | replicated               | once per step         | never                    |
| zero1 | sharded over `data`     | replicated               | once per step         | once per step            |
| zero2 | sharded                 | sharded                  | per microbatch        | once per step            |
| zero3 | sharded                 | sharded                  | per microbatch        | per layer, at each use   |

ddp: Li et al. 2020 (arXiv:2006.15704). zero1-3: the stages of Rajbhandari et al. 2019 (arXiv:1910.02054). Here every
stage keeps its fp32 master weights sharded at rest and gathers a working copy in compute dtype. PyTorch FSDP's
SHARD_GRAD_OP (zero2) and FULL_SHARD (zero3) do the same, so one checkpoint layout serves all of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jdp.base.errors import UserError
from jdp.base.toml import LONGEST
from jdp.base.words import StrategyName, nearest


@dataclass(frozen=True)
class Strategy:
    """One row of the table of strategies: its columns 2, 4 and 5."""

    name: StrategyName
    shard_state: bool
    reduce_each_microbatch: bool  # False: gradients are summed locally and reduced once per step
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


_CALLED = {
    **dict.fromkeys(("fsdp", "fsdp2", "fullshard", "fullyshard", "fullyshardeddataparallel"), "zero3"),
    **dict.fromkeys(("hsdp", "hybridshard"), "zero3, with a replica axis in the mesh"),
    "shardgradop": "zero2",
    **dict.fromkeys(("dp", "noshard", "pmap", "distributeddataparallel"), "ddp"),
    **dict.fromkeys(("zero", "deepspeed"), "zero1, zero2 or zero3, by its stage"),
}
"""Another library's name for a strategy, in small letters and digits -> the strategy."""


def strategy(name: str) -> Strategy:
    rows: Mapping[str, Strategy] = STRATEGIES  # pyright: ignore[reportAssignmentType]
    if str(name) in rows:
        return rows[name]
    hint = strategy_hint(str(name)) or ". Choose one of these."
    raise UserError(f"The strategy is one of {', '.join(STRATEGIES)}; given {name!r}{hint}")


def strategy_hint(word: str) -> str:
    """Return the end of a message about an unknown strategy: another library's name for one, or the nearest, or ""."""
    plain = re.sub(r"[^a-z0-9]", "", word.lower()[:LONGEST])
    stage = re.fullmatch(r"(?:deepspeed)?(?:zero)?(?:stage)?([0-3])", plain)
    if name := list(STRATEGIES)[int(stage[1])] if stage else _CALLED.get(plain):
        return f"; here that is {name}"
    return nearest(word, STRATEGIES, cutoff=0.3)
