"""Refuse a run that cannot fit into memory before anything is built: its weights, its state, a batch.

Only what is certain is counted: the state as it is sharded, and the batch, but no activations, gradients or working
copies (`jdp plan` compiles the step and counts them). It is compared with all the memory there is, not with what is
free now: a run that is refused here could not have started.
"""

from __future__ import annotations

import math

import jax

from jdp.base.formatting import format_bytes
from jdp.base.machine import memory_bytes
from jdp.core.sharding.host_memory import PINNED
from jdp.core.sharding.placement import bytes_per_device
from jdp.core.types import Device
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.models import ModelConfig
from jdp.models.lower_bounds import parameter_lower_bound

_WEIGHT_BYTES = 4  # master weights are float32


def check_weights_and_batch(assembly: Assembly) -> None:
    """Check the weights over all devices, and the batch in this machine's memory.

    To be called before the model is traced and the data read.
    """
    own = isinstance(assembly.config, ModelConfig)  # of a plug-in's model nothing is known before it is traced
    count = parameter_lower_bound(assembly.config) if own else 0
    shares = 1 if assembly.experiment.strategy == "ddp" and not assembly.experiment.rules else assembly.mesh.size
    _refuse("its weights", _WEIGHT_BYTES * count / shares, f"a model of {count:,} parameters or more", assembly)
    leaves = assembly.abstract_batch().values()
    batch = sum(bytes_per_device(leaf.shape, leaf.dtype, 1) for leaf in leaves) // jax.process_count()
    memory = memory_bytes()
    if memory is not None and batch > memory:
        raise ExperimentError(
            f"a batch must fit into memory; train.batch_size = {assembly.experiment.train.batch_size} makes "
            f"{format_bytes(batch)} of samples a step in a process, and this machine has {format_bytes(memory)}: lower "
            "it, or the size of a sample"
        )


def check_state(assembly: Assembly) -> None:
    """Check the state (weights, the optimizer's, the model's own) as it is sharded over the devices.

    To be called before a run's folder is made.
    """
    state = assembly.abstract_state()
    held = sum(
        bytes_per_device(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape), leaf.dtype, 1)
        for leaf in jax.tree.leaves(state)
        if getattr(leaf.sharding, "memory_kind", None) != PINNED or assembly.mesh.devices.flat[0].platform == "cpu"
    )
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    _refuse("its weights and the optimizer's state", held, f"a model of {total:,} parameters", assembly)


def _refuse(what: str, each: float, model: str, assembly: Assembly) -> None:
    """Raise ExperimentError if `each` bytes a device are more than the devices of this process have."""
    devices = [device for device in assembly.mesh.devices.flat if device.process_index == jax.process_index()]
    available, described = _memory(devices)
    if each <= available:
        return
    raise ExperimentError(
        f"{what} must fit into the devices' memory; {model} needs {format_bytes(each)} for them on each of "
        f"{assembly.mesh.size} devices under {assembly.experiment.strategy}, and {described}: make the model smaller"
        f"{'' if assembly.experiment.strategy == 'zero3' else ', or shard more (strategy)'}; `jdp plan` counts the rest"
    )


def _memory(devices: list[Device]) -> tuple[float, str]:
    """Return the bytes that one of these devices can have, and that in words; infinity where it is not known."""
    if devices and devices[0].platform == "cpu" and (memory := memory_bytes()) is not None:
        share = f", which {len(devices)} devices share" if len(devices) > 1 else ""
        return memory / len(devices), f"this machine has {format_bytes(memory)}{share}"
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices if device.platform != "cpu"]
    least = min(filter(None, limits), default=math.inf)
    return least, "" if math.isinf(least) else f"a device has {format_bytes(least)}"
