"""Devices to compile for that this machine need not have.

`target("h100:8x8")` reads the name, makes sure that XLA's GPU compiler is there, describes the chip to it (a text
proto, made from a table of published numbers) and returns stand-ins for 64 devices on 8 hosts. They go into a mesh
like real ones: a step lowered on `jax.ShapeDtypeStruct`s sharded over that mesh compiles to the program that those GPUs
would run. No GPU, driver or CUDA library is needed, only the compiler: `pip install 'jdp[aot]'`. `target("cpu:8")` is
the virtual CPU devices of this process.

Nothing happens on import: jax's plugins are looked for when a GPU target is first asked for.
"""

import ctypes
import difflib
import importlib.metadata
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jdp.types import Device

_GRAMMAR = "a target is KIND:HOSTSxPER_HOST, such as h100:8x8 (8 hosts with 8 GPUs each), or cpu:N, such as cpu:8"
_INSTALL = "pip install 'jdp[aot]'"
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class Target:
    """Devices of one kind: `hosts` machines with `per_host` devices each, ordered host by host.

    `devices[i].process_index` is the host of device i. `memory_bytes` is what one device has to allocate from (None on
    CPU, whose virtual devices share the machine's). `description` is the name that jax gives as `device_kind`.
    """

    kind: str
    hosts: int
    per_host: int
    devices: tuple[Device, ...] = field(repr=False)
    memory_bytes: int | None
    description: str

    def __str__(self) -> str:
        return f"cpu:{self.per_host}" if self.kind == "cpu" else f"{self.kind}:{self.hosts}x{self.per_host}"


@dataclass(frozen=True)
class _Chip:
    """The numbers by which XLA:GPU chooses kernels, combines and schedules. Sizes in bytes, rates per second."""

    name: str
    capability: tuple[int, int]
    extension: str  # ACCELERATED_FEATURES: the sm_90a and sm_100a instructions (wgmma, tcgen05)
    cores: int  # streaming multiprocessors
    lanes: int  # fp32 units a core
    shared_per_core: int
    shared_per_block: int
    l2: int
    clock_ghz: float
    bandwidth: int
    memory: int
    links: int  # NVLinks: XLA asks for them before it chooses an all-reduce that writes into peers' memory


# Sources, for all rows. Cores, lanes and L2: NVIDIA's A100 (2020) and H100 (2022) architecture whitepapers; the H200 is
# the H100's chip. Shared memory, 64 Ki registers and 2048 threads a core: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability" (164 and 163 KiB a core and a block for 8.0, 228 and 227 KiB for 9.0 and 10.0).
# NVLinks: datasheets (600, 900, 900 and 1800 GB/s over 12, 18, 18 and 18 links). Clocks, exact bandwidth (memory clock
# times bus width), memory as CUDA reports it, and the B200's cores and L2: openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb, in agreement with the datasheets' 2039
# GB/s, 3.35, 4.8 and 7.7 TB/s. One exception: for the H200 that folder has 141 GiB of memory, and CUDA reports 139.80
# GiB on the card (the "total capacity" in its out-of-memory messages).
_CHIPS = {
    "a100": _Chip(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        extension="NONE",
        cores=108,
        lanes=64,
        shared_per_core=164 * _KIB,
        shared_per_block=163 * _KIB,
        l2=40 * _MIB,
        clock_ghz=1.41,
        bandwidth=2_039_040_000_000,
        memory=85_100_068_864,
        links=12,
    ),
    "h100": _Chip(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        extension="ACCELERATED_FEATURES",
        cores=132,
        lanes=128,
        shared_per_core=228 * _KIB,
        shared_per_block=227 * _KIB,
        l2=50 * _MIB,
        clock_ghz=1.98,
        bandwidth=3_352_320_000_000,
        memory=84_942_979_072,
        links=18,
    ),
    "h200": _Chip(
        name="NVIDIA H200",
        capability=(9, 0),
        extension="ACCELERATED_FEATURES",
        cores=132,
        lanes=128,
        shared_per_core=228 * _KIB,
        shared_per_block=227 * _KIB,
        l2=50 * _MIB,
        clock_ghz=1.98,
        bandwidth=4_800_000_000_000,
        memory=143_155 * _MIB,
        links=18,
    ),
    "b200": _Chip(
        name="NVIDIA B200",
        capability=(10, 0),
        extension="ACCELERATED_FEATURES",
        cores=148,
        lanes=128,
        shared_per_core=228 * _KIB,
        shared_per_block=227 * _KIB,
        l2=132_644_864,
        clock_ghz=1.965,
        bandwidth=7_672_320_000_000,
        memory=191_514_411_008,
        links=18,
    ),
}

KINDS = (*_CHIPS, "cpu")


def target(name: str) -> Target:
    """The devices that `name` stands for: `h100:8x8`, `h200:1x8`, `a100:64x8`, `b200:2x8`, or `cpu:8`.

    Raises ValueError, with what to type, when the name does not parse, when the GPU compiler is missing or of another
    version than jaxlib, when jax could not start it, and when this process has too few CPU devices.
    """
    kind, hosts, per_host = _parse(name)
    if kind == "cpu":
        return Target(kind, hosts, per_host, _cpu_devices(name, per_host), None, "cpu")
    _check_compiler(name)
    chip = _CHIPS[kind]
    devices = _gpu_devices(name, kind, chip, hosts, per_host)
    return Target(kind, hosts, per_host, devices, chip.memory, chip.name)


def _parse(name: str) -> tuple[str, int, int]:
    """`name` as kind, hosts, devices a host."""
    match = re.fullmatch(r"([^:]+):(?:([1-9]\d*)x)?([1-9]\d*)", name)
    if match is None:
        raise ValueError(f"{_GRAMMAR}; got {name!r}")
    kind, hosts, per_host = match.groups()
    if kind not in KINDS:
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown device kind {kind!r} in target {name!r}: {hint}Known are {', '.join(KINDS)}")
    if (hosts is None) != (kind == "cpu"):
        raise ValueError(f"{_GRAMMAR}; got {name!r}")
    return kind, int(hosts or 1), int(per_host)


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


def _gpu_devices(name: str, kind: str, chip: _Chip, hosts: int, per_host: int) -> tuple[Device, ...]:
    from jax.experimental import topologies

    # XLA reads "NVLINK_DOMAINSxHOSTS_PER_DOMAINxDEVICES_PER_HOST" (xla/pjrt/gpu/gpu_topology.proto). Hosts of the kinds
    # above are joined by a network, so each is its own domain; "1xHOSTSxPER_HOST" would let XLA (jax 0.12) choose
    # all-reduce kernels that write straight into the memory of another host's GPUs.
    topology = f"{hosts}x1x{per_host}"
    try:
        with _unchecked_without_driver():
            described = topologies.get_topology_desc(kind, "cuda", topology=topology, target_config=_config(chip))
    except NotImplementedError as error:
        raise ValueError(
            f"target {name!r}: the CUDA plugin did not start when jax first looked for devices, most likely because it "
            "found no working GPU (jax logged why). Start the process with JAX_PLATFORMS=cpu: the compiler needs none"
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


def _config(chip: _Chip) -> str:
    """`chip` as the text of XLA's GpuTargetConfigProto (xla/stream_executor/device_description.proto)."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_per_block}
  shared_memory_per_core: {chip.shared_per_core}
  core_count: {chip.cores}
  fpus_per_core: {chip.lanes}
  clock_rate_ghz: {chip.clock_ghz}
  l2_cache_size: {chip.l2}
  memory_bandwidth: {chip.bandwidth}
  device_memory_size: {chip.memory}
  device_interconnect_info {{ active_links: {chip.links} }}
  cuda_compute_capability {{
    major: {chip.capability[0]} minor: {chip.capability[1]} feature_extension: {chip.extension}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.name}"
"""
