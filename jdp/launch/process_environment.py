"""The environment of each process: its number in the cluster, and its devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdp.base.machine import cpu_only, listen, visible_gpus

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Part:
    """The consecutive processes of a cluster that are started on this machine."""

    coordinator: str  # "HOST:PORT" at which process 0 will listen
    processes: int  # number of processes on all machines
    here: int  # number of processes on this machine
    first: int = 0  # index of the first of these
    binds: bool = False  # True if process 0 listens at that host only, False for JAX's default
    restarts: int = 0  # number of attempts before this one

    @property
    def ranks(self) -> range:
        """The indices of the processes of this machine."""
        return range(self.first, self.first + self.here)


def single_machine(processes: int, restarts: int) -> Part:
    """Return a cluster of this machine alone, with a port that was free just now."""
    return Part(f"{LOOPBACK}:{free_port(LOOPBACK)}", processes, processes, restarts=restarts)


def free_port(host: str) -> int:
    """Return a port of this address that was free just now. Raises OSError if it is not this machine's."""
    with listen(host, 0) as server:
        return server.getsockname()[1]


def environments(environment: Mapping[str, str], part: Part, devices: int | None) -> dict[int, dict[str, str]]:
    """Return the environment of each process: its number, the coordinator's address, and its devices."""
    shared = dict(environment) | {
        "JDP_COORDINATOR": part.coordinator,
        "JDP_NUM_PROCESSES": str(part.processes),
        "JDP_RESTARTS": str(part.restarts),
        "PYTHONUNBUFFERED": "1",
    }
    if part.binds:
        shared["JAX_COORDINATOR_BIND_ADDRESS"] = part.coordinator
    gpus = visible_gpus(environment)
    if gpus:
        own = [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _split_gpus(gpus, part.here, devices)]
    elif devices is not None:
        own = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}] * part.here
    else:
        own = [{"JAX_PLATFORMS": "cpu"} if cpu_only(environment) else {}] * part.here
    return {
        rank: shared | {"JDP_PROCESS_ID": str(rank)} | devices_of
        for rank, devices_of in zip(part.ranks, own, strict=True)
    }


def _split_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[Sequence[str]]:
    """Return consecutive GPUs for every process. Raises ValueError if there are too few."""
    share = len(gpus) // processes if each is None else each
    if share < 1 or share * processes > len(gpus):
        raise ValueError(
            f"Every process needs GPUs of its own: {processes} processes × {max(share, 1)} = "
            f"{processes * max(share, 1)}, but there are {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu to run on "
            "virtual CPU devices."
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]
