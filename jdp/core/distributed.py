"""Joining a cluster, and leaving it when something failed.

`initialize` looks for a cluster in a fixed order: its own arguments, `jdp launch`'s variables, Slurm, then the ones JAX
itself finds (JAX_COORDINATOR_ADDRESS, Open MPI, Kubernetes jobs, TPU pods). Finding none is fine: one process. Finding
one and failing to join is always an error: several processes that train apart look healthy and are all wrong.

The coordinator is process 0's service where the others meet. It has no authentication: anyone who reaches its port can
end the job. On one machine jdp binds it to the loopback interface; on a cluster set JAX_COORDINATOR_BIND_ADDRESS to an
address of a private network (JAX's default is all interfaces).
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
from jax._src import cloud_tpu_init  # nothing public says whether this is a TPU VM ...
from jax._src.distributed import global_state  # ... nor who we are without starting a backend

HEARTBEAT_SECONDS = 30  # a host that says nothing for so long is lost, and everybody else is ended
SHUTDOWN_SECONDS = 60  # how long a process that finished waits for the others to finish too
LAST_WORDS_SECONDS = 1.0  # process 0 stays so long after a failure: when it goes, JAX aborts the others mid-sentence
FAILED, LOST, INTERRUPTED = 1, 70, 130  # exit codes: an exception, the others did not come, Ctrl-C

_NO_PROXY = "no_grpc_proxy"  # gRPC reads this name, in lower case
_LOST_PEER = re.compile(  # Gloo's words, those of JAX's coordination service, and NCCL's
    r"connection (closed|reset) by peer|broken pipe|another task died|tasks are unhealthy|remote process exited",
    re.IGNORECASE,
)
JDP_VARIABLES = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JDP_PROCESS_ID")


@dataclass(frozen=True)
class Cluster:
    """A cluster to join: which, and who this process is in it. Without a coordinator, JAX works out all of it."""

    found: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = (self.coordinator, self.num_processes, self.process_id)
        if given == (None, None, None):
            return
        values = f"({self.found}); got coordinator={given[0]!r}, num_processes={given[1]}, process_id={given[2]}."
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
    """Join the cluster when there is one; do nothing otherwise, or when already joined.

    Call it before anything asks JAX for its devices. Without arguments the environment says which cluster
    (`find_cluster`); with `jdp launch`, `srun`, `mpirun` or on a TPU pod nothing need be given.

    From then on an exception that nobody catches ends this process at once, with code 1, after its traceback: the
    others wait for it in their next collective, and would be blamed. `sys.excepthook` is chained to, not replaced. A
    process that comes to its end waits a minute for the others to come to theirs, and then says who did not.

    Args:
        coordinator: "HOST:PORT" of process 0, the same in all processes.
        num_processes: number of processes in the cluster.
        process_id: which of them this is, from 0.
        timeout_seconds: how long to wait for the others. JAX ends the process when it runs out.

    Raises:
        ValueError: only some of the arguments are given, or they contradict each other or the cluster already joined.
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
            f"This process is part of a cluster ({cluster.found}) and could not join it: {error} "
            "(to train on its own all the same, set JDP_NUM_PROCESSES=1)"
        ) from error
    _leave_when_failed()


def find_cluster(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Cluster | None:
    """The cluster that the arguments, or else the environment, speak of; None for a process on its own.

    JDP_NUM_PROCESSES=1 says so outright, whatever else the environment holds. A batch script's own shell under Slurm
    (`sbatch`, `salloc`) is a process on its own: only the tasks of a step that `srun` started, when there are several,
    are a cluster.
    """
    if (coordinator, num_processes, process_id) != (None, None, None):
        return Cluster("arguments", coordinator, num_processes, process_id)
    if environment.get("JDP_NUM_PROCESSES") == "1":
        return None
    if any(name in environment for name in JDP_VARIABLES):
        address, count, index = (environment.get(name) for name in JDP_VARIABLES)
        return Cluster("jdp launch", address, _whole(count), _whole(index))
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return Cluster("JAX_COORDINATOR_ADDRESS")
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm(environment)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return Cluster("Open MPI")
    return _tpu_or_kubernetes(environment)


def joined_as() -> tuple[int, int] | None:
    """(process id, number of processes) in the cluster this process has joined, else None.

    Unlike `jax.process_index()` it starts no backend, and so never waits for a peer.
    """
    if not jax.distributed.is_initialized():
        return None
    state = global_state
    return state.process_id, state.num_processes


def coordination_client() -> Any:
    """The client of JAX's coordination service: barriers with a timeout, and a key-value store; None outside of it."""
    return global_state.client


def is_lost_peer(error: BaseException) -> bool:
    """Whether JAX, in a cluster, says that it was another process that ended: its reason is there, not here."""
    if joined_as() is None:
        return False
    text = str(error)
    of_jax = type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and "gloo" in text.lower())
    return of_jax and _LOST_PEER.search(text) is not None


def leave_after_failure(code: int, *, lost_peer: bool = False) -> None:
    """End this process at once with `code` if it has joined a cluster; else return.

    A failed process must not leave by the ordinary way out: JAX's exit barrier waits there for peers that are
    themselves waiting for this one, five minutes by default. One that failed because it lost a peer waits a moment, so
    that who watches the processes sees the cause end first.
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
    """A `sys.excepthook`: says which process it is, lets the hook before it speak, and leaves."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if joined := joined_as():
            print(f"process {joined[0]} of {joined[1]} ends with an error:", file=sys.stderr)
        try:
            self.before(kind, error, trace)
        finally:
            code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED
            leave_after_failure(code, lost_peer=is_lost_peer(error))


def _leave_when_failed() -> None:
    """From here on, an exception that nobody caught ends this process at once."""
    if not isinstance(sys.excepthook, _LeavingHook):
        sys.excepthook = _LeavingHook(sys.excepthook)
        atexit.register(_at_exit)  # runs before JAX's own exit barrier, which was registered earlier


def _at_exit() -> None:
    """Leave at once after a failure, else when all have come to their ends."""
    error = getattr(sys, "last_value", None)  # set by Python, also where another hook took the place of ours
    if isinstance(error, Exception) and not hasattr(sys, "ps1"):  # in a session typed by hand, that means nothing
        leave_after_failure(FAILED, lost_peer=is_lost_peer(error))
    joined, client = joined_as(), coordination_client()
    if joined is None or client is None:
        return
    try:
        client.wait_at_barrier("jdp/exit", SHUTDOWN_SECONDS * 1000)
    except jax.errors.JaxRuntimeError as late:
        if "DEADLINE_EXCEEDED" not in str(late):
            return  # the service is gone: JAX says so
        print(
            f"process {joined[0]} of {joined[1]} came to its end, and {SHUTDOWN_SECONDS} seconds later others had not: "
            "they may wait for it in a step that it did not take. All processes take the same number of batches, and "
            "end together.",
            file=sys.stderr,
        )
        leave_after_failure(LOST)


def _arguments(cluster: Cluster) -> dict[str, Any]:
    """What `jax.distributed.initialize` takes."""
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
    """Reach a coordinator on this machine directly: gRPC would ask an http_proxy for it until the timeout and abort."""
    others = [name for name in os.environ.get(_NO_PROXY, "").split(",") if name]
    os.environ[_NO_PROXY] = ",".join([*others, host])
    jax.config.update("jax_check_proxy_envs", False)


def _check_same(cluster: Cluster, joined: tuple[int, int]) -> None:
    """A second call must not ask for another cluster than the one joined."""
    asked = (cluster.process_id, cluster.num_processes)
    if cluster.coordinator is not None and asked != joined:
        raise ValueError(
            f"This process has already joined a cluster as number {joined[0]} of {joined[1]}; "
            f"it cannot join another ({cluster.found}) as number {asked[0]} of {asked[1]}."
        )


def _tpu_or_kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """The clusters that only JAX can ask who is in them (over a metadata server or the Kubernetes API)."""
    if "JOB_COMPLETION_INDEX" in environment:
        return Cluster("Kubernetes, an indexed job")
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return Cluster("TPU, several hosts")
    if cloud_tpu_init.running_in_cloud_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environment:
        return Cluster("Cloud TPU; a single host without a metadata server sets TPU_SKIP_MDS_QUERY=1")
    return None


def _slurm(environment: Mapping[str, str]) -> Cluster:
    """A Slurm step of several tasks; the coordinator runs on the step's first node.

    The port is JAX's choice (`jax/_src/clusters/slurm_cluster.py`): the same for all tasks of a job, and likely to be
    free. JAX_COORDINATOR_PORT overrides it: two steps of one job that share their first node need that.
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
    """The first host of a Slurm node list: "gpu[007-012,020],login" -> "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", node_list)
    assert match, f"Slurm named no node: {node_list!r}"
    return "".join(part or "" for part in match.groups())


def _slurm_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Which of the visible GPUs are this task's; None for all it sees.

    All, when Slurm binds GPUs to tasks (`--gpus-per-task`), so each sees only its own, or when the node has one task.
    Otherwise every task sees the node's GPUs, and takes its equal part of them.
    """
    bound = "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    tasks = _tasks_on_node(environment)
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if bound or tasks == 1 or gpus < tasks:
        return None
    share, first = gpus // tasks, int(environment["SLURM_LOCALID"])
    return tuple(range(first * share, (first + 1) * share))


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node, from a list such as "4(x2),3"."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, repeat = part.partition("(x")
        counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
    return counts[min(int(environment.get("SLURM_NODEID", "0")), len(counts) - 1)]


def _whole(text: str | None) -> int | None:
    """`text` as a number; the variables of `jdp launch` are ours, so anything else is a mistake of the environment."""
    if text is not None and not text.isdigit():
        raise ValueError(f"{' and '.join(JDP_VARIABLES[1:])} must be whole numbers; got {text!r}.")
    return None if text is None else int(text)
