"""XLA:GPU's description of the GPU to compile for: its GpuTargetConfigProto as text, written and read.

`written(gpu)` makes it from published numbers (openxla/xla, xla/stream_executor/device_description.proto). On a machine
with the GPU, XLA dumps its own (`--xla_dump_to=DIR`, file `*gpu_target_config.pbtxt`), and `with_config` takes the
chip's numbers from it. The version of CUDA is that of XLA's own descriptions (xla/backends/gpu/target_config/specs).
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from jdp.base.chips import Gpu
from jdp.base.errors import UserError

_TOKEN = re.compile(r'\s*(?:#[^\n]*|([A-Za-z_]\w*)\s*:?\s*\{|([A-Za-z_]\w*)\s*:\s*("(?:[^"\\]|\\.)*"|[^\s{}]+)|(\}))')


def written(gpu: Gpu) -> str:
    """Return `gpu` as the text of XLA's GpuTargetConfigProto."""
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


def fields(text: str) -> dict[str, str]:
    """Return the scalars of a text proto by path, `"gpu_device_info.core_count": "132"`, strings without quotes."""
    path, scalars, at = list[str](), dict[str, str](), 0
    end = len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise UserError(f"not a text proto: {text[at : at + 60].strip()!r}")
        opened, name, value, closed = token.groups()
        if opened:
            path.append(opened)
        elif name:
            scalars[".".join((*path, name))] = value.strip('"')
        elif closed:
            if not path:
                raise UserError("not a text proto: one } too many")
            path.pop()
        at = token.end()
    if path:
        raise UserError(f"not a text proto: {path[-1]} is not closed")
    return scalars


# Fields of the installation, not of the device, or repetitions of other fields.
_SOFTWARE = ("dnn_version", "driver_version", "runtime_version", "compile_time_toolkit_version", "name")


def device_fields(text: str) -> dict[str, str]:
    """Return the fields of the device without zeros, which XLA does not write; `name` is what jax calls the device."""
    prefix, scalars = "gpu_device_info.", fields(text)
    device = {k.removeprefix(prefix): v for k, v in scalars.items() if k.startswith(prefix) and v not in ("0", "NONE")}
    if "core_count" not in device:
        raise UserError("the text describes no GPU: give XLA's *gpu_target_config.pbtxt")
    name = scalars.get("device_description_str") or device.get("name", "")
    return {k: v for k, v in device.items() if k not in _SOFTWARE} | {"name": name}


def with_config(gpu: Gpu, text: str) -> Gpu:
    """Return `gpu` with the compiler's numbers, memory and its bandwidth from a dumped text."""
    given = device_fields(text)
    names = {
        "cores": "core_count", "lanes": "fpus_per_core", "shared_per_core": "shared_memory_per_core",
        "shared_per_block": "shared_memory_per_block_optin", "l2": "l2_cache_size",
        "memory_bandwidth": "memory_bandwidth", "memory_bytes": "device_memory_size",
        "links": "device_interconnect_info.active_links",
    }  # fmt: skip
    numbers: Mapping[str, int] = {ours: int(given[theirs]) for ours, theirs in names.items() if theirs in given}
    major, minor = (int(given.get(f"cuda_compute_capability.{part}", "0")) for part in ("major", "minor"))
    return replace(
        gpu,
        **numbers,
        name=given["name"] or gpu.name,
        capability=(major, minor),
        extension=given.get("cuda_compute_capability.feature_extension", "NONE"),
        clock_ghz=float(given.get("clock_rate_ghz", gpu.clock_ghz)),
    )
