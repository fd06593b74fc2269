"""Data parallelism by hand: the same start, local gradients, one sum, the same update.

The claim, from every tutorial: copy the model to all devices, give each a part of the batch, average the gradients, and
the copies stay equal. True, but two mistakes raise no error: a mean of means of unequal shards, and no sum at all.

Replicas start with different weights on purpose. A broadcast makes them equal. Each device takes the gradient of its
own rows, a sum over the devices makes one gradient, and all make the same update. The lesson repeats this without the
sum, and with jdp, and compares the weights.

    python experiments/lessons/simple_ddp.py [--picture FILE.svg]

The gradient of the mean over all rows is Σ gᵢ / Σ |Bᵢ|, gᵢ the summed gradient of device i's rows Bᵢ. jdp does it in
one line, `jdp.make_train_step(loss_fn, jdp.Plan(mesh, "ddp"))`. Li et al. 2020, arXiv:2006.15704.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clock import in_turns
from devices import use_eight_devices
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from narration import curves, keep, parser, show, tell
from toy import ROWS, init, make_batch, total_loss

import jdp

TX = optax.adamw(3e-3)

# 1. The same start. A replica is a device's own copy: replicas are arrays [devices, ...] split over the first
# dimension, so that only our own code keeps them equal. Each device draws its own values; then all take device 0's.


@functools.cache
def on_each_device(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function(replica, rows)`, run on every device with its own replica and its own rows."""

    def local(replicas: Any, *rows: Any) -> Any:
        result = function(jax.tree.map(lambda leaf: leaf[0], replicas), *rows)
        return jax.tree.map(lambda leaf: leaf[None], result)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def broadcast_from_first(own: Any) -> Any:
    """All devices but 0 send zeros, so the sum over the devices is device 0's value."""
    is_first = jax.lax.axis_index("data") == 0
    return jax.tree.map(lambda leaf: jax.lax.psum(jnp.where(is_first, leaf, 0), "data"), own)


def same_start(mesh: Mesh) -> tuple[Any, Any]:
    """Return (parameters, optimizer state) of the replicas, and the parameters as they were before the broadcast."""
    drawn = on_each_device(mesh, init)(jax.random.split(jax.random.key(0), mesh.size))
    params = on_each_device(mesh, broadcast_from_first)(drawn)
    return (params, on_each_device(mesh, TX.init)(params)), drawn


def distance(replicas: Any) -> float:
    """The largest difference between any two devices' copies of one weight."""
    return max(float(np.ptp(np.asarray(leaf), axis=0).max()) for leaf in jax.tree.leaves(replicas))


# 2. Local gradients, one sum, the same update. Σ gᵢ / Σ |Bᵢ| is the gradient of the mean over all rows; the mean of the
# devices' means equals it only if all |Bᵢ| are equal. A row's "weight" is 1, or 0 for padding: they add up to |Bᵢ|.


def gradients(params: Any, rows: dict[str, jax.Array], average: str) -> Any:
    grads, weight = jax.grad(total_loss)(params, rows), rows["weight"].sum()
    if average == "rows":
        grads, weight = jax.lax.psum((grads, weight), "data")
    grads = jax.tree.map(lambda grad: grad / weight, grads)
    return jax.lax.pmean(grads, "data") if average == "means" else grads  # else "nothing": each keeps its own


def step(replica: Any, rows: dict[str, jax.Array], average: str = "rows") -> Any:
    params, opt_state = replica
    updates, opt_state = TX.update(gradients(params, rows, average), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(mesh: Mesh, average: str, steps: int) -> tuple[Any, list[float]]:
    """Return the replicas' parameters, and how far apart they were after each step."""
    replica, apart = same_start(mesh)[0], [0.0]
    run = on_each_device(mesh, functools.partial(step, average=average))
    for seed in range(steps):
        replica = run(replica, make_batch(seed))
        apart.append(distance(replica[0]))
    return replica[0], apart


def error_of_uneven(mesh: Mesh, average: str, shares: np.ndarray) -> float:
    """Return |averaged − g| / |g|, g the gradient of all rows on one device; device i has shares[i] rows."""
    weight = (np.arange(ROWS // mesh.size) < shares[:, None]).astype(np.float32).ravel()
    params, rows = same_start(mesh)[0][0], make_batch(0) | {"weight": weight}
    averaged = on_each_device(mesh, functools.partial(gradients, average=average))(params, rows)
    averaged, first = jax.tree.map(lambda leaf: np.asarray(leaf)[0], (averaged, params))
    right = jax.tree.map(lambda grad: np.asarray(grad) / weight.sum(), jax.grad(total_loss)(first, rows))
    return float(optax.tree.norm(jax.tree.map(np.subtract, averaged, right)) / optax.tree.norm(right))


# 3. The same with jdp: how far its weights are from ours, and what each costs the host, taken in turns.


def against_jdp(mesh: Mesh, steps: int, rounds: int) -> dict[str, float]:
    plan, (first, opt_state) = jdp.Plan(mesh, "ddp"), same_start(mesh)[0]
    state = jdp.init_state(lambda rng: jax.tree.map(lambda leaf: leaf[0], first), TX, plan, rng=jax.random.key(0))
    loss = lambda params, rows, rng: jdp.Loss(total_loss(params, rows), rows["weight"].sum())  # noqa: E731
    theirs, ours = jdp.make_train_step(loss, plan, donate=False), on_each_device(mesh, step)
    for seed in range(steps):
        rows = jax.device_put(make_batch(seed), plan.batch_sharding)
        state = theirs(state, rows)[0]
    by_hand = jax.tree.map(lambda leaf: np.asarray(leaf)[0], train(mesh, "rows", steps)[0])
    apart = jax.tree.map(lambda own, whole: np.abs(own - whole).max(), by_hand, state.params)
    calls = {"hand": lambda: ours((first, opt_state), rows), "jdp": lambda: theirs(state, rows)}
    seconds = in_turns(calls, rounds)
    dispatch, processor, _ = np.median(seconds["jdp"] / seconds["hand"], axis=0)
    found = {"weights apart, jdp and by hand": float(max(jax.tree.leaves(apart)))}
    return found | {"dispatch, jdp / by hand": float(dispatch), "processor time, jdp / by hand": float(processor)}


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    mesh = jdp.make_mesh(data=-1)
    drift = {f"average over {name}": train(mesh, name, 60)[1] for name in ("rows", "nothing")}
    apart = {"before the broadcast": distance(same_start(mesh)[1])}
    apart |= {f"after 60 steps, {name}": distances[-1] for name, distances in drift.items()}
    said = """With the sum over all rows every device makes the same update, and copies stay equal bit for bit. Without
        it each device learns from its own rows and the copies diverge, without an error."""
    show(f"Replicas on {mesh.size} devices", ("when", "largest difference of a weight"), [*apart.items()], said)
    shares = np.where(np.arange(mesh.size) % 2, ROWS // mesh.size, 4)
    wrong = [(f"average over {name}", error_of_uneven(mesh, name, shares)) for name in ("rows", "means")]
    said = """A mean of means gives the rows of small shards more weight. Add up gradients *and* rows, then divide: that
        is right for any split, within float32 rounding."""
    show("Gradient of shards of 4 and 32 rows", ("how", "error / gradient's norm"), wrong, said)
    said = """Both give the same weights. Dispatch is the processor time until a call returns. jdp's step costs more,
        because it also computes the gradient's norm and keeps the old weights if that is not finite. In a large model
        neither matters."""
    show("Against jdp, 30 steps", ("what", "number"), [*against_jdp(mesh, 30, 100).items()], said)
    figure = curves("Distance between the replicas", ("step", range(61)), "largest difference of a weight", drift)
    keep(figure, options.picture, "Distance between replicas over 60 steps, with and without the sum of gradients")


if __name__ == "__main__":
    tell(main)
