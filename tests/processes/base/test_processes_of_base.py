"""What `jdp.base` does in processes of its own."""

import pytest
from own_process import python

from jdp.base import machine

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
