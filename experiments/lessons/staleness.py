"""Staleness: what if devices do not wait for each other?

The claim: "asynchronous updates are faster, as nobody waits for a straggler". They are, but gradients are then of old
weights. An MLP learns scikit-learn's digits (2 x86 cores, load 18, eight virtual devices, Python 3.11.7, jax 0.10.2):
- Gradients s = 0, 1, 2, 4, 8 updates old, SGD with a rate of 0.25: loss 0.049, 0.055, 0.056, 0.10, 2.3. The highest
  rate that learns falls from 1 to 0.5, 0.35, 0.25, 0.13 (on a quadratic with curvature λ it is exactly
  2/λ · sin(π / (4s + 2)): 1, 0.5, 0.31, 0.17, 0.09 of the fresh one's); the best, 0.71 to 0.06, ends at 0.16, not 0.02.
- A straggler: with a step's time 0.9 and a Pareto tail of mean 0.1, 8 synchronous devices take 1.24, 64 1.79, 512 2.86
  times the mean; waiting every 16 steps only, 1.07, 1.16, 1.32. One at half speed: 2 times, however rarely all wait.
- Local steps, the honest modern form: with H = 1, 4, 16 a device sends 225, 56, 14 bytes a sample over the slow links:
  1/H. Loss after 16,384 samples, one seed (in brackets the mean of three in a simulation): SGD averaged 0.014, 0.033,
  0.033 (0.018, 0.036, 0.055); AdamW averaged 0.015, 0.010, 0.025 (0.013, 0.012, 0.026); DiLoCo 0.093, 0.125, 0.023
  (0.095, 0.118, 0.039). H = 4 is free for AdamW, 16 is not; in so short a training DiLoCo does not beat a mean.

    python experiments/lessons/staleness.py [--picture FILE.svg]

jdp: `local_steps=`, `jdp.LocalSteps`. Stich 2019, arXiv:1805.09767; DiLoCo: Douillard et al. 2023, arXiv:2311.08105.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from large_batches import digits, init, loss
from narration import keep, parser, show, tell

import jdp
from jdp.report.charts import chart

AGES, UPDATES, ROWS = (0, 1, 2, 4, 8), 400, 32  # how many updates old a gradient is; rows of a gradient
RATES, FIXED, LEARNT = 2.0 ** np.arange(-5, 1, 0.5), 0.25, 0.5  # of SGD; the one for all ages; a loss, at its limit


# 1. A parameter server. Workers fetch the weights, make a gradient and send it; the server applies it at once. Of s + 1
# workers in turn, each finds that s updates of others came between its fetch and its own.
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
    """Return the highest stable rate with gradients `age` updates old, of that with fresh ones, on a quadratic."""
    return float(np.sin(np.pi / (4 * age + 2)))


# 2. Why anyone would: a synchronous step takes as long as its slowest device. Times of one device's step, mean 1.
TIMES: dict[str, Any] = {
    "normal, 5 %": lambda random, shape: random.normal(1, 0.05, shape),
    "exponential tail": lambda random, shape: 0.9 + random.exponential(0.1, shape),
    "Pareto tail, α = 3": lambda random, shape: 0.9 + 0.2 * random.pareto(3, shape),
    "one at half speed": lambda random, shape: np.ones(shape) + (np.arange(shape[-1]) == 0),
}


def pace(name: str, devices: int, local: int, rounds: int = 200) -> float:
    """Return the mean time of a step if devices wait for each other after every `local` steps; 0: never."""
    times = TIMES[name](np.random.default_rng(0), (rounds, 16, devices))
    if not local:
        return float(1 / (1 / times.mean(axis=(0, 1))).mean())  # devices' rates add up
    return float(times.reshape(-1, local, devices).sum(axis=1).max(axis=1).mean() / local)


# 3. The honest form: each replica trains by itself for H steps, then all agree. No gradient is old; weights differ
# within a round instead. Rates are the best of those a factor 2 apart, by a simulation beforehand.
LOCAL, SAMPLES, INNER_ROWS = (1, 4, 16), 2**14, 64  # H; the same samples for every H; rows of all replicas' one step
METHODS = {
    "SGD, mean": (optax.sgd, {}, {1: 2**0, 4: 2**-1, 16: 2**-1}),
    "AdamW, mean": (optax.adamw, {}, {1: 2**-5, 4: 2**-5, 16: 2**-6}),
    "DiLoCo": (optax.adamw, {"lr": 0.7, "momentum": 0.9}, {1: 2**-10, 4: 2**-9, 16: 2**-8}),
}


def prepared(method: str, steps: int) -> tuple[jdp.Step, jdp.TrainState]:
    plan = jdp.Plan(jdp.make_mesh(replica=4, data=-1), "zero1", min_shard_size=64)
    make, outer, rates = METHODS[method]
    local, state_of = jdp.LocalSteps(steps, **outer), lambda key: jax.tree.map(jnp.asarray, init(0))
    step = jdp.make_train_step(lambda p, batch, rng: loss(p, *batch), plan, local_steps=local, check_loss=False)
    return step, jdp.init_state(state_of, make(rates[steps]), plan, rng=jax.random.key(0))


def train(method: str, steps: int, samples: int = SAMPLES) -> float:
    """Return the loss over all digits after `samples` rows, `steps` local steps a round."""
    (step, state), rows = prepared(method, steps), steps * INNER_ROWS
    for drawn in np.random.default_rng(0).integers(0, len(digits()[0]), (samples // rows, rows)):
        state = jax.block_until_ready(step(state, tuple(leaf[drawn] for leaf in digits())))[0]
    return float(loss(jax.device_get(state.params), *digits()))


def slow_bytes(method: str, steps: int) -> float:
    """Return the bytes that a device sends over `replica`, the slow links, a sample, counted in the program."""
    rows = steps * INNER_ROWS
    report = jdp.verify(*prepared(method, steps), tuple(leaf[:rows] for leaf in digits()), cache=False)
    return sum(each.wire_bytes for each in report.collectives if each.axes == ("replica",)) / rows


def main(argv: Sequence[str] | None = None) -> None:
    picture = parser(__file__, __doc__).parse_args(argv).picture
    use_eight_devices()
    losses, rows = sweep(AGES, RATES, 3), []
    highest = [float(RATES[each < LEARNT][-1]) for each in losses]
    for age, each, rate in zip(AGES, losses, highest, strict=True):
        found = each[RATES == FIXED][0], rate, highest[0] * limit(age), RATES[each.argmin()], each.min()
        rows.append((age, *map(float, found)))
    headers = (f"loss at {FIXED}", "highest rate", "by formula", "best rate", "loss at it")
    show(f"{UPDATES} updates with old gradients", ("updates old", *headers), rows)
    paces = [(name, n, *(pace(name, n, local) for local in (1, 16, 0))) for name in TIMES for n in (2, 8, 64, 512)]
    show("Time of a step", ("one device's", "devices", "waiting every step", "every 16", "never"), paces)
    found = {method: [train(method, steps) for steps in LOCAL] for method in METHODS}
    rows = [*zip(LOCAL, sent := [slow_bytes("SGD, mean", steps) for steps in LOCAL], *found.values(), strict=True)]
    show(f"Loss after {SAMPLES} samples, 4 replicas", ("H", "slow bytes a sample", *found), rows)
    figure, (left, right) = chart(2)
    for age, each in zip(AGES, losses, strict=True):
        left.loglog(RATES, each, "o-", label=f"{age} updates old")
    for method, each in found.items():
        right.loglog(sent, each, "o-", label=method)
    left.set(title="Old gradients", xlabel="learning rate", ylabel="loss, nats")
    right.set(title="Local steps, H = 16, 4, 1", xlabel="bytes a sample over slow links", ylabel="loss, nats")
    left.legend(), right.legend()
    keep(figure, picture, "Left: loss by rate and age of gradients. Right: loss by bytes sent over the slow links.")


if __name__ == "__main__":
    tell(main)
