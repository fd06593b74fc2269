"""The devices that are at hand, as a target: what to plan for when no other was named."""

from collections.abc import Sequence

import jax

from jdp.core.sharding.mesh import mesh_of
from jdp.core.types import Device, PyTree
from jdp.foresight.targets.chips import GPUS
from jdp.foresight.targets.resolve import Target, target


def target_of(named: str | Target | None, state: PyTree = None) -> Target:
    """The target that was named; else the devices that `state` lies on; else all devices of this process' cluster.

    A GPU of a kind that `foresight.chips` knows has that chip's published rates; of another GPU only its memory is
    known. Raises ValueError for a name that is no target.
    """
    if isinstance(named, str):
        return target(named)
    mesh = mesh_of(state)
    return named if named is not None else _described(jax.devices() if mesh is None else list(mesh.devices.flat))


def _described(devices: Sequence[Device]) -> Target:
    first = devices[0]
    hosts = len({device.process_index for device in devices})
    if first.platform == "cpu":
        return Target("cpu", 1, len(devices), tuple(devices), None, "cpu", shape=str(len(devices)))
    known = [(kind, chip) for kind, chip in GPUS.items() if chip.name == first.device_kind]
    kind, chip = known[0] if known else (first.device_kind, None)
    memory = chip.memory_bytes if chip is not None else _limit(first)
    return Target(kind, hosts, len(devices) // hosts, tuple(devices), memory, first.device_kind, chip)


def _limit(device: Device) -> int | None:
    """What the device's allocator may take, where the device is real and tells."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, jax.errors.JaxRuntimeError, NotImplementedError):
        return None


def fingerprint(where: Target) -> str:
    """Everything about a target that decides what the compiler makes for it."""
    return "\n".join(
        [where.kind, f"{where.hosts}x{where.per_host}", where.shape, where.description, where.config or ""]
    )
