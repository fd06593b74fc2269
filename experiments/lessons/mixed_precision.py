"""Mixed precision: what is kept in which width, why float16 needs its loss scaled, and why bfloat16 does not.

The claim: "train in 16 bits, and everything takes half". Products and what is gathered take half. Weights must be kept
in 32 bits, or small updates round away, so model state takes as much as before.

First the formats. Then the bytes of jdp's settings, weighed at rest and counted in the compiled program. Then gradients
of a trained net: which elements does float16 lose, by the factor that the loss is multiplied with? A training loop finds
that factor by itself. Last, weights in bfloat16, which stop learning.

    python experiments/lessons/mixed_precision.py [--picture FILE.svg]

Widths in bits (exponent, fraction): float32 8, 23; float16 5, 10; bfloat16 8, 7. An update u of a weight w is lost if
|u| < |w|·ε/4 or so, with ε = 2^-23, 2^-10, 2^-7. The loop: ∇(S·L)/S; if an element is not finite, skip the step and
halve S, else double it now and then. All devices must decide alike, so look at the *sum*. jdp: `precision="bf16"`.
Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019, arXiv:1905.12322 (bfloat16).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from jax.flatten_util import ravel_pytree
from narration import keep, parser, show, tell
from toy import init, make_batch, total_loss

import jdp
from jdp.foresight.program.collectives import collectives, traffic
from jdp.report.charts import chart

FORMATS = (jnp.float32, jnp.float16, jnp.bfloat16)
SETTINGS = {
    "fp32": jdp.Precision(),
    "bf16": jdp.Precision(compute="bf16"),
    "bf16, reduce too": jdp.Precision(compute="bf16", reduce="bf16"),
    "bf16, master weights too": jdp.Precision("bf16", "bf16", "bf16"),
}
SCALES, STEPS, SMALL = tuple(2.0**k for k in range(0, 33, 4)), 200, 1e-4  # the last: a learning rate


def loss_fn(params: Any, rows: Any, rng: jax.Array) -> jdp.Loss:
    rows = rows | {"x": rows["x"].astype(params["layer0"]["kernel"].dtype)}
    return jdp.Loss(total_loss(params, rows), rows["weight"].sum())


# 1. jdp's settings: what rests, weighed; what is sent, counted.


def bytes_a_parameter(name: str, plan: jdp.Plan) -> tuple[float, ...]:
    """Return bytes a parameter: weights and moments at rest on all devices, sent for gradients, sent for weights."""
    precision = SETTINGS[name]
    start = lambda key: jax.tree.map(lambda leaf: leaf.astype(precision.params_dtype), init(key))  # noqa: E731
    state = jdp.init_state(start, optax.adam(1e-3), plan, rng=jax.random.key(0))
    made = jdp.make_train_step(loss_fn, plan, precision=precision, partitioning="manual", donate=False)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    rest = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) / parameters for part in (state.params, state.opt_state))
    sent = traffic(collectives(made.compile(state, make_batch(0)).as_text()))
    print(sent)
    return *rest,


# 2. Loss scaling: a perceptron that has learnt, its gradients in 16 bits of S times the loss.


def mean_loss(params: Any, rows: Any, dtype: Any) -> jax.Array:
    """Return the mean loss: weights and activations in `dtype`, the loss itself in float32."""
    cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(dtype))
    return total_loss(cast(params), rows | {"x": rows["x"].astype(dtype)}) / len(rows["y"])


@functools.partial(jax.jit, static_argnames="dtype")
def scaled_gradient(params: Any, rows: Any, scale: jax.Array, dtype: Any) -> jax.Array:
    """Return ∇(S·L) as one array [parameters] in `dtype`: not yet divided by S."""
    given = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return ravel_pytree(jax.grad(lambda weights: scale * mean_loss(weights, rows, dtype))(given))[0]


@functools.partial(jax.jit, static_argnames=("dtype", "adapt"))
def train(params: Any, dtype: Any, scale: float, adapt: bool, draws: Any) -> Any: ...


if __name__ == "__main__":
    use_eight_devices()
    plan = jdp.Plan(jdp.make_mesh(data=-1), "zero1", min_shard_size=64)
    for n in SETTINGS:
        print(n, bytes_a_parameter(n, plan))
    params = init(jax.random.key(0))
    tx = optax.adam(3e-3)
    st = tx.init(params)
    @jax.jit
    def up(params, st, rows):
        l, g = jax.value_and_grad(mean_loss)(params, rows, jnp.float32)
        u, st = tx.update(g, st, params)
        return optax.apply_updates(params, u), st, l
    for i in range(STEPS):
        params, st, l = up(params, st, make_batch(i % 4))
    print(l)
    right = np.asarray(scaled_gradient(params, make_batch(0), 1.0, jnp.float32))
    for dtype in FORMATS[1:]:
        for s in SCALES:
            g = np.asarray(scaled_gradient(params, make_batch(0), s, dtype), np.float32)
            nz = right != 0
            print(dtype.__name__, s, ((g == 0) & nz).sum() / nz.sum(), (~np.isfinite(g)).mean(), np.linalg.norm(g/s-right)/np.linalg.norm(right))
