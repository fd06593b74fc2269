"""Warns about a straggler, a process whose host makes the others wait, and about its cost.

A collective begins when the last process reaches it. A process is late if the devices have finished all their work
before it dispatches the next step. All devices are then idle during its host's time since the results of the last step,
waiting for data included. A host that runs ahead of its devices costs nothing, however long it takes.

1. Each process adds up the seconds in which it was late, over a window of steps.
2. At the end of a window it publishes the mean, with the previous window's, in the coordination service's store.
3. Process 0 compares the previous window, which all have published by then. No process waits for another.

Slow devices are not detected: the device reaches the collective late, but its host does not.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jdp.core.cluster.barrier import Store, coordination_client

COSTS = 0.05  # share of a step from which there is a warning
AGAIN = 2  # windows in a row with the same latest process before it is named


@dataclass(frozen=True)
class Straggler:
    """A process that is later than the others."""

    process: int  # its index
    seconds: float  # lateness of its host before a step
    others: float  # the median of the others
    step_seconds: float  # the time of a step

    @property
    def cost(self) -> float:
        """The largest share of a step for which the others wait: its devices' own time may hide a part."""
        return min((self.seconds - self.others) / self.step_seconds, 1.0)

    def __str__(self) -> str:
        return (
            f"process {self.process} is late: its host takes {self.seconds:.3g} s before each step of "
            f"{self.step_seconds:.3g} s, the others' {self.others:.3g} s, and all wait for it, up to {self.cost:.0%} "
            "of the time: look at its data, its disk and what else runs there"
        )


def straggler(late: Mapping[int, float], step_seconds: float) -> Straggler | None:
    """Return the latest process if it costs more than `COSTS` of a step."""
    if len(late) < 2 or step_seconds <= 0:
        return None
    process = max(late, key=late.__getitem__)
    others = statistics.median(seconds for other, seconds in late.items() if other != process)
    found = Straggler(process, late[process], others, step_seconds)
    return found if found.cost > COSTS else None


class HostTimes:
    """Measures the lateness of this process' host; process 0 also finds the straggler."""

    def __init__(self, every: int) -> None:
        self._every, self._client = every, coordination_client()
        self.restart()
        self._before: tuple[int, float, float] = (-1, 0.0, 0.0)
        self._suspect: tuple[int | None, int] = (None, 0)
        self._named: int | None = None
        self.found: Straggler | None = None

    def results(self) -> None:
        """Begin the host's time: the results of a step have arrived, or a common activity has ended."""
        self._results = time.perf_counter()

    def dispatches(self, values: Any) -> None:
        """End the host's time before a step is dispatched."""
        idle = values is None or all(leaf.is_ready() for leaf in jax.tree.leaves(values))
        self._late += (time.perf_counter() - self._results) * idle
        self._steps += 1

    def restart(self) -> None:
        """Discard the current window, which has more than steps."""
        self._late, self._steps = 0.0, 0
        self._began = self._results = time.perf_counter()

    def after(self, done: int) -> str | None:
        """Publish a window at its end; return a line if the straggler has changed for `AGAIN` windows."""
        if self._client is None or done % self._every or not self._steps:
            return None
        window, seconds = done // self._every, time.perf_counter() - self._began
        own = (window, self._late / self._steps, seconds / self._steps)
        earlier, self._before = self._before, own
        self._client.key_value_set(f"jdp/late/{jax.process_index()}", json.dumps([earlier, own]), allow_overwrite=True)
        self.restart()
        if jax.process_index() or earlier[0] < 0:
            return None
        windows = {rank: json.loads(text) for rank, text in Store(self._client, "jdp", ()).all("late").items()}
        late = {rank: late for rank, own in windows.items() for number, late, _ in own if number == earlier[0]}
        found = self.found = straggler(late, earlier[2])
        process, (suspect, times) = found.process if found else None, self._suspect
        self._suspect = (process, times + 1 if process == suspect else 1)
        if process == self._named or self._suspect[1] < AGAIN:
            return None
        before, self._named = self._named, process
        return str(found) if found else f"process {before} is no longer later than the others"
