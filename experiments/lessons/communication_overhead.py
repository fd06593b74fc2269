"""Communication overhead: is the all-reduce what a data-parallel step waits for?

The claims people meet: synchronising gradients is the bottleneck; larger models scale better, as they compute more.
With Ψ parameters a device computes 6·Ψ FLOPs a row and sends 2(N-1)/N·4·Ψ bytes a step: Ψ cancels. FLOPs a byte are
3/4·N/(N-1)·rows, so what decides is how many rows *a device* has (and latency, and what else takes time).

1. Forward pass, gradient (both passes), synchronisation and update of an MLP apart, and jdp's whole step, which also
   takes the gradients' norm and guards the state. In processor time, an eighth for each of eight virtual devices.
2. FLOPs and bytes, read off the compiled programs (0.918: the first layer needs no gradient of its input).
3. What the step's profile says, read with `ProfileData` (`jdp train --profile` writes the same).
4. What `jdp.foresee` says of the same step (as `jdp plan` does), for these devices and for eight H100s.

    python experiments/lessons/communication_overhead.py [--picture FILE.svg]

Measured on 2 x86 cores, load 12 (Python 3.11.7, jax 0.10.2), 4, 16, 64 and 256 rows: sync 0.9 to 1.5 ms whatever the
rows, gradient 3.1, 5.0, 7.3, 28 ms: ratio 0.28, 0.30, 0.15, 0.03. The whole step 25 to 51 ms against 7 to 32 for its
parts. (The forward pass alone is compiled otherwise, and not always the cheaper.) Profile at 64 rows: collectives 27 %,
without waiting 10 %. Foreseen for 64 rows: 5 % here; on H100s 74 %, at 4096 rows 30 %, none of it hidden: one
all-reduce of all waits for the last gradient (`bucketing.py`).
"""

import functools
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clock import in_turns
from devices import use_eight_devices
from jax import P
from narration import keep, parser, show

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.report.charts import chart

TX, PARTS = optax.adamw(1e-3), ("forward", "gradient", "sync", "update")
ROWS = (4, 16, 64, 256)  # a device


def init(key: jax.Array, layers: int = 4, width: int = 512) -> list[jax.Array]:
    return [jax.random.normal(key, (width, width)) * width**-0.5 for _ in range(layers)]


def total_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return (x**2).sum()


def loss(params: list[jax.Array], batch: dict[str, jax.Array], rng: jax.Array) -> jdp.Loss:
    return jdp.Loss(total_loss(params, batch["x"]), jnp.float32(len(batch["x"])))


def parts(mesh: jax.sharding.Mesh, state: jdp.TrainState, x: jax.Array) -> dict:
    """Return the parts (1.). Each leaves what it made on its device, so that only `sync` sends."""

    def everywhere(function, *specs):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False))

    add = functools.partial(jax.tree.map, lambda leaf: leaf[None])  # [...] -> [1, ...]: a device's own
    forward = everywhere(lambda params, x: add(total_loss(params, x)), P(), P("data"))
    both = everywhere(lambda params, x: add(jax.grad(total_loss)(params, x)), P(), P("data"))
    sync = everywhere(lambda grads: jax.lax.psum(grads, "data"), P("data"))
    update = everywhere(lambda *given: add(TX.update(jax.tree.map(lambda g: g[0], given[0]), *given[1:])), *3 * [P()])
    grads = both(state.params, x)
    one = jax.tree.map(lambda leaf: leaf[:1], grads)
    return {  # "gradient" is the forward and the backward pass
        "forward": lambda: forward(state.params, x),
        "gradient": lambda: both(state.params, x),
        "sync": lambda: sync(grads),
        "update": lambda: update(one, state.opt_state, state.params),
    }


def setup(rows: int, **size: int) -> tuple[jdp.Step, jdp.TrainState, dict[str, jax.Array]]:
    """Return jdp's step, a state and a batch of `rows` rows a device."""
    plan = jdp.Plan(jdp.make_mesh(data=-1), "ddp")
    state = jdp.init_state(lambda key: init(key, **size), TX, plan, rng=jax.random.key(0))
    x = np.ones((rows * plan.mesh.size, len(state.params[0])), np.float32)
    return jdp.make_train_step(loss, plan, donate=False), state, jax.device_put({"x": x}, plan.batch_sharding)


def measure(rows: int, rounds: int, **size: int) -> dict[str, float]:
    """Return a device's milliseconds of processor time for each part, and (2.) its FLOPs and the bytes it sends."""
    step, state, batch = setup(rows, **size)
    mesh, text = step.plan.mesh, step.compile(state, batch).as_text()
    seconds = in_turns(parts(mesh, state, batch["x"]) | {"step": lambda: step(state, batch)}, rounds, warmup=1)
    found = {name: 1e3 * float(each[:, 1].min()) / mesh.size for name, each in seconds.items()}
    found |= {"sum": found["gradient"] + found["sync"] + found["update"], "ratio": found["sync"] / found["gradient"]}
    gradient = jax.jit(jax.grad(total_loss)).lower(jax.device_get(state.params), np.asarray(batch["x"])[:rows])
    found["FLOPs"] = gradient.compile().cost_analysis()["flops"]
    return found | {"bytes": total_wire_bytes(collectives(text))}


def profile(rows: int, steps: int, **size: int) -> dict[str, float]:
    """Return (3.) seconds of all operations on all devices, of the collectives, of waiting in them ("Rendezvous")."""
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
    """Return (4.) target, rows, milliseconds computing and sending, of it exposed, and the ratio; None: no compiler."""
    try:
        line = jdp.foresee(*setup(rows, **size), target, strategies=["ddp"]).estimates[0].timeline
    except ValueError as error:  # where XLA's GPU compiler is not installed, with the command that installs it
        return print(error)
    times = (1e3 * each for each in (line.compute_seconds, line.communication_seconds, line.exposed_seconds))
    return target, rows, *times, line.communication_seconds / line.compute_seconds


def main(argv: list[str] | None = None) -> None:
    picture = parser(__file__, __doc__).parse_args(argv).picture
    use_eight_devices()
    found, n, psi = {rows: measure(rows, rounds=7) for rows in ROWS}, jax.device_count(), 4 * 512**2
    columns = (*PARTS, "sum", "step", "ratio")
    show("Milliseconds a device", ("rows", *columns), [(rows, *map(found[rows].get, columns)) for rows in ROWS])
    flops, sent = np.array([(found[rows]["FLOPs"], found[rows]["bytes"]) for rows in ROWS]).T
    counted = (ROWS, flops / (6 * psi * np.array(ROWS)), sent / (2 * (n - 1) / n * 4 * psi), flops / sent)
    headings = ("rows", "FLOPs / formula", "bytes / formula", "FLOPs a byte")
    show("Counted in the program", headings, [*zip(*counted, strict=True)])
    seen = profile(64, steps=5)
    apart = (seen["collectives"] - seen["waiting"]) / (seen["all"] - seen["waiting"])
    print(f"\nprofile, 64 rows: collectives take {seen['collectives'] / seen['all']:.0%}, without waiting {apart:.0%}")
    plans = [foreseen(64, "cpu:8"), foreseen(64, "h100:1x8"), foreseen(4096, "h100:1x8")]
    show("Foreseen, milliseconds", ("target", "rows", "computes", "sends", "exposed", "ratio"), [*filter(None, plans)])
    figure, (axes,) = chart()
    axes.loglog(ROWS, [found[rows]["ratio"] for rows in ROWS], "o-", label="sync / gradient, measured")
    axes.loglog(ROWS, sent / flops, "o-", label="bytes / FLOPs, counted")
    axes.set(title="Communication to computation", xlabel="rows a device")
    axes.legend()
    keep(figure, picture, "Communication to computation falls as rows a device grow.")


if __name__ == "__main__":
    main()
