"""The options of `jdp plan --mtbf`: how often devices fail, and what saving and restarting take."""

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from jdp.cli.options import UsageError
from jdp.core.toml import brief

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport
    from jdp.foresight.targets.resolve import Target

_UNITS = {"h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}
_LONGEST = 1e9  # seconds, 31 years: longer is a typing mistake


class _Options(Protocol):
    @property
    def mtbf(self) -> str | None: ...
    @property
    def save_seconds(self) -> float | None: ...
    @property
    def stall_seconds(self) -> float | None: ...
    @property
    def restart_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class GivenFailures:
    """What was given, in seconds; None for what is to be assumed."""

    device_mtbf: float
    save: float | None
    stall: float | None
    restart: float | None

    def added_to(self, report: "PlanReport", target: "Target", checkpoint_every: int) -> "PlanReport":
        """Return a report with the goodput of its choice; of its first candidate that compiled if none fits.

        Args:
            report: of candidates of which one compiled.
            target: the devices.
            checkpoint_every: the experiment's; 0: at the end only, which is nothing to compare with.
        """
        from jdp.foresight.goodput import foresee_goodput

        chosen = report.choice or next(each for each in report.estimates if each.error is None)
        goodput = foresee_goodput(
            self.device_mtbf,
            devices=report.devices,
            hosts=target.hosts,
            state_bytes=chosen.state_bytes,
            step_seconds=chosen.step_seconds,
            save=self.save,
            stall=self.stall,
            restart=self.restart,
            checkpoint_every=checkpoint_every or None,
        )
        return replace(report, goodput=goodput)


def read_failures(options: _Options) -> GivenFailures | None:
    """Return what --mtbf and the options that go with it say; None without them.

    Raises:
        UsageError: a time is none or out of range, they contradict each other, or --mtbf is missing.
    """
    times = {
        "--save-seconds": options.save_seconds,
        "--stall-seconds": options.stall_seconds,
        "--restart-seconds": options.restart_seconds,
    }
    for flag, seconds in times.items():
        if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= _LONGEST):
            raise UsageError(f"{flag} takes seconds from 0 to 10^9; given {seconds}: write {flag} 30")
        if seconds is not None and options.mtbf is None:
            raise UsageError(f"{flag} goes with --mtbf, a device's mean time between failures: add --mtbf 50000h")
    if options.mtbf is None:
        return None
    save, stall, restart = times.values()
    if save is not None and stall is not None and stall > save:
        raise UsageError(
            f"a save stalls training for at most as long as it takes; given --stall-seconds {stall:g} and "
            f"--save-seconds {save:g}: lower the first"
        )
    return GivenFailures(_seconds(options.mtbf), save, stall, restart)


def _seconds(text: str) -> float:
    """Return the seconds of "50000h", "2000d" or "5.7y". Raises UsageError."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)(h|d|y)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= seconds <= 1e13:
        raise UsageError(
            "--mtbf takes a device's mean time between failures in h, d or y (hours, days, years), of a second or "
            f"more, and less than 300,000 years; given {brief(text)}: write 50000h"
        )
    return seconds
