"""How many days and how much money a number of tokens takes, by a step's simulated time and that time's error.

    steps = ⌈tokens / tokens a step⌉,  seconds = steps × seconds a step / goodput,  money = device-hours × price

Counted are training steps alone: no start, no evaluation, and no failures where no goodput is given.
"""

import math
from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_percent, format_rate, format_span

DAY, HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Bill:
    """What a number of tokens takes."""

    tokens: float  # how many are trained on
    unit: str  # what they are: "tokens", or "examples"
    tokens_per_step: int  # of a global batch
    step_seconds: float  # simulated seconds of a step
    devices: int  # how many are paid for
    price: float | None = None  # of one device for an hour, in any currency; None: not given
    error: float | None = None  # largest error of the simulated times (`Chip.time_error`); None: not known
    goodput: float | None = None  # the share of the time that trains, where that was asked for

    @property
    def steps(self) -> int:
        """How many steps read so many tokens."""
        return math.ceil(self.tokens / self.tokens_per_step)

    @property
    def seconds(self) -> float:
        """From the first step to the end of the last."""
        return self.steps * self.step_seconds / (self.goodput or 1.0)

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.seconds * self.devices / HOUR

    @property
    def money(self) -> float | None:
        """What the device-hours cost; None where no price is given."""
        return None if self.price is None else self.device_hours * self.price

    def within_error(self, value: float) -> tuple[float, float] | None:
        """Return (least, most) of seconds, device-hours or money by the times' error; None where that is not known."""
        return None if self.error is None else (value / (1 + self.error), value * (1 + self.error))

    def __str__(self) -> str:
        span = self.within_error(self.seconds)
        known = "" if span is None else f" ({format_days(span[0])} to {format_days(span[1])})"
        hours = f"{format_amount(self.device_hours)} device-hours"
        sentence = (
            f"{format_rate(self.tokens)} {self.unit} are {self.steps:,} steps: {format_days(self.seconds)}{known}"
        )
        if self.money is None:
            sentence += f", {hours}"
        else:
            costs = self.within_error(self.money)
            known = "" if costs is None else f" ({format_amount(costs[0])} to {format_amount(costs[1])})"
            sentence += f" and {format_amount(self.money)}{known}, for {hours} at {self.price:g} each"
        return f"{sentence}. {self.assumed}"

    @property
    def assumed(self) -> str:
        """A sentence or two: what the range is, and what is not counted."""
        if self.error is None:
            off = "How far off that may be is not known: no published runs were compared with these devices' times."
        else:
            known = format_percent(self.error)
            off = f"The range: foreseen times of published runs are off by {known} at most."
        if self.goodput:
            return f"{off} Failures are counted, of which {format_percent(self.goodput)} of the time is left."
        return f"{off} Training steps alone: no start, no evaluation, no failures (--mtbf counts these)."

    def to_json(self) -> dict[str, Any]:
        """Return the `bill` that `jdp plan --json` prints: seconds, device-hours, money; a range is (least, most)."""
        span, costs = self.within_error(self.seconds), None if self.money is None else self.within_error(self.money)
        return {
            **{name: getattr(self, name) for name in ("tokens", "steps", "price", "goodput", "seconds")},
            "seconds_range": None if span is None else list(span),
            "days": self.seconds / DAY,
            "device_hours": self.device_hours,
            "money": self.money,
            "money_range": None if costs is None else list(costs),
            "error": self.error,
        }


def format_days(seconds: float) -> str:
    """Return seconds as days in three digits, "1,240 days", and what is less than a day in hours or less."""
    if seconds < DAY:
        return format_span(seconds)
    days = format_amount(seconds / DAY)
    return f"{days} day{'' if days == '1' else 's'}"


def format_amount(value: float) -> str:
    """Return a number in three digits, the zeros of large ones written: "1,240,000", "3.25"; from 10^15 on "1e+18"."""
    if value < 100 or value >= 1e15:
        return f"{value:.3g}"
    return f"{float(f'{value:.3g}'):,.0f}"
