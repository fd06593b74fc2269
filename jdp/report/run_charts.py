"""Which charts the report of runs has: which metrics are drawn together, and how.

A chart is left out where no run has its metric. Metrics that this file does not know get a chart of their own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jdp.report.curves import FEWEST_TO_SMOOTH, Chart, Curve, draw, smoothing
from jdp.report.history import resumes
from jdp.report.page import Markup, element, joined

_SPEEDS = ("tokens_per_second", "examples_per_second")
_DRAWN = {"loss", "accuracy", "eval_loss", "eval_accuracy", "lr", "grad_norm", "mfu", *_SPEEDS}
_NOT_DRAWN = {"step", "time", "weight", "skipped", "step_seconds", "data_wait_seconds", "eval_bits_per_token"}
_MOST_OTHERS = 24
_APART = 100.0  # times another run's peak: a learning rate on a logarithmic axis


@dataclass(frozen=True)
class Series:
    """What a run gives to the charts: rows of metrics, and the events of its visits."""

    rows: Sequence[Mapping[str, float]]
    history: Sequence[Mapping[str, Any]] = ()

    def curve(self, run: int, name: str, kind: str = "line", *, per: str | None = None) -> list[Curve]:
        """Return the curve of a metric, or of its ratio to another; an empty list if the run has none."""
        have = [row for row in self.rows if name in row and (per is None or row.get(per))]
        if not have:
            return []
        values = [row[name] / (1.0 if per is None else row[per]) for row in have]
        return [Curve(run, [row["step"] for row in have], values, kind)]

    @property
    def units_per_step(self) -> tuple[float, str] | None:
        """Tokens, or examples, of a step, and which; None where no speed was logged."""
        name = per_second(self.rows)
        if name is None:
            return None
        counts = [row[name] * row["step_seconds"] for row in self.rows if name in row and "step_seconds" in row]
        counts = [count for count in counts if math.isfinite(count) and count >= 0.5]
        return (float(round(statistics.median(counts))), name.removesuffix("_per_second")) if counts else None


def per_second(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return the name of the metric that has the speed; None if there is none."""
    return next((name for name in _SPEEDS if any(name in row for row in rows)), None)


def learning(runs: Sequence[Series], legend: Markup) -> Markup:
    """Return the charts of losses, accuracies, the learning rate and the gradients' norm."""
    counts = [run.units_per_step for run in runs]
    same = counts[0] if counts and all(count == counts[0] for count in counts) else None
    moments = [(i, step) for i, run in enumerate(runs) for step in resumes(run.history)]
    loss = _chart(runs, "Loss", ("loss", "smoothed"), ("eval_loss", "points"), large=True, per_step=same)
    charts = [
        replace(loss, moments=moments, note=_about_loss(runs, moments)),
        _learning_rate(runs),
        _chart(runs, "Norm of the gradients", ("grad_norm", "smoothed")),
        _chart(
            runs, "Accuracy", ("accuracy", "smoothed"), ("eval_accuracy", "points"), unit="percent", may_be_log=False
        ),
    ]
    if same is None and all(counts):
        charts.append(_over_units(loss, counts))
    return _grid(charts, legend) or element("p", "No loss was logged.")


def speed(runs: Sequence[Series], legend: Markup) -> Markup:
    """Return the charts of throughput, the share of time that steps waited for data, and MFU."""
    charts = [
        *(
            _chart(
                runs,
                f"{name.removesuffix('_per_second').capitalize()} a second",
                (name, "smoothed"),
                **_UP,
                unit="per second",
            )
            for name in _SPEEDS
        ),
        Chart(
            "Share of a step spent waiting for data",
            [
                c
                for i, run in enumerate(runs)
                for c in run.curve(i, "data_wait_seconds", "smoothed", per="step_seconds")
            ],
            unit="percent",
            **_UP,
        ),
        _chart(runs, "MFU", ("mfu", "smoothed"), unit="percent", **_UP),
    ]
    return _grid(charts, legend)


def others(runs: Sequence[Series], legend: Markup) -> Markup:
    """Return a chart for each metric that the other sections do not have; empty if there is none."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    named = [name for name in names if name not in _DRAWN | _NOT_DRAWN][:_MOST_OTHERS]
    kinds = {name: "points" if name.startswith("eval_") else "smoothed" for name in named}
    return _grid([_chart(runs, name, (name, kinds[name])) for name in named], legend)


_UP: dict[str, Any] = {"from_zero": True, "may_be_log": False}


def _chart(runs: Sequence[Series], title: str, *metrics: tuple[str, str], **options: Any) -> Chart:
    curves = [c for i, run in enumerate(runs) for name, kind in metrics for c in run.curve(i, name, kind)]
    return Chart(title, curves, **options)


def _learning_rate(runs: Sequence[Series]) -> Chart:
    drawn = _chart(runs, "Learning rate", ("lr", "line"), from_zero=True)
    peaks = [max((value for value in curve.values if math.isfinite(value)), default=0.0) for curve in drawn.curves]
    return replace(drawn, may_be_log=bool(peaks) and max(peaks) > _APART * min(peaks) > 0)


def _over_units(loss: Chart, counts: Sequence[tuple[float, str] | None]) -> Chart:
    """Return the losses over tokens or examples, for runs whose steps do not have as many."""
    moved = [
        replace(curve, steps=[step * count[0] for step in curve.steps])
        for curve in loss.curves
        if (count := counts[curve.run]) is not None
    ]
    units = {count[1] for count in counts if count is not None}
    unit = units.pop() if len(units) == 1 else "sample"
    return Chart(f"Loss over {unit}", moved, x_label=unit.removesuffix("s"))


def _about_loss(runs: Sequence[Series], moments: Sequence[object]) -> str:
    rows = max((sum("loss" in row for row in run.rows) for run in runs), default=0)
    parts = list[str]()
    if rows >= FEWEST_TO_SMOOTH:
        parts.append(f"Pale: as logged; line: its running mean over about {smoothing(rows):.0f} rows.")
    if any("eval_loss" in row for run in runs for row in run.rows):
        parts.append("Points: on held-out data.")
    if moments:
        parts.append("Dotted: resumed.")
    return " ".join(parts)


def _grid(charts: Sequence[Chart], legend: Markup) -> Markup:
    drawn = [draw(chart) for chart in charts if chart.curves]
    return joined([legend, element("div", *drawn, class_="charts")]) if drawn else Markup()
