"""Your part: replace each `raise`. `python experiments/lessons/exercises` checks your functions.

"On every device" means inside `jax.shard_map` over the mesh axis "data". `own` is the array of this device;
`jax.lax.axis_index("data")`, `psum`, `psum_scatter`, `all_gather` and `ppermute` reach the others.
"""

import jax


def broadcast(own: jax.Array) -> jax.Array:
    """On every device: return the array of device 0, with one `psum` (lesson 1)."""
    raise NotImplementedError("broadcast: all devices but 0 can send zeros")


def mean_gradient(summed: jax.Array, rows: jax.Array) -> jax.Array:
    """On every device: return the gradient of the mean over all rows (lesson 1).

    `summed` is the sum of the gradients of this device's rows, `rows` their number, which differs by device.
    """
    raise NotImplementedError("mean_gradient: sum more than the gradients")


def ring(own: jax.Array) -> jax.Array:
    """On every device: return the sum of all devices' arrays [N], with 2(N-1) sends to the right (lesson 2)."""
    raise NotImplementedError("ring: send chunk `me - step`, add the one that arrives; after N-1 rounds replace")


def contracted(x: jax.Array, w: jax.Array) -> jax.Array:
    """On every device: return the whole product of two matrices that are sharded on the summed dimension (lesson 3).

    A device has `x` [B, D / N] and `w` [D / N, F]; the product is [B, F].
    """
    raise NotImplementedError("contracted: a device's product is one part of each sum")


def last_ends(ready: list[float], sends: list[float]) -> float:
    """Return when the last bucket has been sent (lesson 4).

    Bucket i is ready at `ready[i]` and takes `sends[i]` to send. Buckets are sent in order, one at a time.
    """
    raise NotImplementedError("last_ends: a bucket waits for its gradients and for the bucket before it")


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Return the numbers of the tensors of each bucket, in the order of their gradients (lesson 5).

    The last tensor's gradient comes first. A bucket takes tensors until one more would exceed `limit` bytes; a tensor
    larger than that is a bucket of its own.
    """
    raise NotImplementedError("buckets: begin with the last tensor")


def sends_over_computes(rows: int, devices: int, flops: float, bandwidth: float) -> float:
    """Return the time of a ring all-reduce of float32 gradients over that of the computation (lesson 6).

    Each device has `rows` rows, computes `flops` a second and sends `bandwidth` bytes a second. The number of
    parameters is not given: you do not need it.
    """
    raise NotImplementedError("sends_over_computes: 6 FLOPs per row and parameter; count the bytes per parameter")


def zero1_update(weights: jax.Array, gradient: jax.Array, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On every device: make ZeRO-1's update with momentum; return the weights and this device's moment (lesson 7).

    `weights` [M] are whole and equal, `gradient` [M] is of this device's rows, `moment` [M / N] its part alone. The new
    moment is 0.9 times the old one plus the summed gradient; the new weights are the old ones less 0.1 times it.
    """
    raise NotImplementedError("zero1_update: reduce-scatter, update a part, all-gather")


def efficiency(repeated: float, divided: float, devices: int) -> float:
    """Return the efficiency of strong scaling: the speed-up over the number of devices (lesson 8).

    On one device a step takes `repeated` + `divided` seconds. Every device repeats the first part; the second is
    divided among the devices.
    """
    raise NotImplementedError("efficiency: write the time on N devices first (Amdahl 1967)")
