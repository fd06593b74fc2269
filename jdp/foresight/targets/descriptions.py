"""Descriptions of GPUs to compile for: a cluster's file, and XLA's text of a GPU.

A cluster's file has a known GPU, and the numbers that differ:

    # cluster.toml, used as --target cluster.toml:64x8
    like = "h100"
    network_bandwidth_gb_s = 25        # one 200 Gb/s card a GPU
    memory_gib = 79.1

`gpu.txtpb` is XLA:GPU's GpuTargetConfigProto with fields for published numbers (openxla/xla,
xla/stream_executor/device_description.proto); on a machine with the GPU, `--xla_dump_to=DIR` dumps XLA's own. The
version of CUDA is that of XLA's descriptions (xla/backends/gpu/target_config/specs).
"""

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
_OTHER = ("like", "name", "matmul_tflops")
_DTYPES = ("bf16", "f16", "f32", "f64", "f8e4m3fn", "f8e5m2", "s8")


def read(file: str) -> Gpu:
    """Return the GPU that a file describes."""
    path = user_path(file)
    try:
        check_regular(path)
        entries = parse(path.read_text(encoding="utf-8"))
        _check_names(entries, (*_OTHER, *_RATES), "a key")
        like = entries.get("like")
        if like not in [*GPUS]:
            hint = nearest(str(like), GPUS)
            raise UserError(f"like must name the GPU to start from, one of {', '.join(GPUS)}; given {like!r}{hint}")
        return _changed(GPUS[like], entries)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


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
    return Path(__file__).with_name("gpu.txtpb").read_text(encoding="utf-8").format(gpu=gpu)
