"""The page of one or several runs: learning, speed, memory, timeline, events; `run.html` is its template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jdp.base.formatting import listed
from jdp.report.curves import learning, legend, others, speed
from jdp.report.memory import memory_section
from jdp.report.page import format_number, page
from jdp.report.run import Row, Run
from jdp.report.timeline import tail, times_section

_LONGEST_NAME = 40
_MOST_NUMBERS = 25
_SET = re.compile(r"(eval(?:_.+)?)_loss")
_METRIC = re.compile(r"loss|perplexity|bits_per_token|bits_per_byte|(?:top\d+_)?accuracy")


def run_page(runs: Sequence[Run], *, title: str = "") -> str:
    """Return the page as self-contained HTML text, the same for the same runs."""
    several = len(runs) > 1
    sets = [(run.name if several else "", *table) for run in runs if (table := _data_sets(run.rows))]
    compiled = [(tail(run.name, _LONGEST_NAME), run, run.step) for run in runs if run.step is not None]
    estimates = [(name, step.estimate) for name, _, step in compiled]
    missing = {run.name: run.why_no_step for run in runs if run.why_no_step is not None}
    is_same = len(missing) == len(runs) and len({*missing.values()}) == 1
    return page(
        "run.html",
        title=title or f"Run{'s' * several} {listed((run.name for run in runs), 4)}",
        runs=runs,
        several=several,
        legend=legend([run.name for run in runs]) if several else [],
        differences=_differences(runs),
        learning=learning(runs),
        numbers=[(run.name, len({row["step"] for row in run.rows}), *_numbers(run.rows)) for run in runs],
        sets=sets,
        speed=speed(runs),
        others=others(runs),
        missing=[*missing.values()][:1] if is_same else [f"{name}: {why}" for name, why in missing.items()],
        compiled=compiled,
        memory=memory_section(estimates),
        timed=times_section(estimates),
    )


def _differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each key whose value differs between experiments."""
    keys = sorted({key for run in runs for key in run.settings if key != "name"})
    rows = [[key, *(run.settings.get(key, "–") for run in runs)] for key in keys]
    return [row for row in rows if len({*row[1:]}) > 1]


def _numbers(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
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


def _data_sets(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]] | None:
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
