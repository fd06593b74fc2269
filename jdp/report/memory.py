"""What a device holds under each candidate, as a section of a page: bars by class with its memory, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from jdp.base.formatting import format_bytes
from jdp.foresight.forecast import Estimate
from jdp.foresight.memory.peak import CLASSES, Memory
from jdp.foresight.memory.zero_formula import zero_bytes
from jdp.report import page as look
from jdp.report.bars import Bar, binary_unit, stacked_bars
from jdp.report.page import Markup, details, element, joined, key, paragraphs, table

_COLOURS = dict(
    zip(
        CLASSES,
        (look.BLUE, look.VERMILION, look.GREEN, look.SKY, look.ORANGE, look.PURPLE, look.GREY, look.PALE),
        strict=True,
    )
)


def memory_bars(estimates: Sequence[tuple[str, Estimate]], chosen: str | None) -> Markup:
    """Return the section's body."""
    held = [(name, estimate, estimate.memory) for name, estimate in estimates if estimate.memory is not None]
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
    peaks = [_peak(name, memory, is_open=name == chosen) for name, _, memory in held]
    known = ((name, estimate.headroom) for name, estimate, _ in held)
    tight = [f"{name} {each.words}." for name, each in known if each is not None and (each.fraction or not each.fits)]
    return joined([figure, paragraphs(tight), _by_class(held), *peaks, _closed_form(held)])


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
        *((f"most {name} at any time", [m.most.get(name) for m in memories], None) for name in _NOT_AT_THE_PEAK),
    ]
    shown = [(words, row, kind) for words, row, kind in counts if any(row)]
    return table(
        ["memory of a device", *(name for name, _, _ in held)],
        [[words, *("?" if count is None else format_bytes(count) for count in row)] for words, row, _ in shown],
        classes=[kind for _, _, kind in shown],
    )


_NOT_AT_THE_PEAK = ("gradients", "working", "activations")
"""Classes that may hold more at another time than the peak."""


def _peak(name: str, memory: Memory, *, is_open: bool) -> Markup:
    """Return the list of the largest temporaries at the peak."""
    at = f" at {memory.at}" if memory.at else ""
    saved = f"; {format_bytes(memory.saved)} of the activations are kept for the backward pass" if memory.saved else ""
    rows = [
        [
            f"{one.dtype}[{','.join(map(str, one.dims))}]",
            f"{one.count}",
            format_bytes(one.bytes),
            one.role,
            one.source or "–",
        ]
        for one in memory.largest
    ]
    if not rows:
        return Markup()
    listed = table(("array", "how many", "together", "what", "written at"), rows, words=("what", "written at"))
    return details(f"{name}: the largest temporaries at the peak{at}{saved}", listed, is_open=is_open)


def _closed_form(held: Sequence[tuple[str, Estimate, Memory]]) -> Markup:
    """Return a table of the paper's accounting for the same model, devices and strategies."""
    rows = dict[str, list[str]]()
    for _, estimate, memory in held:
        if estimate.parameters:
            row = zero_bytes(estimate.parameters, estimate.shards, estimate.strategy)
            at_peak = memory.parameters + memory.gradients + memory.optimizer + memory.working
            cells = (row.parameters, row.gradients, row.optimizer, row.total, at_peak)
            rows.setdefault(estimate.strategy, [estimate.strategy, *map(format_bytes, cells)])
    if not rows:
        return Markup()
    headers = ("strategy", "weights", "gradients", "optimizer", "together", "at the peak of this step")
    return joined([element("p", _PAPER, class_="note"), table(headers, [*rows.values()])])


_PAPER = (
    "Beside it the closed form of model state (Rajbhandari et al. 2019, section 3: 2 + 2 + 12 bytes a parameter, "
    "shared by the devices of the data axis). jdp keeps fp32 master weights as parameters, where the paper counts them "
    "as optimizer state, and a working copy of them in the step; at the peak not all gradients need be there."
)
