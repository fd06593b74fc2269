"""BatchNorm on many devices: statistics of a device's own rows, or of all devices' rows.

The claims: "data parallelism computes what one device computes" (not if a layer mixes rows); "always synchronise
BatchNorm".

A small network learns scikit-learn's digits on eight devices, from 2 to 32 rows per device, from the same start and the
same batches. One step uses the statistics of each device's rows, the other the statistics of all rows. Held-out loss
and accuracy are compared over three seeds, and so are bytes and times. The fewer rows, the noisier a device's own
statistics.

    python experiments/lessons/batch_norm.py [--picture FILE.svg]

A norm of C channels sums a mean and a mean of squares forward and as much backward: 4·C more float32 in two
collectives. jdp synchronises every `nnx.BatchNorm`. Ioffe and Szegedy 2015, arXiv:1502.03167; Wu and He 2018,
arXiv:1803.08494.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from digits import digits as flat_digits
from flax import nnx
from local_norm import LocalNorm
from narration import keep, parser, show, tell

import jdp
from jdp.foresight.program.collectives import collectives
from jdp.foresight.traffic.theory import ring_bytes
from jdp.report.charts import chart

ROWS, STEPS, SEEDS, HELD_OUT, CHANNELS = (2, 4, 8, 32), 60, 3, 392, (8, 16, 32)  # rows per device; digits held out
NORMS = {"local": LocalNorm, "sync.": nnx.BatchNorm}


def digits() -> tuple[np.ndarray, np.ndarray]:
    return (data := flat_digits())[0].reshape(-1, 8, 8, 1), data[1]


class Net(nnx.Module):
    """Three convolutions, each normalised: 8 x 8, 4 x 4, 2 x 2 positions, their mean, ten logits."""

    def __init__(self, rngs: nnx.Rngs, norm: Any = nnx.BatchNorm) -> None:
        pairs = list(zip((1, *CHANNELS), CHANNELS, strict=False))
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), 1 if a == 1 else 2, use_bias=False, rngs=rngs) for a, b in pairs])
        self.norms = nnx.List([norm(channels, momentum=0.9, rngs=rngs) for channels in CHANNELS])
        self.head = nnx.Linear(CHANNELS[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean((1, 2)))


def loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    logits = model(batch["images"])
    right = (logits.argmax(-1) == batch["labels"]).sum().astype(jnp.float32)
    total = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).sum()
    return jdp.Loss(total, jnp.float32(len(logits)), {"accuracy": right})


# 1. One step, two norms. Under "manual" each device runs the loss on its own rows. jdp gives every nnx.BatchNorm the
# mesh's axes, and other norms nothing: then rows depend on each other, which `check_loss` would refuse.
def make_steps(plan: jdp.Plan) -> dict[str, Any]:
    return {n: jdp.make_train_step(loss, plan, partitioning="manual", check_loss=False, donate=False) for n in NORMS}


@functools.cache
def first_state(plan: jdp.Plan, name: str) -> jdp.TrainState:
    make = lambda key: Net(nnx.Rngs(key), NORMS[name])  # noqa: E731
    return jdp.init_state(make, optax.sgd(0.05, momentum=0.9), plan, rng=jax.random.key(0))


def start(plan: jdp.Plan, seed: int, name: str) -> jdp.TrainState:  # other weights, without compiling: leaves shuffled
    random, state = np.random.default_rng(seed), first_state(plan, name)
    shuffled = lambda x: jax.device_put(random.permutation(np.ravel(x)).reshape(x.shape), x.sharding)  # noqa: E731
    return dataclasses.replace(state, params=jax.tree.map(shuffled, state.params))


def traffic(program: Any, devices: int) -> tuple[int, float]:
    """Return (collectives, bytes that a device sends) of one step, counted in the compiled program."""
    sent = collectives(program.as_text())
    return len(sent), sum(ring_bytes(each.kind, each.payload_bytes, devices) for each in sent)


# 3. The effect. Both see the same batches from the same start, and take turns, so that times can be compared.
def train(programs: dict[str, Any], plan: jdp.Plan, rows: int, count: int, seed: int) -> tuple[Any, dict[str, Any]]:
    (images, labels), states = digits(), {name: start(plan, seed, name) for name in programs}
    random, seconds = np.random.default_rng(seed), {name: list[float]() for name in programs}
    for _ in range(count):
        drawn = random.integers(0, len(images) - HELD_OUT, rows * plan.mesh.size)
        batch = jax.device_put({"images": images[drawn], "labels": labels[drawn]}, plan.batch_sharding)
        for name, program in programs.items():
            begun = time.perf_counter()
            states[name] = jax.block_until_ready(program(states[name], batch))[0]
            seconds[name].append(time.perf_counter() - begun)
    return states, seconds


def compare(plan: jdp.Plan, evaluate: Any, rows: int, count: int, seeds: int) -> dict[str, Any]:
    """Return accuracy and loss [local or not, seeds], collectives and bytes of both, and the ratio of their times."""
    images, labels = digits()
    batch = {"images": images[: rows * plan.mesh.size], "labels": labels[: rows * plan.mesh.size]}
    programs = {name: step.compile(start(plan, 0, name), batch) for name, step in make_steps(plan).items()}
    held_out, ratios, results = {"images": images[-HELD_OUT:], "labels": labels[-HELD_OUT:]}, [], []
    for seed in range(seeds):
        states, seconds = train(programs, plan, rows, count, seed)
        ratios.append(np.median(np.divide(seconds["sync."], seconds["local"])))
        metrics = (evaluate(state, held_out) for state in states.values())
        results.append([[float(each["accuracy"]), float(each["loss"])] for each in metrics])
    accuracy, nats = np.array(results).transpose(2, 1, 0)
    found = {"accuracy": accuracy, "loss": nats, "time": float(np.median(ratios))}
    return found | {"sent": [traffic(program, plan.mesh.size) for program in programs.values()]}


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    plan = jdp.Plan(jdp.make_mesh(data=-1), "ddp")
    evaluate = jdp.make_eval_step(loss, plan)
    found, table = {rows: compare(plan, evaluate, rows, STEPS, SEEDS) for rows in ROWS}, []
    for rows, numbers in found.items():
        shown = [f"{each.mean():.1%} ± {each.std(ddof=1):.1%}" for each in numbers["accuracy"]]
        shown += [f"{each.mean():.3f} ± {each.std(ddof=1):.3f}" for each in numbers["loss"]]
        shown += [f"{size:,.0f} B in {count}" for count, size in numbers["sent"]]
        table.append((rows, *shown, numbers["time"]))
    heads = [f"{what}, {name}" for what in ("accuracy", "loss", "sent") for name in ("local", "sync.")] + ["time ratio"]
    losses = np.array([each["loss"] for each in found.values()])  # [rows, local or not, seeds]
    less, lost, least, most = (f"{each:.2f}" for each in losses[[0, -1]].mean(2).ravel())
    said = f"""With {ROWS[0]} rows per device local statistics are noise: a loss of {less}, not {lost}. With {ROWS[-1]}
        rows they are nearly equal ({least}, {most}); differences within the deviation of the seeds mean nothing.
        Synchronising sends few bytes in many collectives, so it costs latency, not bandwidth."""
    title = f"{STEPS} steps on {plan.mesh.size} devices, {SEEDS} seeds ± deviation; sent: bytes in how many collectives"
    show(title, ("rows per device", *heads), table, said)
    figure, (panel,) = chart(width=6)
    for i, name in enumerate(("local", "synchronised")):
        panel.errorbar(ROWS, losses[:, i].mean(1), losses[:, i].std(1, ddof=1), fmt="o-", capsize=3, label=name)
    panel.set(xscale="log", xlabel="rows per device", ylabel="held-out loss, nats", title="Statistics of BatchNorm")
    panel.legend()
    keep(figure, options.picture, "Held-out loss with local and synchronised statistics, by rows per device")


if __name__ == "__main__":
    tell(main)
