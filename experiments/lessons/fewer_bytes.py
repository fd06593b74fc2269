"""Fewer bytes on the wire: gradients in fewer bits by jdp, or only their largest elements by hand, against the loss.

The claim: "gradients can be compressed a hundredfold without loss". A gradient can be rounded to fewer bits, at random,
so that it is right on average. Or only its largest elements are sent, and each device adds the rest to its next
gradient: error feedback. Each scheme trains the same toy from the same start. jdp's bytes are counted in the program
that trains; top-k, by hand, sends a value and a position for each element.

    python experiments/lessons/fewer_bytes.py [--steps 100] [--picture FILE.svg]

A toy is easy for all. The quickstart's loss on held-out files (0.8 M parameters, 360 steps of Adam, 4 devices;
2026-11-22, by an older jdp, with error feedback):

    none 1.573   int8 1.596   topk 10 % 1.959   topk 1 % 2.478

Error feedback restores the sum of gradients. Adam divides by their squares, which noise and elements that arrive late
make larger (1-bit Adam, Tang et al. 2021, arXiv:2102.02888). Lin et al. 2018 (top-k, 1712.01887); Alistarh et al. 2017
(QSGD, random rounding, 1610.02132).
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

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
# two flows of 4 bytes per parameter. `wire` encodes the first.

STEPS, RATE, SHARES = 100, 3e-3, (0.1, 0.01)  # of the elements that top-k sends
Wire = Literal["bf16", "int8"] | None
WIRES: tuple[Wire, ...] = (None, "bf16", "int8")


def loss_fn(params: Any, rows: dict[str, Any], rng: jax.Array) -> jdp.Loss:
    return jdp.Loss(total_loss(params, rows), rows["weight"].sum())


# 2. Count and train: the bytes are those of the compiled program that trains.


def train(plan: jdp.Plan, wire: Wire, state: jdp.TrainState, steps: int) -> tuple[float, float]:
    """Return (bytes of gradients that a device sends per step, held-out loss)."""
    rows = (jax.device_put(make_batch(i), plan.batch_sharding) for i in itertools.count())
    step = jdp.make_train_step(loss_fn, plan, wire=wire, partitioning="manual", check_loss=False, donate=False)
    run = step.compile(state, next(rows))
    found = collectives(run.as_text())
    for batch in itertools.islice(rows, steps):
        # One step at a time: virtual devices share a few threads, which steps in flight can use up.
        state, _ = jax.block_until_ready(run(state, batch))
    # an all-gather of codes belongs to a gradient, one of float32 to the weights
    sent = [each for each in found if each.kind != "all-gather"]
    return total_wire_bytes(sent), held_out(jax.device_get(state.params))


def topk_bytes(fraction: float, parameters: int, devices: int) -> float:
    """Return the bytes that a device sends per step: 8 for each element, except those of its own shard."""
    return 8 * fraction * parameters * (devices - 1) / devices


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__file__, __doc__)
    made.add_argument("--steps", type=positive, default=STEPS, metavar="N", help="of training, for each scheme")
    options = made.parse_args(argv)
    use_eight_devices()
    steps, plan = int(options.steps), jdp.Plan(jdp.make_mesh(data=-1), "zero1", min_shard_size=64)
    start = jdp.init_state(init, optax.adam(RATE), plan, rng=jax.random.key(0))
    found = {wire or "none": train(plan, wire, start, steps) for wire in WIRES}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(start.params))
    for share in SHARES:
        sent = topk_bytes(share, parameters, plan.mesh.size)
        for name, feedback in (("the rest kept", True), ("the rest dropped", False)):
            found[f"topk {share:.0%}, {name}"] = sent, topk_by_hand(share, feedback, steps, RATE)
    (all_bytes, plain), few = found["none"], found["topk 1%, the rest kept"]
    rows = [(name, int(sent), sent / all_bytes, loss, loss / plain) for name, (sent, loss) in found.items()]
    said = f"""Eight bits send a quarter of the bytes (plus padding, scales and biases) and change the loss by
        {found["int8"][1] / plain - 1:+.1%}. Fewer bytes cost loss: top-k with 1 % {few[1] / plain - 1:+.0%}, and 4
        bytes per parameter for error feedback. Without it an element that is never among the largest is never learnt.
        Random rounding is right on average and needs none."""
    headers = ("scheme", "gradients, bytes", "× none", "loss", "× none")
    show(f"zero1 on {plan.mesh.size} devices: sent by one a step, and loss after {steps} steps", headers, rows, said)
    figure, (panel,) = chart()
    for name, (sent, loss) in found.items():
        panel.loglog([sent / 1e3], [loss], "o")
        panel.annotate(name, (sent / 1e3, loss), (4, 4), textcoords="offset points", fontsize=8)
    panel.set(title=f"After {steps} steps", xlabel="kB of gradients that a device sends per step", ylabel="loss, nats")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}"), axis.set_minor_formatter("{x:g}")
    keep(figure, options.picture, "Bytes of gradients that a device sends per step against the held-out loss")


if __name__ == "__main__":
    tell(main)
