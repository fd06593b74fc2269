"""The head of a plan's page: the few numbers that decide, large, each with what it means below it."""

from collections.abc import Callable, Sequence

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds
from jdp.foresight.cost.bill import format_amount, format_days
from jdp.foresight.forecast import Estimate, PlanReport
from jdp.report.page import Markup, element, joined

Number = tuple[str, str, str]
"""What it is, the number, and what is said below it."""


def head(forecast: PlanReport) -> Markup:
    """Return the numbers: whether it fits, a step, tokens a second, what is hidden; days and money where asked for."""
    return joined([numbers(_numbers(forecast))])


def numbers(shown: Sequence[Number]) -> Markup:
    """Return large numbers side by side, as many in a row as there is room for."""
    tiles = [
        element("div", element("dt", name), element("dd", value), element("dd", below, class_="note"), class_="number")
        for name, value, below in shown
    ]
    return element("dl", *tiles, class_="numbers")


def _numbers(forecast: PlanReport) -> list[Number]:
    compiled = [estimate for estimate in forecast.estimates if estimate.memory is not None]
    if not compiled:
        return [("fits", "?", "no candidate compiled")]
    shown = forecast.choice or min(compiled, key=lambda estimate: estimate.bytes_per_device or 0)
    found = [_fits(shown)]
    if (timeline := shown.timeline) is not None:
        hidden = format_percent(1 - timeline.exposed_fraction) if timeline.communication_seconds else "–"
        waits = f"of communication; a device waits {format_seconds(timeline.exposed_seconds)} a step"
        found += [
            ("step", format_seconds(timeline.step_seconds), _between(shown.step_range, format_seconds)),
            (f"{forecast.unit} a second", format_rate(shown.tokens_per_second or 0), _all_devices(forecast, shown)),
            ("hidden", hidden, waits if timeline.communication_seconds else "nothing is sent"),
        ]
    return [*found, *_smallest(forecast), *_bill(forecast)]


def _smallest(forecast: PlanReport) -> list[Number]:
    least = forecast.smallest
    if least is None:
        return []
    how = "compiled" if least.compiled else "foreseen"
    return [("smallest that fits", least.target, f"{least.name}, {least.held}, {how}")]


def _fits(shown: Estimate) -> Number:
    held, available = format_bytes(shown.bytes_per_device or 0), shown.available_bytes
    if available is None:
        return "fits", "?", f"{held}; what a device has is not known"
    share = (shown.bytes_per_device or 0) / available if available else 0.0
    return "fits", shown.fits_in_words, f"{held} of {format_bytes(available)}, {format_percent(share)}"


def _all_devices(forecast: PlanReport, shown: Estimate) -> str:
    speed = shown.tokens_per_second
    own = "" if speed is None else f", {format_rate(speed / forecast.devices)} each"
    return f"of {forecast.devices:,} devices{own}"


def _between(span: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    return "how far off is not known" if span is None else f"{text(span[0])} to {text(span[1])}"


def _bill(forecast: PlanReport) -> list[Number]:
    bill = forecast.bill
    if bill is None:
        return []
    of = f"for {format_rate(bill.tokens)} {bill.unit}"
    days = _between(bill.within_error(bill.seconds), format_days)
    found = [("time", format_days(bill.seconds), f"{of}: {days}")]
    if bill.money is not None:
        below = _between(bill.within_error(bill.money), format_amount)
        found.append(("money", format_amount(bill.money), f"{below}; {format_amount(bill.device_hours)} device-hours"))
    return found
