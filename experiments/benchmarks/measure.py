"""Shared by the benchmarks: a fair clock, ratios with their spread, and a description of the machine.

Other programs use this machine too, so one number means little. In each round the contenders take turns, in an order
that rotates, and a ratio is formed: a slow moment of the machine slows both of its sides. There are two clocks: wall
time, and the processor time of all threads of this process, which does not count waiting for other programs.
"""

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.base.machine import choose_platform


@dataclass(frozen=True)
class Times:
    """Seconds of one contender, round by round.

    Attributes:
        wall: until the results were ready.
        cpu: processor time of all threads until then.
        call: processor time of the calling thread until the call returned: Python and dispatch.
    """

    wall: np.ndarray
    cpu: np.ndarray
    call: np.ndarray


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, Times]:
    """Time each contender once a round; a contender is a function that starts work and returns its (pending) arrays."""
    names, rows = list(contenders), {name: [] for name in contenders}
    gc.disable()  # as in timeit: a collection would slow whichever contender runs
    for i in range(-warmup, rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            row = _timed(contenders[name])
            if i >= 0:
                rows[name].append(row)
    gc.enable()
    return {name: Times(*np.array(row).T) for name, row in rows.items()}


def _timed(start: Callable[[], Any]) -> tuple[float, float, float]:
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    pending = start()
    thread = time.thread_time() - thread
    jax.block_until_ready(pending)
    return time.perf_counter() - wall, time.process_time() - cpu, thread


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Return least, median and quartiles, in milliseconds."""
    least, low, median, high = np.quantile(seconds, (0, 0.25, 0.5, 0.75)) * 1e3
    return {"least_ms": least, "median_ms": median, "quartile_1_ms": low, "quartile_3_ms": high}


def ratio(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return `ours` / `theirs`: the median and quartiles of the rounds' ratios, and the ratio of the least times.

    `error` is half the 95% interval of the median, by bootstrap over the rounds.
    """
    each = ours / theirs
    low, median, high = np.quantile(each, (0.25, 0.5, 0.75))
    draws = np.random.default_rng(0).choice(each, (2000, each.size))
    error = np.ptp(np.quantile(np.median(draws, axis=1), (0.025, 0.975))) / 2
    least = ours.min() / theirs.min()
    return {"median": median, "error": error, "quartile_1": low, "quartile_3": high, "of_least": least}


def show(r: dict[str, float]) -> str:
    """Return a ratio as text: `1.012 ± 0.004 (quartiles 0.99-1.04, of least times 1.003)`."""
    quartiles = f"quartiles {r['quartile_1']:.2f}-{r['quartile_3']:.2f}"
    return f"{r['median']:.3f} ± {r['error']:.3f} ({quartiles}, of least times {r['of_least']:.3f})"


@dataclass(frozen=True)
class Row:
    """A row of the README's table, which `all.py` makes."""

    measures: str  # the quantity, and the comparison
    result: str  # the numbers
    promised: str = "–"  # the bound that jdp promises; "–": none


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    gpus = {"gpu": jax.devices()[0].device_kind} if jax.default_backend() == "gpu" else {}
    return gpus | {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def finish(result: dict[str, Any], as_json: bool, row: Row) -> None:
    """Print the machine; or with `--json` one object of the result, the row of the README's table and the machine."""
    result = {**result, "row": asdict(row), "machine": machine()}
    if as_json:
        print(json.dumps(result, default=float))
    else:
        print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))


def parser(program: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with `--json`, whose help is the program's docstring; choose JAX's platform."""
    choose_platform()
    formatter = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(Path(program).name, description=documentation, formatter_class=formatter)
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made
