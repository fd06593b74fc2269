"""A first all-reduce of the GPUs of one machine that hangs: the way of sending that is at fault.

NCCL sends between GPUs of a machine by peer-to-peer copies, shared memory or RDMA, and does not notice if one of them
loses what is sent: an IOMMU or PCI ACS, on in many BIOSes, does that to peer-to-peer. So the all-reduce is tried again
without one way after another. Each try is another process, because nothing ends the one that hangs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from jdp.launch.parent_death import ending_with_parent

P2P, SHM, IB = "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"
"""NCCL's variables; "1" leaves a way out: peer-to-peer, shared memory, RDMA."""
TRY = (
    "import sys\n"
    "from jdp.launch.doctor.devices import time_all_reduce\n"
    "sys.exit(not time_all_reduce(2**20, 0.1).right)\n"
)
"""The program of a try: exit code 0 if all GPUs that it sees all-reduce, and the sum is right."""
_RDMA = Path("/sys/class/infiniband")


def is_used() -> bool:
    """Return whether this process' devices send by NCCL."""
    return jax.local_devices()[0].platform in ("gpu", "cuda")


def cure(seconds: float, *, command: Sequence[str] = (sys.executable, "-c", TRY), rdma: Path = _RDMA) -> dict[str, str]:
    """Return the variables with which the all-reduce ends; {} if it hangs with each. A try takes `seconds` at most."""
    for ways in _ways(rdma.is_dir()):
        variables = dict.fromkeys(ways, "1")
        if all(os.environ.get(name) == "1" for name in ways):
            continue
        print(f"jdp doctor: the all-reduce hangs; trying it with {in_shell(variables)}", file=sys.stderr, flush=True)
        if _ends_well(command, variables, seconds):
            return variables
    return {}


def in_shell(variables: Mapping[str, str]) -> str:
    """Return "A=1 B=1", as in front of a command."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _ways(rdma: bool) -> Iterator[tuple[str, ...]]:
    """Yield what is left out in each try: one way, then all."""
    single = (P2P, SHM, *[IB] * rdma)
    yield from ((name,) for name in single)
    yield single


def _ends_well(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
    """Run a try; True if it ends in time with exit code 0. This process holds most of the GPUs' memory."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **variables}
    quiet = subprocess.DEVNULL
    bound = ending_with_parent(command)  # the thread that starts it waits for it
    with subprocess.Popen(bound, env=environment, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False
