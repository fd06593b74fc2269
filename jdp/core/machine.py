"""What this machine has to compute on, and which of it JAX should start: found out without starting JAX."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_NVIDIA_PATHS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_OTHER_PLUGINS = ("libtpu", "jax_rocm7_plugin", "jax_rocm60_plugin", "jax_oneapi_plugin", "intel_extension_for_openxla")


def choose_platform(devices: int | None = None) -> None:
    """Decide what JAX will start on; call it before anything asks JAX for its devices.

    Args:
        devices: number of virtual CPU devices to compute on instead of what the machine has; None leaves the choice to
            JAX, except that an installed CUDA plugin is not started where there is no NVIDIA device (it would print a
            start-up error) and nothing else to start. An explicit JAX_PLATFORMS is always left alone.
    """
    import jax

    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    elif cpu_only(os.environ):
        jax.config.update("jax_platforms", "cpu")


def cpu_only(environment: Mapping[str, str]) -> bool:
    """Whether a CUDA plugin is installed that would find no device, and there is no sign of another accelerator.

    False where JAX_PLATFORMS says what to start.
    """
    if "JAX_PLATFORMS" in environment or "TPU_LIBRARY_PATH" in environment or has_nvidia():
        return False
    return any(map(find_spec, _CUDA_PLUGINS)) and not any(map(find_spec, _OTHER_PLUGINS))


def has_nvidia() -> bool:
    """Whether an NVIDIA driver or device is there (WSL's /dev/dxg counts)."""
    return any(Path(path).exists() for path in _NVIDIA_PATHS)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that a process with this environment would use, as CUDA_VISIBLE_DEVICES names them.

    Empty where JAX has no CUDA plugin, or JAX_PLATFORMS rules them out. CUDA counts from 0 what a container is given,
    whatever numbers the device files have.
    """
    if not any(map(find_spec, _CUDA_PLUGINS)):
        return []
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def memory_bytes() -> int | None:
    """All memory that this process could ever have: the machine's, or its control group's; None where Linux is not."""
    try:
        table = Path("/proc/meminfo").read_text(encoding="ascii")
        found = [int(line.split()[1]) * 1024 for line in table.splitlines() if line.startswith("MemTotal")]
    except (OSError, ValueError):
        return None
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(limit).read_text(encoding="ascii")))  # "max" where there is none
        except (OSError, ValueError):
            continue
    return min(found, default=None)
