"""Published numbers of the GPUs that a step can be planned for: rates, memory, links, and inputs of XLA's compiler.

Sources are in the comment above each row or table. Rates are data-sheet peaks, which no program reaches. Link
efficiencies are NCCL's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

XLA_TYPES = {"fp32": "f32", "bf16": "bf16"}
"""jdp's name of a dtype (`jdp.Precision`) -> XLA's."""
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


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
    capability: tuple[int, int]
    extension: str  # ACCELERATED_FEATURES: the sm_90a and sm_100a instructions (wgmma, tcgen05)
    cores: int  # streaming multiprocessors
    lanes: int  # fp32 units a core
    shared_per_core: int
    shared_per_block: int
    l2: int
    clock_ghz: float
    links: int  # NVLinks: XLA asks for them before it chooses an all-reduce that writes into peers' memory


def _peaks(tera: Mapping[str, float]) -> dict[str, float]:
    """Convert peaks from units of 10^12; both 8-bit floating-point formats are equally fast."""
    peaks = {dtype: 1e12 * rate for dtype, rate in tera.items()}
    return peaks | ({"f8e5m2": peaks["f8e4m3fn"]} if "f8e4m3fn" in peaks else {})


# Compiler numbers, all rows. Cores, lanes and L2: NVIDIA's A100 (2020) and H100 (2022) architecture whitepapers; the
# H200 is the H100's chip. Shared memory, 64 Ki registers and 2048 threads a core: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability" (164 and 163 KiB a core and a block for 8.0, 228 and 227 KiB for 9.0
# and 10.0). NVLinks: datasheets (600, 900, 900 and 1800 GB/s over 12, 18, 18 and 18 links). Clocks, exact bandwidth
# (memory clock times bus width), memory as CUDA reports it, and the B200's cores and L2: openxla/xla,
# xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb, in agreement with the datasheets' 2039
# GB/s, 3.35, 4.8 and 7.7 TB/s. Two exceptions: that folder gives the H200 141 GiB of memory and 50 MiB of L2, but
# CUDA reports 139.80 GiB (the "total capacity" in its out-of-memory messages) and 60 MiB on the card.
#
# Matrix peaks, dense (the sheets' headline numbers are for 2:4 sparsity, twice as much). A100: "NVIDIA A100 Tensor Core
# GPU" datasheet. H100 SXM: "NVIDIA H100 Tensor Core GPU Architecture" whitepaper, table of peak rates: 132 cores x 4096
# bf16 operations a clock x 1.83 GHz; TF32 half, 8 bits double. H200: its datasheet has the H100's numbers. B200:
# "NVIDIA Blackwell" datasheet, column HGX B200, halved where it says "with sparsity". Vector fp32: the same sheets
# (fp32 lanes x 2 x boost clock: 19.5, 66.9, 66.9, 75). fp64 is the tensor cores' peak. The A100 has no fp8. XLA's own
# numbers (the files above, matrix_unit_description: 4 units a core, 512 or 1024 bf16 multiply-adds a clock at 1.83 and
# 1.835 GHz) give 989 and 2225.
#
# Links. NVLink: the same sheets' total halved for one direction. Network: one card a GPU, 200 Gb/s in the DGX A100
# (ConnectX-6), 400 Gb/s in the DGX H100, H200 and B200 (ConnectX-7): the DGX user guides, "Network Connections".
# Efficiencies: NCCL plans with 20, 20.6 and 40.1 GB/s for an NVLink of 25, 25 and 50 (NVIDIA/nccl, src/graph/topo.h,
# SM80_, SM90_ and SM100_NVLINK_BW); its authors explain the rest as protocol overhead and give 370 of 450 GB/s for the
# H100 (NVIDIA/nccl-tests issue 212). Between a card and its GPU NCCL counts 24 and 48 GB/s for PCIe 4 and 5 (the
# topologies in its logs), which is 0.96 of the card's 25 and 50.
# Host: 16 lanes of PCIe 4 (A100) and 5 (the others), 64 and 128 GB/s in both directions together by the same sheets
# ("Interconnect"); NCCL's 24 and 48 are 0.75 of the 32 and 64 in one direction. Not modelled: GPUs that share a PCIe
# switch, or that together need more than the host memory's bandwidth (8 H100s reading: 384 GB/s).

# Efficiency of products, fitted to the runs marked so in experiments/benchmarks/published_runs.py. The best single
# product reaches more (0.80 on H100 and H200, 0.87 on A100, 0.78 on B200: Bekman, "Maximum Achievable Matmul FLOPS",
# stas00/ml-engineering, compute/accelerator/README.md); GPT-2 124M reached 0.75 in a short run on an H100. In long
# runs the power limit lowers the clock. MPT's runs date from 2023; a run of 2026 on an H200 was 1.2 times as fast
# as predicted, because newer libraries are faster. The B200's is the H100's times 0.776 / 0.803.
_WORST = 0.24
_HELD = (
    "of 21 runs published by others and not used for fitting, half are predicted within 5 %, all within "
    f"{100 * _WORST:.0f} % (experiments/benchmarks/published.py)"
)

_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    extension="ACCELERATED_FEATURES",
    cores=132,
    lanes=128,
    shared_per_core=228 * _KIB,
    shared_per_block=227 * _KIB,
    l2=50 * _MIB,
    clock_ghz=1.98,
    memory_bandwidth=3_352_320_000_000,
    memory_bytes=84_942_979_072,
    links=18,
    matmul_flops=_peaks({"bf16": 989.4, "f16": 989.4, "f32": 494.7, "f64": 66.9, "f8e4m3fn": 1978.9, "s8": 1978.9}),
    vector_flops=66.9e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    link_efficiency=20.6 / 25,
    network_efficiency=0.96,
    host_efficiency=0.75,
    matmul_efficiency=0.58,
    compared_with=_HELD,
    time_error=_WORST,
)

_A100 = replace(
    _H100,
    name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    extension="NONE",
    cores=108,
    lanes=64,
    shared_per_core=164 * _KIB,
    shared_per_block=163 * _KIB,
    l2=40 * _MIB,
    clock_ghz=1.41,
    memory_bandwidth=2_039_040_000_000,
    memory_bytes=85_100_068_864,
    links=12,
    matmul_flops=_peaks({"bf16": 312, "f16": 312, "f32": 156, "f64": 19.5, "s8": 624}),
    vector_flops=19.5e12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    link_efficiency=20 / 25,
    matmul_efficiency=0.75,
)

_B200 = replace(
    _H100,
    name="NVIDIA B200",
    capability=(10, 0),
    cores=148,
    l2=132_644_864,
    clock_ghz=1.965,
    memory_bandwidth=7_672_320_000_000,
    memory_bytes=191_514_411_008,
    matmul_flops=_peaks({"bf16": 2250, "f16": 2250, "f32": 1100, "f64": 37, "f8e4m3fn": 4500, "s8": 4500}),
    vector_flops=75e12,
    link_bandwidth=900e9,
    link_efficiency=40.1 / 50,
    matmul_efficiency=0.56,
    compared_with=Gpu.compared_with,
    time_error=None,
)

GPUS = {
    "a100": _A100,
    "h100": _H100,
    "h200": replace(_H100, name="NVIDIA H200", memory_bytes=143_155 * _MIB, memory_bandwidth=4.8e12, l2=60 * _MIB),
    "b200": _B200,
}
