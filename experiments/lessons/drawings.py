"""Pictures of the lessons other than curves: shards of arrays, heat maps, lanes of time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import NamedSharding
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from jdp.report.charts import SERIES


def draw_shards(panels: Sequence[Axes], title: str, places: Sequence[NamedSharding], shapes: Sequence[tuple]) -> None:
    """Draw x, w and y, each part in the colour of the first device that has it, with the devices' numbers."""
    for panel, name, shape, place in zip(panels, "xwy", shapes, places, strict=True):
        parts: dict[tuple[int, ...], list[int]] = {}
        for device, (rows, columns) in place.devices_indices_map(shape).items():
            parts.setdefault((*rows.indices(shape[0])[:2], *columns.indices(shape[1])[:2]), []).append(device.id)
        for (top, bottom, left, right), ids in parts.items():
            colour, text = (
                SERIES[ids[0] % len(SERIES)],
                ",".join(map(str, ids)) if len(ids) < place.num_devices else "all",
            )
            panel.add_patch(Rectangle((left, top), right - left, bottom - top, color=colour, alpha=0.6))
            panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=8)
        panel.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[], yticks=[], title=f"{name}, {title}")


def heat(panel: Axes, title: str, values: np.ndarray, paths: Sequence[str]) -> None:
    panel.pcolormesh(values, cmap="Blues", vmin=0, vmax=1.4)
    for (row, column), value in np.ndenumerate(values):
        panel.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=7, color="black")
    panel.set(title=title, xlabel="device", yticks=np.arange(len(paths)) + 0.5, yticklabels=paths)
    panel.invert_yaxis()


def lanes(panel: Axes, title: str, syncs: dict[str, list[Any]], total: int, k: int) -> None:
    for microbatch in range(k):
        panel.broken_barh([(microbatch * total, 0.97 * total)], (-0.4, 0.8), color=SERIES[-1])
    for lane, each in enumerate(syncs.values(), 1):
        for sync in each:
            panel.broken_barh([(sync.start, sync.end - sync.start)], (lane - 0.4, 0.8), color=SERIES[sync.bucket % 6])
            panel.plot([sync.ready] * 2, [lane - 0.45, lane + 0.45], color=SERIES[sync.bucket % 6], lw=1)
    panel.set(title=title, xlabel="FLOPs", yticks=range(len(syncs) + 1), yticklabels=["microbatches", *syncs])
    panel.invert_yaxis()
