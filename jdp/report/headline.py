"""The head of a plan's page: the few numbers that decide, large, each with what it means below it."""

import math
from collections.abc import Sequence

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds
from jdp.foresight.forecast import PlanReport
from jdp.report.page import Markup, element

Number = tuple[str, str, str]
"""Its name, the number, and the text below it."""


def numbers(shown: Sequence[Number]) -> Markup:
    """Return large numbers side by side, as many in a row as there is room for."""
    tiles = [
        element("div", element("dt", name), element("dd", value), element("dd", below, class_="note"), class_="number")
        for name, value, below in shown
    ]
    return element("dl", *tiles, class_="numbers")


def headline(forecast: PlanReport) -> list[Number]:
    """Return whether it fits, a step, tokens a second, what is hidden."""
    compiled = [estimate for estimate in forecast.estimates if estimate.memory is not None]
    if not compiled:
        return [("fits", "?", "no candidate compiled")]
    shown = forecast.choice or min(compiled, key=lambda estimate: estimate.bytes_per_device or 0)
    held, available = shown.bytes_per_device or 0, shown.available_bytes
    below = f"{format_bytes(held)}; what a device has is not known"
    if available is not None:
        below = f"{format_bytes(held)} of {format_bytes(available)}, {format_percent(held / (available or math.inf))}"
    found = [("fits", shown.fits_in_words if available is not None else "?", below)]
    if (timeline := shown.timeline) is not None:
        hidden = format_percent(1 - timeline.exposed_fraction) if timeline.communication_seconds else "–"
        speed = shown.tokens_per_second
        each = "" if speed is None else f", {format_rate(speed / forecast.devices)} each"
        waits = f"of communication; a device waits {format_seconds(timeline.exposed_seconds)} a step"
        found += [
            ("step", format_seconds(timeline.step_seconds), _between(shown.step_range)),
            (f"{forecast.unit} a second", format_rate(speed or 0), f"of {forecast.devices:,} devices{each}"),
            ("hidden", hidden, waits if timeline.communication_seconds else "nothing is sent"),
        ]
    return found


def _between(span: tuple[float, float] | None) -> str:
    return "how far off is not known" if span is None else f"{format_seconds(span[0])} to {format_seconds(span[1])}"
