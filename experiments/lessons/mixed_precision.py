"""Mixed precision: the width of each array, why float16 needs a scaled loss, and why bfloat16 does not.

The claim: "train in 16 bits, and everything takes half". Products and gathered weights take half. Master weights must
be kept in 32 bits, or small updates round away, so model state takes as much as before.

First the formats. Then the bytes of jdp's settings. Then the gradient of a trained net: which elements does
float16 lose, by the factor that the loss is multiplied with? A training loop finds that factor by itself. Last, weights
kept in bfloat16, which stop learning.

    python experiments/lessons/mixed_precision.py [--picture FILE.svg]

Widths in bits (exponent, fraction): float32 8, 23; float16 5, 10; bfloat16 8, 7. An update u of a weight w is lost if
|u| < |w|·ε/4 or so, with ε = 2^-23, 2^-10, 2^-7. The loop: ∇(S·L)/S; if an element is not finite, skip the step and
halve S, else double it now and then. All devices must decide alike, so check the *sum*. jdp: `precision="bf16"`.
Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019, arXiv:1905.12322 (bfloat16).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from devices import use_eight_devices
from jax.flatten_util import ravel_pytree
from narration import curves, keep, parser, show, tell
from toy import forward, init, make_batch

import jdp
from jdp.core.precision import DTYPES

FORMATS = (jnp.float32, jnp.float16, jnp.bfloat16)
LIMITS = {"largest": "max", "smallest normal": "tiny", "smallest": "smallest_subnormal", "step at 1": "eps"}
SETTINGS = {
    "fp32": jdp.Precision(),
    "bf16": jdp.Precision(compute="bf16"),
    "bf16, reduce too": jdp.Precision(compute="bf16", reduce="bf16"),
    "bf16, master weights too": jdp.Precision("bf16", "bf16", "bf16"),
}
SCALES, STEPS, BATCHES = tuple(2.0**k for k in range(-16, 33, 8)), 400, 2
RATE, SMALL = 3e-3, 1e-4  # of Adam


# 1. jdp's settings: bytes at rest are measured. Bytes sent are the dtypes' widths, because XLA sends 32 bits on CPUs
# anyway.


def bytes_a_parameter(name: str, plan: jdp.Plan) -> tuple[float, ...]:
    """Return bytes per parameter, of all devices: weights and Adam's moments at rest, a gradient and a weight sent."""
    precision = SETTINGS[name]
    start = lambda key: jax.tree.map(lambda leaf: leaf.astype(DTYPES[precision.params]), init(key))  # noqa: E731
    state = jdp.init_state(start, optax.adam(RATE), plan, rng=jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    rest = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) / parameters for part in (state.params, state.opt_state))
    return *rest, precision.reduce_dtype.itemsize, precision.compute_dtype.itemsize


# 2. Loss scaling: weights and activations in `dtype`, the loss itself in float32.


def scaled_gradient(params: Any, rows: Any, scale: Any, dtype: Any) -> Any:
    """Return (mean loss, ∇(S·L) in `dtype`: not yet divided by S)."""
    given, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (params, rows["x"]))

    def scaled(weights: Any) -> jax.Array:
        logits = forward(weights, x).astype(jnp.float32)  # in 16 bits a sure softmax is 1, its gradient 0
        return scale * optax.softmax_cross_entropy_with_integer_labels(logits, rows["y"]).mean()

    loss, grads = jax.value_and_grad(scaled)(given)
    return loss / scale, grads


def lost(params: Any, dtype: Any, scale: float) -> tuple[float, float]:
    """Return the shares of the gradient's elements that become zero, and that are not finite."""
    right, found = (
        ravel_pytree(scaled_gradient(params, make_batch(0), *how)[1])[0] for how in ((1, "f4"), (scale, dtype))
    )
    nonzero = right != 0
    return float((nonzero & (found == 0)).sum() / nonzero.sum()), float(1 - jnp.isfinite(found).mean())


@functools.partial(jax.jit, static_argnames=("dtype", "scale", "adapt", "kept", "rate", "steps"))
def train(dtype: Any, scale: float = 1, adapt: bool = False, kept: Any = "f4", rate: float = RATE, steps: int = STEPS):
    """Return (parameters, the losses and scales of all steps); `kept`: the dtype of the master weights."""
    tx, batches = optax.adam(rate), jax.tree.map(lambda *each: jnp.stack(each), *map(make_batch, range(BATCHES)))

    def step(carry: Any, i: jax.Array) -> Any:
        params, moments, scale, good = carry
        loss, grads = scaled_gradient(params, jax.tree.map(lambda leaf: leaf[i % BATCHES], batches), scale, dtype)
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads)) | (not adapt)
        updates, after = tx.update(grads, moments, params)
        after = optax.apply_updates(params, updates), after
        params, moments = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, (params, moments))
        good = jnp.where(finite, good + 1, 0)  # steps since the last one that was skipped
        factor = jnp.where(finite, jnp.where(good % 100 == 0, 2.0, 1.0), 0.5) if adapt else 1.0
        return (params, moments, scale * factor, good), (loss, scale, finite)

    params = jax.tree.map(lambda leaf: leaf.astype(kept), init(jax.random.key(0)))
    moments = tx.init(jax.tree.map(lambda leaf: leaf.astype("f4"), params))  # in 32 bits in any case
    carry = params, moments, jnp.float32(scale), jnp.int32(0)
    carry, found = jax.lax.scan(step, carry, jnp.arange(steps))
    return carry[0], found


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    about = [(jnp.finfo(f).dtype.name, *(float(getattr(jnp.finfo(f), k)) for k in LIMITS.values())) for f in FORMATS]
    said = """bfloat16 is float32 with its last 16 bits cut off: the same range, and two to three decimal digits of
        seven. float16 has eight times finer steps, but overflows above 65,504 and has nothing below 6e-8."""
    show("Three formats", ("format", *LIMITS), about, said)
    plan = jdp.Plan(jdp.make_mesh(data=-1), "ddp")
    table = [(name, *bytes_a_parameter(name, plan)) for name in SETTINGS]
    said = """With bf16 the model multiplies and gathers weights in 16 bits; state at rest is as large as before.
        Gradients are summed in 32 bits by default, because a sum over many devices rounds in each addition."""
    heads = ("precision", "weights at rest", "moments at rest", "a gradient sent", "a weight sent")
    show("Bytes per parameter", heads, table, said)
    learnt = train("f4")[0]
    table = [(s, *lost(learnt, "f2", s), *lost(learnt, jnp.bfloat16, s)) for s in SCALES]
    said = f"""Without a factor float16 makes {table[2][1]:.1%} of this toy's gradient zero, and
        {table[1][1]:.0%} if gradients are 256 times smaller. Too large a factor overflows.
        bfloat16 has float32's exponents, so it loses nothing with any factor: it needs none."""
    heads = ("factor", "float16: zero", "not finite", "bfloat16: zero", "not finite")
    show("Share of the gradient's elements that are lost", heads, table, said)
    ways = {
        "float32": train("f4"),
        "bfloat16": train(jnp.bfloat16),
        "float16, factor 1": train("f2"),
        "float16, factor found": train("f2", 2.0**24, True),
    }
    table = [(n, float(x[-BATCHES:].mean()), float(s[-1]), int((~f).sum())) for n, (_, (x, s, f)) in ways.items()]
    said = f"""The loop begins with a factor that overflows, skips {table[-1][-1]} steps, and settles. (All four learn
        alike: this toy loses few gradients without it.) On many devices all must skip the same steps, or their weights
        diverge: check the summed gradient, which is not finite on all devices if it is not on one. jdp skips such steps
        in any precision (`skipped` in the metrics)."""
    show(f"{STEPS} steps of Adam", ("computed in", "last losses", "last factor", "steps skipped"), table, said)
    small = {kept: train(jnp.bfloat16, kept=kept, rate=SMALL)[1][0] for kept in ("f4", "bfloat16")}
    table = [(jnp.dtype(kept).name, float(x[0]), float(x[-BATCHES:].mean())) for kept, x in small.items()]
    said = f"""With a rate of {SMALL} many updates are less than half a step of bfloat16 at that weight, and round away.
        32-bit master weights prevent this."""
    show(f"{STEPS} steps with a small rate", ("master weights", "first loss", "last losses"), table, said)
    drawn = {f"master weights in {jnp.dtype(kept).name}": x for kept, x in small.items()}
    figure = curves(f"Adam with a rate of {SMALL}, computed in bfloat16", ("step", range(STEPS)), "loss, nats", drawn)
    keep(figure, options.picture, "Loss by step, with master weights in float32 and in bfloat16")


if __name__ == "__main__":
    tell(main)
