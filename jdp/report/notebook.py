"""What a notebook shows of a plan, a state, its placements, and of what `jdp.foresee` and `jdp.verify` return.

`fragment` draws each with the parts of the pages (`plan_page.py`, `memory.py`, `times.py`, `traffic.py`). It works on
what is known of arrays without reading them (`core/sharding/leaf_table.py`): nothing is computed, and nothing leaves a
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jdp.base.formatting import format_bytes
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, factors
from jdp.core.sharding.leaf_table import Leaf, leaf_table, leaves_of
from jdp.core.sharding.placement_list import Placements
from jdp.core.state import TrainState
from jdp.foresight.any_step.forecast import StepForecast
from jdp.foresight.forecast import PlanReport
from jdp.foresight.step_report import StepReport
from jdp.foresight.verify import Report
from jdp.report import page as look
from jdp.report.bars import Bar, binary_unit, stacked_bars
from jdp.report.charts import SERIES
from jdp.report.memory import memory_bars
from jdp.report.page import Markup, details, element, key, paragraphs, table
from jdp.report.plan_page import answer, tables
from jdp.report.timeline import lanes
from jdp.report.times import times
from jdp.report.traffic import findings, traffic

MOST_LEAVES = 120
"""Rows of a table of leaves; of more, those in the middle are left out."""
_MOST_RECTANGLES = 600


@singledispatch
def fragment(shown: object) -> str:
    """Return HTML for a notebook: a part of a page that stands alone, without scripts."""
    raise TypeError(f"A plan, a state, placements and reports are drawn; given a {type(shown).__name__}. Print it.")


@fragment.register
def _(plan: Plan) -> str:
    row = plan.row
    sharded = f"sharded over {DATA}" if row.shard_state else "replicated"
    reduced = "reduced once a step"
    if row.shard_state:
        reduced = f"reduce-scattered {'at each microbatch' if row.reduce_each_microbatch else 'once a step'}"
    gathered = {"never": "–", "step": "gathered once a step", "use": "gathered at each use"}[row.gather]
    words = [
        ("parameters", sharded),
        ("optimizer state", sharded if plan.offload is None else f"{sharded}, in the hosts’ memory"),
        ("gradients", reduced),
        ("working copy of the parameters", gathered),
        ("rows of a batch", f"split into {plan.batch_shards}"),
        ("replicated all the same", f"parameters of fewer than {plan.min_shard_size:,} elements"),
        *((f"rule for {pattern}", f"{spec}") for pattern, spec in plan.rules),
    ]
    heading = element("p", element("strong", str(plan)))
    return look.fragment(heading, _mesh(plan.mesh), table(("what", "how"), words, words=("how",)))


@fragment.register
def _(state: TrainState) -> str:
    leaves = leaves_of(state)
    return look.fragment(element("p", element("strong", "TrainState")), _parts(leaves), _leaves(leaves))


@fragment.register
def _(placements: Placements) -> str:
    return look.fragment(_parts(placements.leaves), _leaves(placements.leaves))


@fragment.register
def _(forecast: PlanReport) -> str:
    choice = forecast.choice
    estimates = [(estimate.name, estimate) for estimate in forecast.estimates]
    chosen = [(name, estimate) for name, estimate in estimates if estimate is choice]
    sent = [(name, estimate.report) for name, estimate in chosen if estimate.report is not None]
    name = None if choice is None else choice.name
    parts = [
        element("p", f"{forecast.devices} devices, {forecast.target}. Compiled, not run."),
        answer(forecast),
        tables(forecast),
        details("What a device holds", memory_bars(estimates, name), is_open=True),
    ]
    if choice is not None:
        parts += [
            details(f"Where a step’s time goes under {name}", times(chosen, name)),
            details(f"What a device sends under {name}", traffic(sent, name)),
        ]
    return look.fragment(*parts)


@fragment.register
def _(report: StepReport) -> str:
    kind = "answer none" if report.kept is False else "answer"
    answered = element("div", element("p", element("strong", report.verdict)), paragraphs(report.schedule), class_=kind)
    return look.fragment(element("p", report.heading), answered, *_read_off(report))


def _read_off(report: StepReport) -> list[Markup]:
    """Draw what a step sends, by kind or by source line; and of a step of any kind what it holds and waits for."""
    if isinstance(report, Report):
        return [traffic([(report.strategy, report)], None)]
    assert isinstance(report, StepForecast)
    time = report.timeline
    drawn = [] if time is None else [lanes(time, time.step_seconds or 1e-9, _MOST_RECTANGLES)]
    return [findings(report), *drawn, _text_table(report.held_table()), _text_table(report.sent_table())]


def _text_table(rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table of words, its headings in the first row."""
    headers, *others = rows
    return table(headers, others, words=headers)


# Leaves.


def _leaves(leaves: Sequence[Leaf]) -> Markup:
    return _text_table(leaf_table(leaves, MOST_LEAVES))


def _parts(leaves: Sequence[Leaf]) -> Markup:
    """Draw what a device holds, by the parts of the tree."""
    sizes = dict[str, int]()
    for leaf in leaves:
        part = leaf.path.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + leaf.bytes_per_device
    colours = {part: SERIES[i % len(SERIES)] for i, part in enumerate(sizes) if sizes[part]}
    total = sum(sizes.values())
    if not total:
        return Markup()
    bar = Bar("a device", sizes, format_bytes(total))
    described = "Bytes at rest on a device, by part; the table has the same."
    picture = stacked_bars([bar], colours, *binary_unit(total), described)
    keys = [key(part, colour) for part, colour in colours.items()]
    return element("figure", picture, element("figcaption", *keys), class_="picture")


# A mesh.

_SIDE, _GAP, _MOST_ROWS, _MOST_COLUMNS = 34, 3, 16, 32


def _mesh(mesh: Mesh) -> Markup:
    """Draw the devices, the last axis to the right, the others downwards; a colour is a host."""
    devices = np.asarray(mesh.devices).reshape(-1, mesh.devices.shape[-1])
    rows, columns = min(len(devices), _MOST_ROWS), min(devices.shape[1], _MOST_COLUMNS)
    cells = [_cell(devices[row, column], row, column) for row in range(rows) for column in range(columns)]
    width, height = ((_SIDE + _GAP) * count for count in (columns, rows))
    picture = element("svg", *cells, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img")
    *down, across = mesh.axis_names
    words = f"{factors(mesh.shape)}: {across} to the right"
    words += f", {' and '.join(map(str, down))} downwards" if down else ""
    left_out = math.prod(devices.shape) - rows * columns
    words += f"; {left_out:,} devices more are not drawn" if left_out else ""
    caption = element("figcaption", f"{words}. Numbers are the devices’, colours their hosts.")
    return element("figure", element("div", picture, class_="wide"), caption)


def _cell(device: Any, row: int, column: int) -> Markup:
    x, y = (_SIDE + _GAP) * column, (_SIDE + _GAP) * row
    colour = SERIES[device.process_index % len(SERIES)]
    box = element("rect", x=x, y=y, width=_SIDE, height=_SIDE, rx=4, fill=colour)
    at = {"x": x + _SIDE // 2, "y": y + _SIDE // 2 + 4}
    number = element("text", f"{device.id}", text_anchor="middle", font_size=11, fill="#fff", **at)
    return element("g", element("title", str(device)), box, number)
