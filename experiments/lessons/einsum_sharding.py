"""One einsum, `bd,df->bf`, sharded four ways: what each device has, and which collectives XLA inserts.

The claim: "with 5120 rows over two devices each sees 2560 rows and all weights; the forward pass needs no
communication, the weight gradient an all-reduce". True, and one of four ways.

You shard x, w and y, and XLA inserts the collectives. A sum over a split dimension needs an all-reduce, such as the
gradient of w if the rows are split. An operand that a device needs whole needs an all-gather. The programs are compiled
for two and for eight devices, read, and drawn.

    python experiments/lessons/einsum_sharding.py [--sizes 5120 2048 1024] [--target h100:1x8] [--picture FILE.svg]

    sharded                     forward           backward                                         FLOPs/byte, 8 H100s
    batch (data parallel)       -                 all-reduce of ∂w, D·F elements                   549
    weight (tensor parallel)    -                 all-reduce of ∂x, B·D                            110
    both, one axis (ZeRO-3)     all-gather of w   all-gather of w, reduce-scatter of ∂w            366
    both, two axes (4 by 2)     -                 all-reduce of parts: ∂w over 4, ∂x over 2        480

y stays split as x and w are. With both split over D, the dimension that is summed, each device would have a partial sum
of y, and the forward pass an all-reduce. XLA:CPU has an all-reduce where XLA:GPU has a reduce-scatter. In jdp rows 1
and 3 are `Plan(mesh, "ddp")` and `"zero3"`, 2 and 4 rules such as `("*/kernel", P(None, "model"))` on a mesh with that
axis. The JAX scaling book, chapters 3 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import use_eight_devices
from drawings import draw_shards
from jax import NamedSharding, P
from narration import keep, parser, show, tell

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes, traffic
from jdp.foresight.targets.resolve import target
from jdp.report.charts import chart

# 1. The shardings of x [B, D], w [D, F] and y [B, F]. `data` has all devices, unless `model` takes two of them.

SHARDINGS = {
    "batch": (P("data", None), P(None, None), P("data", None)),
    "weight": (P(None, None), P(None, "data"), P(None, "data")),
    "both, one axis": (P("data", None), P("data", None), P("data", None)),
    "both, two axes": (P("data", None), P(None, "model"), P("data", "model")),
}


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bd,df->bf", x, w)


def backward(x: jax.Array, w: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and w: two more einsums, bf,df->bd and bd,bf->df."""
    return jax.vjp(layer, x, w)[1](grad)


def places(sharding: str, devices: Sequence[Any]) -> tuple[NamedSharding, ...]:
    """Return the shardings of x, w and y."""
    model = 2 if sharding == "both, two axes" else 1
    mesh = jdp.make_mesh(devices=devices, data=len(devices) // model, model=model)
    return tuple(NamedSharding(mesh, spec) for spec in SHARDINGS[sharding])


# 2. Compile forward and backward pass, and read the collectives that XLA inserted. This needs no arrays and no devices.


@dataclass(frozen=True)
class Case:
    """Shapes of x and w on one device; payload bytes by kind of collective; bytes that a device sends."""

    has: list[tuple[int, ...]]
    forward: dict[str, int]
    backward: dict[str, int]
    sent: float


def count(sharding: str, devices: Sequence[Any], b: int, d: int, f: int) -> Case:
    where = places(sharding, devices)
    shapes = zip(((b, d), (d, f), (b, f)), where, strict=True)
    x, w, y = (jax.ShapeDtypeStruct(shape, np.float32, sharding=place) for shape, place in shapes)
    forward = jax.jit(layer, out_shardings=where[2]).lower(x, w).compile()
    back = jax.jit(backward, out_shardings=where[:2]).lower(x, w, y).compile()
    first, second = (collectives(compiled.as_text()) for compiled in (forward, back))
    has = [place.shard_shape(each.shape) for each, place in ((x, where[0]), (w, where[1]))]
    return Case(has, traffic(first), traffic(second), total_wire_bytes([*first, *second]))


# 3. The same as objects: a layer that knows one device, unchanged inside a data-parallel one.


@dataclass
class Linear:
    w: Any

    def __call__(self, x: Any) -> jax.Array:
        return jax.jit(layer)(x, self.w)


class DataParallel:
    """Put all weights of a layer on every device, and split each batch over the devices."""

    def __init__(self, inner: Linear) -> None:
        self.rows, everywhere, _ = places("batch", jax.devices())
        self.inner = Linear(jax.device_put(inner.w, everywhere))

    def __call__(self, x: Any) -> jax.Array:
        return self.inner(jax.device_put(x, self.rows))


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__file__, __doc__)
    made.add_argument("--sizes", type=int, nargs=3, default=(5120, 2048, 1024), metavar=("B", "D", "F"))
    made.add_argument("--target", metavar="NAME", help="compile for these devices too, such as h100:1x8")
    b, d, f = (options := made.parse_args(argv)).sizes
    if any(size < 1 or size % 8 for size in (b, d, f)):
        made.error(f"--sizes must divide by 8 devices; given {b} {d} {f}: 5120 2048 1024")
    use_eight_devices()
    meshes = [jax.devices()[:2], jax.devices()[:8], *([target(options.target).devices] if options.target else [])]
    rows, devices = [], meshes[1]
    for chosen, way in ((chosen, way) for chosen in meshes for way in SHARDINGS if len(chosen) > 2 or "two" not in way):
        case = count(way, chosen, b, d, f)
        kinds = [", ".join(f"{k} {v / 1e6:.3g} MB" for k, v in c.items()) or "-" for c in (case.forward, case.backward)]
        rows.append((len(chosen), way, "{} {}".format(*case.has), *kinds, 6 * b * d * f / len(chosen) / case.sent))
    headers = ("devices", "sharded", "x and w on a device", "forward", "backward", "FLOPs per byte sent")
    said = """Splitting the batch sends the gradient of w, splitting w the gradient of x; the smaller one is cheaper.
        With the batch split there are 0.75·B/(N−1) FLOPs for each byte sent: the rows per device decide, not the
        layer's size. Splitting both on one axis keeps less on a device and gathers w for each pass; XLA:GPU then
        reduce-scatters the gradient of w, which sends half of XLA:CPU's all-reduce."""
    show(f"bd,df->bf with B = {b}, D = {d}, F = {f}", headers, rows, said)
    x, w = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((b, d), (d, f)))
    one, parallel = Linear(w)(x), DataParallel(Linear(w))(x)
    print(f"\none device against data-parallel: {np.abs(one - np.asarray(parallel)).max():.2g} apart; its result:")
    jax.debug.visualize_array_sharding(parallel)
    figure, panels = chart(3, len(SHARDINGS), height=1.9)
    for i, way in enumerate(SHARDINGS):
        draw_shards(panels[3 * i : 3 * i + 3], way, places(way, devices), ((b, d), (d, f), (b, f)))
    keep(figure, options.picture, "Which devices have which part of x, w and y under four shardings")


if __name__ == "__main__":
    tell(main)
