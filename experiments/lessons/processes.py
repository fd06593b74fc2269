"""Processes of one cluster, for the lessons that measure a real exchange: each has one CPU device, or its GPUs.

Also: the time of an all-reduce between them, α + bytes / β; and of a step that overlaps several with its backward pass.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from clock import in_turns
from jax import NamedSharding, P
from jax.sharding import Mesh
from narration import collected_notices

from jdp.base.machine import visible_gpus
from jdp.base.notices import notice_anywhere
from jdp.launch import launch

_GIVEN = "JDP_LESSON_GIVEN"


def in_processes(lesson: str, processes: int, **given: Any) -> Any:
    """Run a lesson as several processes of a cluster; return process 0's `measure_here(**given)`, a JSON value.

    `lesson` is its `__file__`, which ends with `if __name__ == "__main__" and not is_one_of_several(measure_here)`.
    """
    environment = dict(os.environ)
    if len(visible_gpus(environment)) < processes:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        environment[_GIVEN] = json.dumps({"file": str(file), "given": given})
        if code := launch([sys.executable, lesson], processes, environment=environment):
            raise SystemExit(code)  # `launch` has shown the last lines of the process that failed
        answer = json.loads(file.read_text("utf-8"))
    for message in answer["reported"]:
        notice_anywhere(message)
    return answer["found"]


def is_one_of_several(measure_here: Callable[..., Any]) -> bool:
    """Do the part of a process that `in_processes` started; return False in the lesson itself."""
    if _GIVEN not in os.environ:
        return False
    task = json.loads(os.environ[_GIVEN])
    with collected_notices() as reported:
        found = measure_here(**task["given"])
    if jax.process_index() == 0:
        Path(task["file"]).write_text(json.dumps({"found": found, "reported": reported}), "utf-8")
    return True


def spread(block: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return a global array in which every device has `block` as its own rows."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback((mesh.size * len(block), *block.shape[1:]), sharding, lambda _: block)


def all_reduce_seconds(sizes: Sequence[int], mesh: Mesh, rounds: int) -> list[tuple[int, float]]:
    """Return the least time of an all-reduce of each size in bytes; ten per call, to spread the cost of the call."""

    def ten(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, y: jax.lax.psum(y, "data") * 0.5, x)

    run = jax.jit(jax.shard_map(ten, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    sent = {str(size): spread(np.ones(size // 4, np.float32), mesh) for size in sizes}
    seconds = in_turns({size: lambda x=x: run(x) for size, x in sent.items()}, rounds)
    return [(int(size), float(each[:, 2].min()) / 10) for size, each in seconds.items()]


def fit(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return α in seconds and β in bytes a second for (bytes, seconds), by least squares of the relative errors."""
    sizes, times = np.array(measured).T
    alpha, slowness = np.linalg.lstsq(np.stack([1 / times, sizes / times], 1), np.ones(len(times)))[0]
    return max(float(alpha), 1e-6), 1 / float(slowness)


def simulate(buckets: list[int], backward: float, alpha: float, beta: float) -> float:
    """Return seconds of an overlapped step: gradients come at an even pace, one bucket travels at a time."""
    ready = done = 0.0
    for size in buckets:
        ready += backward * size / sum(buckets)
        done = max(ready, done) + alpha + size / beta
    return done
