"""Published numbers of the GPUs that a step can be planned for: rates, memory, links, and inputs of XLA's compiler.

`gpus.toml` has a table for each, with the sources. Rates are data-sheet peaks, which no program reaches. Link
efficiencies are NCCL's.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

XLA_TYPES = {"fp32": "f32", "bf16": "bf16"}
"""jdp's name of a dtype (`jdp.Precision`) -> XLA's."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Rates of an NVIDIA GPU, in bytes and floating-point operations a second, and the numbers by which XLA:GPU chooses
    kernels, combines and schedules. Sizes in bytes."""

    name: str  # `device_kind` in jax
    memory_bytes: int  # the device's own memory
    memory_bandwidth: float
    # dense peak of the matrix units by the XLA element type of the operands ("bf16", "f16", "f32", "f64", "f8e4m3fn",
    # "f8e5m2", "s8"); a type that is missing has no matrix unit of its own. "f32" means jax's default precision: TF32
    # (`jax.lax.Precision`).
    matmul_flops: Mapping[str, float] = field(hash=False)
    vector_flops: float  # fp32, outside the matrix units
    link_bandwidth: float  # inside a host, in one direction
    network_bandwidth: float  # between hosts, in one direction, for each device
    host_bandwidth: float | None = None  # to its host's memory, in one direction; None: not known
    link_efficiency: float = 1.0  # payload as a share of `link_bandwidth`; likewise the next two
    network_efficiency: float = 1.0
    host_efficiency: float = 1.0
    link_latency: float = 0.0  # seconds a hop, added to the tables in `jdp.base.link_times`
    network_latency: float = 0.0
    matmul_efficiency: float = 0.8  # share of `matmul_flops` that large products reach in a training run
    # how far predicted times are from published runs on this chip, in words
    compared_with: str = "they were not compared with runs on this device"
    # the largest error, as a share: 0.24 if predicted over published is between 1 / 1.24 and 1.24; None if not compared
    time_error: float | None = None
    capability: Sequence[int] = field(hash=False)  # (major, minor)
    extension: str  # ACCELERATED_FEATURES: the sm_90a and sm_100a instructions (wgmma, tcgen05)
    cores: int  # streaming multiprocessors
    lanes: int  # fp32 units a core
    shared_per_core: int
    shared_per_block: int
    l2: int
    clock_ghz: float
    links: int  # NVLinks: XLA asks for them before it chooses an all-reduce that writes into peers' memory


def _read(file: Path) -> dict[str, Gpu]:
    """Return the GPU of each table; a table with `like` has the other keys of that table."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return {kind: Gpu(**{**tables.get(own.pop("like", ""), {}), **own}) for kind, own in tables.items()}


GPUS = _read(Path(__file__).with_name("gpus.toml"))
