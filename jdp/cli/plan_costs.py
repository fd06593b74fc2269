"""The options of `jdp plan` for what a run costs: --tokens in days and money, --mtbf in time lost to failures."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jdp.base.formatting import format_span
from jdp.base.shorten import brief
from jdp.cli.options import UsageError
from jdp.cli.plan_options import Options

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport
    from jdp.foresight.targets.resolve import Target

_UNITS = {"h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}
_LONGEST = 1e9  # seconds, 31 years: longer is a typing mistake
_MOST_TOKENS, _MOST_PRICE = 1e18, 1e6


# --tokens and --price.


def check_bill(options: Options) -> None:
    """Check --tokens and --price."""
    tokens, price = options.tokens, options.price
    if tokens is not None and not (1 <= tokens <= _MOST_TOKENS and float(tokens).is_integer()):
        raise UsageError(f"--tokens takes a whole number from 1 to 10^18; given {tokens:g}: write --tokens 1e12")
    if price is None:
        return
    if not (math.isfinite(price) and 0 < price <= _MOST_PRICE):
        raise UsageError(
            f"--price takes what an hour of one device costs, more than 0 and at most 10^6; given {price:g}: write "
            "--price 2.5"
        )
    if tokens is None:
        raise UsageError("--price goes with --tokens, how many are to be trained on: add --tokens 1e12")


def with_bill(report: "PlanReport", options: Options) -> "PlanReport":
    """Return the report with the bill of its choice, or with a note on why there is none."""
    from jdp.foresight.cost.bill import Bill

    chosen = report.choice
    if options.tokens is None:
        return report
    if chosen is None or chosen.step_seconds is None or chosen.timeline is None:
        why = "no candidate fits" if chosen is None else "how long a step takes is not known for this target"
        return replace(report, notes=(*report.notes, f"--tokens has no days to tell: {why}"))
    bill = Bill(
        options.tokens,
        report.unit,
        chosen.tokens,
        chosen.step_seconds,
        report.devices,
        options.price,
        chosen.timeline.error,
        None if report.goodput is None else report.goodput.ways[0].goodput,
    )
    return replace(report, bill=bill)


# --mtbf and the options that go with it.


@dataclass(frozen=True)
class GivenFailures:
    """Failures and their times in seconds, given or measured; None: assumed. `note` reports the measured ones."""

    device_mtbf: float
    save: float | None
    stall: float | None
    restart: float | None
    note: str = ""

    def added_to(self, report: "PlanReport", target: "Target", checkpoint_every: int) -> "PlanReport":
        """Return a report with the goodput of its choice; of its first candidate that compiled if none fits."""
        from jdp.foresight.cost.goodput import foresee_goodput

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
        notes = (*goodput.notes, self.note) if self.note else goodput.notes
        return replace(report, goodput=replace(goodput, notes=notes))


def read_failures(options: Options) -> GivenFailures | None:
    """Return the values of --mtbf and the options that go with it; None without --mtbf."""
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
        if options.measured is not None:
            raise UsageError("--measured goes with --mtbf, a device's mean time between failures: add --mtbf 50000h")
        return None
    save, stall, restart = times.values()
    if save is not None and stall is not None and stall > save:
        raise UsageError(
            f"a save stalls training for at most as long as it takes; given --stall-seconds {stall:g} and "
            f"--save-seconds {save:g}: lower the first"
        )
    given = GivenFailures(_seconds(options.mtbf), save, stall, restart)
    return given if options.measured is None else _with_measured(given, options.measured)


def _with_measured(given: GivenFailures, folder: Path) -> GivenFailures:
    """Fill the times that are not given with those that a run measured. Raises UsageError."""
    from jdp.core.cluster.initialize import LOST_HOST_SECONDS
    from jdp.guard.flight_recorder import FLIGHT, read_ranks
    from jdp.guard.save_times import measured

    events = read_ranks(folder / FLIGHT)
    if not events:
        raise UsageError(
            f"--measured takes a run that has a flight recorder; given {folder}: name the folder of a run, such as "
            "runs/NAME"
        )
    found, words = measured(events[min(events)]), list[str]()
    stall, restart = given.stall, given.restart
    if stall is None and found.stall is not None:
        stall = found.stall if given.save is None else min(found.stall, given.save)
        words.append(f"a save stalls {format_span(stall)}")
    if restart is None and found.restart is not None:
        restart = LOST_HOST_SECONDS + found.restart
        words.append(f"resuming takes {format_span(found.restart)}, after {LOST_HOST_SECONDS} s to notice a lost host")
    note = f"measured in {folder}: {'; '.join(words) or 'no save and no resume'}"
    return replace(given, stall=stall, restart=restart, note=note)


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
