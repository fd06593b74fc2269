"""The devices that JAX finds, their communication library, and its speed: the only checks that start JAX.

NCCL sends between GPUs of a machine by peer-to-peer copies, shared memory or RDMA, and does not notice lost data. An
IOMMU or PCI ACS, enabled in many BIOSes, breaks peer-to-peer copies. So an all-reduce that hangs is tried again without
each transport in turn. Each try is another process, because nothing ends the process that hangs."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.formatting import format_bytes, format_rate, format_seconds, listed
from jdp.base.machine import has_nvidia
from jdp.core.cluster.barrier import from_first_process
from jdp.launch.doctor.findings import Finding
from jdp.launch.processes import ending_with_parent

SECONDS = 2.0  # for all payloads together, after compilation
PAYLOADS = {"cpu": (2**16, 2**20, 2**24), "": (2**20, 2**25, 2**28)}
"""Platform -> payload of an all-reduce per device, in bytes; "" for all other platforms."""
_SLOW = 1e9  # bytes a second: 10 Gb/s Ethernet
_FEWEST, _MOST = 3, 200
_RDMA = Path("/sys/class/infiniband")


def examine_devices() -> list[Finding]:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX raises it if a platform does not start
        first = str(error).splitlines()[0]
        mend = "fix the other findings first; if there are none, see JAX's own lines above"
        return [Finding("devices", "wrong", f"JAX starts none: {first}", mend)]
    kinds = Counter(device.device_kind for device in devices)
    found = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    unused = has_nvidia() and devices[0].platform == "cpu"
    asked = unused and "cpu" in os.environ.get("JAX_PLATFORMS", "")
    found += "; this machine has an NVIDIA GPU, which JAX does not use" if unused else ""
    remedy = "pip install 'jdp[cuda]'"
    if hidden := [name for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES") if name in os.environ]:
        remedy = f"unset {hidden[0]}, which is {os.environ[hidden[0]]!r}"
    elif any(map(find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        remedy = "nvidia-smi must list the GPU; JAX's own lines above tell why its plugin does not start"
    judged = Finding.judged("devices", found, remedy, wrong=unused and not asked, note=asked)
    return [judged, Finding("collectives", "ok", _library(devices[0].platform))]


def _library(platform: str) -> str:
    names = sorted(each.name for each in _RDMA.iterdir()) if _RDMA.is_dir() else []
    wire = f"RDMA by {listed(names)}" if names else "TCP; there is no RDMA device"
    if platform == "cpu":
        return "Gloo, over TCP" if jax.process_count() > 1 else "XLA's own, within this process"
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return f"NCCL {importlib.metadata.version(package)}, between hosts by {wire}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"the platform's own, between hosts by {wire}"


@dataclass(frozen=True)
class Timed:
    """All-reduces of one size."""

    payload: int  # bytes per device
    seconds: float  # mean time of one all-reduce
    right: bool  # True if each sum was right
    devices: int  # number of devices

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second on the links of a ring: 2 (N − 1) / N × payload / seconds ("bus bandwidth" of nccl-tests)."""
        return 2 * (self.devices - 1) / self.devices * self.payload / self.seconds


def examine_all_reduce() -> list[Finding]:
    """Check sum and speed of all-reduces over all devices for two seconds; every process calls this."""
    devices = jax.devices()
    if len(devices) == 1:
        return [Finding("all-reduce", "ok", "one device: nothing is sent")]
    payloads = PAYLOADS.get(devices[0].platform, PAYLOADS[""])
    try:
        timed = [time_all_reduce(payload, SECONDS / len(payloads)) for payload in payloads]
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError is Gloo's, for example about a lost peer
        first = (str(error) or type(error).__name__).splitlines()[0]
        mend = "fix the other findings first; if there are none, NCCL_DEBUG=INFO jdp doctor prints more on GPUs"
        return [Finding("all-reduce", "wrong", first, mend)]
    if wrong := [each for each in timed if not each.right]:
        found = f"the sum of {format_bytes(wrong[0].payload)} from each of {len(devices)} devices is wrong"
        mend = "do not train on them: run without each host in turn, to find the faulty host"
        return [Finding("all-reduce", "wrong", found, mend)]
    shown = "; ".join(
        f"{format_bytes(each.payload)} in {format_seconds(each.seconds)}, {format_rate(each.bus_bandwidth)}B/s"
        for each in timed
    )
    slow = devices[0].platform != "cpu" and timed[-1].bus_bandwidth < _SLOW
    mend = "NCCL_DEBUG=INFO shows the transport (NET/IB, P2P/NVLS, NET/Socket); NCCL_SOCKET_IFNAME sets the interface"
    found = f"{len(devices)} devices, right; {shown} of bus bandwidth"
    return [Finding.judged("all-reduce", found, mend, note=slow)]


def time_all_reduce(payload: int, seconds: float) -> Timed:
    """Sum an array over all devices repeatedly, and return the time of one sum."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    mine = np.stack([np.full(payload // 4, 1 + devices.index(each), np.float32) for each in jax.local_devices()])
    given = jax.make_array_from_process_local_data(rows, mine, (len(devices), payload // 4))
    add = jax.jit(
        jax.shard_map(
            lambda row: lax.psum(row, "all"), mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec()
        )
    )
    total = add(given).block_until_ready()  # compiles and connects
    start = time.perf_counter()
    total = add(given).block_until_ready()
    once = time.perf_counter() - start
    count = from_first_process(
        "how many all-reduces are timed", int(min(_MOST, max(_FEWEST, seconds / max(once, 1e-6))))
    )
    start = time.perf_counter()
    for _ in range(count):
        total = add(given).block_until_ready()
    spent = (time.perf_counter() - start) / count
    expected = len(devices) * (len(devices) + 1) / 2
    right = all(bool(np.all(np.asarray(shard.data) == expected)) for shard in total.addressable_shards)
    return Timed(payload, spent, right, len(devices))


P2P, SHM, IB = "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"
"""NCCL's variables; "1" disables a transport: peer-to-peer, shared memory, RDMA."""
TRY = (
    "import sys\n"
    "from jdp.launch.doctor.devices import time_all_reduce\n"
    "sys.exit(not time_all_reduce(2**20, 0.1).right)\n"
)
"""The program of a try: exit code 0 if the visible GPUs all-reduce, and the sum is right."""


def is_nccl_used() -> bool:
    return jax.local_devices()[0].platform in ("gpu", "cuda")


def nccl_cure(
    seconds: float, *, command: Sequence[str] = (sys.executable, "-c", TRY), rdma: Path = _RDMA
) -> dict[str, str]:
    """Return the variables with which the all-reduce succeeds; {} if none. A try takes at most `seconds`."""
    single = (P2P, SHM, *[IB] * rdma.is_dir())
    for ways in (*((name,) for name in single), single):  # each alone, then all together
        variables = dict.fromkeys(ways, "1")
        if all(os.environ.get(name) == "1" for name in ways):
            continue
        print(f"jdp doctor: the all-reduce hangs; trying it with {in_shell(variables)}", file=sys.stderr, flush=True)
        if _ends_well(command, variables, seconds):
            return variables
    return {}


def in_shell(variables: Mapping[str, str]) -> str:
    """Return "A=1 B=1", for the front of a command."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _ends_well(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
    """Run a try; True if it ends in time with exit code 0. This process holds most of the GPUs' memory."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **variables}
    quiet = subprocess.DEVNULL
    bound = ending_with_parent(command)  # the thread that starts the command waits for it
    with subprocess.Popen(bound, env=environment, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False
