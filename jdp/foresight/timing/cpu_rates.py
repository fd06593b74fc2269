"""Rates of this machine's processor, measured: CPUs have no published rates that would fit.

`measure(devices)` runs small programs on all of a target's devices at once, in float32, each for a fifth of a second,
once in a process: matrix products, additions, exponentials, copies; loops of kernels that do next to nothing, and of
collectives that carry next to nothing. Virtual devices share the machine's cores and memory, so that each of N gets
about an N-th. A collective is a copy in memory, after every device has arrived.
"""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.core.sharding.mesh import without_mesh
from jdp.core.types import Device
from jdp.foresight.timing.kernels import CostModel, Rates

CAVEAT = "times are simulated from rates measured on this machine just now; its virtual devices share its cores"
_SECONDS = 0.2
_AXIS = "devices"


@dataclass(frozen=True)
class Machine:
    """A device among several on this machine, while all of them work."""

    rates: Rates  # measured, so that the model's efficiencies are 1
    model: CostModel  # the constants that fit
    barrier_seconds: float  # time of a collective that carries next to nothing

    def collective_seconds(self, kind: str, payload_bytes: float, groups: tuple[tuple[int, ...], ...]) -> float:
        """Return the seconds of one execution: a device reads its operand and writes its result in shared memory."""
        shard = payload_bytes / max(map(len, groups))
        moved = payload_bytes + shard if kind in ("all-gather", "reduce-scatter") else 2 * payload_bytes
        return self.barrier_seconds + moved / self.rates.memory_bandwidth


@functools.cache
def measure(devices: tuple[Device, ...]) -> Machine:
    """Measure this machine's rates for each of `devices`, while all of them work. Takes about two seconds."""
    with without_mesh():
        return _measured(Mesh(np.array(devices), (_AXIS,)))


def _measured(mesh: Mesh) -> Machine:
    tiny, square = np.zeros(16, np.float32), np.full((384, 384), 1e-3, np.float32)
    cached, long = np.full(2**16, 0.5, np.float32), np.zeros((2048, 2048), np.float32)
    time_of = functools.partial(_seconds_a_round, mesh)
    kernel = time_of(lambda x: x + 1, tiny, rounds=64)
    barrier = time_of(lambda x: jax.lax.psum(x, _AXIS) * 0.5, tiny, rounds=64)
    product = time_of(lambda x: x @ x, square, rounds=8)
    addition = time_of(lambda x: _repeated(lambda y: y * x + 0.1, 32, x), cached, rounds=8) / (64 * cached.size)
    exponential = time_of(lambda x: _repeated(lambda y: jnp.exp(-y), 8, x), cached, rounds=8) / (8 * cached.size)
    # One round: a step writes most of its values into memory that it was just given, page by page.
    copy = time_of(lambda x: x + 1, long, rounds=1)
    # `x.T`, written out: the barrier keeps XLA from only renaming the dimensions.
    transposed = time_of(lambda x: jax.lax.optimization_barrier(x.T) + 0.0, long, rounds=1)
    rates = Rates({"f32": 2 * 384**3 / product}, 2 / addition, 2 * long.nbytes / copy, 1)
    model = CostModel(
        matmul_efficiency=1.0,
        narrow_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_seconds=kernel,
        tile=0,
        special_function_cost=exponential / addition,
        integer_cost=1.0,
        transposed_efficiency=copy / transposed,
    )
    return Machine(rates, model, max(0.0, barrier - kernel))


def _repeated(function: Callable[[jax.Array], jax.Array], times: int, x: jax.Array) -> jax.Array:
    for _ in range(times):
        x = function(x)
    return x


def _seconds_a_round(mesh: Mesh, body: Callable[[jax.Array], jax.Array], argument: np.ndarray, *, rounds: int) -> float:
    """Seconds of one round of a loop around `body`, on every device at once with an `argument` of its own.

    The fastest call within the time allowed counts: other processes on the machine only add to it. With as many devices
    as cores, processor time counts, which other processes hardly change.
    """
    spec = PartitionSpec(_AXIS)

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, y: body(y), x)

    everywhere = np.concatenate([argument] * mesh.size)
    given = jax.device_put(everywhere, NamedSharding(mesh, spec))
    run = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    jax.block_until_ready(run(given))
    cores = os.cpu_count() or 1
    end, fastest = time.perf_counter() + _SECONDS, float("inf")
    while (begin := time.perf_counter()) < end:
        worked = time.process_time()
        jax.block_until_ready(run(given))
        wall, worked = time.perf_counter() - begin, time.process_time() - worked
        fastest = min(fastest, wall if mesh.size < cores else min(wall, worked / cores))
    return fastest / rounds
