"""Fewer bytes on the wire: each of jdp's ways to encode gradients and weights, its bytes against its loss.

The claim: "gradients can be compressed a hundredfold without loss". A gradient can be rounded to fewer bits, or only
its largest elements sent, or two thin factors of it. What is lost is kept on each device and added to the next
gradient: error feedback. Each scheme trains the same toy from the same start; the bytes are counted in the program that
trains. Then top-k by hand, with what is dropped kept, and not.

    python experiments/lessons/fewer_bytes.py [--steps 100] [--picture FILE.svg]

A toy is kind to all. The quickstart (`--wire.gradients`, 0.8 M parameters, 360 steps of Adam), loss on held-out files,
on 4; on 2 devices (2026-11, jax 0.10.2; rounded to the nearest, int8 had 1.581; 1.583):

    none 1.573; 1.585   int8 1.596; 1.597   fp8 1.604   powersgd 4 1.915   topk 10 % 1.959   topk 1 % 2.478

Error feedback restores the sum of gradients. Adam divides by their squares, which noise, and what arrives late and at
once, make larger (1-bit Adam, Tang et al. 2021, arXiv:2102.02888). Lin et al. 2018 (top-k, 1712.01887); Vogels et al.
2019 (PowerSGD, 1905.13727); Wang et al. 2023 (ZeRO++, 2306.10209); Alistarh et al. 2017 (QSGD, stochastic rounding,
1610.02132).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from devices import use_eight_devices
from narration import keep, parser, positive, show, tell
from topk import held_out, topk_by_hand
from toy import init, make_batch, total_loss

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
    headers = ("scheme", "gradients, bytes", "× none", "weights, bytes", "kept, bytes", "loss", "× none")
    said = f"""Eight bits cost a quarter of the bytes (and padding, scales, biases) and
        {found["int8"].loss / none.loss - 1:+.1%} of loss. Fewer bytes than that cost loss: top-k with 1 %
        {found["topk 1 %"].loss / none.loss - 1:+.0%}, beside 4 bytes a parameter kept for error feedback."""
    show(f"zero1 on {plan.mesh.size} devices: sent by one a step, and loss after {steps} steps", headers, rows, said)
    by_hand = [(f, *(topk_by_hand(f, feedback, steps, RATE) for feedback in (True, False))) for f in (0.1, 0.01)]
    said = """Without error feedback an element that is never among the largest is never learnt. Rounding at random
        is right on average, and needs none; top-k and PowerSGD do, so jdp refuses them without."""
    show("top-k by hand: loss", ("share that is sent", "the rest is kept", "the rest is dropped"), by_hand, said)
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
