"""Measure the cost of a checkpoint: the loop's time, in steps of the quickstart's size; and GiB/s for a large state.

    python experiments/benchmarks/checkpoint.py [--gib 1] [--saves 8] [--folder /dev/shm] [--json]

Stall: gpt-nano (0.8 M parameters, adamw, zero1 on four virtual CPU devices, 16 x 128 tokens) trains, and saves a
checkpoint after every fourth step. `save` is the time of the call on the loop's thread; the rest is in the background.
Throughput: a state of float32 arrays of 16 MiB with random values, on one device, in a folder in memory, so no disk is
measured. Saving ends with the commit, checksums included. Restoring includes the check of every file; `check` is that
check alone; `copy` is the loop's time for `save_in_memory`. The first round of each, and the first two copies, are not
counted, because they touch fresh memory.

Promised: the call takes less than 5% of a step; saving and restoring at least 1 GiB/s; checking 1 GiB/s a core.

Measured 2026-11 on 2 x86 cores shared with other programs (load 12), jax 0.10.2 on Python 3.11.7: a call took 6.9 ms of
the loop's processor time, 49 ms by the clock, in steps of 1,652 ms: 3.0%. With `--gib 0.25`: saving 0.44 to 0.8 GiB a
processor second, restoring 0.3 to 0.8, checking 3 to 4 (fresh memory costs this machine 2.7 s a GiB). Two idle cores of
another machine (jax 0.11.2), the same options without checksums: 1.7 to 2.1 GiB/s saved and 1.2 to 1.45 restored;
earlier, with zstandard, 0.2 to 0.7 and 0.5 to 0.7. When the loop's thread called Orbax, a call of `save` took 35 to 65
ms in steps of 220 ms: 16 to 30%.

Sixteen idle cores (jax 0.11.2, Python 3.12.3, 1 GiB, checksums included): 1.00 GiB/s saved, 1.44 restored, 5.3 checked;
with six of the cores in use 0.86 to 0.94, 1.21 to 1.31 and 4.7. A call took 6.9 to 7.6 ms, 5.8 of them processor time,
of steps of 69 to 84 ms: 8 to 11%, more than promised, because the step is shorter there, but not the call.

2026-11-23, 2 cores of a virtual machine (load 13 to 19, jax 0.10.2), repeated restores of 1 GiB by Orbax alone: 0.77 to
1.70 GiB a processor second. Memory that the virtual machine takes from its host costs 2.4 s a GiB, so a fresh process
has 0.3 to 0.4.

2026-11-25, the same machine (load 6), 0.5 GiB on four devices under `zero1`: a copy takes 70 to 85 ms of the loop, 6 to
7 GiB/s, from the third on, and 0.12 s of processor time with its checksums.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measure import Row, finish, parser

import jdp
from jdp.checkpoint import check
from jdp.models import GPT, GPTConfig, next_token_loss

STALL_GOAL, SPEED_GOAL = 0.05, 1.0
GPT_NANO = GPTConfig(vocab_size=256, context=256, layers=4, width=128, heads=4, kv_heads=2, tied=True)
SIDE = 2048  # rows and columns of an array of 16 MiB


def loss_fn(model: GPT, batch: dict[str, jax.Array], rng: jax.Array | None) -> jdp.Loss:
    return jdp.Loss(*next_token_loss(model(batch["tokens"], rng=rng), batch["targets"], batch["weights"]))


def stall(folder: Path, saves: int) -> dict[str, float]:
    """Return median milliseconds of a step and of a call of `save`, and the call's processor time in its thread."""
    plan = jdp.Plan(jdp.make_mesh(data=-1), "zero1")
    seed = jax.random.key(0)
    state = jdp.init_state(lambda rng: GPT(GPT_NANO, rngs=nnx.Rngs(rng)), optax.adamw(1e-3), plan, rng=seed)
    step = jdp.make_train_step(loss_fn, plan)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 129)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 128), np.float32)}
    steps, calls, threads = [], [], []
    with jdp.Checkpoints(folder, keep=1) as checkpoints:
        for i in range(4 * (saves + 1)):
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            if i % 4 == 2:  # the background work of the last save has ended
                steps.append(time.perf_counter() - begin)
            if i % 4 == 3:
                begin, thread = time.perf_counter(), time.thread_time()
                checkpoints.save(state, {"step": i})
                calls.append(time.perf_counter() - begin)
                threads.append(time.thread_time() - thread)
                checkpoints.wait()
    medians = [float(np.median(times[1:])) * 1e3 for times in (steps, calls, threads)]
    return dict(zip(("step_ms", "save_ms", "save_cpu_ms"), medians, strict=True)) | {"stall": medians[1] / medians[0]}


def throughput(folder: Path, gib: float, rounds: int) -> dict[str, dict[str, float]]:
    """Return GiB a second of wall time and of processor time: medians of all rounds but the first."""
    count = max(1, round(gib * 2**30 / SIDE / SIDE / 4))
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1], data=1), "ddp")

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return {f"w{i}": jax.random.normal(jax.random.fold_in(rng, i), (SIDE, SIDE)) for i in range(count)}

    state: Any = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    target = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    size = count * SIDE * SIDE * 4 / 2**30
    times: dict[str, list[tuple[float, float]]] = {"save": [], "restore": [], "check": [], "copy": []}

    def timed(name: str, action: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(action())
        times[name].append((time.perf_counter() - wall, time.process_time() - cpu))

    def save(i: int) -> None:
        checkpoints.save(replace(state, step=jnp.int32(i)))
        checkpoints.wait()

    with jdp.Checkpoints(folder, keep=1, keep_in_memory=1) as checkpoints:
        for i in range(rounds + 1):
            timed("copy", lambda i=i: checkpoints.save_in_memory(replace(state, step=jnp.int32(i))))
            timed("save", lambda i=i: save(i))
            timed("restore", lambda: checkpoints.restore(target)[0].params)
            timed("check", lambda: [found.status for found in check(folder)].count("whole"))
    best = {name: np.median(np.array(rows[1 + (name == "copy") :]), axis=0) for name, rows in times.items()}
    return {name: {"gib_per_s": size / wall, "gib_per_cpu_s": size / cpu} for name, (wall, cpu) in best.items()}


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--gib", type=float, default=1.0, metavar="SIZE")
    options.add_argument("--saves", type=int, default=8, metavar="N")
    options.add_argument("--rounds", type=int, default=3, metavar="N")
    options.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="jdp-checkpoint-", dir=chosen.folder))
    try:
        loop = stall(folder / "loop", chosen.saves)
        speed = throughput(folder / "large", chosen.gib, chosen.rounds)
    finally:
        shutil.rmtree(folder)
    if not chosen.json:
        calls = f"{loop['save_ms']:.1f} ms of the loop ({loop['save_cpu_ms']:.1f} ms of its processor time)"
        share = f"{loop['stall']:.1%}; promised: less than {STALL_GOAL:.0%}"
        print(f"a step takes {loop['step_ms']:.1f} ms, a save {calls}: {share}")
        for name, found in speed.items():
            print(f"{name}: {found['gib_per_s']:.2f} GiB/s, {found['gib_per_cpu_s']:.2f} GiB a processor second")
    measures = "what `save` takes of the loop, in steps of the quickstart's model; a large state, by processor time"
    speeds = ", ".join(f"{name} {found['gib_per_cpu_s']:.1f} GiB/s" for name, found in speed.items())
    row = Row(measures, f"{loop['stall']:.1%}; {speeds}", f"< {STALL_GOAL:.0%}; {SPEED_GOAL:g} GiB/s")
    goal = {"stall": STALL_GOAL, "gib_per_s": SPEED_GOAL}
    finish({"goal": goal, "loop": loop, "throughput": speed}, chosen.json, row)


if __name__ == "__main__":
    main()
