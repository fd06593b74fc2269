"""What evaluations found, for the report of runs: data sets side by side, confused classes, documents, samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdp.base.shorten import cut
from jdp.report.page import Markup, details, element, joined, table

_SET = re.compile(r"(eval(?:_.+)?)_loss")
_METRIC = re.compile(r"loss|perplexity|bits_per_token|bits_per_byte|(?:top\d+_)?accuracy")
_MOST_CLASSES, _MOST_PAIRS, _MOST_DOCUMENTS, _MOST_SAMPLES = 32, 20, 20, 12
_FEWEST_TOKENS = 32
"""Of a document that can be among the worst: a loss of fewer tokens says little."""


@dataclass(frozen=True)
class Found:
    """What the files of a run's newest evaluation hold, and its samples.

    Attributes:
        step: of the evaluation.
        confusion: data set -> {"classes": names, "counts": [label, predicted, count] each}.
        documents: data set -> rows of documents.
        samples: rows with "step", "prompt" and "text", in order.
    """

    step: int = 0
    confusion: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    documents: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict[str, Any])
    samples: Sequence[Mapping[str, Any]] = ()


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


def confusion(found: Found) -> Markup:
    """Return for each data set a map of which class was taken for which, and the pairs confused most often."""
    parts: list[str] = []
    for name, given in found.confusion.items():
        counts = {(int(a), int(b)): int(count) for a, b, count in given["counts"]}
        names = [str(text) for text in given["classes"]]
        most = max((max(pair) for pair in counts), default=-1) + 1
        names += [str(index) for index in range(len(names), most)]
        total, right = sum(counts.values()), sum(n for (a, b), n in counts.items() if a == b)
        title = f"{called(name)} at step {found.step:,}: {right:,} of {total:,} right"
        shown = [_map(names, counts)] if len(names) <= _MOST_CLASSES else []
        parts.append(joined([element("h3", title), *shown, _pairs(names, counts)]))
    return joined(parts)


def _map(names: Sequence[str], counts: Mapping[tuple[int, int], int]) -> Markup:
    """Return a table with a row for each class; a cell is as dark as its share of the row."""
    head = [element("th", "is \\ taken for", scope="col", class_="words")]
    head += [element("th", cut(name, 24), scope="col") for name in names]
    body: list[Markup] = []
    for label, name in enumerate(names):
        row = [counts.get((label, predicted), 0) for predicted in range(len(names))]
        total = sum(row) or 1
        cells = [
            element("td", f"{count:,}" if count else "·", style=f"background:rgba({colour},{0.65 * count / total:.2f})")
            for predicted, count in enumerate(row)
            for colour in [_RIGHT if predicted == label else _WRONG]
        ]
        body.append(element("tr", element("th", name, scope="row"), *cells))
    whole = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", whole, class_="wide", tabindex=0)


_RIGHT, _WRONG = "0,114,178", "213,94,0"
"""Blue and vermilion of `jdp.report.page`, as numbers."""


def _pairs(names: Sequence[str], counts: Mapping[tuple[int, int], int]) -> Markup:
    wrong = sorted(((n, a, b) for (a, b), n in counts.items() if a != b), key=lambda each: (-each[0], *each[1:]))
    if not wrong:
        return Markup()
    of_class = {a: sum(n for (label, _), n in counts.items() if label == a) for _, a, _ in wrong[:_MOST_PAIRS]}
    cells = [[names[a], names[b], f"{n:,}", f"{n / of_class[a]:.1%}"] for n, a, b in wrong[:_MOST_PAIRS]]
    listed = table(("class", "taken for", "examples", "of the class"), cells, words=("taken for",))
    return details(f"Confused most often: {len(cells)} of {len(wrong):,} pairs", listed)


def documents(found: Found) -> Markup:
    """Return for each data set the documents of the largest loss a token."""
    parts: list[str] = []
    for name, rows in found.documents.items():
        long = [row for row in rows if row["tokens"] >= _FEWEST_TOKENS]
        if not (chosen := sorted(long or rows, key=_loss, reverse=True)[:_MOST_DOCUMENTS]):
            continue
        cells = [
            [
                f"{row['document']:,}",
                f"{row['tokens']:,}",
                _number(row.get("loss")),
                _number(row.get("bits_per_byte")),
                str(row.get("text", "–")),
            ]
            for row in chosen
        ]
        of_tokens = f" of {_FEWEST_TOKENS} tokens or more" if long else ""
        title = f"{called(name)} at step {found.step:,}: {len(rows):,} documents; the largest losses{of_tokens}"
        parts.append(details(title, table(_OF_DOCUMENT, cells, words=("begins with",)), is_open=not parts))
    return joined(parts)


_OF_DOCUMENT = ("document", "tokens", "loss", "bits a byte", "begins with")


def _loss(row: Mapping[str, Any]) -> float:
    value = row.get("loss")
    return float("inf") if value is None else value  # not finite


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def samples(found: Found) -> Markup:
    """Return the newest samples, the last step first."""
    steps = sorted({row["step"] for row in found.samples}, reverse=True)
    parts = [
        details(
            f"Step {step:,}",
            *(element("pre", row["text"], tabindex=0) for row in found.samples if row["step"] == step),
            is_open=step == steps[0],
        )
        for step in steps[:_MOST_SAMPLES]
    ]
    if left := len(steps) - _MOST_SAMPLES:
        parts += [element("p", f"{left:,} earlier steps are in samples/.", class_="note")] if left > 0 else []
    return joined(parts)
