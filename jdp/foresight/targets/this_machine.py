"""The devices of this machine or cluster as a target: what to plan for when no other was named."""

import jax

from jdp.base.chips import GPUS
from jdp.base.shorten import described
from jdp.core.sharding.mesh import mesh_of
from jdp.core.types import Device, PyTree
from jdp.foresight.targets.resolve import Target, target


def check_target(named: object) -> None:
    """Check that a target is a name or a `Target`. Raises ValueError."""
    if named is not None and not isinstance(named, str | Target):
        raise ValueError(f'A target is text such as "h100:1x8" or "cpu:8"; given {described(named)}. Name devices so.')


def target_of(named: str | Target | None, state: PyTree = None) -> Target:
    """Return the target that was named; else the devices that `state` is placed on; else all of this cluster.

    A GPU of a kind that `base.chips` knows has that chip's published rates; of another GPU only its memory is known.
    """
    if named is not None:
        return target(named) if isinstance(named, str) else named
    mesh = mesh_of(state)
    devices: list[Device] = jax.devices() if mesh is None else list(mesh.devices.flat)
    first = devices[0]
    if first.platform == "cpu":
        return Target("cpu", 1, len(devices), tuple(devices), None, "cpu", shape=str(len(devices)))
    known = ((kind, chip) for kind, chip in GPUS.items() if chip.name == first.device_kind)
    kind, chip = next(known, (first.device_kind, None))
    memory = chip.memory_bytes if chip is not None else allocatable_bytes(first)
    hosts = len({device.process_index for device in devices})
    return Target(kind, hosts, len(devices) // hosts, tuple(devices), memory, first.device_kind, chip)


def allocatable_bytes(device: Device) -> int | None:
    """Return what the device's allocator may take; None for a device that is only described, or does not report it."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, jax.errors.JaxRuntimeError, NotImplementedError):
        return None
