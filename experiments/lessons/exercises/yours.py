"""Your part: replace each `raise`. `python experiments/lessons/exercises` says which are right.

`on every device` means inside `jax.shard_map` over the mesh axis "data": `own` is what this device has, and
`jax.lax.axis_index("data")`, `psum`, `psum_scatter`, `all_gather` and `ppermute` know the others.
"""

import jax


def broadcast(own: jax.Array) -> jax.Array:
    """On every device: return what device 0 has, with one `psum` (lesson 1)."""
    raise NotImplementedError("broadcast: all but device 0 can send zeros")


def mean_gradient(summed: jax.Array, rows: jax.Array) -> jax.Array:
    """On every device: return the gradient of the mean over all rows (lesson 1).

    `summed` is the sum of the gradients of this device's rows, `rows` how many these are: not the same everywhere.
    """
    raise NotImplementedError("mean_gradient: what has to be added up beside the gradients?")


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Return the numbers of the tensors that travel together, in the order of their gradients (lesson 5).

    The last tensor's gradient comes first. A bucket takes tensors until one more would exceed `limit` bytes; a tensor
    larger than that is a bucket of its own.
    """
    raise NotImplementedError("buckets: begin with the last tensor")


def sends_over_computes(rows: int, devices: int, flops: float, bandwidth: float) -> float:
    """Return the time of a ring all-reduce of float32 gradients over that of the computation (lesson 6).

    Each device has `rows` rows, computes `flops` a second and sends `bandwidth` bytes a second. The number of
    parameters is not given: you do not need it.
    """
    raise NotImplementedError("sends_over_computes: 6 FLOPs a row and parameter; how many bytes a parameter?")


def zero1_update(weights: jax.Array, gradient: jax.Array, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On every device: make ZeRO-1's update with momentum; return the weights and this device's moment (lesson 7).

    `weights` [M] are whole and equal, `gradient` [M] is of this device's rows, `moment` [M / N] its part alone. The new
    moment is 0.9 times the old one plus the summed gradient; the new weights are the old ones less 0.1 times it.
    """
    raise NotImplementedError("zero1_update: reduce-scatter, update a part, all-gather")


def ring(own: jax.Array) -> jax.Array:
    """On every device: return the sum of all devices' arrays [N], with 2(N-1) sends to the right (lesson 2)."""
    raise NotImplementedError("ring: send chunk `me - step`, add what arrives; after N-1 rounds replace")
