"""Whether a run can fit at all, said before anything is built: its weights, its state, a batch.

What is counted is certain: the state as it lies on the devices, and the batch; activations, gradients and working
copies are not (`jdp plan` compiles the step and counts them). What is compared with is all the memory there is, not
what is free now: a run that is refused here could not have started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jdp.core.formatting import format_bytes
from jdp.core.machine import memory_bytes
from jdp.core.types import Device
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.models.lower_bounds import parameter_lower_bound

_WEIGHT_BYTES = 4  # master weights are float32


def check_weights_and_batch(assembly: Assembly) -> None:
    """Before the model is traced and the data read: weights over all devices, and the batch in this machine's memory.

    Raises:
        ExperimentError: they cannot fit.
    """
    count = parameter_lower_bound(assembly.config)
    shares = 1 if assembly.experiment.strategy == "ddp" and not assembly.experiment.rules else assembly.mesh.size
    _refuse("its weights", _WEIGHT_BYTES * count / shares, f"a model of {count:,} parameters or more", assembly)
    batch = sum(map(_bytes, assembly.abstract_batch().values())) // jax.process_count()
    memory = memory_bytes()
    if memory is not None and batch > memory:
        raise ExperimentError(
            f"a batch must fit into memory; train.batch_size = {assembly.experiment.train.batch_size} makes "
            f"{format_bytes(batch)} of samples a step in a process, and this machine has {format_bytes(memory)}: lower "
            "it, or the size of a sample"
        )


def check_state(assembly: Assembly) -> None:
    """Before a run's folder is made: the state (weights, optimizer's, the model's own) as it lies on each device.

    Raises:
        ExperimentError: it cannot fit.
    """
    leaves = jax.tree.leaves(assembly.abstract_state())
    held = sum(_shard_bytes(leaf) for leaf in leaves)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(assembly.abstract_state().params))
    _refuse("its weights and the optimizer's state", held, f"a model of {total:,} parameters", assembly)


def _refuse(what: str, each: float, model: str, assembly: Assembly) -> None:
    """Raise if `each` bytes a device are more than the devices of this process have."""
    devices = [device for device in assembly.mesh.devices.flat if device.process_index == jax.process_index()]
    found = _memory(devices)
    if found is None or each <= found[0]:
        return
    raise ExperimentError(
        f"{what} must fit into the devices' memory; {model} needs {format_bytes(each)} for them on each of "
        f"{assembly.mesh.size} devices under {assembly.experiment.strategy}, and {found[1]}: make the model smaller"
        f"{'' if assembly.experiment.strategy == 'zero3' else ', or shard more (strategy)'}; `jdp plan` counts the rest"
    )


def _memory(devices: list[Device]) -> tuple[float, str] | None:
    """Bytes that one of these devices can have, and that in words; None where it is not known."""
    if not devices:
        return None
    if devices[0].platform == "cpu":
        memory = memory_bytes()
        share = f", which {len(devices)} devices share" if len(devices) > 1 else ""
        return None if memory is None else (memory / len(devices), f"this machine has {format_bytes(memory)}{share}")
    limits = list(_limits(devices))
    return (min(limits), f"a device has {format_bytes(min(limits))}") if limits else None


def _limits(devices: Iterable[Device]) -> Iterable[int]:
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit:
            yield limit


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * _item_bytes(leaf)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * _item_bytes(leaf)


def _item_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.dtype(leaf.dtype).itemsize
