"""Keep the memory that a CPU computes in, on huge pages, instead of asking the kernel for it in every step.

XLA:CPU allocates the buffers of a step when it starts. glibc's `malloc` maps large ones from the kernel, which fills
fresh pages with zeros: a quarter of the processor time of a small model's step (`experiments/benchmarks/peers.py`). The
settings below keep freed memory on one heap, in pages of 2 MiB if the kernel has them. The price: the process stays at
its peak memory, and all its threads allocate from one arena.
"""

import ctypes
import os

from jdp.base.machine import available_memory
from jdp.base.public import public

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
