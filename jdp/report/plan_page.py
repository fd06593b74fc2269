"""The report of `jdp plan` as one self-contained page; `plan.html` is its template.

Large numbers come first, then the answer with its reasons; then a table of the candidates, with the memory
(`memory.py`), timeline (`timeline.py`) and traffic of each. Every picture has its numbers beside it as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from jdp.base.formatting import format_bytes
from jdp.core.sharding.axes import factors
from jdp.foresight.forecast import PlanReport
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, MeshCollective, Row
from jdp.foresight.verify import Report
from jdp.report.memory import memory_section
from jdp.report.page import page, without_roots
from jdp.report.timeline import times_section

MOST_ROWS = 600
"""Rows of collectives on a page; a candidate with more than its share shows the largest."""

_KEPT, _BROKEN = Markup('<span class="tag good">kept</span>'), Markup('<span class="tag bad">broken</span>')


def plan_page(forecast: PlanReport, *, title: str, described: str = "") -> str:
    """Return the page as self-contained HTML text, without network, fonts or other files.

    The same forecast gives the same text, below 1.5 MB: long timelines merge neighbours, and only the largest
    collectives are listed.
    """
    estimates = [(estimate.name, estimate) for estimate in forecast.estimates]
    choice = None if forecast.choice is None else forecast.choice.name
    reports = [(name, estimate.report) for name, estimate in estimates if estimate.report is not None]
    judged = [(each, None if each.report is None else each.report.kept) for each in forecast.estimates]
    errors = [estimate.error for estimate in forecast.estimates if estimate.error is not None]
    compiled = [estimate for estimate in forecast.estimates if estimate.memory is not None]
    lead = f"{forecast.devices} devices, {forecast.target}. Compiled, not run; numbers are for one device and one step."
    kinds = [(name, row, verdict) for name, report in reports for row, verdict in _verdicts(report)]
    return page(
        "plan.html",
        title=title,
        lead=f"{described} {lead}".strip(),
        forecast=forecast,
        shown=forecast.choice or min(compiled, key=lambda each: each.bytes_per_device or 0, default=None),
        candidates=[
            _candidates(forecast, forecast.speed_table(), [each.error or kept is False for each, kept in judged]),
            _candidates(forecast, forecast.memory_table(), [each.error for each, _ in judged]),
        ],
        notes=[note for note in forecast.notes if not any(error in note for error in errors)],
        choice=choice,
        memory=memory_section(estimates),
        timed=times_section(estimates, choice),
        tolerance=f"{TOLERANCE:g}",
        slack=f"{SLACK:.0%}",
        kinds=[
            [name, *row.cells(), format_bytes(row.theory_wire_bytes) if row.expected_bytes else "–", verdict]
            for name, row, verdict in kinds
        ],
        broken=["bad" if verdict == _BROKEN else "" for _, _, verdict in kinds],
        reports=[
            (
                name,
                report,
                factors(report.mesh),
                _collective_rows(report.collectives, max(10, MOST_ROWS // len(reports))),
            )
            for name, report in reports
        ],
    )


def _candidates(forecast: PlanReport, table: Sequence[Sequence[str]], bad: Sequence[object]) -> dict[str, Any]:
    """Return a table with a row for each candidate; the choice and bad candidates are marked."""
    headers, *rows = table
    chosen = [estimate is forecast.choice for estimate in forecast.estimates]
    tagged = Markup('{} <span class="tag good">chosen</span>')
    names = [tagged.format(row[0]) if marked else row[0] for row, marked in zip(rows, chosen, strict=True)]
    return {
        "headers": headers,
        "rows": [[name, *cells] for name, (_, *cells) in zip(names, rows, strict=True)],
        "kinds": ["chosen" if marked else "bad" if wrong else "" for marked, wrong in zip(chosen, bad, strict=True)],
    }


# The traffic of a device.


def _verdicts(report: Report) -> Iterable[tuple[Row, str]]:
    """Yield each kind with its verdict. A kind may send more than promised if others send less."""
    for row in report.rows:
        if report.kept is None:
            yield row, "not judged"
        else:
            yield row, _KEPT if row.kept else "more, but all kinds together less" if report.kept else _BROKEN
    yield from ((row, "the model’s own axes") for row in report.model_axes)
    if report.statistics is not None:
        yield report.statistics, "batch statistics or metrics"


def _collective_rows(collectives: Sequence[MeshCollective], most: int) -> list[list[str]]:
    """Return a row for each group of collectives with equal cells, largest first."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for each in collectives:
        c = each.collective
        times = f"≥ {c.count:,}" if c.caveats else f"{c.count:,}"
        looped, asynchronous = "in" if each.in_accumulation_loop else "out", "yes" if c.is_async else "no"
        source = without_roots(c.source or "–")
        shown = (c.kind, c.dtype, format_bytes(c.payload_bytes), times, looped, ", ".join(each.axes), c.group_size)
        groups.setdefault((*shown, asynchronous, source, c.payload_bytes), []).append(c.wire_bytes)
    ordered = sorted(groups.items(), key=lambda group: -sum(group[1]))
    rows = [
        [
            kind,
            dtype,
            payload,
            times if len(wires) == 1 else f"{len(wires)} × {times}",
            *others,
            format_bytes(sum(wires)),
            source,
        ]
        for (kind, dtype, payload, times, *others, source, _), wires in ordered[:most]
    ]
    if left := [wires for _, wires in ordered[most:]]:
        rows.append([f"{sum(map(len, left))} more", *[""] * 7, format_bytes(sum(map(sum, left))), ""])
    return rows
