"""What `jdp.base` does in processes of its own: memory that is kept between steps, and threads; Ctrl-C.

What `malloc` was told cannot be taken back.
"""

import platform

import pytest
from own_process import python

from jdp.base import machine

GLIBC = platform.libc_ver()[0] == "glibc"
PROGRAM = """
import mmap, resource, sys
import numpy as np
from jdp.base.machine import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(16 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE

before = resident()
line, grown = keep_memory(), resident() - before
faults()
print(int("jax" in sys.modules), int(line is not None), grown, faults())
"""


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
def test_freed_memory_is_reused_without_page_faults():
    imported, said, grown, faults = map(int, python("-c", PROGRAM).stdout.split())
    assert (imported, said) == (0, 1)
    assert grown < 4 * 2**20  # addresses are reserved, not memory
    assert faults < 8  # of 4096 pages
    assert python("-c", PROGRAM, JDP_FRESH_MEMORY="1").stdout.split()[1] == "0"


def test_another_allocator_or_library_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_OTHER_ALLOCATORS", ("malloc",))  # a name that every library has
    assert machine.keep_memory() is None


# Prints how many threads XLA's pool has.
POOL = """
import os, jax, jdp
{}
names = [open(f"/proc/self/task/{{thread}}/comm").read() for thread in os.listdir("/proc/self/task")]
print(sum(name.startswith("tf_XLAEigen") for name in names))
"""


def pool(code, **variables):
    done = python("-c", POOL.format(code), **variables)
    return int(done.stdout), done.stderr


@pytest.mark.skipif(machine.cores() > 16, reason="the pool has a thread for each core")
def test_each_cpu_device_has_two_threads(monkeypatch):
    for name in ("XLA_FLAGS", "PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    assert pool("jax.config.update('jax_num_cpu_devices', 8); jdp.make_mesh()") == (16, "")
    flag = "--xla_force_host_platform_device_count=6"
    assert pool("jdp.initialize(); jax.devices()", XLA_FLAGS=flag, NPROC="20") == (20, "")


INTERRUPTED = """
import atexit, os, signal, sys, time, traceback

def step():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)

try:
    step() if os.environ["MOMENT"] == "import" and __name__ == "own" else None
except KeyboardInterrupt:
    raise ImportError("as a module in C++ reports it")

def lost():
    try:
        step()
    except KeyboardInterrupt:
        traceback.print_exc()
        time.sleep(60)

stalled = step
if __name__ == "__main__":
    if os.environ["MOMENT"] == "stalled":
        os.dup2(os.pipe()[1], 2)
        os.write(2, bytes(2**16))  # nobody reads
    atexit.register(print, "Python waits for threads")
    from jdp.__main__ import main
    sys.exit(main())
"""


@pytest.mark.parametrize("moment", ["import", "step", "lost", "stalled"])
def test_ctrl_c_is_one_line(tmp_path, moment):
    (tmp_path / "own.py").write_text(INTERRUPTED)
    words = ["plan", f"own.py:{moment.replace('import', 'step')}", "--target", "cpu:2"]
    done = python("own.py", *words, cwd=tmp_path, MOMENT=moment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n" * (moment != "stalled"))
