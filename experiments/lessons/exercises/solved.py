"""The exercises, solved: look here when yours are right, or after an hour."""

import jax
import jax.numpy as jnp


def broadcast(own: jax.Array) -> jax.Array:
    return jax.lax.psum(jnp.where(jax.lax.axis_index("data") == 0, own, 0), "data")


def mean_gradient(summed: jax.Array, rows: jax.Array) -> jax.Array:
    total, weight = jax.lax.psum((summed, rows), "data")
    return total / weight  # not the mean of summed / rows: a row of a small shard would count for more


def ring(own: jax.Array) -> jax.Array:
    n, me = jax.lax.axis_size("data"), jax.lax.axis_index("data")
    for step in range(2 * (n - 1)):
        arrived = jax.lax.ppermute(own[(me - step) % n], "data", [(i, (i + 1) % n) for i in range(n)])
        place = own.at[(me - step - 1) % n]
        own = place.add(arrived) if step < n - 1 else place.set(arrived)
    return own


def contracted(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.psum(x @ w, "data")


def last_ends(ready: list[float], sends: list[float]) -> float:
    end = 0.0
    for at, takes in zip(ready, sends, strict=True):
        end = max(at, end) + takes
    return end


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    filled: list[list[int]] = [[]]
    for number in reversed(range(len(sizes))):
        if filled[-1] and sum(sizes[each] for each in filled[-1]) + sizes[number] > limit:
            filled.append([])
        filled[-1].append(number)
    return filled


def sends_over_computes(rows: int, devices: int, flops: float, bandwidth: float) -> float:
    sends = 2 * (devices - 1) / devices * 4 / bandwidth  # seconds per parameter
    return sends / (6 * rows / flops)


def zero1_update(weights: jax.Array, gradient: jax.Array, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
    own = jax.lax.psum_scatter(gradient, "data", tiled=True)
    moment = 0.9 * moment + own
    part = weights.reshape(-1, moment.size)[jax.lax.axis_index("data")] - 0.1 * moment
    return jax.lax.all_gather(part, "data", tiled=True), moment


def efficiency(repeated: float, divided: float, devices: int) -> float:
    return (repeated + divided) / (devices * repeated + divided)  # of N times s + p/N
