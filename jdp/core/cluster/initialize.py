"""Join a cluster of processes, and exit after a failure.

`schedulers` finds the cluster; without a cluster the process is alone. A cluster that cannot be joined is always an
error: otherwise each process would train alone, which looks healthy and gives wrong results.
"""

import atexit
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from jdp.base.errors import UserError, public
from jdp.base.machine import provide_threads
from jdp.base.notices import note_joined
from jdp.base.signals import INTERRUPTED
from jdp.core.cluster.agreement import check_environment
from jdp.core.cluster.barrier import LostPeer, coordination_client, end_threads, joined_as
from jdp.core.cluster.roll_call import RollCall, bind_address, wait_for_coordinator
from jdp.core.cluster.schedulers import Cluster, find_cluster, split_address

HEARTBEAT_SECONDS = 60  # without a heartbeat for this time, or half of it, a process is lost, and JAX aborts the others
JOIN_SECONDS = 60  # how long JAX's own joining may take once all are here
SHUTDOWN_SECONDS = 60  # how long a process that has finished waits for the others
LAST_WORDS_SECONDS = 1.0  # process 0 stays this long after a failure: when it ends, JAX aborts the others at once
_NO_PROXY = "no_grpc_proxy"  # gRPC reads this name, in lower case: through a proxy it would not reach the coordinator
FAILED = 70  # the exit code after an exception, or if the others did not arrive

_LOST_PEER = re.compile(  # messages of Gloo, of JAX's coordination service, and of NCCL
    r"connection (closed|reset) by peer|broken pipe|another task died|tasks are unhealthy|remote process exited|"
    r"failed to send RPC to coordination service",
    re.IGNORECASE,
)


@public()
def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = 300,
) -> None:
    """Join the cluster if there is one; do nothing otherwise, or if it is joined already.

        >>> jdp.initialize()  # first, before anything asks JAX for its devices
        >>> mesh = jdp.make_mesh(data=-1)  # all devices of all processes

    Without arguments the environment determines the cluster: `jdp launch`, `srun`, `mpirun` and a TPU pod set it. An
    indexed Kubernetes job sets JDP_NUM_PROCESSES. Processes started by ssh set JDP_COORDINATOR and JDP_PROCESS_ID too.
    On a single machine this returns at once. For virtual CPU devices XLA gets two threads each (PJRT_NPROC).

    After joining, an uncaught exception ends this process at once, with exit code 70, after its traceback. Otherwise
    the other processes would wait for it in their next collective. `sys.excepthook` is chained, not replaced. A process
    that ends normally waits up to a minute for the others to end, and reports if they do not.

    The processes compare their versions, jdp's source and their number of devices. If one differs, all raise the same
    error and end with exit code 78, because a restart alone does not help.

    Args:
        coordinator: "HOST:PORT" of process 0, the same in all processes. Give the first three arguments when none of
            the launchers above starts the processes.
        num_processes: number of processes in the cluster.
        process_id: index of this process, from 0.
        timeout_seconds: how long to wait for the others, in seconds. Processes that are missing after ten seconds are
            printed. Raise it when machines of one job start minutes apart.

    Raises:
        ValueError: only some of the first three arguments are given. They contradict each other or the cluster that was
            joined before. The environment variables of the launcher do not describe a cluster. JAX_MTLS_CERT_FILE is
            set, and this JAX ignores it.
        Mismatch: a ValueError; the processes were not started alike.
        MissingProcesses: a RuntimeError; not all came in time. Uncaught, it ends the process with exit code 75.
        RuntimeError: there is a cluster, but it could not be joined.
    """
    provide_threads()
    cluster = find_cluster(coordinator, num_processes, process_id)
    if cluster is None or cluster.num_processes == 1:
        return
    if not isinstance(sys.excepthook, _LeavingHook):
        sys.excepthook = _LeavingHook(sys.excepthook)
        atexit.register(_at_exit)  # runs before JAX's own exit barrier, which was registered earlier
    if joined := joined_as():
        given = (cluster.process_id, cluster.num_processes)
        if cluster.coordinator is not None and given != joined:
            raise UserError(
                f"This process has already joined a cluster as number {joined[0]} of {joined[1]}; given number "
                f"{given[0]} of {given[1]} ({cluster.source}). Call initialize once."
            )
        return
    if "JAX_MTLS_CERT_FILE" in os.environ and jax.__version_info__ < (0, 12):
        raise UserError(
            f"Mutual TLS of JAX's coordinator needs JAX 0.12; given JAX_MTLS_CERT_FILE, which JAX {jax.__version__} "
            "ignores. Unset it and use a private network, or install a newer JAX."
        )
    if cluster.coordinator is not None:
        assert cluster.process_id is not None and cluster.num_processes is not None
        host, _ = split_address(cluster.coordinator)
        os.environ[_NO_PROXY] = ",".join(filter(None, [os.environ.get(_NO_PROXY), host]))
        jax.config.update("jax_check_proxy_envs", False)
        RollCall(cluster.coordinator, cluster.process_id, cluster.num_processes).call(timeout_seconds)
        timeout_seconds = JOIN_SECONDS
        if cluster.process_id:
            wait_for_coordinator(cluster.coordinator, JOIN_SECONDS)
    try:
        jax.distributed.initialize(**_arguments(cluster), initialization_timeout=timeout_seconds)
    except Exception as error:
        raise RuntimeError(
            f"This process is part of a cluster ({cluster.source}) and could not join it: {error} (to train alone, set "
            "JDP_NUM_PROCESSES=1)"
        ) from error
    check_environment()
    note_joined()


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an error in a cluster was caused by another process, which ended or is stuck."""
    if joined_as() is None:
        return False
    if isinstance(error, LostPeer):
        return True
    if isinstance(error, TimeoutError) and isinstance(error.__cause__, jax.errors.JaxRuntimeError):
        return True  # Orbax raises this if a barrier of the coordination service fails, for whatever reason
    text = str(error)
    of_jax = type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and "gloo" in text.lower())
    return of_jax and _LOST_PEER.search(text) is not None


def leave_after_failure(code: int, *, lost_peer: bool = False) -> None:
    """End this process at once if it has joined a cluster; else return.

    A failed process must not end normally: JAX's exit barrier would wait for peers that wait for this process, five
    minutes by default. A process that lost a peer waits a moment, so that a supervisor sees the cause end first.
    """
    joined = joined_as()
    if joined is None:
        return
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stdout.flush()
        sys.stderr.flush()
    if joined[0] == 0 or lost_peer:
        time.sleep(LAST_WORDS_SECONDS)
    os._exit(code)


@dataclass(frozen=True)
class _LeavingHook:
    """A `sys.excepthook` that names the process, calls the previous hook, and ends the process."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if joined := joined_as():
            print(f"process {joined[0]} of {joined[1]} ends with an error:", file=sys.stderr)
        try:
            self.before(kind, error, trace)
        finally:
            leave_after_failure(_exit_code(error), lost_peer=is_lost_peer(error))
            if hasattr(error, "exit_code"):  # this process has not joined, and Python would end with 1
                raise SystemExit(_exit_code(error))


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error, which may have its own, like `Mismatch`."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)


def _at_exit() -> None:
    """End the process at once after a failure, else when all processes have arrived here."""
    error = getattr(sys, "last_value", None)  # set by Python, even if another hook replaced ours
    if isinstance(error, Exception) and not hasattr(sys, "ps1"):  # set by any error in an interactive session
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
            "they may wait for it in a step. All processes take the same number of batches, and end together.",
            file=sys.stderr,
        )
        leave_after_failure(FAILED)
    end_threads()


def _arguments(cluster: Cluster) -> dict[str, Any]:
    timeouts = {"heartbeat_timeout_seconds": HEARTBEAT_SECONDS, "shutdown_timeout_seconds": SHUTDOWN_SECONDS}
    if cluster.coordinator is None:
        return timeouts
    return timeouts | {
        "coordinator_address": cluster.coordinator,
        "num_processes": cluster.num_processes,
        "process_id": cluster.process_id,
        "local_device_ids": cluster.local_device_ids,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": bind_address(cluster.coordinator),
    }
