"""The environment of each process: its number in the cluster, and its devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdp.base.errors import UserError
from jdp.base.machine import cpu_only, listen, visible_gpus
from jdp.base.progress_file import PROGRESS_FILE
from jdp.core.cluster.schedulers import split_address

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and this machine's number.

    Attributes:
        count: number of nodes.
        rank: number of this node, from 0.
        coordinator: "HOST:PORT" of process 0, which is on node 0.

    Raises:
        ValueError: the values contradict each other, or the coordinator is not an address.
    """

    count: int
    rank: int
    coordinator: str

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise UserError(
                f"Nodes are numbered from 0 to --nodes - 1; given --node-rank {self.rank} of --nodes {self.count}. "
                "Give each machine its own number."
            )
        split_address(self.coordinator)


@dataclass(frozen=True)
class Part:
    """The consecutive processes of a cluster on this machine."""

    coordinator: str  # "HOST:PORT" at which process 0 will listen
    processes: int  # number of processes on all machines
    here: int  # number of processes on this machine
    first: int = 0  # index of the first process on this machine

    @property
    def ranks(self) -> range:
        """The indices of the processes of this machine."""
        return range(self.first, self.first + self.here)


def part_of(nodes: Nodes | None, processes: int) -> Part:
    """Return this machine's part of an attempt; a single machine uses a free port."""
    if nodes is not None:
        return Part(nodes.coordinator, nodes.count * processes, processes, nodes.rank * processes)
    with listen(LOOPBACK, 0) as server:
        return Part(f"{LOOPBACK}:{server.getsockname()[1]}", processes, processes)


def environments(
    environment: Mapping[str, str], part: Part, devices: int | None, *, restarts: int, folder: Path
) -> dict[int, dict[str, str]]:
    """Return the environment of each process: its number, the coordinator's address, and its devices.

    `restarts` is the number of previous attempts; the processes report their progress in `folder`.
    """
    shared = dict(environment) | {
        "JDP_COORDINATOR": part.coordinator,
        "JDP_NUM_PROCESSES": str(part.processes),
        "JDP_RESTARTS": str(restarts),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = visible_gpus(environment)
    if gpus:
        own = [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _split_gpus(gpus, part.here, devices)]
    elif devices is not None:
        own = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}] * part.here
    else:
        own = [{"JAX_PLATFORMS": "cpu"} if cpu_only(environment) else {}] * part.here
    return {
        rank: shared | {"JDP_PROCESS_ID": str(rank), PROGRESS_FILE: str(folder / f"progress.{rank}")} | devices_of
        for rank, devices_of in zip(part.ranks, own, strict=True)
    }


def _split_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[Sequence[str]]:
    """Return consecutive GPUs for every process. Raises ValueError if there are too few."""
    share = len(gpus) // processes if each is None else each
    if share < 1 or share * processes > len(gpus):
        raise UserError(
            f"Every process needs its own GPUs: {processes} processes × {max(share, 1)} = "
            f"{processes * max(share, 1)}, but there are {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu to run on "
            "virtual CPU devices."
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]
