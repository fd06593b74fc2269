"""The times of a run's saves and restarts, from its flight recorders, for `jdp plan --mtbf`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Times of a run, in seconds; None if it has none.

    Attributes:
        stall: the median time for which a save stopped training, without each visit's first, which makes buffers.
        restart: from the start of a resuming process to the end of its first step, which compiles.
    """

    stall: float | None
    restart: float | None


def measured(events: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the times of saves and restarts of one process."""
    first: list[float] = []
    later: list[float] = []
    restarts: list[float] = []
    began: float | None = None
    saved = resumed = False
    for event in events:
        match event:
            case {"event": "start", "time": time}:
                began, saved, resumed = event.get("began", time), False, False
            case {"event": "resumed", "step": int(step)}:
                resumed = step > 0
            case {"event": "step", "time": time} if resumed and began is not None:
                restarts.append(time - began)
                resumed = False
            case {"event": "end", "doing": "save", "seconds": int() | float() as seconds}:
                (later if saved else first).append(float(seconds))
                saved = True
            case _:
                pass
    saves = later or first
    return Measured(median(saves) if saves else None, median(restarts) if restarts else None)
