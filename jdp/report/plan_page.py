"""The report of `jdp plan` as one self-contained page, for those who decide what to launch.

Large numbers come first, then the answer with its reasons; then the candidates in a table, and what each of them holds
(`memory.py`), waits for (`times.py`) and sends (`traffic.py`). Every picture has its numbers beside it as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds
from jdp.foresight.forecast import PlanReport
from jdp.report.memory import memory_bars
from jdp.report.page import CHOSEN, Markup, Section, details, element, joined, page, paragraphs, table, tagged
from jdp.report.times import times
from jdp.report.traffic import traffic


def plan_page(forecast: PlanReport, *, title: str, described: str = "") -> str:
    """Return the page as HTML text, which needs nothing else: no network, no fonts, no files beside it.

    The same forecast gives the same text. It stays below 1.5 MB: neighbours in long timelines are drawn together, and
    of many collectives those that send most are listed.
    """
    estimates = [(estimate.name, estimate) for estimate in forecast.estimates]
    chosen = None if forecast.choice is None else forecast.choice.name
    reports = [(name, estimate.report) for name, estimate in estimates if estimate.report is not None]
    lead = f"{forecast.devices} devices, {forecast.target}. Compiled, not run; numbers are for one device and one step."
    sections = [
        Section("answer", "What to launch", answer(forecast)),
        Section("candidates", "The candidates compared", tables(forecast)),
        Section("memory", "What a device holds", memory_bars(estimates)),
        Section("time", "Where a step’s time goes", times(estimates, chosen)),
        Section("sent", "What a device sends", traffic(reports, chosen)),
    ]
    return page(title, sections, lead=f"{described} {lead}".strip())


# The answer.


def answer(forecast: PlanReport) -> Markup:
    """Return the large numbers, and which candidate to take and why."""
    box = element(
        "div",
        element("p", element("strong", forecast.verdict)),
        paragraphs(forecast.why),
        class_="answer" if forecast.choice is not None else "answer none",
    )
    shown_below = [estimate.error for estimate in forecast.estimates if estimate.error is not None]
    notes = [f"Note: {note}" for note in forecast.notes if not any(error in note for error in shown_below)]
    return joined([numbers(headline(forecast)), box, paragraphs(notes, "note")])


# The table.


def tables(forecast: PlanReport) -> Markup:
    """Return the candidates in two tables, of times and of memory."""
    unkept = [o.report is not None and o.report.kept is False for o in forecast.estimates]
    failed = [o.error is not None for o in forecast.estimates]
    either = zip(unkept, failed, strict=True)
    errors = [
        details(f"Why {estimate.name} did not compile", element("p", estimate.error[:4000]), is_open=True)
        for estimate in forecast.estimates
        if estimate.error is not None
    ]
    return joined(
        [
            _marked_table(forecast, forecast.speed_table(), failed=[*map(any, either)]),
            _marked_table(forecast, forecast.memory_table(), failed=failed),
            element("p", _GLOSSARY, class_="note"),
            *errors,
        ]
    )


def _marked_table(forecast: PlanReport, rows: Sequence[Sequence[str]], *, failed: Sequence[bool]) -> Markup:
    """Return a table with a row for each candidate, in which the chosen one and those that failed are marked."""
    headers, *rows = rows
    chosen = [estimate is forecast.choice for estimate in forecast.estimates]
    named = [[tagged(row[0], CHOSEN if marked else None), *row[1:]] for row, marked in zip(rows, chosen, strict=True)]
    kinds = ["chosen" if is_choice else "bad" if bad else None for is_choice, bad in zip(chosen, failed, strict=True)]
    return table(headers, named, words=("partitioning",), classes=kinds)


_GLOSSARY = (
    "“of theory”: bytes sent over what the strategy promises. “hidden”: the share of communication during which the "
    "device computes. MFU: model FLOPs / (step time × devices × peak FLOP/s) (Chowdhery et al. 2022, appendix B); "
    "rematerialised work does not count. Tokens a second are those of all devices. T(1)/T(N): a step without its "
    "communication over the step with it."
)


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
        span = shown.step_range
        off = "how far off is not known" if span is None else " to ".join(map(format_seconds, span))
        found += [
            ("step", format_seconds(timeline.step_seconds), off),
            (f"{forecast.unit} a second", format_rate(speed or 0), f"of {forecast.devices:,} devices{each}"),
            ("hidden", hidden, waits if timeline.communication_seconds else "nothing is sent"),
        ]
    return found
