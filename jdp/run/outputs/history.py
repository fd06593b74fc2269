"""The events of a run, visit by visit: `history.jsonl` in its folder, which is only appended to.

One JSON object a line, each with "time" (Unix seconds), "event" and "step" (batches consumed):

| event            | when                         | further keys                                             |
|------------------|------------------------------|----------------------------------------------------------|
| started, resumed | before a visit's first step  | platform, device, devices, hosts, processes, jax, python |
|                  |                              | changed, if it was: key of the experiment: [before, now] |
| finished         | all steps are done           | stopped_early                                            |
| stopped          | a signal, after saving       | signal                                                   |
| failed           | an error, or a second Ctrl-C | error                                                    |

A visit that was killed, or whose machine was lost, has no last line: the next one's "resumed" follows at once. Metrics
forget the steps after the checkpoint from which a visit resumes; this file does not.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jdp.base.toml import cut
from jdp.experiment.schema.experiment import Experiment
from jdp.run.progress import Progress
from jdp.run.signals import Stopped

HISTORY = "history.jsonl"
_LONGEST_ERROR = 1000


@contextlib.contextmanager
def recorded(
    folder: Path,
    experiment: Experiment,
    progress: Progress,
    mesh: Mesh,
    changed: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> Generator[None]:
    """Record the beginning of a visit, and how it ends when it leaves `with`. Process 0 writes.

    A run that was finished before the visit is left as it is.
    """
    if progress.finished(experiment) or jax.process_index() != 0:
        yield
        return
    begun = devices_of(mesh) | ({"changed": changed} if changed else {})
    _append(folder, "resumed" if progress.done else "started", progress.done, **begun)
    try:
        yield
    except Stopped as request:
        _append(folder, "stopped", progress.done, signal=request.summary["stopped"])
        raise
    except BaseException as error:
        with contextlib.suppress(OSError):  # the error may be that the disk is full
            _append(folder, "failed", progress.done, error=cut(str(error) or type(error).__name__, _LONGEST_ERROR))
        raise
    _append(folder, "finished", progress.done, stopped_early=progress.stops_early(experiment))


def read_history(file: Path) -> list[dict[str, Any]]:
    """Return the events of a history.jsonl in their order; damaged lines are left out. No file: no events."""
    events: list[dict[str, Any]] = []
    for line in file.read_bytes().split(b"\n") if file.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int:
                events.append(event)
    return events


def _append(folder: Path, event: str, step: int, **values: Any) -> None:
    """Append a line. After a killed writer's half-written line it begins a new one."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, "step": step, **values}) + "\n"
    with (folder / HISTORY).open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(line.encode())


def devices_of(mesh: Mesh) -> dict[str, Any]:
    """Return the devices and versions of a visit."""
    devices = list(mesh.devices.flat)
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
