"""What a device holds under each candidate, as a section of a page: bars by class with its memory, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from jdp.base.formatting import format_bytes
from jdp.foresight.forecast import Estimate
from jdp.foresight.memory import CLASSES, Memory
from jdp.report import page as look
from jdp.report.bars import Bar, binary_unit, stacked_bars
from jdp.report.page import Markup, element, joined, key, paragraphs, table

_COLOURS = dict(zip(CLASSES, (look.BLUE, look.GREEN, look.PURPLE, look.GREY, look.ORANGE, look.PALE), strict=True))


def memory_bars(estimates: Sequence[tuple[str, Estimate]]) -> Markup:
    """Return the section's body."""
    held = [
        (name, estimate, estimate.memory) for name, estimate in estimates if estimate.memory and estimate.memory.total
    ]
    if not held:
        return element("p", "No candidate compiled, so nothing is known.")
    keys = [key(CLASSES[name], _COLOURS[name]) for name in CLASSES if any(m.by_class()[name] for _, _, m in held)]
    most = max(max(memory.total, estimate.available_bytes or 0) for _, estimate, memory in held)
    picture = stacked_bars(
        [
            Bar(
                name, memory.by_class(), f"{format_bytes(memory.total)}{_FITS[estimate.fits]}", estimate.available_bytes
            )
            for name, estimate, memory in held
        ],
        _COLOURS,
        *binary_unit(most),
        described="Bytes of a device’s memory by class, for each candidate; the table below has the same numbers.",
    )
    limit = held[0][1].available_bytes
    dashed = "" if limit is None else f"; dashed: what a device has for it, {format_bytes(limit)}"
    caption = f"A device’s memory at the step’s peak{dashed}."
    figure = element("figure", picture, element("figcaption", *keys), element("figcaption", caption), class_="picture")
    known = ((name, estimate.headroom) for name, estimate, _ in held)
    tight = [f"{name} {each.words}." for name, each in known if each is not None and (each.fraction or not each.fits)]
    return joined([figure, paragraphs(tight), _by_class(held), _closed_form(held)])


_FITS = {True: ", fits", False: ", does not fit", None: ""}


def _by_class(held: Sequence[tuple[str, Estimate, Memory]]) -> Markup:
    """Return a table of bytes: a row for each class, a column for each candidate. Rows of zeros are left out."""
    memories = [memory for _, _, memory in held]
    limits = [estimate.available_bytes for _, estimate, _ in held]
    counts: list[tuple[str, list[int | None], str | None]] = [
        *((words, [memory.by_class()[name] for memory in memories], None) for name, words in CLASSES.items()),
        ("total", [memory.total for memory in memories], "total"),
        ("at rest beside it", [memory.outside for memory in memories], None),
        ("what a device has for it", [*limits], None),
    ]
    shown = [(words, row, kind) for words, row, kind in counts if any(row)]
    return table(
        ["memory of a device", *(name for name, _, _ in held)],
        [[words, *("?" if count is None else format_bytes(count) for count in row)] for words, row, _ in shown],
        classes=[kind for _, _, kind in shown],
    )


def _closed_form(held: Sequence[tuple[str, Estimate, Memory]]) -> Markup:
    """Return a table of the paper's accounting for the same model, devices and strategies."""
    rows = dict[str, list[str]]()
    for _, estimate, memory in held:
        if (row := estimate.closed_form) is not None:
            cells = (row.parameters, row.gradients, row.optimizer, row.total, memory.parameters + memory.optimizer)
            rows.setdefault(estimate.strategy, [estimate.strategy, *map(format_bytes, cells)])
    if not rows:
        return Markup()
    headers = ("strategy", "weights", "gradients", "optimizer", "together", "at rest here")
    return joined([element("p", _PAPER, class_="note"), table(headers, [*rows.values()])])


_PAPER = (
    "Beside it the closed form of model state (Rajbhandari et al. 2019, section 3: 2 + 2 + 12 bytes a parameter, "
    "shared by the devices of the data axis). jdp keeps fp32 master weights as parameters, where the paper counts them "
    "as optimizer state, at rest; the working copy and the gradients are among a step’s temporaries."
)
