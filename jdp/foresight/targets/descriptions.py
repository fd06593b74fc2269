"""Descriptions of GPUs to compile for: a cluster's file, and XLA's own text of a GPU.

A cluster's file has a known GPU, and the numbers that differ:

    # cluster.toml, used as --target cluster.toml:64x8
    like = "h100"
    network_bandwidth_gb_s = 25        # one 200 Gb/s card a GPU
    memory_gib = 79.1
    gpu_target_config = "dump.pbtxt"   # for other chips: XLA's dump on the machine, relative to this file

`read(path)` starts from the known GPU's numbers, then applies the dump's (`with_config`), then the file's own.
`written(gpu)` makes XLA:GPU's GpuTargetConfigProto from published numbers (openxla/xla,
xla/stream_executor/device_description.proto); on a machine with the GPU, `--xla_dump_to=DIR` dumps XLA's own. The
version of CUDA is that of XLA's descriptions (xla/backends/gpu/target_config/specs).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jdp.base.chips import GPUS, Gpu
from jdp.base.errors import UserError
from jdp.base.toml import parse
from jdp.base.user_path import check_regular, user_path
from jdp.base.words import nearest

_RATES = {
    "memory_gib": ("memory_bytes", 2**30),
    "memory_bandwidth_gb_s": ("memory_bandwidth", 1e9),
    "vector_tflops": ("vector_flops", 1e12),
    "link_bandwidth_gb_s": ("link_bandwidth", 1e9),
    "network_bandwidth_gb_s": ("network_bandwidth", 1e9),
    "host_bandwidth_gb_s": ("host_bandwidth", 1e9),
    "host_efficiency": ("host_efficiency", 1),
    "link_efficiency": ("link_efficiency", 1),
    "network_efficiency": ("network_efficiency", 1),
    "matmul_efficiency": ("matmul_efficiency", 1),
    "link_latency_us": ("link_latency", 1e-6),
    "network_latency_us": ("network_latency", 1e-6),
}
"""Key of the file -> the field of `Gpu` that it sets, and the unit. Efficiencies are at most 1; latencies may be 0."""
_OTHER = ("like", "name", "matmul_tflops", "gpu_target_config")
_DTYPES = ("bf16", "f16", "f32", "f64", "f8e4m3fn", "f8e5m2", "s8")


def read(file: str) -> tuple[Gpu, str]:
    """Return the GPU that a file describes, and the text of XLA's GpuTargetConfigProto for it."""
    path = user_path(file)
    try:
        entries = parse(_text(path, ""))
        _check_names(entries, (*_OTHER, *_RATES), "a key")
        like, dump = entries.get("like"), entries.get("gpu_target_config")
        if like not in [*GPUS]:
            hint = nearest(str(like), GPUS)
            raise UserError(f"like must name the GPU to start from, one of {', '.join(GPUS)}; given {like!r}{hint}")
        if dump is None:
            gpu = _changed(GPUS[like], entries)
            return gpu, written(gpu)
        text = _text(path.parent / str(dump), "gpu_target_config ")
        return _changed(with_config(GPUS[like], text), entries), text
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _text(path: Path, subject: str) -> str:
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{subject}cannot be read: {error}") from error


def _changed(gpu: Gpu, entries: Mapping[str, object]) -> Gpu:
    changes = dict[str, object]()
    for key, (field, unit) in _RATES.items():
        if key in entries:
            number = _number(entries[key], key) * unit
            changes[field] = round(number) if field == "memory_bytes" else number
    name = entries.get("name", gpu.name)
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set('"\\'):
        raise UserError(f"name must be one line without quotes or backslashes; given {name!r}: rename it")
    peaks = entries.get("matmul_tflops", {})
    if not isinstance(peaks, dict):
        raise UserError(f"matmul_tflops must be a table such as {{ bf16 = 990 }}; given {peaks!r}: write one")
    _check_names(peaks, _DTYPES, "an element type of matmul_tflops")
    faster = {str(dtype): 1e12 * _number(peak, f"matmul_tflops.{dtype}") for dtype, peak in peaks.items()}
    return replace(gpu, **changes, name=name, matmul_flops={**gpu.matmul_flops, **faster})


def _number(value: object, key: str) -> float:
    most = 1 if key.endswith("_efficiency") else 1e9
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number <= most or (number == 0 and not key.endswith("_latency_us")):  # nan is in no range
        raise UserError(f"{key} must be a positive number{' of at most 1' * (most == 1)}; given {value!r}: correct it")
    return float(number)


def _check_names(names: Iterable[object], allowed: Sequence[str], what: str) -> None:
    for name in names:
        if name not in allowed:
            hint = nearest(str(name), allowed)
            raise UserError(f"{what} must be one of {', '.join(allowed)}; given {name!r}{hint}")


def written(gpu: Gpu) -> str:
    """Return `gpu` as the text of XLA's GpuTargetConfigProto."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_per_block}
  shared_memory_per_core: {gpu.shared_per_core}
  core_count: {gpu.cores}
  runtime_version: "12.8.0"
  fpus_per_core: {gpu.lanes}
  clock_rate_ghz: {gpu.clock_ghz}
  l2_cache_size: {gpu.l2}
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  device_memory_size: {gpu.memory_bytes}
  device_interconnect_info {{ active_links: {gpu.links} }}
  cuda_compute_capability {{
    major: {gpu.capability[0]} minor: {gpu.capability[1]} feature_extension: {gpu.extension}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


_TOKEN = re.compile(r'\s*(?:#[^\n]*|([A-Za-z_]\w*)\s*:?\s*\{|([A-Za-z_]\w*)\s*:\s*("(?:[^"\\]|\\.)*"|[^\s{}]+)|(\}))')
# Fields of the installation, not of the device, or repetitions of other fields.
_SOFTWARE = ("dnn_version", "driver_version", "runtime_version", "compile_time_toolkit_version", "name")


def device_fields(text: str) -> dict[str, str]:
    """Return the fields of the device without zeros, which XLA does not write; `name` is jax's name for the device."""
    prefix, path, scalars = "gpu_device_info.", list[str](), dict[str, str]()
    for opened, name, value, closed in _TOKEN.findall(text):
        if opened:
            path.append(opened)
        elif name:
            scalars[".".join((*path, name))] = value.strip('"')
        elif closed:
            path = path[:-1]
    device = {k.removeprefix(prefix): v for k, v in scalars.items() if k.startswith(prefix) and v not in ("0", "NONE")}
    if "core_count" not in device:
        raise UserError("gpu_target_config describes no GPU: give XLA's *gpu_target_config.pbtxt")
    name = scalars.get("device_description_str") or device.get("name", "")
    return {k: v for k, v in device.items() if k not in _SOFTWARE} | {"name": name}


_DUMPED = {
    "cores": "core_count", "lanes": "fpus_per_core", "shared_per_core": "shared_memory_per_core",
    "shared_per_block": "shared_memory_per_block_optin", "l2": "l2_cache_size", "memory_bandwidth": "memory_bandwidth",
    "memory_bytes": "device_memory_size", "links": "device_interconnect_info.active_links",
}  # fmt: skip


def with_config(gpu: Gpu, text: str) -> Gpu:
    """Return `gpu` with the compiler's numbers, memory and its bandwidth from a dumped text."""
    device = device_fields(text)
    numbers: Mapping[str, int] = {ours: int(device[theirs]) for ours, theirs in _DUMPED.items() if theirs in device}
    major, minor = (int(device.get(f"cuda_compute_capability.{part}", "0")) for part in ("major", "minor"))
    return replace(
        gpu,
        **numbers,
        name=device["name"] or gpu.name,
        capability=(major, minor),
        extension=device.get("cuda_compute_capability.feature_extension", "NONE"),
        clock_ghz=float(device.get("clock_rate_ghz", gpu.clock_ghz)),
    )
