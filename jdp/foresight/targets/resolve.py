"""Devices to compile for that this machine need not have.

`target("h100:8x8")` describes the chip to XLA's compiler by a text proto of published numbers, and returns stand-ins
for 64 devices on 8 hosts: a step lowered over their mesh compiles to the program that those devices would run.
"""

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jdp.base.chips import GPUS, Gpu
from jdp.base.errors import UserError
from jdp.base.machine import version_of
from jdp.base.toml import described
from jdp.base.words import nearest
from jdp.core.sharding.mesh import mesh_of
from jdp.core.types import Device, PyTree
from jdp.foresight.targets.descriptions import read, written

_GRAMMAR = (
    "a target is KIND:HOSTSxPER_HOST, such as h100:8x8 (8 hosts with 8 GPUs each) or cluster.toml:8x8 (GPUs that a "
    "file describes); or cpu:N, such as cpu:8"
)
_INSTALL = "pip install 'jdp[aot]'"

KINDS = (*GPUS, "cpu")
MOST_DEVICES = 16384
"""Four times the size that jdp is made for: a larger number is a typing error, or a very long compilation."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind: `hosts` machines with `per_host` devices each, ordered host by host.

    Attributes:
        kind: the name before the colon, such as "h100".
        hosts, per_host: how many machines, and how many devices each has.
        devices: the devices of all hosts; `devices[i].process_index` is the host of device i.
        memory_bytes: memory of one device; None on CPU, whose virtual devices share the machine's.
        description: jax's `device_kind`.
        chip: the published rates; None if unknown, as on CPU.
        config: XLA's description of a GPU; None for other devices.
        shape: the text after the colon, such as "8x8"; empty for the devices of this machine, except CPUs.
    """

    kind: str
    hosts: int
    per_host: int
    devices: tuple[Device, ...] = field(repr=False)
    memory_bytes: int | None
    description: str
    chip: Gpu | None = field(default=None, repr=False)
    config: str | None = field(default=None, repr=False)
    shape: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.shape or f'{self.hosts}x{self.per_host}'}"

    @property
    def fingerprint(self) -> str:
        """Everything about the target that affects compilation, as text."""
        return "\n".join((self.kind, f"{self.hosts}x{self.per_host}", self.shape, self.description, self.config or ""))


def target(name: str) -> Target:
    """Return the devices that a name stands for.

    Args:
        name: KIND:HOSTSxPER_HOST, such as `h100:8x8` or `my/cluster.toml:8x8`; or `cpu:8`.

    Raises:
        ValueError: the name does not parse, or a cluster's file is wrong. The compiler is missing, has another version
            than jaxlib, or did not start. This process has too few CPU devices. The message has the fix.
    """
    kind, shape = _parse(name)
    sizes = [int(size) for size in shape.split("x")]
    if kind == "cpu":
        return Target(kind, 1, sizes[0], _cpu_devices(name, sizes[0]), None, "cpu", shape=shape)
    chip = GPUS[kind] if kind in GPUS else read(kind)
    config = written(chip)
    _check_compiler(name)
    hosts, per_host = sizes
    devices = _gpu_devices(name, config, hosts, per_host)
    return Target(kind, hosts, per_host, devices, chip.memory_bytes, chip.name, chip, config, shape)


def _parse(name: str) -> tuple[str, str]:
    kind, _, shape = name.rpartition(":")
    kind = kind if kind.endswith(".toml") else kind.lower()
    size = "[1-9][0-9]{0,17}"  # Python parses at most 4300 digits
    if kind and kind not in KINDS and not kind.endswith(".toml"):
        raise UserError(
            f"the kind of a target must be one of {', '.join(KINDS)}, or a file that ends in .toml; given {kind!r} in "
            f"{name!r}{nearest(kind, KINDS)}"
        )
    if not kind or not re.fullmatch(size if kind == "cpu" else f"{size}x{size}", shape):
        raise UserError(f"{_GRAMMAR}; given {name!r}: write one of these")
    if math.prod(map(int, shape.split("x"))) > MOST_DEVICES:
        raise UserError(f"a target has at most {MOST_DEVICES} devices; given {name!r}: use fewer")
    return kind, shape


def _cpu_devices(name: str, wanted: int) -> tuple[Device, ...]:
    try:
        present = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS names other platforms only
        present = []
    if len(present) < wanted:
        raise UserError(
            f"target {name!r} needs {wanted} CPU devices and this process has {len(present)}: start it with "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={wanted}, or call "
            f"jax.config.update('jax_num_cpu_devices', {wanted}) before anything else uses jax"
        )
    return tuple(present[:wanted])


def _check_compiler(name: str) -> None:
    families = [(f"jax-cuda{n}-plugin", f"jax-cuda{n}-pjrt") for n in (13, 12)]
    family = next((f for f in families if all(map(version_of, f))), None)
    if family is None:
        raise UserError(f"target {name!r} needs XLA's GPU compiler, which is not installed: {_INSTALL}")
    jaxlib = version_of("jaxlib")
    if other := next((package for package in family if version_of(package) != jaxlib), None):
        pins = " ".join(f"'{package}=={jaxlib}'" for package in family)
        raise UserError(
            f"target {name!r} needs XLA's GPU compiler at exactly jaxlib's version: {other} is {version_of(other)}, "
            f"jaxlib is {jaxlib}: pip install {pins}"
        )
    if not _has_toolkit():
        raise UserError(f"target {name!r} needs ptxas and libdevice (nvidia-cuda-nvcc and nvidia-nvvm): {_INSTALL}")


def _has_toolkit() -> bool:
    packages = [("nvidia-cuda-nvcc", "nvidia-nvvm"), ("nvidia-cuda-nvcc-cu12",)]
    return (
        any(all(map(version_of, family)) for family in packages)
        or "CUDA_ROOT" in os.environ
        or "xla_gpu_cuda_data_dir" in os.environ.get("XLA_FLAGS", "")
        or Path("/usr/local/cuda").exists()
    )


def _gpu_devices(name: str, config: str, hosts: int, per_host: int) -> tuple[Device, ...]:
    from jax.experimental import topologies

    # XLA reads "NVLINK_DOMAINSxHOSTS_PER_DOMAINxDEVICES_PER_HOST" (xla/pjrt/gpu/gpu_topology.proto). Hosts of the kinds
    # above are joined by a network, so each is its own domain; "1xHOSTSxPER_HOST" would let XLA (jax 0.12) choose
    # all-reduce kernels that write straight into the memory of another host's GPUs.
    topology = f"{hosts}x1x{per_host}"
    try:
        with _unchecked_without_driver():
            described = topologies.get_topology_desc("gpu", "cuda", topology=topology, target_config=config)
    except NotImplementedError:  # it is a RuntimeError too
        raise UserError(
            f"target {name!r}: the CUDA plugin did not start when jax first looked for devices, most likely because it "
            "found no working GPU (jax logged why). Start the process with JAX_PLATFORMS=cpu: compiling needs no GPU"
        ) from None
    except RuntimeError as error:
        raise UserError(f"target {name!r}: this jax's XLA rejects the description of the GPU: {error}") from error
    return tuple(described.devices)


@contextlib.contextmanager
def _unchecked_without_driver() -> Generator[None]:
    """Without an NVIDIA driver, keep the CUDA plugin from checks that would fail on a machine that only compiles."""
    switch = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    chosen = switch in os.environ or _has_driver()
    os.environ |= {} if chosen else {switch: "1"}
    try:
        yield
    finally:
        if not chosen:
            del os.environ[switch]


def _has_driver() -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


def target_of(named: str | Target | None, state: PyTree = None) -> Target:
    """Return the named target; else the devices of `state`; else all devices of this cluster."""
    if named is not None and not isinstance(named, str | Target):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f'A target is text such as "h100:1x8" or "cpu:8"; given {described(named)}. Pass such a name.')
    if named is not None:
        return target(named) if isinstance(named, str) else named
    mesh = mesh_of(state)
    devices: list[Device] = jax.devices() if mesh is None else list(mesh.devices.flat)
    first = devices[0]
    if first.platform == "cpu":
        return Target("cpu", 1, len(devices), tuple(devices), None, "cpu", shape=str(len(devices)))
    known = ((kind, chip) for kind, chip in GPUS.items() if chip.name == first.device_kind)
    kind, chip = next(known, (first.device_kind, None))
    memory = None if chip is None else chip.memory_bytes
    if chip is None:
        with contextlib.suppress(AttributeError, jax.errors.JaxRuntimeError, NotImplementedError):
            memory = (first.memory_stats() or {}).get("bytes_limit")  # of its allocator; not of a described device
    hosts = len({device.process_index for device in devices})
    return Target(kind, hosts, len(devices) // hosts, tuple(devices), memory, first.device_kind, chip)
