"""Staleness: what if devices do not wait for each other?

The claim: "asynchronous updates are faster: nobody waits for a straggler". But their gradients are of old weights.

An MLP learns digits from gradients that are 0 to 8 updates old, with many rates. Then the pace of synchronous steps is
simulated. Last, today's method: each replica trains by itself for H steps, then all average, with 1/H of the bytes.

    python experiments/lessons/staleness.py [--picture FILE.svg]

On a quadratic with curvature λ a gradient s updates old learns up to a rate of 2/λ · sin(π / (4s + 2)). Stich 2019,
arXiv:1805.09767 (local SGD); Douillard et al. 2023, arXiv:2311.08105 (DiLoCo). jdp: `experiments/loops/diloco.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from digits import digits, init, loss
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from narration import keep, parser, show, tell
from stragglers import TIMES, pace

import jdp
from jdp.report.charts import chart

AGES, UPDATES, ROWS = (0, 1, 2, 4, 8), 400, 32  # how many updates old a gradient is; rows of a gradient
RATES, FIXED, LEARNT = 2.0 ** np.arange(-5, 1, 0.5), 0.25, 0.5  # of SGD; the one for all ages; a loss, at its limit


# 1. A parameter server. Workers fetch the weights, make a gradient and send it; the server applies it at once. If s + 1
# workers take turns, s updates of others come between a worker's fetch and its own update.
@jax.jit
def train_with_old_gradients(start: Any, data: Any, draws: jax.Array, age: Any, rates: jax.Array) -> jax.Array:
    """Return the loss over all data after `len(draws)` updates, for each rate; `draws`: rows of each update."""
    slots = AGES[-1] + 1  # the last weights, in a ring: those after update i in slot i modulo `slots`

    def one(rate: jax.Array) -> jax.Array:
        def update(past: Any, step: jax.Array) -> Any:
            now, old = (jax.tree.map(lambda leaf, i=i: leaf[i % slots], past) for i in (step, step - age))
            grads = jax.grad(loss)(old, *(leaf[draws[step]] for leaf in data))
            put = lambda leaf, weights, grad: leaf.at[(step + 1) % slots].set(weights - rate * grad)  # noqa: E731
            return jax.tree.map(put, past, now, grads), None

        past = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots, *leaf.shape)), start)
        past, _ = jax.lax.scan(update, past, jnp.arange(len(draws)))
        return loss(jax.tree.map(lambda leaf: leaf[len(draws) % slots], past), *data)

    return jax.vmap(one)(rates)


def sweep(ages: Sequence[int], rates: np.ndarray, seeds: int, updates: int = UPDATES) -> np.ndarray:
    """Return losses [ages, rates], medians over seeds; inf where training diverged."""
    losses = []
    for seed in range(seeds):
        draws = np.random.default_rng(seed).integers(0, len(digits()[0]), (updates, ROWS))
        losses.append([train_with_old_gradients(init(seed), digits(), draws, age, rates) for age in ages])
    return np.median(np.nan_to_num(losses, nan=np.inf), axis=0)


def limit(age: int) -> float:
    """Return the highest stable rate on a quadratic with gradients `age` updates old, over that with fresh ones."""
    return float(np.sin(np.pi / (4 * age + 2)))


# 2. Each replica trains by itself for H steps, then all average. Rates are the best in steps of a factor 2.
LOCAL, SAMPLES, INNER_ROWS = (1, 4, 16), 2**14, 64  # H; the same samples for every H; rows of all replicas' one step
METHODS = {  # the inner optimizer, the outer rate and momentum, the inner rate by H
    "SGD, mean": (optax.sgd, 1.0, 0.0, {1: 2**0, 4: 2**-1, 16: 2**-1}),
    "AdamW, mean": (optax.adamw, 1.0, 0.0, {1: 2**-5, 4: 2**-5, 16: 2**-6}),
    "DiLoCo": (optax.adamw, 0.7, 0.9, {1: 2**-10, 4: 2**-9, 16: 2**-8}),
}


def prepared(method: str, steps: int) -> tuple[Any, Any]:
    """Return a round, jitted, and what it starts from: (weights, outer momentum, each replica's optimizer state)."""
    make, rate, momentum, rates = METHODS[method]
    tx, mesh = make(rates[steps]), jdp.make_mesh(devices=jax.devices()[:4], replica=4, data=1)

    def step(carried: Any, batch: Any) -> Any:
        params, opt_state = carried
        updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def of_a_replica(params: Any, held: Any, opt_state: Any, batch: Any) -> Any:
        batch = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), batch)
        (end, opt_state), _ = jax.lax.scan(step, (params, jax.tree.map(lambda x: x[0], opt_state)), batch)
        delta = jax.tree.map(lambda p, e: jax.lax.pmean(p - e, "replica"), params, end)  # the one exchange
        held = jax.tree.map(lambda m, d: momentum * m + d, held, delta)
        params = jax.tree.map(lambda p, d, m: p - rate * (d + momentum * m), params, delta, held)
        return params, held, jax.tree.map(lambda x: x[None], opt_state)

    each, all, start = P("replica"), P(), jax.tree.map(jnp.asarray, init(0))
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *jnp.shape(x))), tx.init(start))
    state = jax.device_put((start, jax.tree.map(jnp.zeros_like, start)), NamedSharding(mesh, all))
    specs: Any = {"in_specs": (all, all, each, each), "out_specs": (all, all, each)}
    a_round = jax.jit(jax.shard_map(of_a_replica, mesh=mesh, **specs, check_vma=False))
    return a_round, (*state, jax.device_put(stacked, NamedSharding(mesh, each)))


def train(method: str, steps: int, samples: int = SAMPLES) -> float:
    """Return the loss over all digits after `samples` rows, `steps` local steps a round."""
    (a_round, state), rows = prepared(method, steps), steps * INNER_ROWS
    for drawn in np.random.default_rng(0).integers(0, len(digits()[0]), (samples // rows, rows)):
        state = jax.block_until_ready(a_round(*state, tuple(leaf[drawn] for leaf in digits())))
    return float(loss(jax.device_get(state[0]), *digits()))


def slow_bytes(method: str, steps: int) -> float:
    """Return the bytes that a device sends over `replica`, the slow links, a sample, counted in the program."""
    (a_round, state), rows = prepared(method, steps), steps * INNER_ROWS
    report = jdp.verify(a_round, *state, tuple(leaf[:rows] for leaf in digits()), cache=False)
    return sum(each.wire_bytes for each in report.sent if each.axes == ("replica",)) / rows


def main(argv: Sequence[str] | None = None) -> None:
    picture = parser(__file__, __doc__).parse_args(argv).picture
    use_eight_devices()
    losses, rows = sweep(AGES, RATES, 3), []
    highest = [float(RATES[each < LEARNT][-1]) for each in losses]
    for age, each, rate in zip(AGES, losses, highest, strict=True):
        found = each[RATES == FIXED][0], rate, highest[0] * limit(age), RATES[each.argmin()], each.min()
        rows.append((age, *map(float, found)))
    headers = (f"loss at a rate of {FIXED}", "highest rate that learns", "by formula", "best rate", "loss at it")
    said = f"""An old gradient overshoots, because the weights have moved since. The older it is, the lower the rate
        must be, nearly by the formula, and the best loss is worse: {rows[-1][-1]:.2g}, not {rows[0][-1]:.2g}."""
    show(f"{UPDATES} updates with old gradients", ("updates old", *headers), rows, said)
    paces = [(name, n, *(pace(name, n, local) for local in (1, 16, 0))) for name in TIMES for n in (2, 8, 64, 512)]
    names = ("time of one device's step", "devices", "waiting every step", "every 16", "never")
    said = """The more devices, the slower the slowest. Waiting every 16 steps averages out occasional delays."""
    show("Time of a step, in mean times of one device", names, paces, said)
    found = {method: [train(method, steps) for steps in LOCAL] for method in METHODS}
    rows = [*zip(LOCAL, sent := [slow_bytes("SGD, mean", steps) for steps in LOCAL], *found.values(), strict=True)]
    said = """H times fewer bytes cross the slow links. With one seed a factor below two means nothing."""
    show(f"Loss after {SAMPLES} samples, 4 replicas", ("local steps H", "slow bytes per sample", *found), rows, said)
    figure, (left, right) = chart(2)
    _ = [left.loglog(RATES, each, "o-", label=f"{age} updates old") for age, each in zip(AGES, losses, strict=True)]
    _ = [right.loglog(sent, each, "o-", label=method) for method, each in found.items()]
    left.set(title="Old gradients", xlabel="learning rate", ylabel="loss, nats")
    right.set(title="Local steps, H = 16, 4, 1", xlabel="bytes per sample over slow links", ylabel="loss, nats")
    left.legend(), right.legend()
    keep(figure, picture, "Left: loss by rate and age of gradients. Right: loss by bytes sent over the slow links.")


if __name__ == "__main__":
    tell(main)
