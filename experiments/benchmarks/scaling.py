"""How what jdp costs grows with size: curves, not points.

    python experiments/benchmarks/scaling.py [--curves compile,plan,checkpoint,dispatch,feed] [--full] [--json]

Each point is a process of its own, and its number its processor time (all threads), which other programs touch less
than the clock:

- compile: seconds to trace, lower and compile the training step of gpt-nano (one CPU device) over its layers, scanned
  and unrolled.
- plan: seconds that `jdp plan` takes for gpt-nano under zero3, over H100s (needs the extra `aot`).
- checkpoint: GiB a processor second saved and restored, over GiB of float32 state in memory (`checkpoint.py`).
- dispatch: host time of a call against a jitted function of the flat leaves, over leaves (`dispatch.py`).
- feed: milliseconds to read and transfer a batch of 16 rows of the quickstart's text, over tokens a row.

`--full` has the ends of the curves too: 96 layers, 4096 devices, 4 GiB. `growth` is the exponent of the power of the
size that the ends of a curve have: 0 does not grow, 1 is linear.

Promised: dispatch at most 1.10; restoring at least as fast as saving.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHILD = "--as-child"
POINTS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "compile scanned": ("layers", [4, 16, 48], [4, 8, 16, 32, 64, 96]),
    "compile unrolled": ("layers", [4, 16], [4, 8, 16, 32, 64, 96]),
    "plan": ("H100s", [8, 512], [8, 64, 512, 4096]),
    "checkpoint": ("GiB", [0.0625, 0.25], [0.0625, 0.25, 1, 4]),
    "dispatch": ("leaves", [49, 394, 1999], [49, 199, 394, 799, 1999]),
    "feed": ("tokens", [128, 1024, 8192], [128, 512, 2048, 8192, 32768]),
}
"""Curve -> what it is over, the points, and those of `--full`."""


def compile_step(layers: int, *, scan: bool) -> dict[str, float]:
    """Compile the quickstart's step with a number of layers."""
    from jdp.base.machine import choose_platform
    from jdp.experiment.assembly import Assembly
    from jdp.experiment.file import load

    keys = {"devices": "1", "strategy": "ddp", "model.layers": str(layers), "model.scan": str(scan).lower()}
    experiment = load(Path(__file__).parents[1] / "quickstart.toml", keys)
    choose_platform(1)
    assembly = Assembly.on_devices(experiment)
    state, batch = assembly.abstract_state(), assembly.abstract_batch()
    start = time.process_time()
    lowered = assembly.train_step.lower(state, batch)
    traced = time.process_time()
    lowered.compile()
    return {"seconds": time.process_time() - start, "trace": traced - start}


def plan(devices: int) -> dict[str, float]:
    """Run `jdp plan` for gpt-nano under zero3."""
    import contextlib
    import io

    from jdp.cli.main import main

    words = ["plan", str(Path(__file__).parents[1] / "quickstart.toml"), "--target", f"h100:{devices // 8}x8"]
    words += ["--strategy", "zero3", "--train.batch_size", str(devices), "--no-cache", "--json"]
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    return {"seconds": time.process_time() - start}


def checkpoint(gib: float) -> dict[str, float]:
    """Save and restore a state in memory."""
    from checkpoint import throughput

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = throughput(Path(folder), gib, 2)
    return {name: found[name]["gib_per_cpu_s"] for name in ("save", "restore")}


def dispatch(leaves: int) -> dict[str, float]:
    """Call a step of a toy with so many leaves."""
    from dispatch import measure

    found = measure("ddp", 400, (leaves - 4) // 15)
    assert found["leaves"] == leaves, found["leaves"]
    return {"ratio": found["ratio"]["median"], "us": found["call"]["jdp"]["median_ms"] * 1e3}


def feed(tokens: int) -> dict[str, float]:
    """Read and transfer batches of the quickstart's text."""
    import jax

    from jdp.base.machine import choose_platform
    from jdp.experiment.assembly import Assembly
    from jdp.experiment.file import load

    keys = {"devices": "1", "strategy": "ddp", "model.context": str(tokens), "data.length": str(tokens)}
    choose_platform(1)
    assembly = Assembly.on_devices(load(Path(__file__).parents[1] / "quickstart.toml", keys))
    with assembly.feed(assembly.data.train, seed=0, shuffle=True) as batches:
        jax.block_until_ready(next(batches))
        start, count = time.process_time(), 50
        for _ in range(count):
            jax.block_until_ready(next(batches))
        return {"ms": (time.process_time() - start) / count * 1e3}


CURVES: dict[str, Callable[..., dict[str, float]]] = {
    "compile scanned": lambda layers: compile_step(layers, scan=True),
    "compile unrolled": lambda layers: compile_step(layers, scan=False),
    "plan": plan,
    "checkpoint": checkpoint,
    "dispatch": dispatch,
    "feed": feed,
}


def point(curve: str, size: Any) -> dict[str, float]:
    """Measure one point in a process of its own."""
    command = [sys.executable, __file__, CHILD, curve, json.dumps(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{curve} at {size} left with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def growth(rows: list[dict[str, Any]], name: str) -> float:
    """Return the exponent of a power of the size that the ends of a curve have: 1 is linear."""
    first, last = rows[0], rows[-1]
    return math.log(last[name] / first[name]) / math.log(last["size"] / first["size"])


def from_end_to_end(curve: str, made: dict[str, Any]) -> str:
    """Return a curve's first number at both ends, for the README's table."""
    first, last, name = made["rows"][0], made["rows"][-1], next(iter(made["growth"]))
    return f"{curve} {first['size']}–{last['size']} {made['over']}: {first[name]:.3g}–{last[name]:.3g} {name}"


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        print(json.dumps(CURVES[sys.argv[2]](json.loads(sys.argv[3]))))
        return
    from measure import Row, finish, parser

    options = parser(__file__, __doc__)
    options.add_argument("--curves", default="compile,plan,checkpoint,dispatch,feed", metavar="NAMES")
    options.add_argument("--full", action="store_true", help="the ends of the curves too: an hour")
    chosen = options.parse_args()
    found: dict[str, Any] = {}
    for curve, (over, few, many) in POINTS.items():
        if curve.split()[0] in chosen.curves.split(","):
            rows = [{"size": size, **point(curve, size)} for size in (many if chosen.full else few)]
            found[curve] = {"over": over, "rows": rows, "growth": {n: growth(rows, n) for n in rows[0] if n != "size"}}
            if not chosen.json:
                shown = "; ".join(
                    f"{row['size']}: " + ", ".join(f"{n} {row[n]:.3g}" for n in row if n != "size") for row in rows
                )
                print(f"{curve} over {over}: {shown}", flush=True)
    ends = [from_end_to_end(curve, made) for curve, made in found.items()]
    finish({"curves": found}, chosen.json, Row("what grows, from end to end, by processor time", "; ".join(ends)))


if __name__ == "__main__":
    main()
