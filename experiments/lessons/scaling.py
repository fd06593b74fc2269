"""Scaling: how much faster do N devices train, and for which models do the published efficiencies hold?

The claims people meet: "95 % efficient on a node, 70 to 90 % at scale"; "larger models scale better"; "memory per
device is the same as on one"; 175B on 64 devices, 82 s a step of which 3 s are sync, 90 % hidden: "64x at 95 %".

Strong scaling divides one batch among N devices. Weak scaling gives each device the same rows. Virtual devices share
two cores, so processor time per device stands in for a core each. Next, two processes with a core each are timed by the
clock. Last, `jdp plan` simulates H100s: schedule and network.

    python experiments/lessons/scaling.py [--plan] [--picture FILE.svg]

Efficiency is Throughput(N) / (N * Throughput(1)); of a plan, computing time / step. Amdahl 1967: time is s + p/N, and
every device repeats s. Gustafson 1988: the speed-up of a growing batch is N - s(N-1). `--plan` compiles the plans that
`planned.py` has recorded again (minutes; needs the extra `aot`). jdp: `jdp plan FILE --target h100:1x8,8x8,64x8`.
"""

import functools
import os

import jax
import numpy as np
from clock import in_turns
from devices import use_eight_devices
from narration import keep, parser, show, tell
from planned import HOSTS, RECORDED, WAYS, foreseen, show_planned
from processes import in_processes, is_one_of_several, spread
from step_parts import TX, init, loss

import jdp
from jdp.report.charts import chart

COUNTS = (1, 2, 4, 8)


@functools.cache
def step_on(devices: tuple, width: int) -> tuple[jdp.Step, jdp.TrainState]:
    plan = jdp.Plan(jdp.make_mesh(devices=devices, data=len(devices)), "ddp")
    state = jdp.init_state(lambda key: init(key, width=width), TX, plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss, plan, donate=False, partitioning="manual"), state


def prepared(devices: list, rows: int, width: int = 512) -> tuple:
    """Return jdp's step on some devices, a state, and a batch of `rows` rows per device."""
    step, state = step_on(tuple(devices), width)
    return step, state, {"x": spread(np.ones((rows, width), np.float32), step.plan.mesh)}


def measure(rows: int, rounds: int, weak: bool) -> list[tuple[float, float]]:
    """Return wall seconds of a step, and processor seconds over N, for each number of devices."""
    made = {n: prepared(jax.devices()[:n], rows if weak else rows // n) for n in COUNTS}
    seconds = in_turns({n: lambda each=each: each[0](*each[1:]) for n, each in made.items()}, rounds, warmup=1)
    return [(float(each[:, 2].min()), float(each[:, 1].min()) / n) for n, each in seconds.items()]


def measure_here(rows: list[int], rounds: int) -> list[float]:
    """Run in each process, on its own core. Return wall seconds of a step by rows per device."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["JDP_PROCESS_ID"]) % len(cores)]})
    jdp.initialize()
    made = {str(each): prepared(jax.devices(), each) for each in rows}
    seconds = in_turns({name: lambda each=each: each[0](*each[1:]) for name, each in made.items()}, rounds, warmup=1)
    return [float(each[:, 2].min()) for each in seconds.values()]


def amdahl(counts: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return s and p of s + p/N (Amdahl 1967), by least squares of the relative errors."""
    n, t = np.array(counts), np.array(seconds)
    s, p = np.linalg.lstsq(np.stack([1 / t, 1 / (n * t)], 1), np.ones(len(t)))[0]
    return float(s), float(p)


def gustafson(counts: list[int], speedups: list[float]) -> float:
    """Return s of the scaled speed-up N - s(N-1) (Gustafson 1988), by least squares."""
    more, lost = np.array(counts) - 1, np.subtract(counts, speedups)
    return float(more @ lost / (more @ more))


def claimed_175b() -> dict[str, float]:
    """Return the claimed speed-up, the one by the claim's own numbers (0.3 of 82 s exposed), and the batch's tokens."""
    return {"64 at 95 %": 64 * 0.95, "by its own numbers": 64 * (1 - 0.1 * 3 / 82), "tokens per batch": 64 * 2e6}


def show_scaling(kind: str, found: list[tuple[float, float]], axes) -> None:
    times = [each for _, each in found]
    speedups = [times[0] / each * (n if kind == "weak" else 1) for n, each in zip(COUNTS, times, strict=True)]
    cells = zip(COUNTS, *1e3 * np.array(found).T, speedups, np.divide(speedups, COUNTS), strict=True)
    headers = ("devices", "clock, ms", "processor time per device, ms", "speed-up by it", "efficiency")
    (same, split), lost = amdahl(COUNTS, times), gustafson(COUNTS, speedups)
    said = f"""Twice the devices do not halve a step: {same / (same + split):.0%} of it (s by Amdahl) is repeated by
        every device, such as AdamW on all weights. The fewer rows a device has, the larger this share."""
    if kind == "weak":
        said = f"""The batch grows with the devices, so the repeated part counts less: {lost:.0%} (s by Gustafson; below
            0, another program slowed the first). Wall time grows, because eight devices share this machine's cores."""
    show(f"{kind} scaling, virtual devices", headers, [*cells], said)
    axes.plot(COUNTS, speedups, "o-", label=f"{kind}, by processor time")


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--plan", action="store_true", help="compile the recorded plans again: minutes")
    given = options.parse_args(argv)
    jdp.keep_memory()
    use_eight_devices()
    figure, (left, right) = chart(columns=2)
    for kind, rows in (("strong", 512), ("weak", 128)):
        show_scaling(kind, measure(rows, rounds=10, weak=kind == "weak"), left)
    (alone,), (strong, weak) = (in_processes(__file__, 1 + len(r) // 2, rows=r, rounds=10) for r in ([512], [256, 512]))
    rows = [("strong", alone / strong, alone / strong / 2), ("weak", 2 * alone / weak, alone / weak)]
    said = """These are wall times, and gradients pass through a socket: the gap to 2 is repeated work, sending and
        waiting. (Above 2, another program used the first process' core.)"""
    show("Two processes, a core each, against one", ("scaling", "speed-up", "efficiency"), rows, said)
    try:
        planned = {way: [foreseen(way, n) for n in HOSTS] for way in WAYS} if given.plan else RECORDED
    except ValueError as error:  # XLA's GPU compiler is not installed; the message has the command
        print(f"\n{error}\nThe recorded plans:")
        planned = RECORDED
    show_planned(planned, right)
    claim = claimed_175b()
    said = """The claim contradicts its own numbers: 0.3 s of 82 s are 0.4 %, not 5 %. And no published critical batch
        is as large."""
    show("175B on 64 devices, claimed to be 64 x at 95 %", ("what", "number"), [*claim.items()], said)
    left.set(title="Speed-up on this machine", xlabel="virtual devices", ylabel="speed-up")
    right.set(title="Efficiency, planned", xlabel="H100s", ylabel="efficiency")
    left.legend(), right.legend()
    keep(
        figure, given.picture, "Speed-up by devices on this machine, and planned efficiency by H100s of several models."
    )


if __name__ == "__main__" and not is_one_of_several(measure_here):
    tell(main)
