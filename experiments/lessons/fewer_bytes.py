"""Fewer bytes on the wire: each of jdp's ways to encode gradients and weights, its bytes against its loss.

    python experiments/lessons/fewer_bytes.py [--steps 100] [--picture FILE.svg]

Measured 2026-11 (eight virtual devices, Python 3.11.7, jax 0.10.2), 100 steps of Adam under zero1:

    gradients  none   bf16   fp8    int8   int8, nothing kept  topk 10 %  powersgd 4  topk 1 %
    bytes, x   1      0.55   0.29   0.29   0.29                0.23       0.26        0.04
    loss, x    1      1.000  1.001  1.000  1.000               1.04       1.12        1.45

Padding and biases included: without them int8 is 0.254. Rounding is right on average (QSGD), so int8 trains without
what it lost. Top-k does not: 0.41 becomes 0.56 (10 %), 0.52 becomes 0.96 (1 %); jdp refuses it. A toy is kind to all;
the quickstart (`--wire.gradients`, 0.8 M parameters, 360 steps of Adam), loss on held-out files, on 4; on 2 devices:

    none 1.573; 1.585   int8 1.596; 1.597   fp8 1.604   powersgd 4 1.915   topk 10 % 1.959   topk 1 % 2.478

Error feedback restores the sum of gradients; Adam divides by their squares, which noise, and what arrives late and at
once, make larger (1-bit Adam, Tang et al. 2021, arXiv:2102.02888). Rounded to the nearest, int8 had 1.581; 1.583.

Lin et al. 2018 (top-k, arXiv:1712.01887); Vogels et al. 2019 (PowerSGD, 1905.13727); Wang et al. 2023 (ZeRO++: int8
gradients and weights, 2306.10209); Alistarh et al. 2017 (QSGD, stochastic rounding, 1610.02132).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from devices import use_eight_devices
from narration import keep, parser, positive, show, tell
from toy import ROWS, init, make_batch, total_loss

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.report.charts import chart

# 1. The schemes. Under `zero1` a step reduces gradients (to the device that updates them) and gathers the new weights:
# two flows of 4 bytes a parameter. All schemes encode the first, one of them the second too.

STEPS, RATE = 100, 3e-3
WIRES: dict[str, jdp.Wire | None] = {
    "none": None,
    "bf16": jdp.Wire("bf16"),
    "fp8": jdp.Wire("fp8"),
    "int8": jdp.Wire("int8"),
    "int8, nothing kept": jdp.Wire("int8", error_feedback=False),
    "int8, weights too": jdp.Wire("int8", weights="int8"),
    "topk 10 %": jdp.Wire("topk", fraction=0.1),
    "topk 1 %": jdp.Wire("topk", fraction=0.01),
    "powersgd, rank 4": jdp.Wire("powersgd", rank=4),
}


def loss_fn(params: Any, rows: dict[str, Any], rng: jax.Array) -> jdp.Loss:
    return jdp.Loss(total_loss(params, rows), rows["weight"].sum())


def held_out(params: Any) -> float:
    """Return the mean loss, in nats, of 4096 rows that no step sees."""
    return float(total_loss(params, make_batch(10**6, 4096))) / 4096


# 2. Count and train: the bytes are those of the compiled program that trains. What encoding lost is kept on each
# device, in float32, and added to the next gradient: `state.sync`.


@dataclass(frozen=True)
class Result:
    """`gradients`, `weights`: bytes that a device sends a step; `kept`: bytes that it holds for error feedback."""

    gradients: float
    weights: float
    kept: int
    loss: float


def train(plan: jdp.Plan, wire: jdp.Wire | None, start: jdp.TrainState, steps: int) -> Result:
    rows = (jax.device_put(make_batch(i), plan.batch_sharding) for i in itertools.count())
    step = jdp.make_train_step(loss_fn, plan, wire=wire, partitioning="manual", check_loss=False, donate=False)
    state = step.complete(start)
    run = step.compile(state, next(rows))
    found = collectives(run.as_text())
    gathered = total_wire_bytes([each for each in found if each.kind == "all-gather"])
    kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.sync))
    for batch in itertools.islice(rows, steps):
        # One step at a time: virtual devices share a few threads, which steps in flight can use up.
        state, _ = jax.block_until_ready(run(state, batch))
    return Result(total_wire_bytes(found) - gathered, gathered, kept, held_out(jax.device_get(state.params)))


# 3. jdp refuses top-k and PowerSGD without error feedback. What would be lost, by hand, and in one process: eight
# "devices" are eight parts of the batch. Each sends the largest elements of its gradient; the rest is dropped, or kept.


def largest(x: np.ndarray, fraction: float) -> np.ndarray:
    """Return x [devices, ...] with all but each device's largest elements set to zero."""
    flat = np.abs(x).reshape(len(x), -1)
    count = max(1, round(fraction * flat.shape[1]))
    least = np.partition(flat, -count, axis=1)[:, -count]
    return np.where(np.abs(x) >= least.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def topk_by_hand(fraction: float, feedback: bool, steps: int, devices: int = 8) -> float:
    params, tx = init(jax.random.key(0)), optax.adam(RATE)
    each_gradient, update = jax.jit(jax.vmap(jax.grad(total_loss), (None, 0))), jax.jit(tx.update)
    moments, kept = tx.init(params), [np.zeros((devices, *x.shape), np.float32) for x in jax.tree.leaves(params)]
    for i in range(steps):
        rows = {name: x.reshape(devices, -1, *x.shape[1:]) for name, x in make_batch(i).items()}
        grads, treedef = jax.tree.flatten(jax.device_get(each_gradient(params, rows)))
        wanted = [g + k for g, k in zip(grads, kept, strict=True)]
        sent = [largest(x, fraction) for x in wanted]
        if feedback:
            kept = [w - s for w, s in zip(wanted, sent, strict=True)]
        updates, moments = update(treedef.unflatten([x.sum(axis=0) / ROWS for x in sent]), moments)
        params = optax.apply_updates(params, updates)
    return held_out(params)


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__file__, __doc__)
    made.add_argument("--steps", type=positive, default=STEPS, metavar="N", help="of training, for each scheme")
    options = made.parse_args(argv)
    use_eight_devices()
    steps, plan = int(options.steps), jdp.Plan(jdp.make_mesh(data=-1), "zero1", min_shard_size=64)
    start = jdp.init_state(init, optax.adam(RATE), plan, rng=jax.random.key(0))
    found = {name: train(plan, wire, start, steps) for name, wire in WIRES.items()}
    none = found["none"]
    rows = [
        (name, int(r.gradients), r.gradients / none.gradients, int(r.weights), r.kept, r.loss, r.loss / none.loss)
        for name, r in found.items()
    ]
    headers = ("scheme", "gradients, bytes", "x none", "weights, bytes", "kept, bytes", "loss", "x none")
    show(f"zero1 on {plan.mesh.size} devices: sent by one in a step, and the loss after {steps} steps", headers, rows)
    by_hand = [(f, *(topk_by_hand(f, feedback, steps) for feedback in (True, False))) for f in (0.1, 0.01)]
    show("top-k by hand: loss", ("share that is sent", "the rest is kept", "the rest is dropped"), by_hand)
    figure, (panel,) = chart()
    for size, names in [(s, [*n]) for s, n in itertools.groupby(found, lambda name: found[name].gradients / 1e3)]:
        panel.loglog([size] * len(names), [found[name].loss for name in names], "o")
        panel.annotate("\n".join(names), (size, found[names[0]].loss), (4, 4), textcoords="offset points", fontsize=8)
    panel.set(title=f"After {steps} steps", xlabel="kB of gradients that a device sends a step", ylabel="loss, nats")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}"), axis.set_minor_formatter("{x:g}")
    keep(figure, options.picture, "Bytes of gradients that a device sends a step against the held-out loss")


if __name__ == "__main__":
    tell(main)
