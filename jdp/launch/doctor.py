"""The checks of `jdp doctor` for this machine, and for the processes together; each finding names the fix.

Findings go through the coordination service, which works while devices hang. Only the checks of devices start JAX.
"""

import importlib.metadata
import json
import os
import platform
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.requirements import Requirement

from jdp.base.formatting import format_bytes, format_rate, format_seconds, listed
from jdp.base.machine import has_nvidia, version_of
from jdp.core.cluster.barrier import from_every_process, from_first_process, named

Status = Literal["ok", "note", "wrong"]
"""A note is left to the reader, such as a limit that hurts only large runs. `wrong` sets exit code 1."""


@dataclass(frozen=True)
class Finding:
    """The result of one check in one process, and the fix: a command or a sentence, "" if none is needed."""

    check: str
    status: Status
    found: str
    mend: str = ""

    @classmethod
    def judged(cls, check: str, found: str, mend: str, *, wrong: bool = False, note: bool = False) -> "Finding":
        """Return a finding: `wrong`, a `note`, or else ok and without a fix."""
        status: Status = "wrong" if wrong else "note" if note else "ok"
        return cls(check, status, found, mend if wrong or note else "")


@dataclass(frozen=True)
class Examined:
    """Findings and hosts of all processes that sent them, by process."""

    findings: dict[int, list[Finding]]
    hosts: dict[int, str]

    @property
    def wrong(self) -> int:
        """The number of faults; a fault of several processes counts once."""
        return sum(finding.status == "wrong" for finding, _ in self.rows())

    def rows(self) -> list[tuple[Finding, tuple[int, ...]]]:
        """Return a finding for each row of the table, with its processes, in the order of the checks.

        If a check is ok in all processes, the row has the first one's finding. Findings with the same fix share a row.
        """
        everyone = [(finding, process) for process, all_ in self.findings.items() for finding in all_]
        rows: list[tuple[Finding, tuple[int, ...]]] = []
        for check in dict.fromkeys(finding.check for finding, _ in everyone):
            found = [(finding, process) for finding, process in everyone if finding.check == check]
            unwell = [(finding, process) for finding, process in found if finding.status != "ok"]
            if not unwell:
                rows.append((found[0][0], tuple(self.findings)))
            grouped: dict[tuple[str, str], tuple[Finding, dict[int, None]]] = {}
            for finding, process in unwell:
                key = (finding.status, finding.mend or finding.found)
                grouped.setdefault(key, (finding, {}))[1][process] = None
            rows += [(finding, tuple(processes)) for finding, processes in grouped.values()]
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": not self.wrong,
            "processes": len(self.findings),
            "findings": [
                {"process": process, "host": self.hosts[process], **asdict(finding)}
                for process, findings in self.findings.items()
                for finding in findings
            ],
        }

    def lines(self) -> list[str]:
        """Return the table as text: a line for each finding, followed by its fix if it is not ok."""
        rows = self.rows()
        width = max((len(finding.check) for finding, _ in rows), default=0)
        lines: list[str] = []
        for finding, processes in rows:
            who = "" if len(processes) == len(self.findings) else f"  [{named(processes)}]"
            if len(processes) == 1 < len(self.findings):
                who = f"  [{named(processes)} on {self.hosts[processes[0]]}]"
            status = finding.status.upper() if finding.status == "wrong" else finding.status
            lines.append(f"{status:<5}  {finding.check:<{width}}  {finding.found}{who}")
            if finding.mend:
                lines.append(f"{'':<5}  {'':<{width}}  → {finding.mend}")
        return lines


def gather(findings: list[Finding], seconds: float) -> tuple[dict[int, list[Finding]], dict[int, str]]:
    """Return the findings and the host of every process, by its index; every process calls this."""
    text = json.dumps([socket.gethostname(), [astuple(each) for each in findings]])
    said = [json.loads(each) for each in from_every_process("what was found", text, seconds=seconds)]
    hosts = {process: host for process, (host, _) in enumerate(said)}
    return {process: [Finding(*each) for each in found] for process, (_, found) in enumerate(said)}, hosts


def described(hosts: Mapping[int, str]) -> str:
    """Return "2 processes on node1", or "8 processes on 2 hosts: node1, node2"."""
    different = list(dict.fromkeys(hosts.values()))
    processes = "1 process" if len(hosts) == 1 else f"{len(hosts)} processes"
    where = different[0] if len(different) == 1 else f"{len(different)} hosts: {listed(different, 8)}"
    return f"{processes} on {where}"


# This machine without JAX.

SHOWN = ("jdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)")


def examine_versions() -> list[Finding]:
    """Check the bounds that jdp and jax declare, and the plugins' versions."""
    found = {"python": platform.python_version()} | {name: version_of(name) for name in SHOWN}
    installed = {each.name for each in importlib.metadata.distributions()}  # parses a file per name
    found |= {name: version_of(name) for name in sorted(filter(None, installed)) if _PLUGIN.fullmatch(name)}
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    wrong = [*_unmet("jdp"), *_unmet("jax", only="jaxlib"), *_mismatched(found)]
    return wrong or [Finding("versions", "ok", shown)]


def _unmet(package: str, only: str | None = None) -> list[Finding]:
    try:
        requires = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{package} was not installed by pip, so its bounds are unknown"
        return [Finding("versions", "note", text, "pip install . (in jdp's folder)" if package == "jdp" else "")]
    unmet: list[Finding] = []
    for requirement in map(Requirement, requires):
        name, version = requirement.name, version_of(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or only not in (None, name):
            continue
        if not version:
            found = f"{package} needs {name}{requirement.specifier}, which is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            found = f"{package} was tested with {name}{requirement.specifier}; installed is {version}"
        else:
            continue
        unmet.append(Finding("versions", "wrong", found, f"pip install '{name}{requirement.specifier}'"))
    return unmet


def _mismatched(found: dict[str, str]) -> list[Finding]:
    """Return findings about plugins whose version differs from jaxlib's: JAX may load them with only a warning."""
    return [
        Finding(
            "versions",
            "wrong",
            f"{name} is {version}, and jaxlib {found['jaxlib']}: they must be equal",
            f"pip install 'jax[{name.split('-')[1]}]=={found['jax']}'",
        )
        for name, version in found.items()
        if _PLUGIN.fullmatch(name) and version != found["jaxlib"]
    ]


# The disk.

LITTLE_ROOM = 2**30
FEW_INODES = 10_000  # a checkpoint has tens of files per process


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def examine_disk(folder: Path) -> list[Finding]:
    """Check space, inodes and writing; write and remove a file."""
    folder = existing(folder)
    status = os.statvfs(folder)
    mend = f"remove small files (du --inodes -x {folder} | sort -n | tail), or choose another --run-dir"
    found = f"{status.f_favail:,} free of {status.f_files:,} at {folder}"
    inodes = Finding.judged("inodes", found, mend, wrong=status.f_favail < FEW_INODES)
    if not status.f_files:  # Btrfs and some network file systems have no fixed number
        inodes = Finding("inodes", "ok", f"without a limit at {folder}")
    return [examine_room(folder), inodes, _writing(folder)]


def examine_room(folder: Path, checkpoint: Path | None = None) -> Finding:
    """Check the free space on a disk, also for a checkpoint as large as `checkpoint`."""
    needed = 0 if checkpoint is None else sum(file.stat().st_size for file in checkpoint.rglob("*"))
    status = os.statvfs(folder)
    free, size = status.f_frsize * status.f_bavail, status.f_frsize * status.f_blocks
    mend = f"make room (du -xh {folder} | sort -h | tail), or choose another --run-dir"
    found = f"{format_bytes(free)} free of {format_bytes(size)} at {folder}"
    found += f"; a checkpoint takes {format_bytes(needed)}" if needed else ""
    check = "disk" if checkpoint is None else "next checkpoint"
    return Finding.judged(check, found, mend, wrong=free < (needed or LITTLE_ROOM))


def _writing(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("writing", "wrong", f"{folder} is a file, not a folder", "choose another --run-dir")
    try:
        with tempfile.NamedTemporaryFile(prefix=".jdp-doctor-", dir=folder) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        mend = f"make {folder} writable for this user, or choose another --run-dir"
        return Finding("writing", "wrong", f"{folder} cannot be written: {error.strerror}", mend)
    return Finding("writing", "ok", f"a file was written and removed at {folder}")


# The devices.

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
    nccl = version_of("nvidia-nccl-cu13") or version_of("nvidia-nccl-cu12")
    return f"NCCL {nccl}, between hosts by {wire}" if nccl else f"the platform's own, between hosts by {wire}"


def examine_all_reduce() -> list[Finding]:
    """Check sum and speed of all-reduces over all devices for two seconds; every process calls this."""
    devices = jax.devices()
    if len(devices) == 1:
        return [Finding("all-reduce", "ok", "one device: nothing is sent")]
    payloads = PAYLOADS.get(devices[0].platform, PAYLOADS[""])
    try:
        timed = {payload: time_all_reduce(payload, SECONDS / len(payloads)) for payload in payloads}
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError is Gloo's, for example about a lost peer
        first = (str(error) or type(error).__name__).splitlines()[0]
        mend = "fix the other findings first; if there are none, NCCL_DEBUG=INFO jdp doctor prints more on GPUs"
        return [Finding("all-reduce", "wrong", first, mend)]
    if wrong := [payload for payload, (_, right) in timed.items() if not right]:
        found = f"the sum of {format_bytes(wrong[0])} from each of {len(devices)} devices is wrong"
        mend = "do not train on them: run without each host in turn, to find the faulty host"
        return [Finding("all-reduce", "wrong", found, mend)]
    sent = 2 * (len(devices) - 1) / len(devices)  # on each link of a ring, in payloads ("bus bandwidth" of nccl-tests)
    rates = {payload: sent * payload / seconds for payload, (seconds, _) in timed.items()}
    shown = "; ".join(
        f"{format_bytes(payload)} in {format_seconds(timed[payload][0])}, {format_rate(rate)}B/s"
        for payload, rate in rates.items()
    )
    slow = devices[0].platform != "cpu" and rates[payloads[-1]] < _SLOW
    mend = "NCCL_DEBUG=INFO shows the transport (NET/IB, P2P/NVLS, NET/Socket); NCCL_SOCKET_IFNAME sets the interface"
    found = f"{len(devices)} devices, right; {shown} of bus bandwidth"
    return [Finding.judged("all-reduce", found, mend, note=slow)]


def time_all_reduce(payload: int, seconds: float) -> tuple[float, bool]:
    """Sum an array over all devices repeatedly; return the time of one sum, and whether it is right."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",))
    rows, everywhere = PartitionSpec("all"), PartitionSpec()
    mine = np.stack([np.full(payload // 4, 1 + devices.index(each), np.float32) for each in jax.local_devices()])
    shape = (len(devices), payload // 4)
    given = jax.make_array_from_process_local_data(NamedSharding(mesh, rows), mine, shape)
    add = jax.jit(jax.shard_map(lambda row: lax.psum(row, "all"), mesh=mesh, in_specs=rows, out_specs=everywhere))

    def timed(count: int) -> tuple[float, jax.Array]:
        start, total = time.perf_counter(), given
        for _ in range(count):
            total = add(given).block_until_ready()
        return (time.perf_counter() - start) / count, total

    timed(1)  # compiles and connects
    count = min(_MOST, max(_FEWEST, int(seconds / max(timed(1)[0], 1e-6))))
    spent, total = timed(from_first_process("how many all-reduces are timed", count))
    expected = len(devices) * (len(devices) + 1) / 2
    right = all(bool(np.all(np.asarray(shard.data) == expected)) for shard in total.addressable_shards)
    return spent, right
