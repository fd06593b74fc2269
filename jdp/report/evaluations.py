"""Evaluations and samples, for the report of runs: data sets side by side, and the text that was written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jdp.report.page import Markup, details, element, joined, table

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
