"""Bad steps: steps that are not finite, or whose loss jumps; when to go back, and which to leave out.

A step whose gradient or update is not finite changes nothing. If many follow one another, the weights or the data are
at fault, and going on does not help. So the run can go back to a checkpoint from before them and leave out the batches
of the bad steps. It also leaves out some before these, one of which may have spoilt the weights. PaLM did so by hand
(Chowdhery et al. 2022, arXiv:2204.02311, section 5.1). It went back some 100 steps and left out 200 to 500 batches; the
spike did not come again, though the same batches did no harm elsewhere.

The decisions are a function of the losses in their order. So all processes decide alike, and a run that was stopped and
resumed decides as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Self

LEAST = 50  # losses that are seen before one can be a spike, or the whole window if that is shorter
FLOOR = 1e-3  # of the mean: a standard deviation that is less counts as so much
NEW_LEVEL = 50  # spikes in a row that make the loss' level another one


class GoBack(Exception):
    """The run goes back to an earlier checkpoint, for the reason that is the text.

    Attributes:
        before: the run goes back to a checkpoint from before this step.
        left_out: all steps whose batches are left out from now on, in order.
        returns: number of returns for bad steps without a good step in between, with this one.
        recorded: what the run's history says of it, besides the reason.
    """

    recorded: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, why: str, before: int, left_out: Sequence[int], returns: int) -> None:
        super().__init__(why)
        self.before, self.left_out, self.returns = before, list(left_out), returns


class RollBack(GoBack):
    """Too many bad steps in a row: the run goes back, and takes other steps, which its text names.

    Attributes:
        why: the reason why the last of them is bad.
    """

    def __init__(self, bad: BadSteps, why: str, leave_out: range) -> None:
        last = leave_out[-1]
        in_a_row = f"{bad.in_a_row} bad steps in a row, the last one step" if bad.in_a_row > 1 else "step"
        left_out = sorted({*leave_out, *bad.left_out})
        super().__init__(f"{in_a_row} {last}: {why}", leave_out[0], left_out, bad.returns + 1)
        self.why = why


@dataclass
class Level:
    """Running mean and variance of the loss: equal weights at first, exponential ones after `window` steps.

    With α = 1 / min(n, window): d = x - mean; mean ← mean + α·d; variance ← (1 - α)·(variance + α·d²) (Finch 2009,
    "Incremental calculation of weighted mean and variance", section 9).

    Attributes:
        count: losses seen.
        mean, variance: of them.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def seen(self, loss: float, window: int) -> None:
        """Add a loss."""
        self.count += 1
        alpha = 1 / min(self.count, window)
        difference = loss - self.mean
        self.mean += alpha * difference
        self.variance = (1 - alpha) * (self.variance + alpha * difference**2)

    def deviations(self, loss: float, window: int) -> float:
        """Return the standard deviations by which a loss is above the mean; 0 before enough losses were seen."""
        if self.count < min(LEAST, window):
            return 0.0
        return (loss - self.mean) / max(math.sqrt(self.variance), FLOOR * abs(self.mean), 1e-12)


@dataclass
class BadSteps:
    """The bad steps of a run, which each checkpoint records."""

    first: int = 0  # the first bad step of those in a row; 0 if the last step was good
    in_a_row: int = 0  # their number
    left_out: list[int] = field(default_factory=list[int])  # steps whose batches are left out, past and to come
    returns: int = 0  # number of returns since the last good step after those
    level: Level = field(default_factory=Level)  # of the loss at good steps

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def went(self, back: GoBack | None) -> None:
        """Take over the steps that are left out in a run that went back."""
        if back is not None:
            self.left_out, self.returns = back.left_out, back.returns

    @classmethod
    def of(cls, record: Any) -> Self:
        """Return the inverse of `record`; a new one for None, the record of an older run."""
        if record is None:
            return cls()
        try:
            steps = [int(step) for step in record["left_out"]]
            level = Level(int(record["level"]["count"]), *(float(record["level"][x]) for x in ("mean", "variance")))
            return cls(int(record["first"]), int(record["in_a_row"]), steps, int(record["returns"]), level)
        except (TypeError, KeyError, ValueError):
            raise ValueError(
                "the record of bad steps is a table with first, in_a_row, left_out, returns and level; given "
                f"{record!r}: take the record of another checkpoint"
            ) from None


@dataclass(frozen=True)
class Rules:
    """When a step is bad, and when the run goes back.

    Attributes:
        spike_deviations: standard deviations above the running mean from which a loss is a spike; 0: none is. OLMo 2
            counts losses 7 away from the mean of the last 1,000 (arXiv:2501.00656, section 3.2).
    """

    spike_deviations: float = 0.0
    spike_window: int = 1000  # number of steps in the running mean
    roll_back_after: int = 0  # bad steps in a row after which the run goes back; 0: it never does
    leave_out_before: int = 1  # steps before the first bad one that are left out too

    def judge(self, bad: BadSteps, step: int, loss: float, *, skipped: bool) -> str | None:
        """Judge a step; return why it is bad, or None."""
        why = self._why(bad.level, loss, skipped=skipped)
        if why is None:
            bad.first = bad.in_a_row = 0
            if bad.returns and step > bad.left_out[-1]:
                bad.returns = 0
            if self.spike_deviations and math.isfinite(loss):
                bad.level.seen(loss, self.spike_window)
            return None
        bad.first, bad.in_a_row = bad.first or step, bad.in_a_row + 1
        if self.roll_back_after and bad.in_a_row >= self.roll_back_after:
            first = max(bad.first - self.leave_out_before, 1)
            raise RollBack(bad, why, range(first, step + 1))
        if bad.in_a_row >= NEW_LEVEL and not skipped:
            bad.level = Level()
        return why

    def _why(self, level: Level, loss: float, *, skipped: bool) -> str | None:
        if skipped:
            return "its gradient or update was not finite"
        above = level.deviations(loss, self.spike_window) if self.spike_deviations else 0.0
        if not self.spike_deviations or not above > self.spike_deviations:
            return None
        return f"its loss is {loss:.4g}, {above:.3g} standard deviations above the running mean {level.mean:.4g}"
