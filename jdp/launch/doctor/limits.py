"""Limits of this process and its machine that end runs: files, threads, locked and shared memory, processors."""

import os
import resource
from pathlib import Path

from jdp.base.formatting import format_bytes
from jdp.base.machine import available_memory, group_numbers, has_nvidia, memory_bytes
from jdp.launch.doctor.findings import Finding

FEW_FILES = 1024  # a process of a few hundred peers has a connection to each; loaders and checkpoints open tens
FEW_THREADS = 4096  # of the user: a process of JAX on a host of 128 cores starts some five hundred
LITTLE_MEMORY = 2**30
LITTLE_SHARED = 2**30  # NCCL's documentation asks containers for --shm-size=1g
_RDMA = Path("/sys/class/infiniband")


def examine_limits(shared_memory: Path = Path("/dev/shm")) -> list[Finding]:
    """Check every limit, without JAX."""
    return [_memory(), _processors(), _files(), _threads(), _locked(), _shared(shared_memory)]


def _memory() -> Finding:
    total, free = memory_bytes(), available_memory()
    if total is None or free is None:
        return Finding("memory", "note", "not known: this system has no /proc/meminfo")
    return Finding.judged(
        "memory",
        f"{format_bytes(free)} free of {format_bytes(total)}",
        "end what uses it (top -o %MEM), or ask for more: --mem of sbatch, resources.limits.memory of a pod",
        wrong=free < LITTLE_MEMORY,
    )


def _processors() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _processor_quota()
    found = f"{usable} of {present}" + (f", of which the control group gives {quota:.3g}" if quota else "")
    few = min(usable, quota or usable) < min(2, present)
    mend = "ask for more: srun --cpus-per-task=8, mpirun --bind-to none, resources.limits.cpu of a pod"
    return Finding.judged("processors", found, mend, note=few)


def _processor_quota() -> float | None:
    """Return the number of processors that the control group may use; None: no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _most(hard)
    raised = f"ulimit -n {min(most, 65536):.0f}" if most > soft else ""
    system = "LimitNOFILE of the service, or `* - nofile 65536` in /etc/security/limits.conf"
    mend = f"{raised} before it starts" if min(most, 65536) >= FEW_FILES and raised else f"as root: {system}"
    return Finding.judged("open files", f"at most {_shown(soft)} (ulimit -n)", mend, wrong=_most(soft) < FEW_FILES)


def _threads() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    left = [limit - (used or 0) for limit, used in group_numbers("pids", "pids.max", "pids.max", "pids.current")]
    in_group = f", {min(left):,} more in the control group" if left else ""
    group = bool(left) and min(left) < FEW_THREADS
    mend = "raise pids.max: podPidsLimit of the kubelet, --pids-limit of docker, TasksMax of systemd"
    if _most(soft) < FEW_THREADS:
        mend = "ulimit -u 65536, or as root `* - nproc 65536` in /etc/security/limits.conf"
    return Finding.judged(
        "threads", f"at most {_shown(soft)} (ulimit -u){in_group}", mend, wrong=group or _most(soft) < FEW_THREADS
    )


def _locked() -> Finding:
    """Check locked memory, which RDMA needs: InfiniBand and RoCE register the memory that they send from."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = _RDMA.is_dir() and any(_RDMA.iterdir())
    size = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    found = f"at most {size} (ulimit -l)" + ("" if rdma else "; no RDMA device needs it")
    mend = "ulimit -l unlimited; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
    return Finding.judged("locked memory", found, mend, wrong=rdma and soft != resource.RLIM_INFINITY)


def _shared(folder: Path) -> Finding:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding("shared memory", "note", f"{folder} cannot be read: {error.strerror}")
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    found = f"{format_bytes(free)} free of {format_bytes(size)} in {folder}"
    mend = f"as root: mount -o remount,size=8G {folder}; docker run --shm-size=8g; a memory-backed emptyDir in a pod"
    little = free < LITTLE_SHARED
    return Finding.judged("shared memory", found, mend, wrong=little and has_nvidia(), note=little)


def _most(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
