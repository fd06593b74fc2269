"""Communication overhead: does a data-parallel step wait for its all-reduce?

The claims people meet: synchronising gradients is the bottleneck; larger models scale better, because they compute
more.

A step is taken apart, and each part timed: forward pass, backward pass, the sum over devices, the update. FLOPs and
bytes are counted in the compiled programs. More parameters mean more of both, so the model's size cancels. The rows per
device decide: FLOPs grow with them, bytes do not. In a profile of the step, part of the apparent sending is waiting for
other devices. Last, `jdp.foresee` predicts the same for eight H100s.

    python experiments/lessons/communication_overhead.py [--picture FILE.svg]

With Ψ parameters: 6·Ψ FLOPs per row, 2(N-1)/N·4·Ψ bytes per step, so 3/4·N/(N-1)·rows FLOPs per byte. Times are
processor time over eight devices. `jdp train --profile` writes such a profile; `jdp plan` predicts an experiment's
step. The step has `partitioning="manual"`: each device runs these parts on its own rows.
"""

import functools
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from clock import in_turns
from devices import use_eight_devices
from narration import keep, parser, show, tell
from step_parts import programs, setup, total_loss

import jdp
from jdp.base.chips import GPUS
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.report.charts import chart

PARTS = ("forward", "backward", "sync", "update")
ROWS = (4, 16, 64, 256)  # a device


def measure(rows: int, rounds: int, **size: int) -> dict[str, float]:
    """Return a device's milliseconds of processor time for each part, its FLOPs, the bytes it sends."""
    step, state, batch = setup(rows, **size)
    mesh, text = step.plan.mesh, step.compile(state, batch).as_text()
    parts = {name: functools.partial(f, *given) for name, (f, given) in programs(mesh, state, batch["x"]).items()}
    seconds = in_turns(parts | {"step": lambda: step(state, batch)}, rounds, warmup=1)
    found = {name: 1e3 * float(each[:, 1].min()) / mesh.size for name, each in seconds.items()}
    found["sum"], found["ratio"] = (
        sum(found[each] for each in PARTS),
        found["sync"] / sum(found[each] for each in PARTS[:2]),
    )
    gradient = jax.jit(jax.grad(total_loss)).lower(jax.device_get(state.params), np.asarray(batch["x"])[:rows])
    found["FLOPs"] = gradient.compile().cost_analysis()["flops"]
    return found | {"bytes": total_wire_bytes(collectives(text))}


def profile(rows: int, steps: int, **size: int) -> dict[str, float]:
    """Return seconds of all operations on all devices, of the collectives, of waiting in them ("Rendezvous")."""
    (step, state, batch), found = setup(rows, **size), Counter[str]()
    jax.block_until_ready(step(state, batch))  # compiled before
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([step(state, batch) for _ in range(steps)])
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for event in (event for line in plane.lines for event in line.events):
                operation = str(dict(event.stats).get("hlo_op", ""))
                found["all"] += event.duration_ns / 1e9 * bool(operation)
                found["collectives"] += event.duration_ns / 1e9 * operation.startswith("all-reduce")
                found["waiting"] += event.duration_ns / 1e9 * (event.name == "Rendezvous")
    return dict(found)


def foreseen(rows: int, target: str, **size: int) -> tuple | None:
    """Return target, rows, ms of computing, sending and exposed sending, and the ratio; None without a compiler."""
    try:
        line = jdp.foresee(*setup(rows, **size), target, strategies=["ddp"]).estimates[0].timeline
    except ValueError as error:  # XLA's GPU compiler is not installed; the message has the command
        return print(error)
    times = (1e3 * each for each in (line.compute_seconds, line.communication_seconds, line.exposed_seconds))
    return target, rows, *times, line.communication_seconds / line.compute_seconds


def roofline(rows: int, width: int = 4096, devices: int = 8) -> dict[str, float]:
    """Return an H100's time to read, to send inside a host and to send between hosts, over its time to compute. A layer
    [width, width] in bf16 takes 2·rows·width² FLOPs and 2·(width² + 2·rows·width) bytes of memory per product; DDP's
    float32 gradients are sent. Each ratio is the chip's FLOPs per byte over those of the work."""
    chip, sends = GPUS["h100"], 0.75 * devices / (devices - 1) * rows
    peak = chip.matmul_flops["bf16"]
    work = {"memory": (rows * width / (width + 2 * rows), chip.memory_bandwidth)}
    work |= {"NVLink": (sends, chip.link_bandwidth), "InfiniBand": (sends, chip.network_bandwidth)}
    return {name: peak / bandwidth / flops_per_byte for name, (flops_per_byte, bandwidth) in work.items()}


def main(argv: list[str] | None = None) -> None:
    picture = parser(__file__, __doc__).parse_args(argv).picture
    jdp.keep_memory()  # else asking for memory costs more than the update
    use_eight_devices()
    found, n, psi = {rows: measure(rows, rounds=7) for rows in ROWS}, jax.device_count(), 4 * 512**2
    few, many = found[ROWS[0]], found[ROWS[-1]]
    columns = (*PARTS, "sum", "step", "ratio")
    headers = ("rows per device", *PARTS, "their sum", "jdp's step", "sync / (forward + backward)")
    said = f"""Sync takes nearly the same time for any number of rows, forward and backward grow with them: the ratio
        falls from {few["ratio"]:.2f} to {many["ratio"]:.2f}. The parts add up to the step, apart from other work on the
        cores."""
    show("Processor time of a device, ms", headers, [(rows, *map(found[rows].get, columns)) for rows in ROWS], said)
    flops, sent = np.array([(found[rows]["FLOPs"], found[rows]["bytes"]) for rows in ROWS]).T
    counted = (ROWS, flops / (6 * psi * np.array(ROWS)), sent / (2 * (n - 1) / n * 4 * psi), flops / sent)
    headers = ("rows per device", "FLOPs / formula", "bytes / formula", "FLOPs per byte sent")
    said = """Both formulas hold. The number of parameters is in both, so it cancels, and the rows remain. (0.918: the
        first of four layers needs no gradient of its input, which is one product of twelve.)"""
    show("Counted in the program", headers, [*zip(*counted, strict=True)], said)
    lines = {rows: roofline(rows) for rows in (16, 256, 2048, 32768)}
    said = """Above 1, computing waits. With few rows it waits for memory, because each weight is read for few FLOPs.
        The network needs more rows, and a slow link the most: this is the roofline model, with one roof for each."""
    table = [(rows, *each.values()) for rows, each in lines.items()]
    show("Roofline of an H100: time over computing time", ("rows per device", *lines[16]), table, said)
    seen = profile(64, steps=5)
    rows = [("all-reduce", seen["collectives"] / seen["all"])]
    rows += [("without waiting", (seen["collectives"] - seen["waiting"]) / (seen["all"] - seen["waiting"]))]
    said = """A profile's bar "all-reduce" is not all sending: a device that comes first waits there for the last.
        Subtract the waiting before you blame the network."""
    show("Profile of a step, 64 rows", ("what", "share of the time"), rows, said)
    plans = [*filter(None, (foreseen(64, "h100:1x8"), foreseen(4096, "h100:1x8")))]
    said = [f"with {rows} rows {ratio:.0%} of the time that computing takes" for _, rows, *_, ratio in plans]
    said = f"""On H100s sending takes {", ".join(said)}. Compare sends with exposed: hardly any of it is hidden, because
        one all-reduce of all gradients waits for the last one. `bucketing.py` starts earlier."""
    headers = ("devices", "rows per device", "computes, ms", "sends, ms", "exposed, ms", "sends / computes")
    show("Predicted for H100s", headers, plans, *[said] * bool(plans))
    figure, (axes,) = chart()
    axes.loglog(ROWS, [found[rows]["ratio"] for rows in ROWS], "o-", label="sync / (forward + backward), measured")
    axes.loglog(ROWS, sent / flops, "o-", label="bytes / FLOPs, counted")
    axes.set(title="Communication to computation", xlabel="rows per device")
    axes.legend()
    keep(figure, picture, "Communication to computation falls as rows per device grow.")


if __name__ == "__main__":
    tell(main)
