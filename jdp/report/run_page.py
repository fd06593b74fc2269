"""The report of one or several runs as one self-contained page: learning, speed, memory, timeline, what happened.

The page takes plain values; `jdp report` reads them from the folders of runs, and compiles the step again for memory
and timeline. What is not known is reported as such.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds, listed
from jdp.core.sharding.placement import Placement
from jdp.foresight.forecast import Estimate
from jdp.report.curves import swatch
from jdp.report.history import happened, state
from jdp.report.memory import memory_bars
from jdp.report.page import Markup, Section, details, element, joined, page, paragraphs, table
from jdp.report.run_charts import Series, learning, others, per_second, speed
from jdp.report.timeline import tail
from jdp.report.times import times

_LONGEST_NAME = 40
_MOST_PLACEMENTS, _MOST_NUMBERS = 200, 25


@dataclass(frozen=True)
class CompiledStep:
    """What was read off a run's step, compiled again: for which target, the estimate, leaves at rest, and notes."""

    target: str
    estimate: Estimate
    placements: Sequence[Placement] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Run:
    """One run as the page takes it."""

    name: str  # of the run, different from the others'
    rows: Sequence[Mapping[str, float]]  # of metrics, each with "step" and numbers
    history: Sequence[Mapping[str, Any]] = ()  # the events of its visits
    summary: Mapping[str, Any] | None = None  # of its last visit that came to the end
    toml: str = ""  # the experiment as run
    settings: Mapping[str, str] = field(default_factory=dict[str, str])  # its dotted keys, and their values as text
    checkpoints: Sequence[int] = ()  # steps of those that are there
    notes: Sequence[str] = ()  # what was damaged or missing, a sentence each
    step: CompiledStep | None = None  # the compiled step; None with the reason in `no_step`
    no_step: str = "The step was not compiled."  # why there is none, as a sentence
    samples: Sequence[Mapping[str, Any]] = ()  # rows with "step", "prompt" and "text"
    goodput: str | None = None  # the useful share of all its time, and where the rest went; None: not known


def run_page(runs: Sequence[Run], *, title: str = "") -> str:
    """Return the page as HTML text, the same for the same runs; it needs no network, no fonts and no other files."""
    names = [run.name for run in runs]
    several = len(runs) > 1
    charted = [Series(run.rows, run.history) for run in runs]
    legend = element("p", *(swatch(i, name) for i, name in enumerate(names)), class_="legend") if several else Markup()
    numbers = [_numbers_of(run, f"Numbers of {run.name}" if several else "Numbers") for run in runs]
    experiments = [
        details(f"{run.name}: experiment.toml", element("pre", run.toml, tabindex=0), is_open=not several)
        for run in runs
    ]
    sections = [
        Section("overview", "The runs" if several else "The run", _overview(runs)),
        *([Section("differences", "What differs", _differences(runs))] if several else []),
        Section("learning", "Loss and learning rate", joined([learning(charted, legend), *numbers])),
        *_evaluated(runs),
        Section("speed", "Throughput and data wait", joined([_speeds(runs), speed(charted, legend)])),
        *([Section("others", "Other metrics", more)] if (more := others(charted, legend)) else []),
        Section("memory", "Where every byte lives", _memory(runs)),
        Section("time", "Timeline of the compiled step", _times(runs)),
        Section("happened", "What happened", joined([_happened(run, titled=several) for run in runs])),
        Section("experiment", "The experiment as run", joined(experiments)),
    ]
    return page(title or f"Run{'s' * several} {listed(names, 4)}", sections)


def _evaluated(runs: Sequence[Run]) -> list[Section]:
    """Return the sections of evaluations and samples, without those that no run has."""
    several = len(runs) > 1
    sets = joined([data_sets(run.name if several else "", run.rows) for run in runs])
    sections = [Section("sets", "Evaluated data sets", sets)]
    drawn = [(run.name, samples(run.samples)) for run in runs if run.samples]
    parts = [joined([*([element("h3", name)] if several else []), body]) for name, body in drawn]
    sections.append(Section("samples", "Samples", joined(parts)))
    return [section for section in sections if section.body]


# What was done.


def _overview(runs: Sequence[Run]) -> Markup:
    rows = [
        [
            run.name,
            _state(run),
            f"{_last(run, 'step', 0):,.0f}{_of_steps(run)}",
            _number(_last(run, "loss")),
            _evaluation(run),
            _rate(run),
            _share(_median(run, "mfu")),
            run.settings.get("strategy", "–").strip('"'),
            _devices(run),
            f"{_last(run, 'skipped', 0):,.0f}",
            "… " * (len(run.checkpoints) > 3) + ", ".join(map(str, run.checkpoints[-3:])) or "–",
        ]
        for run in runs
    ]
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return joined([table(_OVERVIEW, rows, words=("state", "last evaluation", "strategy")), paragraphs(notes, "note")])


_OVERVIEW = (
    *("run", "state", "steps", "loss", "last evaluation", "speed", "MFU", "strategy", "devices", "skipped"),
    "checkpoints",
)


def _state(run: Run) -> Markup:
    words = state(run.history, run.summary)
    return element("span", words, class_={"finished": "tag good", "failed": "tag bad"}.get(words))


def _of_steps(run: Run) -> str:
    steps = run.settings.get("train.steps", "")
    return f" of {int(steps):,}" if steps.isdecimal() and len(steps) < 16 else ""


def _evaluation(run: Run) -> str:
    """Return the newest value of the metrics that an evaluation is known by."""
    shown = [
        f"{_number(value)} {name.removeprefix('eval_').replace('_', ' ')}"
        for name in ("eval_loss", "eval_accuracy", "eval_bits_per_token", "eval_bits_per_byte")
        if (value := _last(run, name)) is not None
    ]
    return ", ".join(shown) or "–"


def _devices(run: Run) -> str:
    known = [event for event in run.history if "devices" in event]
    if known:
        return f"{known[-1]['devices']} × {known[-1].get('device', '?')}"
    return str((run.summary or {}).get("devices", "–"))


def _differences(runs: Sequence[Run]) -> Markup:
    """Return a table of the keys that have not the same value in every experiment."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "name")
    rows = [
        [key, *(run.settings.get(key, "–") for run in runs)]
        for key in sorted(keys)
        if len({run.settings.get(key) for run in runs}) > 1
    ]
    if not rows:
        return element("p", "The experiments are the same, apart from their names.")
    names = [run.name for run in runs]
    return table(("key", *names), rows, words=names)


# Numbers.


def _last(run: Run, name: str, default: Any = None) -> Any:
    return next((row[name] for row in reversed(run.rows) if name in row), default)


def _values(run: Run, name: str) -> list[float]:
    return [row[name] for row in run.rows if name in row]


def _median(run: Run, name: str) -> float | None:
    values = _values(run, name)
    return statistics.median(values) if values else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "–" if value is None else format_percent(value)


def _rate(run: Run) -> str:
    name = per_second(run.rows)
    return "–" if name is None else f"{format_rate(_median(run, name) or 0.0)} {name.removesuffix('_per_second')}/s"


def _speeds(runs: Sequence[Run]) -> Markup:
    """Return a table of the speed of each run; a row with compilation in it hardly moves a median."""
    rows: list[list[str]] = []
    for run in runs:
        seconds = sorted(_values(run, "step_seconds"))
        if not seconds:
            continue
        middle, slow = statistics.median(seconds), seconds[min(len(seconds) - 1, len(seconds) * 95 // 100)]
        waited = _median(run, "data_wait_seconds")
        share = None if waited is None or not middle else waited / middle
        rows.append(
            [
                run.name,
                format_seconds(middle),
                format_seconds(slow),
                _rate(run),
                _share(share),
                _share(_median(run, "mfu")),
            ]
        )
    if not rows:
        return element("p", "No speed was logged.")
    return table(("run", "median step", "95th percentile", "median speed", "waiting for data", "MFU"), rows)


def _numbers_of(run: Run, summary: str) -> Markup:
    """Return some rows of a run's metrics as a table: about as many as one reads."""
    by_step: dict[float, dict[str, float]] = {}
    for row in run.rows:
        by_step.setdefault(row["step"], {}).update(row)
    names = [*dict.fromkeys(name for row in by_step.values() for name in row if name not in ("step", "time"))]
    if not by_step or not names:
        return Markup()
    rows = list(by_step.values())
    evaluated = [i for i, row in enumerate(rows) if any(name.startswith("eval_") for name in row)]
    step = max(1, -(-len(rows) // _MOST_NUMBERS))
    chosen = sorted(
        {*range(0, len(rows), step), len(rows) - 1, *evaluated[:: max(1, -(-len(evaluated) // _MOST_NUMBERS))]}
    )
    cells = [[f"{rows[i]['step']:,.0f}", *(_number(rows[i].get(name)) for name in names)] for i in chosen]
    return details(f"{summary}: {len(chosen)} of {len(rows):,} steps with metrics", table(("step", *names), cells))


# The compiled step.


def _compiled(runs: Sequence[Run]) -> list[tuple[str, Run, CompiledStep]]:
    return [(tail(run.name, _LONGEST_NAME), run, run.step) for run in runs if run.step is not None]


def _memory(runs: Sequence[Run]) -> Markup:
    compiled = _compiled(runs)
    held = [(name, step.estimate) for name, _, step in compiled if step.estimate.memory is not None]
    several = len(runs) > 1
    parts = [_why_not(runs)]
    if held:
        parts.append(memory_bars(held))
        parts += [
            element("p", _compiled_for(name if several else "", step), class_="note") for name, _, step in compiled
        ]
    parts += [_placements(f"{name}: leaves" if several else "Leaves", s.placements) for name, _, s in compiled]
    return joined(parts)


def _why_not(runs: Sequence[Run]) -> Markup:
    """Return why steps are missing: a sentence for each run, or one for all."""
    missing = [(run.name, run.no_step) for run in runs if run.step is None]
    missing += [
        (run.name, f"The step did not compile: {run.step.estimate.error}")
        for run in runs
        if run.step is not None and run.step.estimate.error is not None
    ]
    if len(missing) == len(runs) and len({why for _, why in missing}) == 1:
        return element("p", missing[0][1])
    return paragraphs([f"{name}: {why}" for name, why in missing])


def _compiled_for(name: str, step: CompiledStep) -> str:
    text = f"{name}: compiled again" if name else "Compiled again"
    notes = [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in step.notes]
    return " ".join([f"{text} for {step.target}, not run; numbers are for one device.", *notes])


def _placements(summary: str, placements: Sequence[Placement]) -> Markup:
    """Return the table of the state's leaves between steps, the largest first."""
    if not placements:
        return Markup()
    ordered = sorted(placements, key=lambda leaf: -leaf.bytes_per_device)
    rows = [
        [
            leaf.path,
            f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]",
            _spec(leaf.rest),
            _spec(leaf.compute),
            f"{leaf.bytes_per_device:,}",
            leaf.reason,
        ]
        for leaf in ordered[:_MOST_PLACEMENTS]
    ]
    total = sum(leaf.bytes_per_device for leaf in ordered)
    if left := ordered[_MOST_PLACEMENTS:]:
        rows.append([f"{len(left):,} more", "", "", "", f"{sum(leaf.bytes_per_device for leaf in left):,}", ""])
    headers = ("leaf", "array", "between steps", "while computing", "bytes of a device", "why")
    listed = table(headers, rows, words=("array", "between steps", "while computing", "why"))
    return details(f"{summary} of the state at rest, {format_bytes(total)} of a device", listed)


def _spec(spec: object) -> str:
    return str(spec).removeprefix("PartitionSpec")


def _times(runs: Sequence[Run]) -> Markup:
    timed = [(name, run, step) for name, run, step in _compiled(runs) if step.estimate.timeline is not None]
    if not timed:
        compiled = any(step.estimate.memory is not None for _, _, step in _compiled(runs))
        return element("p", "The rates of these devices are not known.") if compiled else _why_not(runs)
    measured = [
        f"{name}: the simulated step takes {format_seconds(step.estimate.step_seconds or 0.0)} on {step.target}; the "
        f"run’s median step took {format_seconds(median)} on {_devices(run)}."
        for name, run, step in timed
        if (median := _median(run, "step_seconds")) is not None
    ]
    return joined([paragraphs(measured), times([(name, step.estimate) for name, _, step in timed], None)])


# What happened, and what was asked for.


def _happened(run: Run, *, titled: bool) -> Markup:
    events = happened(run.rows, run.history)
    heading = [element("h3", run.name)] if titled else []
    if run.goodput is not None:
        heading.append(element("p", f"{run.goodput[:1].upper()}{run.goodput[1:]}."))
    if not events:
        return joined([*heading, element("p", "Nothing is recorded.")])
    rows = [[event.clock, f"{event.step:,.0f}", event.words] for event in events]
    kinds = ["bad" if event.is_bad else None for event in events]
    return joined([*heading, table(("time (UTC)", "step", "what"), rows, words=("what",), classes=kinds)])


_SET = re.compile(r"(eval(?:_.+)?)_loss")
_METRIC = re.compile(r"loss|perplexity|bits_per_token|bits_per_byte|(?:top\d+_)?accuracy")
_MOST_SAMPLES = 12


def data_sets(name: str, rows: Sequence[Mapping[str, float]]) -> Markup:
    """Return a table of the newest metrics of each data set; empty if there is one with its loss alone."""
    newest: dict[str, dict[str, float]] = {}
    for row in rows:
        named = [match[1] for metric in row if (match := _SET.fullmatch(metric))]
        for metric, value in row.items():
            of = max((each for each in named if metric.startswith(f"{each}_")), key=len, default="")
            if of and _METRIC.fullmatch(kind := metric.removeprefix(f"{of}_")):
                newest.setdefault(of, {})[kind] = value
    names = [*dict.fromkeys(metric for values in newest.values() for metric in values)]
    if len(newest) < 2 and len(names) < 3:
        return Markup()
    cells = [
        [called(each), *(f"{values[metric]:.4g}" if metric in values else "–" for metric in names)]
        for each, values in newest.items()
    ]
    return table(("data set", *(metric.replace("_", " ") for metric in names)), cells, caption=name)


def called(name: str) -> str:
    """Return a data set's name for people."""
    return "held out" if name == "eval" else name.removeprefix("eval_")


def samples(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the newest samples, the last step first, of rows with "step", "prompt" and "text"."""
    steps = sorted({row["step"] for row in rows}, reverse=True)
    parts = [
        details(
            f"Step {step:,}",
            *(element("pre", row["text"], tabindex=0) for row in rows if row["step"] == step),
            is_open=step == steps[0],
        )
        for step in steps[:_MOST_SAMPLES]
    ]
    if left := len(steps) - _MOST_SAMPLES:
        parts += [element("p", f"{left:,} earlier steps are in samples/.", class_="note")] if left > 0 else []
    return joined(parts)
