"""Find the cluster that this process is part of, from environment variables alone.

Whoever starts processes says by variables how many there are and which one this is. The address of process 0, where the
coordinator listens, follows from them too:

| started by          | host of process 0                              | port                                    |
|---------------------|------------------------------------------------|-----------------------------------------|
| jdp launch, ssh     | JDP_COORDINATOR                                | JDP_COORDINATOR                         |
| mpirun, one host    | loopback                                       | from the job's name                     |
| mpirun, several     | mpirun's own, which rank 0 compares with its   | from the job's name                     |
| srun                | the first of the step's node list              | from the job's number                   |
| an indexed job      | this pod's name with index 0                   | 8476                                    |

JDP_COORDINATOR replaces the address under a scheduler too, and JAX_COORDINATOR_PORT the port. On TPU pods, and where
JAX_COORDINATOR_ADDRESS is set, JAX's own detectors (`jax/_src/clusters`) are used. For the others they are not right:

- Slurm: they take the shell of a batch script for a process of the cluster; they misread "gpu[007]" and "n[1-2]-ib".
- Open MPI: they know version 4 alone, and do not notice that rank 0 runs on another host than mpirun.
- Both: they give each process one GPU, even if it should have several.
- Kubernetes: they ask the API server, for which a pod needs rights.
"""

import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax._src import cloud_tpu_init  # nothing public says whether this is a TPU VM

from jdp.base.machine import visible_gpus

JDP_VARIABLES = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JDP_PROCESS_ID")
KUBERNETES_PORT = 8476
_FIRST_PORT, _PORTS = 2**16 - 2**12, 2**12  # above the ports that Linux gives out by itself


@dataclass(frozen=True)
class Cluster:
    """A cluster to join, and which of its processes this is. Without a coordinator, JAX detects both."""

    source: str  # origin of the cluster, for messages: "arguments" or "Slurm", say
    coordinator: str | None = None  # "HOST:PORT" of process 0
    num_processes: int | None = None  # number of processes in the cluster
    process_id: int | None = None  # index of this process
    local_device_ids: tuple[int, ...] | None = None  # the visible devices of this process; None for all

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        values = f"({self.source}); given coordinator={given[0]!r}, num_processes={given[1]}, process_id={given[2]}."
        if None in given:
            raise ValueError(f"Joining a cluster takes all of coordinator, num_processes and process_id {values}")
        assert self.num_processes is not None and self.process_id is not None
        _, colon, port = str(self.coordinator).rpartition(":")
        if not 0 <= self.process_id < self.num_processes or not colon:
            raise ValueError(f"A cluster has a coordinator HOST:PORT and 0 <= process_id < num_processes {values}")
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"The coordinator's port is a number from 1 to 65535 {values}")


def find_cluster(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Cluster | None:
    """Return the cluster that the arguments, or else the environment, describe; None for a single process.

    JDP_NUM_PROCESSES=1 means a single process, whatever else the environment holds. The shell of a batch script under
    Slurm (`sbatch`, `salloc`) is a single process too: only several tasks of a step that `srun` started are a cluster.
    """
    if (coordinator, num_processes, process_id) != (None, None, None):
        return Cluster("arguments", coordinator, num_processes, process_id)
    if environment.get("JDP_NUM_PROCESSES") == "1":
        return None
    address, count = environment.get("JDP_COORDINATOR"), _integer(environment, "JDP_NUM_PROCESSES")
    if "JDP_PROCESS_ID" in environment:
        return Cluster("JDP_COORDINATOR", address, count, _integer(environment, "JDP_PROCESS_ID"))
    if address is None and "JAX_COORDINATOR_ADDRESS" in environment:
        return Cluster("JAX_COORDINATOR_ADDRESS")
    cluster = _open_mpi(environment) or _slurm(environment) or _kubernetes(environment)
    if cluster is None and (address is not None or count is not None):
        return Cluster("JDP_COORDINATOR", address, count, None)  # raises: a part of it is missing
    if cluster is not None and count not in (None, cluster.num_processes):
        raise ValueError(
            f"JDP_NUM_PROCESSES must be the number of processes that {cluster.source} started, "
            f"{cluster.num_processes}; given {count}. Unset it."
        )
    return cluster or _tpu(environment)


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster of an mpirun of several ranks; None if there is none.

    Before Slurm's: where mpirun runs in a Slurm job, its ranks also have the variables of the daemons' step.
    """
    size = int(environment.get("OMPI_COMM_WORLD_SIZE", "1"))
    if size == 1:
        return None
    rank, job = int(environment["OMPI_COMM_WORLD_RANK"]), environment.get("PMIX_NAMESPACE", "")
    local, on_host = (int(environment.get(f"OMPI_COMM_WORLD_LOCAL_{name}", "0")) for name in ("RANK", "SIZE"))
    address = environment.get("JDP_COORDINATOR")
    if address is None:
        host = "127.0.0.1" if on_host == size else _mpirun_host(environment, rank)
        address = f"{host}:{_port(environment, zlib.crc32(job.encode()))}"
    return Cluster("Open MPI", address, size, rank, _share(len(visible_gpus(environment)), on_host, local))


def _mpirun_host(environment: Mapping[str, str], rank: int) -> str:
    """Return the host on which mpirun runs; rank 0 raises if it runs on another, and mpirun ends the others.

    Open MPI 4 gives all ranks the addresses of that host, 5 a job name with the host's name in it.
    """
    mpirun, daemon = (environment.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
    address = re.search(r"tcp://([^,:]+)|tcp6://(\[[^,\]]+)", mpirun)
    named = re.fullmatch(r"[^-]+-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
    if address:
        host, together = address[1] or f"{address[2]}]", mpirun == daemon
    elif named:
        here = environment.get("PMIX_HOSTNAME", "")
        host, together = named[1], here.partition(".")[0] == named[1].partition(".")[0]
    else:
        raise ValueError(
            "The coordinator's address must be known to all ranks; this mpirun names no host. Name rank 0's: mpirun -x "
            "JDP_COORDINATOR=HOST:PORT …"
        )
    if rank == 0 and not together:
        raise ValueError(
            f"Rank 0, where the coordinator listens, must run on mpirun's own host; given mpirun on {host} and rank 0 "
            f"on {socket.gethostname()}. Name rank 0's: mpirun -x JDP_COORDINATOR={socket.gethostname()}:PORT …"
        )
    return host


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster of a Slurm step of several tasks; None if there is none."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return None
    address = environment.get("JDP_COORDINATOR")
    if address is None:
        address = slurm_coordinator(environment)
    return Cluster("Slurm", address, tasks, int(environment["SLURM_PROCID"]), _slurm_devices(environment))


def slurm_coordinator(environment: Mapping[str, str]) -> str:
    """Return the address of a Slurm step's coordinator: its first node, and the port that JAX takes too.

    The port is equal for all tasks of a job, and likely to be free. Two steps of one job that share their first node
    need JAX_COORDINATOR_PORT.
    """
    host = next(slurm_hosts(environment["SLURM_STEP_NODELIST"]))
    return f"{host}:{_port(environment, int(environment['SLURM_JOB_ID']))}"


def slurm_hosts(node_list: str) -> Iterator[str]:
    """Yield the hosts of a Slurm node list: "gpu[007-009,020],login" -> gpu007, gpu008, gpu009, gpu020, login."""
    entries: list[str] = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    assert entries, f"Slurm named no node: {node_list!r}"
    for entry in entries:
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", entry)
        if match is None:
            yield entry
            continue
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                for rest in slurm_hosts(match[3]) if match[3] else [""]:
                    yield f"{match[1]}{number:0{len(first)}}{rest}"


def _slurm_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return which of the visible GPUs are this task's; None for all.

    With `--gpus-per-task`, or one task on the node, a task uses all GPUs that it sees; else an equal share of them.
    """
    if "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""):
        return None
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    return _share(gpus, _tasks_on_node(environment), int(environment["SLURM_LOCALID"]))


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this node, from a list such as "4(x2),3"."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeat = entry.partition("(x")
        counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", "0")), len(counts) - 1)]


def _share(gpus: int, processes: int, local: int) -> tuple[int, ...] | None:
    """Return the GPUs of process `local` of the `processes` on this host, an equal share; None for all that it sees."""
    if processes < 2 or gpus < processes:
        return None
    share = gpus // processes
    return tuple(range(local * share, (local + 1) * share))


def _kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster of an indexed job, alone or in a JobSet; None if this is none.

    A pod knows its own index and, by its headless service, the name of pod 0. The job must say how many there are.
    """
    index = environment.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    count = _integer(environment, "JDP_NUM_PROCESSES")
    if count is None:
        raise ValueError(
            "A pod of an indexed Kubernetes job joins the others by JDP_NUM_PROCESSES; it is not set. Give the job's "
            "container this variable, spec.completions (1: each pod is on its own): experiments/cluster/jobset.yaml."
        )
    address = environment.get("JDP_COORDINATOR")
    if address is None:
        host, _, domain = socket.getfqdn().partition(".")
        if not domain or not host.endswith(f"-{index}"):
            raise ValueError(
                "Pods of an indexed job find each other by a headless service, as JOB-0.SERVICE…; given a pod named "
                f"{socket.getfqdn()!r}. Make a headless service and name it in spec.template.spec.subdomain, or set "
                "JDP_COORDINATOR, as experiments/cluster/jobset.yaml does."
            )
        port = environment.get("JAX_COORDINATOR_PORT", KUBERNETES_PORT)
        address = f"{host.removesuffix(index)}0.{domain}:{port}"
    return Cluster("Kubernetes, an indexed job", address, count, int(index))


def _tpu(environment: Mapping[str, str]) -> Cluster | None:
    """Return a TPU pod, which JAX asks a metadata server about; None if this is none."""
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return Cluster("TPU, several hosts")
    if cloud_tpu_init.running_in_cloud_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environment:
        return Cluster("Cloud TPU; a single host without a metadata server sets TPU_SKIP_MDS_QUERY=1")
    return None


def _port(environment: Mapping[str, str], job: int) -> str:
    """Return the coordinator's port, the same in all processes of a job and likely to be free."""
    return environment.get("JAX_COORDINATOR_PORT") or str(_FIRST_PORT + job % _PORTS)


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    """Return the value of one of jdp's variables; None if it is not set. Raises ValueError."""
    text = environment.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(
            f"{' and '.join(JDP_VARIABLES[1:])} must be whole numbers; given {text!r}. Unset them, or use jdp launch."
        )
    return None if text is None else int(text)
