"""Several processes as one, restarted after a failure: torchrun for JAX.

`launch` gives each process its rank through the environment (`jdp.initialize` reads it), starts them all, and watches
them (`processes`). If one fails, the others are ended and the first failure is reported. All are then restarted if
`restarts` allows it:

- Not after an error that would repeat: a user's mistake (2), processes that do not match (78), the answer no (1),
  Ctrl-C.
- At most `max_restarts` times.
- Not a third time without a new checkpoint, if the program reports its progress.

`jdp train` then resumes from its newest checkpoint. Each of several nodes has its own supervisor, and supervisors do
not communicate: the processes of other nodes end because they lost a peer, and all wait for each other when they join
again (`core.cluster.roll_call`).
"""

import contextlib
import fcntl
import os
import signal
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from jdp.base.errors import UserError
from jdp.base.progress_file import JOINED
from jdp.launch.output import Outputs, say
from jdp.launch.process_environment import Nodes, environments, part_of
from jdp.launch.processes import Child, Processes
from jdp.launch.restarts import SOFTWARE_ERROR, Restarts

END_SECONDS = 60.0
"""How long a node whose processes have all ended with 0 waits for the other nodes to end."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def launch(
    command: Sequence[str],
    processes: int,
    *,
    devices_per_process: int | None = None,
    clean_stdout: bool = False,
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    log_dir: Path | None = None,
    reports_progress: bool = False,
    nodes: Nodes | None = None,
) -> int:
    """Run `command` as processes of one cluster, and wait for all of them. Call it in the main thread.

    Args:
        command: program and arguments, the same for all.
        processes: number of processes on this machine.
        devices_per_process: on a machine with NVIDIA GPUs, number of GPUs per process (default: an equal share); else
            number of virtual CPU devices (default: JAX's, one).
        clean_stdout: write process 0's stdout unchanged to stdout, and everything else to stderr.
        grace_seconds: how long the processes may take to save and end after SIGINT or SIGTERM before they are killed.
        environment: initial variables (default: those of this process).
        max_restarts: number of restarts of all processes after a failure.
        log_dir: folder of a log file per process; None: no log files.
        reports_progress: True if the command reports its progress from its start, as `jdp train` does: if it fails
            three times before any progress, it is not restarted.
        nodes: the machines of the cluster, each of which calls this with the same command and number of processes;
            None: only this machine.

    Returns:
        0 if all ended with 0, else the exit code of the first process that failed (128 + n for signal n). A process
        that aborted because a peer had died counts only if no other failed.

    Raises:
        ValueError: fewer than one process, a negative number of restarts, or fewer GPUs than the processes need.
    """
    if processes < 1:
        raise UserError(f"jdp launch starts 1 or more processes; given -n {processes}. Start at least one.")
    if max_restarts < 0:
        raise UserError(f"A number of restarts is 0 or more; given {max_restarts}. 0 means: end when one fails.")
    start, outputs = dict(os.environ if environment is None else environment), Outputs(clean_stdout, log_dir)
    with temporary_folder() as folder:
        restarts = Restarts(max_restarts, reports_progress, folder, several_nodes=nodes is not None)
        with recorded_signals() as signals:
            while True:
                part = part_of(nodes, processes)
                variables = environments(start, part, devices_per_process, restarts=restarts.made, folder=folder)
                with Processes(command, variables, outputs) as running:
                    watch(running, signals, grace_seconds)
                if (cause := running.cause) is None:
                    break
                report(cause, part.processes, signals, running.children)
                if signals or not restarts.another(cause.status):
                    return restarts.exit_code(cause.status)
        if nodes is not None and (folder / JOINED).exists():
            _wait_for_nodes(nodes)
        return 0


def _wait_for_nodes(nodes: Nodes) -> None:
    """Wait for the other nodes to end with 0 too: a node that restarts learns that this node has ended."""
    from jdp.core.cluster.agreement import Mismatch
    from jdp.core.cluster.roll_call import MissingProcesses, RollCall

    try:
        RollCall(nodes.coordinator, nodes.rank, nodes.count, "node").call(END_SECONDS)
    except MissingProcesses:  # they failed for good, and report it
        return
    except Mismatch as error:
        say(str(error))


def watch(running: Processes, signals: Sequence[int], grace_seconds: float) -> None:
    """Let the processes run to their end; pass on signals, and kill after a second one."""
    passed_on = 0
    while running.turn():
        if len(signals) > passed_on:
            first = signal.SIGINT if signals[0] == signal.SIGINT else signal.SIGTERM  # also for SIGHUP and SIGUSR1
            running.pass_on(signal.SIGKILL if passed_on else first, grace_seconds)
            passed_on = len(signals)


def report(cause: Child, processes: int, signals: Sequence[int], children: Sequence[Child]) -> None:
    """Report on stderr which process failed first, how, and its last lines of output."""
    who = f"process {cause.rank} of {processes} {cause.how}"
    if signals:
        say(f"{who}, after {signal.Signals(signals[0]).name}.")
        return
    why = ""
    if cause.aborted:
        still = ", ".join(str(child.rank) for child in children if child.stopped)
        more = f"; process {still} had not ended, and may hang" if still else ""
        why = f" (JAX aborts a process when a peer is gone; no process failed in another way{more})"
    early = [str(child.rank) for child in children if child.ended < cause.ended and child.status == 0]
    if early and (cause.aborted or cause.status == SOFTWARE_ERROR):
        why += f" (process {', '.join(early)} had left before it, with exit code 0: all must take the same steps)"
    words = [f"    {line}" for line in cause.last_words] or ["    (nothing)"]
    say("\n".join([f"{who}{why}. Its last output:", *words]))


@contextlib.contextmanager
def recorded_signals() -> Generator[list[int]]:
    """Record signals that would end this process in a list instead."""
    received: list[int] = []

    def record(number: int, _: FrameType | None) -> None:
        received.append(number)

    ignored = [number for number in _STOPPING if signal.getsignal(number) == signal.SIG_IGN]  # for example by nohup
    before = {number: signal.signal(number, record) for number in _STOPPING if number not in ignored}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PREFIX = "jdp-launch-"
_LOCK = ".lock"


@contextlib.contextmanager
def temporary_folder() -> Generator[Path]:
    """Make a folder for this launcher's files; at the end remove it and the folders of killed launchers."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        _remove_unlocked(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    fresh = folder / f"{_LOCK}.new"
    with fresh.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh.rename(folder / _LOCK)  # named only after it is locked: no launcher takes it for a killed launcher's
        try:
            yield folder
        finally:
            _remove(folder)


def _remove_unlocked(lock: Path) -> None:
    with contextlib.suppress(OSError):  # it is held, another user's, or gone
        if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.geteuid():
            return
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
        finally:
            os.close(handle)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pattern in ("*progress.*", JOINED, _LOCK):
            for file in folder.glob(pattern):
                file.unlink(missing_ok=True)
        folder.rmdir()
