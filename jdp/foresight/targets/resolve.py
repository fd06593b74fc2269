"""Devices to compile for that this machine need not have.

`target("h100:8x8")` reads the name, makes sure that XLA's compiler for that kind is there, describes the chip to it (a
text proto, made from a table of published numbers) and returns stand-ins for 64 devices on 8 hosts. They go into a mesh
like real ones: a step lowered on `jax.ShapeDtypeStruct`s sharded over that mesh compiles to the program that those
devices would run. No GPU, driver or CUDA library is needed, only the compiler: `pip install 'jdp[aot]'`; for TPUs
(`tpu-v5e:4x4`) `pip install 'jdp[tpu]'`. `target("cpu:8")` is the virtual CPU devices of this process, and
`target("cluster.toml:64x8")` GPUs that a file describes (`foresight.cluster`).

Nothing happens on import: jax's plugins are looked for when a target that needs one is first asked for.
"""

import ctypes
import difflib
import importlib.metadata
import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jdp.core.types import Device
from jdp.core.user_path import user_path
from jdp.foresight.targets.chips import CHIPS, GPUS, TPUS, Chip
from jdp.foresight.targets.cluster_file import read
from jdp.foresight.targets.gpu_config import differing, written

_GRAMMAR = (
    "a target is KIND:HOSTSxPER_HOST, such as h100:8x8 (8 hosts with 8 GPUs each) or cluster.toml:8x8 (GPUs that a "
    "file describes); TPU:TOPOLOGY, such as tpu-v5e:4x4; or cpu:N, such as cpu:8"
)
_INSTALL = "pip install 'jdp[aot]'"
_INSTALL_TPU = "pip install 'jdp[tpu]'"

KINDS = (*CHIPS, "cpu")
MOST_DEVICES = 16384
"""Four times what jdp is made for: beyond it lies a typing mistake, and a very long compilation."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind: `hosts` machines with `per_host` devices each, ordered host by host.

    `devices[i].process_index` is the host of device i. `memory_bytes` is what one device has to allocate from (None on
    CPU, whose virtual devices share the machine's). `description` is the name that jax gives as `device_kind`. `chip`
    has the published rates (None on CPU, where none are known); `config` is the text that described a GPU to XLA, and
    `shape` what stood behind the colon.
    """

    kind: str
    hosts: int
    per_host: int
    devices: tuple[Device, ...] = field(repr=False)
    memory_bytes: int | None
    description: str
    chip: Chip | None = field(default=None, repr=False)
    config: str | None = field(default=None, repr=False)
    shape: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.shape or f'{self.hosts}x{self.per_host}'}"

    @property
    def fingerprint(self) -> str:
        """Everything about the target that decides what the compiler makes for it, as text."""
        named = (self.kind, f"{self.hosts}x{self.per_host}", self.shape, self.description, self.config or "")
        return "\n".join(named)


def target(name: str) -> Target:
    """The devices that `name` stands for: `h100:8x8`, `a100:64x8`, `my/cluster.toml:8x8`, `tpu-v5e:4x4`, `cpu:8`.

    Raises ValueError, with what to type, when the name does not parse, when the file of a cluster is not right, when
    the compiler is missing or of another version than jaxlib, when jax could not start it, and when this process has
    too few CPU devices.
    """
    kind, shape = _parse(name)
    sizes = [int(size) for size in shape.split("x")]
    if kind == "cpu":
        return Target(kind, 1, sizes[0], _cpu_devices(name, sizes[0]), None, "cpu", shape=shape)
    if kind in TPUS:
        return _tpu_target(name, kind, shape)
    chip, config = (GPUS[kind], written(GPUS[kind])) if kind in GPUS else read(user_path(kind))
    _check_compiler(name)
    hosts, per_host = sizes
    devices = _gpu_devices(name, config, hosts, per_host)
    return Target(kind, hosts, per_host, devices, chip.memory_bytes, chip.name, chip, config, shape)


def differences(target: Target, dump_text: str) -> list[str]:
    """Where the description that `target` gives XLA and one that XLA dumped on a machine with the device disagree.

    `dump_text` is the `*gpu_target_config.pbtxt` that XLA writes with `--xla_dump_to=DIR`. One line a field, such as
    "memory_bandwidth: shipped 3352320000000, device 3350000000000"; versions of drivers and libraries are left out.
    Raises ValueError for a target that is no GPU, and for a text that is no such dump.
    """
    if target.config is None:
        raise ValueError(f"only GPU targets are described to XLA by a text to compare; got target {target}")
    return differing(target.config, dump_text)


def _parse(name: str) -> tuple[str, str]:
    """`name` as kind and what stands behind its last colon."""
    kind, _, shape = name.rpartition(":")
    kind = kind if kind.endswith(".toml") else kind.lower()
    size = "[1-9][0-9]{0,17}"  # Python reads no number of more than 4300 digits
    known = {"cpu": size, **dict.fromkeys(TPUS, f"{size}(x{size}){{1,2}}")}
    if not kind or not re.fullmatch(f"{size}(x{size}){{0,2}}", shape):
        raise ValueError(f"{_GRAMMAR}; got {name!r}")
    if kind not in KINDS and not kind.endswith(".toml"):
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown device kind {kind!r} in target {name!r}: {hint}Known are {', '.join(KINDS)}, and files that end "
            "in .toml"
        )
    if not re.fullmatch(known.get(kind, f"{size}x{size}"), shape):
        raise ValueError(f"{_GRAMMAR}; got {name!r}")
    if math.prod(map(int, shape.split("x"))) > MOST_DEVICES:
        raise ValueError(f"a target has at most {MOST_DEVICES} devices; got {name!r}")
    return kind, shape


def _cpu_devices(name: str, wanted: int) -> tuple[Device, ...]:
    """The first `wanted` CPU devices of this process."""
    try:
        present = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS names other platforms only
        present = []
    if len(present) < wanted:
        raise ValueError(
            f"target {name!r} needs {wanted} CPU devices and this process has {len(present)}: start it with "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={wanted}, or call "
            f"jax.config.update('jax_num_cpu_devices', {wanted}) before anything else uses jax"
        )
    return tuple(present[:wanted])


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_compiler(name: str) -> None:
    """Say what to install before jax or XLA fail less clearly: a plugin missing or of another version, no libdevice."""
    families = [(f"jax-cuda{n}-plugin", f"jax-cuda{n}-pjrt") for n in (13, 12)]
    family = next((f for f in families if all(map(_installed, f))), None)
    if family is None:
        raise ValueError(f"target {name!r} needs XLA's GPU compiler, which is not installed: {_INSTALL}")
    jaxlib = _installed("jaxlib")
    for package in family:
        if _installed(package) != jaxlib:
            pins = " ".join(f"'{p}=={jaxlib}'" for p in family)
            raise ValueError(
                f"target {name!r} needs XLA's GPU compiler at exactly jaxlib's version: {package} is "
                f"{_installed(package)}, jaxlib is {jaxlib}: pip install {pins}"
            )
    if not _has_toolkit():
        raise ValueError(f"target {name!r} needs ptxas and libdevice (nvidia-cuda-nvcc and nvidia-nvvm): {_INSTALL}")


def _has_toolkit() -> bool:
    """Whether XLA finds ptxas and libdevice.10.bc: in Python packages, or where a CUDA toolkit is or is said to be."""
    packages = [("nvidia-cuda-nvcc", "nvidia-nvvm"), ("nvidia-cuda-nvcc-cu12",)]
    return (
        any(all(map(_installed, family)) for family in packages)
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
    except NotImplementedError:  # a RuntimeError too: it comes first
        raise ValueError(
            f"target {name!r}: the CUDA plugin did not start when jax first looked for devices, most likely because it "
            "found no working GPU (jax logged why). Start the process with JAX_PLATFORMS=cpu: the compiler needs none"
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"target {name!r}: this jax's XLA does not accept the description of the GPU (a dumped one holds for the "
            f"version that wrote it). It says: {error}"
        ) from error
    return tuple(described.devices)


@contextmanager
def _unchecked_without_driver() -> Generator[None]:
    """Where there is no NVIDIA driver, keep the CUDA plugin from looking for cuDNN and devices before it registers.

    With JAX_PLATFORMS=cpu it does not look; without it, it fails on what a machine that only compiles does not have.
    On a machine with a driver its checks stay on: they protect real runs.
    """
    switch = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    if switch in os.environ or _has_driver():
        yield
        return
    os.environ[switch] = "1"
    try:
        yield
    finally:
        del os.environ[switch]


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _tpu_target(name: str, kind: str, shape: str) -> Target:
    """TPUs of one slice, through libtpu. Hosts are those that it puts the slice on."""
    if _installed("libtpu") is None:
        raise ValueError(f"target {name!r} needs XLA's TPU compiler, libtpu, which is not installed: {_INSTALL_TPU}")
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(f"{kind.removeprefix('tpu-')}:{shape}", "tpu")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"target {name!r}: libtpu did not accept it: {error}") from error
    devices = tuple(sorted(described.devices, key=lambda device: (device.process_index, device.id)))
    hosts, chip = len({device.process_index for device in devices}), TPUS[kind]
    return Target(
        kind, hosts, len(devices) // hosts, devices, chip.memory_bytes, devices[0].device_kind, chip, shape=shape
    )
