"""Several processes as one, started again when they fail: torchrun for JAX.

`launch` gives each process its rank through the environment (`jdp.initialize` reads it), starts them all, and watches
them (`processes`). When one fails the others are ended and the first failure is reported. All are then started again,
on a new port, if `restarts` allows it:

- Not after an error that would come again: a user's mistake (2), processes that do not match (78), the answer no (1),
  Ctrl-C.
- As often as `max_restarts` allows.
- Not a third time without a new checkpoint, if the program reports its progress.

`jdp train` then resumes from its newest checkpoint. On several machines each has a supervisor, and they connect at a
rendezvous (`decisions`, `rendezvous`).
"""

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from jdp.base.progress_file import PROGRESS_FILE
from jdp.launch.decisions import Decisions, Member, decisions_of
from jdp.launch.output import Outputs, say
from jdp.launch.process_environment import environments
from jdp.launch.processes import Child, Processes
from jdp.launch.rendezvous import Nodes
from jdp.launch.restarts import SOFTWARE_ERROR, Restarts
from jdp.launch.secret import SECRET, new_secret, shared_secret
from jdp.launch.standby import Standbys
from jdp.launch.temporary_folder import PROGRESS, temporary_folder

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
    facts: Mapping[str, str] | None = None,
    fits: Callable[[int], bool] = lambda processes: True,
) -> int:
    """Run `command` as processes of one cluster, and wait for all of them. Call it in the main thread.

    Args:
        command: program and arguments, the same for all.
        processes: number of processes on this machine.
        devices_per_process: on a machine with NVIDIA GPUs, number of GPUs of each process (default: an equal share);
            else number of virtual CPU devices (default: JAX's, one).
        clean_stdout: write process 0's stdout unchanged to stdout, and everything else to stderr.
        grace_seconds: how long the processes may take to save and end after SIGINT or SIGTERM before they are killed.
        environment: variables to start from (default: those of this process).
        max_restarts: how often all processes are started again after one has failed.
        log_dir: folder of a log file for each process; None: none.
        reports_progress: True if the command reports its progress from its start on, as `jdp train` does: if it fails
            three times before that, it is not started again.
        nodes: the machines of the cluster, on each of which this is called; None: this one alone. `max_restarts` and
            `fits` are node 0's.
        facts: values that must be the same on every node, by name.
        fits: returns True if that number of processes can do the run; asked if a node stays away.

    Returns:
        0 if all ended with 0, else the exit code of the first that failed (128 + n for signal n). A process that
        aborted because a peer had died counts only if no other failed. 75 if nodes stayed away; 78 if they differ.

    Raises:
        ValueError: fewer than one process, a negative number of restarts, or fewer GPUs than the processes need; or
            node 0 cannot listen at its address. The secret (JDP_SECRET) is too short, cannot be read, or is another
            than node 0's.
    """
    if processes < 1:
        raise ValueError(f"jdp launch starts 1 or more processes; given -n {processes}. Start at least one.")
    if max_restarts < 0:
        raise ValueError(f"A number of restarts is 0 or more; given {max_restarts}. 0 means: end when one fails.")
    start = dict(os.environ if environment is None else environment)
    secret = shared_secret(start)
    if nodes is None and secret is None:
        start[SECRET] = new_secret()  # for `jdp doctor` as its processes: this machine may have other users
    outputs = Outputs(clean_stdout, log_dir)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(temporary_folder()) / PROGRESS
        decisions = decisions_of(
            processes, Restarts(max_restarts, reports_progress, progress), nodes, facts or {}, fits, secret
        )
        if isinstance(decisions, Member):
            stack.enter_context(decisions)
        signals = stack.enter_context(recorded_signals())
        standbys = (
            stack.enter_context(Standbys(command, progress, outputs)) if reports_progress and max_restarts else None
        )
        while not isinstance(part := decisions.next_part(signals), int):
            variables = environments(start | {PROGRESS_FILE: str(progress)}, part, devices_per_process)
            with Processes(command, variables, outputs, standbys) as running:
                ready = standbys if part.restarts < max_restarts else None
                if ready is not None:
                    later = replace(part, restarts=part.restarts + 1)
                    ready.attempt(environments(start | {PROGRESS_FILE: str(progress)}, later, devices_per_process))
                watch(running, signals, grace_seconds, decisions, ready)
            if running.cause is not None:
                report(running.cause, part.processes, signals, running.children)
            decisions.ended(running.cause, signals)
        return part


def watch(
    running: Processes,
    signals: Sequence[int],
    grace_seconds: float,
    decisions: Decisions,
    standbys: Standbys | None = None,
) -> None:
    """Let the processes run to their end; pass on signals, of which a second one kills."""
    passed_on = 0
    while running.turn():
        if standbys is not None and not signals:
            standbys.turn()
        if len(signals) > passed_on:
            first = signal.SIGINT if signals[0] == signal.SIGINT else signal.SIGTERM  # as SIGHUP and SIGUSR1 become
            running.pass_on(signal.SIGKILL if passed_on else first, grace_seconds)
            passed_on = len(signals)
        if decisions.stop(running.cause if running.stopping else None) and not running.stopping:
            running.stop()


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

    ignored = [number for number in _STOPPING if signal.getsignal(number) == signal.SIG_IGN]  # as by nohup
    before = {number: signal.signal(number, record) for number in _STOPPING if number not in ignored}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
