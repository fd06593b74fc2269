"""Several processes as one, restarted after a failure: torchrun for JAX.

`launch` gives each process its rank through the environment (`jdp.initialize` reads it), starts them all, and watches
them (`processes`). If one fails, the others are ended and the first failure is reported. All are then restarted if
`Restarts` allows it:

- Not after an error that would repeat: a user's mistake (2), processes that do not match (78), the answer no (1),
  Ctrl-C.
- At most `max_restarts` times.
- Not a third time without a new checkpoint, if the program reports its progress.

`jdp train` then resumes from its newest checkpoint. A second failure at a step proves nothing: a checkpoint written in
the background is reported only with the next one, or after the run has resumed from it.

Each of several nodes has its own supervisor, and supervisors do not communicate. The processes of other nodes end
because they lost a peer, and all wait for each other when they join again (`core.cluster.roll_call`). A process that
fails before all have joined fails only on its node. Such restarts go on for some minutes and are not counted.
"""

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from jdp.base.errors import UserError
from jdp.base.notices import JOINED, read_progress
from jdp.base.signals import INTERRUPTED, TRY_AGAIN
from jdp.launch.events import EventLog
from jdp.launch.output import Outputs, say
from jdp.launch.processes import Child, Nodes, Processes, environments

MISMATCH, SOFTWARE_ERROR = 78, 70
FINAL = (1, 2, MISMATCH, INTERRUPTED, -signal.SIGINT)
"""Exit codes, or -n for signal n, after which a restart would fail again, or is not wanted."""

MOST_WITHOUT_PROGRESS = 2
"""Largest number of restarts in a row without progress."""

PAUSE_SECONDS = 1.0
UNCOUNTED_SECONDS = 300.0
"""How long a node restarts processes that fail before all nodes have joined."""

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
    event_log: Path | None = None,
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
        event_log: this node's log in the run's events, of the first failure and the restarts; None: no run.
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
    with tempfile.TemporaryDirectory(prefix="jdp-launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        restarts = Restarts(max_restarts, reports_progress, folder, several_nodes=nodes is not None, log=event_log)
        with recorded_signals() as signals:
            while True:
                variables = environments(
                    start, nodes, processes, devices_per_process, restarts=restarts.made, folder=folder
                )
                with Processes(command, variables, outputs) as running:
                    watch(running, signals, grace_seconds)
                if (cause := running.cause) is None:
                    break
                count = processes * (1 if nodes is None else nodes.count)
                report(cause, count, signals, running.children, event_log)
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


def tell(log: Path | None, event: str, words: str, more: str = "", **values: Any) -> None:
    """Report on stderr, and in this node's log if the run has one."""
    say(words + more)
    if log is not None:
        with contextlib.closing(EventLog(log)) as events:
            events.event(event, words=words, **values)


def report(cause: Child, processes: int, signals: Sequence[int], children: Sequence[Child], log: Path | None) -> None:
    """Report which process failed first, how, and its last lines of output."""
    who = f"process {cause.rank} of {processes} {cause.how}"
    facts = {"rank": cause.rank, "pid": cause.process.pid, "host": socket.gethostname(), "lost_peer": cause.aborted}
    if signals:
        tell(log, "ended", f"{who}, after {signal.Signals(signals[0]).name}", ".", **facts)
        return
    why = ""
    if cause.aborted:
        still = ", ".join(str(child.rank) for child in children if child.stopped)  # perhaps the cause
        more = f"; process {still} had not ended, and may hang" if still else ""
        why = f" (JAX aborts a process when a peer is gone; no process failed in another way{more})"
    early = [str(child.rank) for child in children if child.ended < cause.ended and child.status == 0]
    if early and (cause.aborted or cause.status == SOFTWARE_ERROR):
        why += f" (process {', '.join(early)} had left before it, with exit code 0: all must take the same steps)"
    words = [f"    {line.decode(errors='replace')}" for line in cause.streams[0].tail] or ["    (nothing)"]
    tell(log, "ended", f"{who}{why}", "\n".join([". Its last output:", *words]), **facts)


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


@dataclass
class Restarts:
    """Counts the restarts, and compares the run's progress between them."""

    most: int  # number of restarts allowed
    reports_progress: bool  # True if a program without a report has made no progress
    folder: Path  # in which the processes report their progress
    several_nodes: bool = False  # True if there are other nodes
    log: Path | None = None  # this node's log in the run's events
    made: int = 0  # number of restarts so far
    _until: float = field(default_factory=lambda: time.monotonic() + UNCOUNTED_SECONDS)
    _before: int | None = None
    _without_progress: int = 0  # failures at `_before`, after the first
    _crash_loop: bool = False

    def another(self, status: int) -> bool:
        """Decide after a failure, and report the decision; True: restart."""
        if self.most == 0 or status in FINAL:
            return False
        if self.several_nodes and not (self.folder / JOINED).exists():  # not all had joined
            again = status != TRY_AGAIN and time.monotonic() < self._until  # a failed wait has used up its time
            if again:
                words = "it failed before all processes had joined: started again, which is not counted"
                tell(self.log, "restart", words)
                time.sleep(PAUSE_SECONDS)
            return again
        step = read_progress(self.folder)
        known = self.reports_progress or step is not None
        self._without_progress = self._without_progress + 1 if self.made and known and step == self._before else 0
        if self._without_progress == MOST_WITHOUT_PROGRESS:
            self._crash_loop = True
            where = f"after checkpoint {step}" if step else "before its first checkpoint"
            words = f"crash loop: failed {where} {MOST_WITHOUT_PROGRESS + 1} times in a row; not started again"
            tell(self.log, "given up", words)
            return False
        if self.made >= self.most:
            count = f"{self.most} restart{'s' * (self.most > 1)} of {self.most}"
            tell(self.log, "given up", f"not started again: {count} made (--max-restarts)")
            return False
        self.made, self._before = self.made + 1, step
        self._until = time.monotonic() + UNCOUNTED_SECONDS
        (self.folder / JOINED).unlink(missing_ok=True)
        whence = "" if step is None else f", from step {step}" if step else ", from the beginning"
        tell(self.log, "restart", f"restart {self.made} of {self.most}{whence}")
        return True

    def exit_code(self, status: int) -> int:
        """Return the exit code, given that of the process that failed first; a crash loop must not be tried again."""
        code = 128 - status if status < 0 else status
        return SOFTWARE_ERROR if self._crash_loop and code == TRY_AGAIN else code
