"""The options of `jdp plan --tokens`: what a number of tokens takes, in days and money."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from jdp.cli.options import UsageError
from jdp.cli.plan_options import Options

if TYPE_CHECKING:
    from jdp.foresight.forecast import PlanReport

_MOST_TOKENS, _MOST_PRICE = 1e18, 1e6


def check_bill(options: Options) -> None:
    """Check --tokens and --price.

    Args:
        options: the command's.

    Raises:
        UsageError: a number that is none or out of range, or a price without tokens.
    """
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
    """Return the report with the bill of its choice, and why there is none where no candidate fits or has a time.

    Args:
        report: with the goodput, where that was asked for.
        options: the command's, checked.
    """
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
