"""Find this process' cluster, from environment variables alone.

The program that starts processes sets variables with their number and the index of each. The address of process 0,
where the coordinator listens, follows from them too:

| started by          | host of process 0                              | port                                    |
|---------------------|------------------------------------------------|-----------------------------------------|
| jdp launch, ssh     | JDP_COORDINATOR                                | JDP_COORDINATOR                         |
| mpirun, one host    | loopback                                       | from the job's name                     |
| mpirun, several     | mpirun's own                                   | from the job's name                     |
| srun                | the first of the step's node list              | from the job's number                   |
| an indexed job      | this pod's name with index 0                   | 8476                                    |

JDP_COORDINATOR replaces the address under a scheduler too, and JAX_COORDINATOR_PORT the port. JAX's own detectors give
the address under Slurm and Open MPI 4. They do not know Open MPI 5, need permissions in a pod, and give each process
one GPU, even if it is alone on its host.
"""

import os
import re
import socket
import zlib
from dataclasses import dataclass

from jax._src import cloud_tpu_init  # nothing public says whether this is a TPU VM
from jax._src.clusters import OmpiCluster, SlurmCluster  # nothing public detects without joining

from jdp.base.errors import UserError
from jdp.base.machine import visible_gpus

KUBERNETES_PORT = 8476
_FIRST_PORT, _PORTS = 2**16 - 2**12, 2**12  # above Linux' ephemeral ports


@dataclass(frozen=True)
class Cluster:
    """A cluster to join, and the index of this process. Without a coordinator, JAX detects both."""

    source: str  # for messages, such as "arguments" or "Slurm"
    coordinator: str | None = None  # "HOST:PORT" of process 0
    num_processes: int | None = None  # number of processes in the cluster
    process_id: int | None = None  # index of this process
    local_device_ids: tuple[int, ...] | None = None  # the visible devices of this process; None for all

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        values = f"({self.source}); given coordinator={given[0]!r}, num_processes={given[1]}, process_id={given[2]}."
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            raise UserError(f"Joining a cluster takes all of coordinator, num_processes and process_id {values}")
        split_address(self.coordinator)
        if not 0 <= self.process_id < self.num_processes:
            raise UserError(f"Processes are numbered: 0 <= process_id < num_processes {values}")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"A coordinator is HOST:PORT, with a port from 1 to 65535; given {address!r}.")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise UserError(f"An IPv6 address has brackets before its port; given {address!r}. Write [{host}]:{port}.")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach "HOST:PORT"."""
    host, _ = split_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def find_cluster(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Cluster | None:
    """Return the cluster that the arguments, or else the environment, describe; None for a single process.

    JDP_NUM_PROCESSES=1 means a single process, whatever the rest of the environment. The shell of a batch script under
    Slurm (`sbatch`, `salloc`) is a single process too: only several tasks of a step of `srun` are a cluster.
    """
    if (coordinator, num_processes, process_id) != (None, None, None):
        return Cluster("arguments", coordinator, num_processes, process_id)
    if os.environ.get("JDP_NUM_PROCESSES") == "1":
        return None
    address, count = os.environ.get("JDP_COORDINATOR"), _integer("JDP_NUM_PROCESSES")
    if "JDP_PROCESS_ID" in os.environ:
        return Cluster("JDP_COORDINATOR", address, count, _integer("JDP_PROCESS_ID"))
    if address is None and "JAX_COORDINATOR_ADDRESS" in os.environ:
        return Cluster("JAX_COORDINATOR_ADDRESS")
    cluster = _open_mpi(address) or _slurm(address) or _kubernetes(address, count)
    if cluster is None and (address is not None or count is not None):
        return Cluster("JDP_COORDINATOR", address, count, None)  # raises: a part of it is missing
    if cluster is not None and count not in (None, cluster.num_processes):
        raise UserError(
            f"JDP_NUM_PROCESSES must be the number of processes that {cluster.source} started, "
            f"{cluster.num_processes}; given {count}. Unset it."
        )
    return cluster or _tpu()


def _open_mpi(address: str | None) -> Cluster | None:
    """Return the cluster of an mpirun of several ranks; None if there is none.

    This comes before Slurm, because in a Slurm job the ranks of mpirun also have the variables of the daemons' step.
    Open MPI 4 gives all ranks the addresses of mpirun's host; Open MPI 5 gives a job name that contains its name.
    """
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if size == 1:
        return None
    job = os.environ.get("PMIX_NAMESPACE", "")
    local, on_host = (int(os.environ.get(f"OMPI_COMM_WORLD_LOCAL_{name}", "0")) for name in ("RANK", "SIZE"))
    named = re.fullmatch(r"[^-]+-(.+)-\d+@\d+", job)
    port = os.environ.get("JAX_COORDINATOR_PORT") or str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
    if address is None and on_host == size:
        address = f"127.0.0.1:{port}"
    elif address is None and OmpiCluster.is_env_present():
        address = OmpiCluster.get_coordinator_address(None, port)
    elif address is None and named:
        address = f"{named[1]}:{port}"
    elif address is None:
        raise UserError(
            "All ranks must know the coordinator's address; this mpirun names no host. Name rank 0's: mpirun -x "
            "JDP_COORDINATOR=HOST:PORT …"
        )
    return Cluster("Open MPI", address, size, int(os.environ["OMPI_COMM_WORLD_RANK"]), _share(on_host, local))


def _slurm(address: str | None) -> Cluster | None:
    """Return the cluster of a Slurm step of several tasks; None if there is none.

    With `--gpus-per-task`, or one task on the node, a task uses all visible GPUs; otherwise an equal share of them.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return None
    address = address or SlurmCluster.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    own = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    on_node = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 2(x4): on each of 4 nodes
    share = None if own or on_node is None else _share(int(on_node[0]), int(os.environ["SLURM_LOCALID"]))
    return Cluster("Slurm", address, tasks, int(os.environ["SLURM_PROCID"]), share)


def _share(processes: int, local: int) -> tuple[int, ...] | None:
    """Return process `local`'s equal share of the GPUs of `processes` on this host; None for all visible GPUs."""
    gpus = len(visible_gpus(os.environ))
    if processes < 2 or gpus < processes:
        return None
    share = gpus // processes
    return tuple(range(local * share, (local + 1) * share))


def _kubernetes(address: str | None, count: int | None) -> Cluster | None:
    """Return the cluster of an indexed job, alone or in a JobSet; None outside of one.

    A pod knows its own index and, by its headless service, the name of pod 0. The job must say the number of pods.
    """
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    if count is None:
        raise UserError(
            "A pod of an indexed Kubernetes job joins the others by JDP_NUM_PROCESSES; it is not set. Set it to "
            "spec.completions in the job's container (1: each pod is alone), as experiments/cluster/jobset.yaml does."
        )
    if address is None:
        host, _, domain = socket.getfqdn().partition(".")
        if not domain or not host.endswith(f"-{index}"):
            raise UserError(
                "Pods of an indexed job find each other by a headless service, as JOB-0.SERVICE…; given a pod named "
                f"{socket.getfqdn()!r}. Name a headless service in spec.template.spec.subdomain, as "
                "experiments/cluster/jobset.yaml does, or set JDP_COORDINATOR."
            )
        port = os.environ.get("JAX_COORDINATOR_PORT", KUBERNETES_PORT)
        address = f"{host.removesuffix(index)}0.{domain}:{port}"
    return Cluster("Kubernetes, an indexed job", address, count, int(index))


def _tpu() -> Cluster | None:
    """Return a TPU pod, for which JAX asks a metadata server; None outside of one."""
    if "MEGASCALE_COORDINATOR_ADDRESS" in os.environ or "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return Cluster("TPU, several hosts")
    if cloud_tpu_init.running_in_cloud_tpu_vm and "TPU_SKIP_MDS_QUERY" not in os.environ:
        return Cluster("Cloud TPU; a single host without a metadata server sets TPU_SKIP_MDS_QUERY=1")
    return None


def _integer(name: str) -> int | None:
    """Return the value of one of jdp's variables; None if it is not set."""
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"JDP_NUM_PROCESSES and JDP_PROCESS_ID must be whole numbers; given {text!r}. Unset them.")
    return None if text is None else int(text)
