"""This machine's devices, memory and addresses, and the platform that JAX will start; nothing here starts JAX."""

import ctypes
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from jdp.base.errors import public
from jdp.base.notices import notice_anywhere

_T = TypeVar("_T")
_NVIDIA_PATHS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_MOST_RUN = 256  # devices: a program for more virtual devices is only compiled
_OTHER_PLUGINS = ("libtpu", "jax_rocm7_plugin", "jax_rocm60_plugin", "jax_oneapi_plugin", "intel_extension_for_openxla")


def choose_platform(devices: int | None = None) -> None:
    """Choose the platform that JAX will start; call it before any code asks JAX for its devices."""
    import jax

    if devices is not None or cpu_only(os.environ):
        jax.config.update("jax_platforms", "cpu")
    if devices is not None:
        use_cpu_devices(devices)
    provide_threads()


def use_cpu_devices(count: int) -> None:
    """Have JAX start `count` virtual CPU devices, with enough threads; RuntimeError if its devices have started."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    provide_threads()


def provide_threads() -> None:
    """Have XLA start two threads for each CPU device of JAX; report if it is too late.

    By default XLA starts one for each core or device. Two steps in flight can then occupy the threads that a collective
    needs, and XLA aborts: "Expected 8 threads to join the rendezvous, but only 7 of them arrived on time".
    """
    import jax

    devices: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if devices < 0:
        flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        devices = int(flags[-1]) if flags else 1
    name = next((name for name in ("PJRT_NPROC", "NPROC") if os.environ.get(name, "").isdecimal()), None)  # XLA's order
    threads = cores() if name is None else int(os.environ[name])
    if threads >= 2 * devices or not 2 <= devices <= _MOST_RUN:
        return
    if jax_has_started():
        if jax.default_backend() == "cpu":
            notice_anywhere(
                f"JAX has started {devices} CPU devices with too few threads and may abort in a collective: call "
                f"jdp.initialize() before anything asks JAX for its devices, or set NPROC={2 * devices}"
            )
        return
    if name is not None:
        notice_anywhere(f"{name}={threads} is too few threads for {devices} CPU devices: XLA gets {2 * devices}")
    os.environ["PJRT_NPROC"] = str(2 * devices)


def jax_has_started() -> bool:
    """Return True if JAX has its devices; this neither imports nor starts JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def starts_cpus_alone() -> bool:
    """Return True if JAX is known to start CPU devices only: after `choose_platform`, or by JAX_PLATFORMS."""
    import jax

    if platforms := jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        return platforms == "cpu"
    return not any(map(find_spec, (*_CUDA_PLUGINS, *_OTHER_PLUGINS)))


def cpu_only(environment: Mapping[str, str]) -> bool:
    """Return True if a CUDA plugin has no device and no other accelerator is likely, unless JAX_PLATFORMS is set."""
    if "JAX_PLATFORMS" in environment or "TPU_LIBRARY_PATH" in environment or has_nvidia():
        return False
    return any(map(find_spec, _CUDA_PLUGINS)) and not any(map(find_spec, _OTHER_PLUGINS))


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    from importlib import metadata  # here, because `jdp --help` would wait for it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def has_nvidia() -> bool:
    """Return True if this machine has an NVIDIA driver or device (WSL's /dev/dxg counts)."""
    return any(Path(path).exists() for path in _NVIDIA_PATHS)


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the NVIDIA GPUs that a process with this environment would use, as CUDA_VISIBLE_DEVICES names them.

    Empty if JAX has no CUDA plugin, or JAX_PLATFORMS excludes GPUs. In a container CUDA numbers GPUs from 0.
    """
    platforms = environment.get("JAX_PLATFORMS") or "cuda"
    if not {"cuda", "gpu"} & set(platforms.split(",")) or not any(map(find_spec, _CUDA_PLUGINS)):
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def memory_bytes() -> int | None:
    """Return the memory of this machine in bytes, or of its control group if less; None without Linux."""
    total = _meminfo("MemTotal")
    return None if total is None else min([total, *(limit for limit, _ in _group_memory())])


def available_memory() -> int | None:
    """Return the bytes that the machine and the control group leave for this process; None without Linux."""
    free = _meminfo("MemAvailable")
    return None if free is None else min([free, *(limit - used for limit, used in _group_memory())])


def _group_memory() -> list[tuple[int, int]]:
    """Return memory limit and use of this process' control group and of each group above it (cgroups v1 and v2)."""
    folders: dict[Path, None] = {}
    for number, controllers, path in (line.split(":", 2) for line in text_of("/proc/self/cgroup").splitlines()):
        if number == "0" or "memory" in controllers.split(","):
            top = Path("/sys/fs/cgroup") / ("" if number == "0" else controllers)
            group = top / path.lstrip("/")
            folders |= dict.fromkeys([group, *(parent for parent in group.parents if parent.is_relative_to(top))])
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    limits = [(_number(folder / limit), folder / used) for folder in folders for limit, used in names]
    return [(limit, _number(used) or 0) for limit, used in limits if limit is not None]


def _meminfo(entry: str) -> int | None:
    row = re.search(rf"^{entry}:\s*(\d+) kB", text_of("/proc/meminfo"), re.MULTILINE)
    return int(row[1]) * 1024 if row else None


def _number(file: Path) -> int | None:
    """Return the number in a control group's file; None without a file, or for "max", which means no limit."""
    text = text_of(file).strip()
    return int(text) if text.isdecimal() else None


def text_of(file: Path | str) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def listen(host: str, port: int) -> socket.socket:
    """Return a server on one address of this machine, or on all for ""."""
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    # The longest queue that the kernel allows: a connection to a full queue is retried a second later.
    return socket.create_server((host, port), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN)


def portions(items: Iterable[_T], size: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Yield the items in order, in groups of at most `most` bytes together; a larger item is alone."""
    group, total = list[_T](), 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


OFF = "JDP_FRESH_MEMORY"
"""Environment variable that turns this off, unless it is empty or "0"."""

# mallopt(3), from <malloc.h>: parameter -> value
_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: arenas of other threads would be mapped and returned
    -4: 0,  # M_MMAP_MAX: large blocks come from the heap too
    -1: -1,  # M_TRIM_THRESHOLD: the heap never shrinks
    -2: 64 * 2**20,  # M_TOP_PAD: the heap grows by this many bytes more than requested
}
_MADV_HUGEPAGE = 14  # madvise(2), from <asm-generic/mman-common.h>
_HUGE_PAGE = 2 * 2**20
_MOST_ADVISED, _ADVISED_SHARE = 8 * 2**30, 4  # addresses, not memory: a page is taken when it is first written
_OTHER_ALLOCATORS = ("mallctl", "mi_malloc", "tc_malloc")  # jemalloc, mimalloc, tcmalloc, by LD_PRELOAD


@public()
def keep_memory() -> str | None:
    """Keep the memory that this process frees, on huge pages: a small model's step takes a quarter less time.

        >>> line = jdp.keep_memory()  # first, on CPUs

    Call it before JAX starts its devices, in a process that computes on CPUs (`jdp train` does so itself). It does not
    speed up transfers to a GPU. It needs glibc on Linux and does nothing elsewhere. The process stays at its peak
    memory. JDP_FRESH_MEMORY=1 in the environment turns it off.

    Returns:
        A line that reports the change; None if nothing was done.
    """
    library = _glibc() if os.environ.get(OFF, "0") in ("", "0") else None
    if library is None:
        return None
    for parameter, value in _SETTINGS.items():
        library.mallopt(parameter, value)
    _advise_huge_pages(library, min(_MOST_ADVISED, (available_memory() or 0) // _ADVISED_SHARE))
    return f"memory is kept between steps, on huge pages: the process stays at its peak ({OFF}=1 turns it off)"


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such handle
        return None
    if not hasattr(library, "gnu_get_libc_version") or any(hasattr(library, name) for name in _OTHER_ALLOCATORS):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _advise_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Have the next `size` bytes of the heap use huge pages: a block that is freed unwritten costs only addresses."""
    block = library.malloc(size) if size > _HUGE_PAGE else None
    if block is None:
        return
    begin, end = -(-block // _HUGE_PAGE) * _HUGE_PAGE, (block + size) // _HUGE_PAGE * _HUGE_PAGE
    library.madvise(begin, end - begin, _MADV_HUGEPAGE)
    library.free(block)
