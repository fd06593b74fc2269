"""The pages of plans and of runs, as self-contained HTML; `plan.html` and `run.html` are their templates.

A plan's large numbers come first, then the answer with its reasons; then a table of the candidates, with the memory and
timeline (`step.py`) and the traffic of each. The page of one or several runs has curves, speed, memory, timeline and
events. Every picture has its numbers beside it as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from jdp.base.formatting import format_bytes, listed
from jdp.core.sharding.axes import factors
from jdp.foresight.foresee import PlanReport
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, MeshCollective, Row
from jdp.foresight.verify import Report
from jdp.report.charts import learning, legend, others, speed
from jdp.report.page import format_number, page, without_roots
from jdp.report.run import Row as Metrics
from jdp.report.run import Run
from jdp.report.step import memory_section, tail, times_section

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
        timed=times_section(estimates),
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


# Runs.

_LONGEST_NAME = 40
_MOST_NUMBERS = 25
_SET = re.compile(r"(eval(?:_.+)?)_loss")
_METRIC = re.compile(r"loss|perplexity|bits_per_token|bits_per_byte|(?:top\d+_)?accuracy")


def run_page(runs: Sequence[Run]) -> str:
    """Return the page as self-contained HTML text, the same for the same runs."""
    several = len(runs) > 1
    sets = [(run.name if several else "", *table) for run in runs if (table := _data_sets(run.rows))]
    compiled = [(tail(run.name, _LONGEST_NAME), run, run.step) for run in runs if run.step is not None]
    estimates = [(name, step.estimate) for name, _, step in compiled]
    missing = [f"{run.name}: {run.why_no_step}" for run in runs if run.why_no_step is not None]
    keys = sorted({key for run in runs for key in run.settings if key != "name"})
    settings = [[key, *(run.settings.get(key, "–") for run in runs)] for key in keys]
    return page(
        "run.html",
        title=f"Run{'s' * several} {listed((run.name for run in runs), 4)}",
        runs=runs,
        several=several,
        legend=legend([run.name for run in runs]) if several else [],
        differences=[row for row in settings if len({*row[1:]}) > 1],
        learning=learning(runs),
        numbers=[(run.name, len({row["step"] for row in run.rows}), *_numbers(run.rows)) for run in runs],
        sets=sets,
        speed=speed(runs),
        others=others(runs),
        missing=missing,
        compiled=compiled,
        memory=memory_section(estimates),
        timed=times_section(estimates),
    )


def _numbers(rows: Sequence[Metrics]) -> tuple[list[str], list[list[str]]]:
    """Return the names of all metrics, and a readable number of their rows."""
    by_step: dict[float, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    names = [*dict.fromkeys(name for row in by_step.values() for name in row if name not in ("step", "time"))]
    merged = list(by_step.values())
    evaluated = [i for i, row in enumerate(merged) if any(name.startswith("eval_") for name in row)]
    some = {i for every in (range(len(merged)), evaluated) for i in every[:: max(1, -(-len(every) // _MOST_NUMBERS))]}
    shown = [merged[i] for i in sorted(some | {len(merged) - 1})] if merged else []
    return names, [[f"{row['step']:,.0f}", *(format_number(row.get(name)) for name in names)] for row in shown]


def _data_sets(rows: Sequence[Metrics]) -> tuple[list[str], list[list[str]]] | None:
    """Return names and rows of the newest metrics of each data set; None for a single data set with only a loss."""
    newest: dict[str, dict[str, float]] = {}
    for row in rows:
        named = [match[1] for metric in row if (match := _SET.fullmatch(metric))]
        for metric, value in row.items():
            of = max((name for name in named if metric.startswith(f"{name}_")), key=len, default="")
            if of and _METRIC.fullmatch(kind := metric.removeprefix(f"{of}_")):
                newest.setdefault(of, {})[kind] = value
    names = [*dict.fromkeys(metric for values in newest.values() for metric in values)]
    if len(newest) < 2 and len(names) < 3:
        return None
    called = {name: "held out" if name == "eval" else name.removeprefix("eval_") for name in newest}
    cells = [[called[name], *(format_number(values.get(each)) for each in names)] for name, values in newest.items()]
    return [name.replace("_", " ") for name in names], cells
