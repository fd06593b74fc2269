"""The memory of a device under each candidate: bars by class against its capacity, and a table of the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup

from jdp.base.formatting import format_bytes
from jdp.foresight.forecast import Estimate
from jdp.foresight.memory import CLASSES, Memory
from jdp.report.charts import FAINT, INK, PAPER, SETTINGS, chart, inline
from jdp.report.page import COLOURS

Held = Sequence[tuple[str, Estimate, Memory]]

_HUES = ("blue", "green", "purple", "grey", "orange", "pale")
_COLOURS = {name: COLOURS[hue] for name, hue in zip(CLASSES, _HUES, strict=True)}
_FITS = {True: ", fits", False: ", does not fit", None: ""}
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FAR = 3.0  # times the longest bar: limits beyond it are not drawn, to keep bars visible
_ROOM = 1.18  # for words after the longest bar


def memory_section(estimates: Sequence[tuple[str, Estimate]]) -> dict[str, Any] | None:
    """Return the values of the template's macro `memory`; None if no candidate compiled."""
    held = [(name, each, each.memory) for name, each in estimates if each.memory and each.memory.total]
    if not held:
        return None
    longest = max(memory.total for _, _, memory in held)
    limit = held[0][1].available_bytes
    line = "" if limit is None else "; dashed: " if limit <= _FAR * longest else "; beyond the axis: "
    classes = [name for name in CLASSES if any(memory.by_class()[name] for _, _, memory in held)]
    counts: list[tuple[str, list[int | None], str]] = [
        *((CLASSES[name], [memory.by_class()[name] for _, _, memory in held], "") for name in classes),
        ("total", [memory.total for _, _, memory in held], "total"),
        ("at rest beside it", [memory.outside for _, _, memory in held], ""),
        ("memory for a step", [each.available_bytes for _, each, _ in held], ""),
    ]
    counts = [(words, row, kind) for words, row, kind in counts if any(row)]
    rooms = [(name, each.headroom) for name, each, _ in held if each.headroom is not None]
    return {
        "picture": _bars(held, longest),
        "legend": [(CLASSES[name], _COLOURS[name]) for name in classes],
        "limit": "" if limit is None else f"{line}the memory for a step, {format_bytes(limit)}",
        "tight": [f"{name} {room.words}." for name, room in rooms if room.fraction or not room.fits],
        "names": [name for name, _, _ in held],
        "rows": [
            [words, *("?" if count is None else format_bytes(count) for count in row)] for words, row, _ in counts
        ],
        "kinds": [kind for _, _, kind in counts],
        "closed_form": _closed_form(held),
    }


def _bars(held: Held, longest: int) -> Markup:
    """Draw a bar for each candidate, top down, with its limit as a line."""
    unit, unit_name = next((each for each in _UNITS if longest >= each[0]), _UNITS[-1])
    limits = {row: each.available_bytes for row, (_, each, _) in enumerate(held) if each.available_bytes is not None}
    near = {row: limit / unit for row, limit in limits.items() if limit <= _FAR * longest}
    with mpl.rc_context(SETTINGS):
        figure, [axes] = chart(height=0.75 + 0.42 * len(held))
        axes.set_xlim(0, _ROOM * max(longest / unit, *near.values(), 0.0))
        axes.set_ylim(len(held) - 0.5, -0.5)
        axes.set_yticks(range(len(held)), [name for name, _, _ in held])
        axes.tick_params(axis="y", colors=INK, length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(unit_name, color=FAINT)
        for row, (_, estimate, memory) in enumerate(held):
            begin = 0.0
            for name, count in memory.by_class().items():
                width = count / unit
                if width:
                    axes.barh(row, width, 0.66, begin, color=_COLOURS[name], edgecolor=PAPER, linewidth=0.6)
                begin += width
            limit = near.get(row, -1.0)
            if limit >= 0:
                axes.vlines(limit, row - 0.5, row + 0.5, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
            behind = limit if begin <= limit < begin + (1 - 1 / _ROOM) * axes.get_xlim()[1] else begin  # not across it
            label = f"{format_bytes(memory.total)}{_FITS[estimate.fits]}"
            axes.annotate(label, (behind, row), (6, 0), textcoords="offset points", va="center", color=INK)
        described = "Bytes of a device’s memory by class, for each candidate; the table below has the same numbers."
        return inline(figure, described)


def _closed_form(held: Held) -> list[list[str]]:
    """Return the paper's accounting for the same model, devices and strategies: a row for each strategy."""
    rows = dict[str, list[str]]()
    for _, estimate, memory in held:
        if (row := estimate.closed_form) is not None:
            cells = (row.parameters, row.gradients, row.optimizer, row.total, memory.parameters + memory.optimizer)
            rows.setdefault(estimate.strategy, [estimate.strategy, *map(format_bytes, cells)])
    return [*rows.values()]
