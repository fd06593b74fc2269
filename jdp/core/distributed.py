"""Join a cluster of processes, and leave it if something failed.

`initialize` looks for a cluster in a fixed order: its own arguments, `jdp launch`'s variables,
JAX_COORDINATOR_ADDRESS, Slurm, then those that JAX itself detects (Open MPI, Kubernetes jobs, TPU pods). Finding none
means one process. Finding one and failing to join is always an error: several processes that train separately look
healthy and are all wrong.

The coordinator is a service of process 0 at which the others register. It has no authentication: anyone who reaches its
port can end the job. On one machine jdp binds it to the loopback interface; on a cluster set
JAX_COORDINATOR_BIND_ADDRESS to an address of a private network (JAX's default is all interfaces).
"""

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
from jax._src import cloud_tpu_init  # nothing public says whether this is a TPU VM

from jdp.core.coordination import LostPeer, coordination_client, joined_as
from jdp.core.handshake import check_environment

HEARTBEAT_SECONDS = 30  # a process without a heartbeat for so long is lost, and all others are ended
SHUTDOWN_SECONDS = 60  # how long a process that has finished waits for the others
LAST_WORDS_SECONDS = 1.0  # process 0 stays so long after a failure: when it ends, JAX aborts the others at once
FAILED, INTERRUPTED = 70, 130  # exit codes: an exception, or the others did not arrive; Ctrl-C

_NO_PROXY = "no_grpc_proxy"  # gRPC reads this name, in lower case
_LOST_PEER = re.compile(  # messages of Gloo, of JAX's coordination service, and of NCCL
    r"connection (closed|reset) by peer|broken pipe|another task died|tasks are unhealthy|remote process exited",
    re.IGNORECASE,
)
JDP_VARIABLES = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JDP_PROCESS_ID")


@dataclass(frozen=True)
class Cluster:
    """A cluster to join, and which of its processes this is. Without a coordinator, JAX detects both.

    Attributes:
        source: what named the cluster, for messages: "arguments", "Slurm", ...
        coordinator: "HOST:PORT" of process 0.
        num_processes: number of processes in the cluster.
        process_id: index of this process.
        local_device_ids: which of the visible devices are this process'; None for all.

    Raises:
        ValueError: only some of coordinator, num_processes and process_id are given, or they contradict each other.
    """

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        values = f"({self.source}); given coordinator={given[0]!r}, num_processes={given[1]}, process_id={given[2]}."
        if None in given:
            raise ValueError(f"Joining a cluster takes all of coordinator, num_processes and process_id {values}")
        assert self.num_processes is not None and self.process_id is not None
        if not 0 <= self.process_id < self.num_processes or ":" not in str(self.coordinator):
            raise ValueError(f"A cluster has a coordinator HOST:PORT and 0 <= process_id < num_processes {values}")


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = 300,
) -> None:
    """Join the cluster if there is one; do nothing otherwise, or if it is joined already.

    Call it before anything asks JAX for its devices. Without arguments the environment determines the cluster: under
    `jdp launch`, `srun` or `mpirun`, in an indexed Kubernetes job or on a TPU pod no argument is needed. On a single
    machine it returns at once.

    After joining, an uncaught exception ends this process at once, with exit code 70, after its traceback; otherwise
    the other processes would wait for it in their next collective. `sys.excepthook` is chained, not replaced. A
    process that ends normally waits up to a minute for the others to end, and reports if they do not.

    The processes compare their versions, jdp's source and how many they are; if one differs all raise the same error,
    and end with exit code 78: starting again alone does not help.

    Args:
        coordinator: "HOST:PORT" of process 0, the same in all processes.
        num_processes: number of processes in the cluster.
        process_id: index of this process, from 0.
        timeout_seconds: how long to wait for the others, in seconds. After it JAX ends the process.

    Raises:
        ValueError: only some of the first three arguments are given, or they contradict each other or the cluster that
            is joined already; or a variable of `jdp launch` is not a whole number.
        Mismatch: a ValueError; the processes were not started alike.
        RuntimeError: there is a cluster, but it could not be joined.
    """
    cluster = find_cluster(os.environ, coordinator, num_processes, process_id)
    if cluster is None or cluster.num_processes == 1:
        return
    if joined := joined_as():
        _check_same(cluster, joined)
        _leave_when_failed()
        return
    try:
        jax.distributed.initialize(**_arguments(cluster), initialization_timeout=timeout_seconds)
    except Exception as error:
        raise RuntimeError(
            f"This process is part of a cluster ({cluster.source}) and could not join it: {error} "
            "(to train on its own all the same, set JDP_NUM_PROCESSES=1)"
        ) from error
    _leave_when_failed()
    check_environment()


def find_cluster(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Cluster | None:
    """Return the cluster that the arguments, or else the environment, describe; None for a single process.

    JDP_NUM_PROCESSES=1 means a single process, whatever else the environment holds. The shell of a batch script under
    Slurm (`sbatch`, `salloc`) is a single process too: only several tasks of a step that `srun` started are a cluster.

    Args:
        environment: environment variables.
        coordinator, num_processes, process_id: as for `initialize`.

    Raises:
        ValueError: they do not describe a cluster.
    """
    if (coordinator, num_processes, process_id) != (None, None, None):
        return Cluster("arguments", coordinator, num_processes, process_id)
    if environment.get("JDP_NUM_PROCESSES") == "1":
        return None
    if any(name in environment for name in JDP_VARIABLES):
        address, count, index = (environment.get(name) for name in JDP_VARIABLES)
        return Cluster("jdp launch", address, _integer(count), _integer(index))
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return Cluster("JAX_COORDINATOR_ADDRESS")
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm(environment)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return Cluster("Open MPI")
    return _tpu_or_kubernetes(environment)


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an error in a cluster means that another process ended or is stuck, which is then the cause."""
    if joined_as() is None:
        return False
    if isinstance(error, LostPeer):
        return True
    text = str(error)
    of_jax = type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and "gloo" in text.lower())
    return of_jax and _LOST_PEER.search(text) is not None


def leave_after_failure(code: int, *, lost_peer: bool = False) -> None:
    """End this process at once if it has joined a cluster; else return.

    A failed process must not end normally: JAX's exit barrier would wait for peers that are themselves waiting for this
    one, five minutes by default. One that failed because it lost a peer waits a moment, so that whoever watches the
    processes sees the cause end first.

    Args:
        code: the exit code.
        lost_peer: True if the failure is that another process ended.
    """
    joined = joined_as()
    if joined is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if joined[0] == 0 or lost_peer:
        time.sleep(LAST_WORDS_SECONDS)
    os._exit(code)


@dataclass(frozen=True)
class _LeavingHook:
    """A `sys.excepthook` that names the process, calls the hook before it, and ends the process."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if joined := joined_as():
            print(f"process {joined[0]} of {joined[1]} ends with an error:", file=sys.stderr)
        try:
            self.before(kind, error, trace)
        finally:
            leave_after_failure(_exit_code(error), lost_peer=is_lost_peer(error))


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error: its own, where it has one, as `Mismatch` has."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)


def _leave_when_failed() -> None:
    """Install the hooks by which an uncaught exception ends this process at once."""
    if not isinstance(sys.excepthook, _LeavingHook):
        sys.excepthook = _LeavingHook(sys.excepthook)
        atexit.register(_at_exit)  # runs before JAX's own exit barrier, which was registered earlier


def _at_exit() -> None:
    """End the process at once after a failure, else when all processes have arrived here."""
    error = getattr(sys, "last_value", None)  # set by Python, even if another hook replaced ours
    if isinstance(error, Exception) and not hasattr(sys, "ps1"):  # in an interactive session it means nothing
        leave_after_failure(_exit_code(error), lost_peer=is_lost_peer(error))
    joined, client = joined_as(), coordination_client()
    if joined is None or client is None:
        return
    try:
        client.wait_at_barrier("jdp/exit", SHUTDOWN_SECONDS * 1000)
    except jax.errors.JaxRuntimeError as late:
        if "DEADLINE_EXCEEDED" not in str(late):
            return  # the service is gone: JAX reports it
        print(
            f"process {joined[0]} of {joined[1]} came to its end, and {SHUTDOWN_SECONDS} seconds later others had not: "
            "they may wait for it in a step that it did not take. All processes take the same number of batches, and "
            "end together.",
            file=sys.stderr,
        )
        leave_after_failure(FAILED)


def _arguments(cluster: Cluster) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize`."""
    timeouts = {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS, "shutdown_timeout_seconds": SHUTDOWN_SECONDS}
    if cluster.coordinator is None:
        return timeouts
    host = cluster.coordinator.rsplit(":", 1)[0].strip("[]")
    local = host in ("localhost", "::1") or host.startswith("127.")
    if local:
        _bypass_proxies(host)
    return timeouts | {
        "coordinator_address": cluster.coordinator,
        "num_processes": cluster.num_processes,
        "process_id": cluster.process_id,
        "local_device_ids": cluster.local_device_ids,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": cluster.coordinator if local else None,
    }


def _bypass_proxies(host: str) -> None:
    """Make gRPC reach a coordinator on this machine directly: through an http_proxy it would time out and abort."""
    others = [name for name in os.environ.get(_NO_PROXY, "").split(",") if name]
    os.environ[_NO_PROXY] = ",".join([*others, host])
    jax.config.update("jax_check_proxy_envs", False)


def _check_same(cluster: Cluster, joined: tuple[int, int]) -> None:
    """Check that a second call names the cluster that is joined already."""
    given = (cluster.process_id, cluster.num_processes)
    if cluster.coordinator is not None and given != joined:
        raise ValueError(
            f"This process has already joined a cluster as number {joined[0]} of {joined[1]}; "
            f"it cannot join another ({cluster.source}) as number {given[0]} of {given[1]}. Call initialize once."
        )


def _tpu_or_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Return a cluster whose processes only JAX can find out (from a metadata server or the Kubernetes API)."""
    if "JOB_COMPLETION_INDEX" in environment:
        return Cluster("Kubernetes, an indexed job")
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return Cluster("TPU, several hosts")
    if cloud_tpu_init.running_in_cloud_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environment:
        return Cluster("Cloud TPU; a single host without a metadata server sets TPU_SKIP_MDS_QUERY=1")
    return None


def _slurm(environment: Mapping[str, str]) -> Cluster:
    """Return the cluster of a Slurm step of several tasks; the coordinator runs on the step's first node.

    The port is computed as JAX does (`jax/_src/clusters/slurm_cluster.py`): equal for all tasks of a job, and likely to
    be free. JAX_COORDINATOR_PORT overrides it: two steps of one job that share their first node need that.
    """
    port = environment.get("JAX_COORDINATOR_PORT") or int(environment["SLURM_JOB_ID"]) % 2**12 + 2**16 - 2**12
    return Cluster(
        "Slurm",
        f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_PROCID"]),
        _slurm_devices(environment),
    )


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: "gpu[007-012,020],login" -> "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", node_list)
    assert match, f"Slurm named no node: {node_list!r}"
    return "".join(group or "" for group in match.groups())


def _slurm_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return which of the visible GPUs are this task's; None for all.

    A task uses all GPUs that it sees if Slurm binds GPUs to tasks (`--gpus-per-task`) or the node has one task.
    Otherwise every task sees the node's GPUs, and uses an equal share of them.
    """
    bound = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    tasks = _tasks_on_node(environment)
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if bound or tasks == 1 or gpus < tasks:
        return None
    share, first = gpus // tasks, int(environment["SLURM_LOCALID"])
    return tuple(range(first * share, (first + 1) * share))


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this node, from a list such as "4(x2),3"."""
    counts: list[int] = []
    for entry in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeat = entry.partition("(x")
        counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", "0")), len(counts) - 1)]


def _integer(text: str | None) -> int | None:
    """Return the value of a variable that `jdp launch` sets."""
    if text is not None and not text.isdigit():
        raise ValueError(
            f"{' and '.join(JDP_VARIABLES[1:])} must be whole numbers; given {text!r}. Unset them, or use jdp launch."
        )
    return None if text is None else int(text)
