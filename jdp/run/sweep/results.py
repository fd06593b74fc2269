"""The results of a sweep, the best run first, as a table for people and as one object for programs.

The experiment's `train.stop_metric` decides, by default the loss on held-out data: higher is better for an accuracy,
lower for anything else. Runs without this number come last.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdp.base.formatting import format_rate
from jdp.experiment.file import ExperimentError
from jdp.run.evaluation import Best
from jdp.run.sweep.walk import DONE, FAILED, Result


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results, best first; at the end those without a score: done, failed, stopped, not run."""
    order = {DONE: 0, FAILED: 1}

    def key(result: Result) -> tuple[bool, float]:
        value = score(result)
        return (True, order.get(result.status, 2)) if value is None else (False, -value)

    return sorted(results, key=key)


def score(result: Result) -> float | None:
    """Return a number that is higher for better runs.

    None for a run that is not done, or whose metric is missing or not finite.
    """
    metric = result.member.experiment.train.stop_metric
    summary = result.summary or {}
    value = summary.get(f"final_{metric}", summary.get("eval_sets", {}).get(metric))
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if Best(metric).mode == "max" else -value


def as_json(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return one object: the runs, best first, and the name of the best, null if no run has a score."""
    order = ranked(results)
    return {
        "name": name,
        "metric": order[0].member.experiment.train.stop_metric,
        "best": order[0].member.name if score(order[0]) is not None else None,
        "runs": [
            {
                "name": result.member.name,
                "values": dict(result.member.values),
                "status": result.status,
                **({"error": result.error, "exit_code": result.exit_code} if result.status == FAILED else {}),
                "summary": result.summary,
            }
            for result in order
        ],
    }


def record(name: str, results: Sequence[Result], runs: Path) -> Path:
    """Write the object to RUN_DIR/NAME.sweep.json, in one rename."""
    file = runs / f"{name}.sweep.json"
    fresh = file.with_name(f"{file.name}.new")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(as_json(name, results), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return fresh.replace(file)
    except OSError as error:
        raise ExperimentError(f"{file} cannot be written: {error.strerror}; choose another --run-dir") from None


def failures(results: Sequence[Result]) -> list[str]:
    """Return a line for each run that failed, with its error."""
    return [f"{result.member.name}: {result.error}" for result in results if result.status == FAILED]


def table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the headers, and a row for each run, best first."""
    order = ranked(results)
    keys = list(order[0].member.values)
    by = f"final_{order[0].member.experiment.train.stop_metric}"  # first what the runs are ranked by
    columns = dict.fromkeys((by, "final_eval_loss", "final_eval_accuracy", "final_loss"))
    metrics = [metric for metric in columns if any(metric in (result.summary or {}) for result in order)]
    headers = ["run", *keys, *(metric.removeprefix("final_") for metric in metrics), "steps", "speed", "status"]
    return headers, [_row(result, keys, metrics) for result in order]


def _row(result: Result, keys: Sequence[str], metrics: Sequence[str]) -> list[str]:
    summary = result.summary or {}
    numbers = [_number(summary.get(metric), "{:.4f}") for metric in metrics]
    speed = summary.get("tokens_per_second", summary.get("examples_per_second"))
    return [
        result.member.name,
        *(result.member.values[key] for key in keys),
        *numbers,
        _number(summary.get("steps"), "{}"),
        f"{format_rate(speed)}/s" if isinstance(speed, int | float) else "-",
        result.status,
    ]


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"
