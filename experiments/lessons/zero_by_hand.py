"""ZeRO's three stages by hand: what each device keeps and sends in each phase, and mistakes of popular tables.

DDP keeps everything on every device: weights, gradients, Adam's moments. ZeRO removes the copies one kind at a time.
Stage 1 shards the moments: a device updates its part of the weights, then all gather the new weights. Stage 2 also
shards the gradients, stage 3 the weights, which are gathered layer by layer in both passes. Here the stages are written
with `all_gather` and `psum_scatter` alone. Bytes at rest are measured, bytes sent are counted in the compiled programs,
and the weights must equal DDP's.

    python experiments/lessons/zero_by_hand.py [--picture FILE.svg]

With Ψ float32 parameters on N devices, and D = 4Ψ(N−1)/N, the bytes that one reduce-scatter or all-gather of all of
them sends:

    stage  at rest, bytes  forward       backward                      update
    ddp    16Ψ             -             all-reduce, 2D                -
    zero1  8Ψ + 8Ψ/N       -             -                             reduce-scatter D, then all-gather D
    zero2  4Ψ + 12Ψ/N      -             reduce-scatter D              all-gather D
    zero3  16Ψ/N           all-gather D  all-gather D, then scatter D  -

jdp: `jdp.Plan(mesh, "zero3")`; its weights rest sharded in each stage. `jdp plan --table 70e9:8` has the closed form.
Rajbhandari et al. 2019, arXiv:1910.02054: sections 3 and 5 (memory), 7 (communication).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from jax import NamedSharding, P
from jax.flatten_util import ravel_pytree
from narration import keep, parser, show, stacked, tell
from toy import ROWS, init, make_batch
from zero_claims import show_claims

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.foresight.traffic.theory import zero_bytes
from jdp.report.charts import chart

STAGES, PHASES = ("ddp", "zero1", "zero2", "zero3"), ("forward", "backward", "update")
WIDTHS = (64, 256, 256, 16)
gather, scatter = (partial(f, axis_name="data", tiled=True) for f in (jax.lax.all_gather, jax.lax.psum_scatter))

# 1. Forward and backward, as two functions: nothing gathered in the first is kept for the second. A layer is one flat
# array (its size divides by 8); in stage 3 it is gathered at each use, and JAX's transpose of that is the scatter.


def layer(stage: str, i: int, kept: jax.Array, x: jax.Array) -> jax.Array:
    kernel, bias = jnp.split(gather(kept) if stage == "zero3" else kept, [WIDTHS[i] * WIDTHS[i + 1]])
    x = x @ kernel.reshape(WIDTHS[i], WIDTHS[i + 1]) + bias
    return jax.nn.relu(x) if i + 2 < len(WIDTHS) else x


def loss(logits: jax.Array, rows: dict[str, Any]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows["y"]).sum() / ROWS


def forward(stage: str, layers: Sequence[jax.Array], rows: dict[str, Any]) -> list[jax.Array]:
    reached = [rows["x"]]  # the input of each layer, and the logits
    for i, kept in enumerate(layers):
        reached.append(layer(stage, i, kept, reached[-1]))
    return reached


def backward(stage: str, layers: Sequence[jax.Array], rows: dict[str, Any], reached: list[jax.Array]) -> list[Any]:
    grads, grad = [], jax.grad(loss)(reached[-1], rows)
    for i in reversed(range(len(layers))):
        own, grad = jax.vjp(partial(layer, stage, i), layers[i], reached[i])[1](grad)
        grads.insert(0, {"ddp": partial(jax.lax.psum, axis_name="data"), "zero2": scatter}.get(stage, jnp.asarray)(own))
    return grads


# 2. The update. Adam works on each element alone: a device updates the part whose moments it keeps. Then the weights
# are gathered; moments are never sent.


def update(stage: str, layers: Sequence[Any], grads: Sequence[Any], moments: Sequence[Any], step: jax.Array) -> Any:
    def adam(kept: jax.Array, grad: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        own = kept.reshape(-1, m.size)[jax.lax.axis_index("data") % (kept.size // m.size)]  # a part, or all there is
        grad = scatter(grad) if stage == "zero1" else grad
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        own -= 3e-3 * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return (gather(own) if stage in ("zero1", "zero2") else own), m, v

    layers, *moments = zip(*map(adam, layers, grads, *moments), strict=True)
    return list(layers), list(map(list, moments))


# 3. Run the three on every device; measure the bytes at rest, and count the bytes that the compiled programs send.


def run(mesh: jax.sharding.Mesh, stage: str, steps: int) -> dict[str, Any]:
    """Return bytes at rest by class, the same by formula, bytes sent by phase in units of D, and the weights."""
    weights, rest = P("data") if stage == "zero3" else P(), P() if stage == "ddp" else P("data")
    specs = [(forward, (weights, P("data")), P("data")), (backward, (weights, P("data"), P("data")), rest)]
    specs += [(update, (weights, rest, rest, P()), (weights, rest))]
    on_each = partial(jax.shard_map, mesh=mesh, check_vma=False)
    phases = [jax.jit(on_each(partial(f, stage), in_specs=takes, out_specs=gives)) for f, takes, gives in specs]
    layers = [ravel_pytree((each["kernel"], each["bias"]))[0] for each in init(jax.random.key(0), WIDTHS).values()]
    moments = jax.device_put([[jnp.zeros_like(each) for each in layers] for _ in "mv"], NamedSharding(mesh, rest))
    layers = jax.device_put(layers, NamedSharding(mesh, weights))
    for i in range(steps):
        rows = jax.device_put(make_batch(i, classes=WIDTHS[-1]), NamedSharding(mesh, P("data")))
        grads = phases[1](layers, rows, reached := phases[0](layers, rows))
        arguments = (layers, rows), (layers, rows, reached), (layers, grads, moments, np.float32(i + 1))
        layers, moments = phases[2](*arguments[2])
    learnt = np.concatenate([*map(np.asarray, layers)])
    texts = (phase.lower(*given).compile().as_text() for phase, given in zip(phases, arguments, strict=True))
    sent = [total_wire_bytes(collectives(text)) / (learnt.nbytes * (1 - 1 / mesh.size)) for text in texts]
    rest = [sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(t)) for t in (layers, grads, moments)]
    formula = zero_bytes(learnt.size, mesh.size, stage, params=4, grads=4, optimizer=8)
    return {"at_rest": rest, "formula": formula, "sent": sent, "weights": learnt}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    mesh = jdp.make_mesh(data=-1)
    found = {stage: run(mesh, stage, 20) for stage in STAGES}
    classes = ("parameters", "gradients", "optimizer")
    rows = [(stage, *r["at_rest"], r["formula"].total, *r["sent"]) for stage, r in found.items()]
    headers = ("stage", *classes, "sum by formula", *(f"sent {phase}, × D" for phase in PHASES))
    apart = max(float(np.abs(r["weights"] - found["ddp"]["weights"]).max()) for r in found.values())
    said = f"""Each stage divides one more column by {mesh.size}. Stages 1 and 2 send 2D as DDP does: an all-reduce *is*
        a reduce-scatter and an all-gather, and they do the update in between. Stage 3 sends 3D: it keeps no weights, so
        each pass gathers them. All learn the same: weights differ by {apart:.1g} after 20 steps."""
    title = f"{found['ddp']['weights'].size} parameters on {mesh.size} devices: bytes at rest, and sent"
    show(title, headers, rows, said)
    show_claims({stage: r["sent"] for stage, r in found.items()})
    figure, (left, right) = chart(2)
    at_rest, sent = (np.array([r[key] for r in found.values()]).T for key in ("at_rest", "sent"))
    stacked(left, "At rest on a device, bytes", STAGES, dict(zip(classes, at_rest, strict=True)))
    stacked(right, "Sent by a device per step, × D", STAGES, dict(zip(PHASES, sent, strict=True)))
    keep(figure, options.picture, "Bytes at rest by class, and bytes sent by phase, for ddp and the stages of ZeRO")


if __name__ == "__main__":
    tell(main)
