"""Large batches: how the learning rate scales with them, and when more devices stop helping.

The claims: scale the rate linearly with the batch and warm it up, whatever the optimizer; a larger batch is better.
More devices make the batch larger, so this decides how many are useful.

An MLP learns scikit-learn's digits from 4, 16, 64 or 256 rows per step. Its rate was tuned for 4 rows and is scaled by
three rules; then the best of seven rates is taken. The lesson counts the steps to a loss of 0.1. Then the noise scale
estimates the largest useful batch from two norms that data parallelism has anyway, in one training.

    python experiments/lessons/large_batches.py [--picture FILE.svg]

Steps are S_min (1 + B_crit / B): McCandlish et al. 2018, arXiv:1812.06162, equation 2.11; the noise scale is S / |G|²,
its appendix A.1. Linear rule: Goyal et al. 2017, arXiv:1706.02677 (SGD). Square root: Hoffer et al. 2017,
arXiv:1705.08741 (SGD); Malladi et al. 2022, arXiv:2205.10287 (Adam). jdp: `jdp.scaled_lr`; `jdp.warmup`, or
`warmup_steps` in [optimizer].
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from digits import digits, init, loss
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from narration import keep, parser, show, tell

import jdp
from jdp.report.charts import chart

BATCHES = (4, 16, 64, 256)
OPTIMIZERS = {"SGD": (optax.sgd(1.0), 2**-3), "Adam": (optax.adam(1.0), 2**-8)}  # with rates tuned for 4 rows per step
TARGET, MOST, WARMUP = 0.1, 700, 20  # nats, mean over the first 256 digits; steps; steps
RULES = {"same rate": 0, "square root": 1, "linear": 2}  # the rate for 4 · 4^i rows: the tuned one times 1, 2^i, 4^i


# 1. Steps to a loss against batch size, for several rates at once.
@functools.partial(jax.jit, static_argnames="name")
def train(name: str, start: Any, data: Any, draws: jax.Array, rates: Any, warmup: int, target: float) -> Any:
    """Return (steps until the loss is below `target`, or -1; the parameters then) of each rate; `draws`: its rows."""
    tx = OPTIMIZERS[name][0]

    def one(rate: jax.Array, step: jax.Array, batch: Any, carried: Any) -> Any:
        params, opt_state, ended = carried
        updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
        warm = jnp.where(ended == 0, rate, 0.0) * jnp.minimum(1.0, (step + 1) / jnp.maximum(warmup, 1))
        params = jax.tree.map(lambda old, change: old + warm * change, params, updates)
        now = loss(params, *(leaf[:256] for leaf in data))  # 100, or not a number: diverged
        reached = jnp.where(now < target, step + 1, jnp.where(now < 100, 0, -1))
        return params, opt_state, jnp.where(ended == 0, reached, ended)

    def body(carried: Any) -> Any:
        step, inner = carried
        return step + 1, jax.vmap(one, (0, None, None, 0))(rates, step, [leaf[draws[step]] for leaf in data], inner)

    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(rates), *leaf.shape)), start)
    begun = params, jax.vmap(tx.init)(params), jnp.zeros(len(rates), jnp.int32)
    going = lambda carried: (carried[0] < len(draws)) & (carried[1][2] == 0).any()  # noqa: E731
    params, _, ended = jax.lax.while_loop(going, body, (0, begun))[1]
    return jnp.where(ended == 0, -1, ended), params


def sweep(name: str, batches: Sequence[int], seeds: int, warmup: int = 0, target: float = TARGET) -> Any:
    """Return steps [batches, 7 rates: the tuned one times 1, 2, … 64], inf for never; and the last run's
    parameters."""
    rates, steps, params = OPTIMIZERS[name][1] * 2.0 ** np.arange(7), [], None
    for batch, seed in itertools.product(batches, range(seeds)):
        draws = np.random.default_rng(seed).integers(0, len(digits()[0]), (MOST, batch))
        ended, params = train(name, init(seed), digits(), draws, rates, warmup, target)
        steps.append(np.where(ended < 0, np.inf, ended))
    return np.median(np.reshape(steps, (len(batches), seeds, -1)), axis=1), params


# 2. When more devices stop helping: steps(B) = S_min · (1 + B_crit / B), equation 2.11; least relative errors.
def fit(batches: Sequence[int], steps: Sequence[float]) -> tuple[float, float]:
    terms = np.array([[1 / s, 1 / (b * s)] for b, s in zip(batches, steps, strict=True)])
    least, slope = map(float, np.linalg.lstsq(terms, np.ones(len(steps)), rcond=None)[0])
    return least, slope / least


# 3. The noise scale S / |G|². A mean of B gradients has E|g_B|² = |G|² + S / B, S the summed variances. Two B are
# available, a device's rows and the whole batch: two equations (appendix A.1).
def noise_scale(mesh: Mesh, params: Any, batches: int, rows: int = 256) -> tuple[float, float]:
    """Return (|G|², S) from two squared norms, averaged over batches: the ratio of one batch's is noisy and biased."""

    def norms(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        own = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), images, labels)  # cast: else summed already
        square = lambda tree: sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))  # noqa: E731
        return jax.lax.pmean(square(own), "data"), square(jax.lax.pmean(own, "data"))

    sharded = jax.jit(jax.shard_map(norms, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()))
    draws = np.random.default_rng(0).integers(0, len(digits()[0]), (batches, rows))
    pairs = [jax.device_get(sharded(params, *(leaf[draw] for leaf in digits()))) for draw in draws]  # one at a time
    (small, big), share = np.mean(np.array(pairs, np.float64), axis=0), rows / mesh.size
    return (rows * big - share * small) / (rows - share), (small - big) / (1 / share - 1 / rows)


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    figure, panels = chart(2)
    for name, panel in zip(OPTIMIZERS, panels, strict=True):
        plain, warm = (sweep(name, BATCHES, 3, warmup)[0] for warmup in (0, WARMUP))
        best = np.minimum(plain, warm).min(axis=1)
        least, critical = fit(BATCHES, best)
        columns = {rule: [row[i * power] for i, row in enumerate(plain)] for rule, power in RULES.items()}
        columns |= {"linear, warm-up": [row[2 * i] for i, row in enumerate(warm)], "best rate": list(best)}
        columns["fit"] = [least * (1 + critical / batch) for batch in BATCHES]
        for label, steps in columns.items():
            panel.loglog(BATCHES, steps, "--" if label == "fit" else "o-", label=label)
        panel.set(title=name, xlabel="rows per step", ylabel=f"steps to a loss of {TARGET}")
        panel.legend()
        columns["work of a row"] = list(best[0] / best * BATCHES[0] / np.array(BATCHES))
        holds = [rule for rule in ("square root", "linear") if np.isfinite(columns[rule]).all()]
        said = f"""At the same rate more rows save few steps. {" and ".join(holds) or "no rule"} learns with every
            batch; "inf" diverged. With the best rate steps are {least:.0f} (1 + {critical:.0f} / rows). At
            {critical:.0f} rows, the critical batch, a row does half the work of one in a small batch; at 256
            {columns["work of a row"][-1]:.0%}."""
        rows = [*zip(BATCHES, *columns.values(), strict=True)]
        show(f"{name}: steps to a loss of {TARGET}", ("rows", *columns), rows, said)
    mesh, found = jdp.make_mesh(data=-1), list[tuple[float, ...]]()
    for target in (2.0, 1.0, 0.3, 0.1):
        params = jax.tree.map(lambda leaf: leaf[2], sweep("SGD", [16], 1, target=target)[1])  # of the best rate
        found.append((target, *(scale := noise_scale(mesh, params, 100)), scale[1] / scale[0]))
    said = """S / |G|² is a batch size: below it gradients are mostly noise, and more rows save steps. It grows while
        the model learns, because |G| falls. It has the order of magnitude of the critical batch above, from one
        training."""
    headers = ("at a loss of", "squared gradient |G|²", "variance of a row S", "noise scale S / |G|², rows")
    show(f"Noise scale, {mesh.size} devices, 256 rows", headers, found, said)
    keep(figure, options.picture, "Steps to a loss against batch size, for three rules of scaling and the best rate")


if __name__ == "__main__":
    tell(main)
