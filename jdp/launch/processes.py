"""The processes of one attempt on this machine: started together, watched, and ended together.

`turn`, called repeatedly, forwards their output and notices which have ended. If one fails, the others are ended,
because they would wait for it.

Each learns its number in the cluster, and its devices, from its environment (`environments`).

The processes end with this process, even after SIGKILL (Linux: PR_SET_PDEATHSIG). Each has its own process group: it
gets Ctrl-C once, from this process, and its child programs end with it.
"""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from jdp.base.errors import UserError
from jdp.base.machine import cpu_only, listen, visible_gpus
from jdp.base.notices import PROGRESS_FILE
from jdp.core.cluster.schedulers import split_address
from jdp.launch.output import Outputs, Stream

POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0  # after an abort (a peer died): for that peer to end by itself
ORDERLY = (75, 130)  # exit codes of a process that was stopped and has saved
ORDERLY_SECONDS = 15.0  # after one of these: for the other processes to exit by themselves
LAST_WORDS_SECONDS = 0.8  # after a failure, from SIGTERM to SIGKILL: JAX ignores SIGTERM, and waiting peers hang
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass
class Child:
    """One process and its state."""

    rank: int
    process: "subprocess.Popen[bytes]"
    streams: list[Stream]
    ended: float = math.inf  # time.monotonic() when its end was noticed
    stopped: bool = False  # it got SIGTERM because another process had failed

    @property
    def status(self) -> int:
        """Exit code, or -n after signal n."""
        return self.process.returncode

    @property
    def how(self) -> str:
        """How it ended, in words: "ended with exit code 3", "ended with signal 9 (SIGKILL)"."""
        if self.ended == math.inf:
            return "was killed"
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        names = {number.value: number.name for number in signal.Signals}  # without real-time signals
        return f"ended with signal {-self.status} ({names.get(-self.status, 'unknown')})"

    @property
    def aborted(self) -> bool:
        """True if it ended by SIGABRT, with which JAX ends a process whose peer died: never the cause itself."""
        return self.status == -signal.SIGABRT

    @property
    def patience(self) -> float:
        """Seconds after its failure in which the others may exit by themselves."""
        return SETTLE_SECONDS if self.aborted else ORDERLY_SECONDS if self.status in ORDERLY else 0.0

    @property
    def failed(self) -> bool:
        """True if it ended with an error and was not stopped."""
        return self.ended < math.inf and self.status != 0 and not self.stopped


class Processes:
    """The processes of one attempt on this machine; none outlives `with`."""

    def __init__(self, command: Sequence[str], environments: Mapping[int, dict[str, str]], outputs: Outputs) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._kill_at = math.inf  # set after all have been asked to end
        try:
            for rank, own in environments.items():
                self.children.append(self._start(command, rank, own, outputs))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that still run, and close pipes and log files."""
        _send_signal(signal.SIGKILL, running(self.children))
        for key in list(self._selector.get_map().values()):
            key.data.pipe.close()
        self._selector.close()
        for child in self.children:
            if (log := child.streams[0].log) is not None:
                log.close(f"process {child.rank} {child.how}")

    @property
    def cause(self) -> Child | None:
        """The process that failed first; a process that aborted after a peer's death counts only if no other failed."""
        failed = [child for child in self.children if child.failed]
        return min(failed, key=lambda child: (child.aborted, child.ended), default=None)

    def turn(self) -> bool:
        """Forward output for a moment; if a process failed, end the others. Return False after all have ended."""
        if not running(self.children):
            while self._forward_output(0):
                pass
            return False
        self._forward_output(POLL_SECONDS)
        now, alive = time.monotonic(), running(self.children)
        is_due = any(child.failed and now >= child.ended + child.patience for child in self.children)
        if is_due and self._kill_at == math.inf:
            for child in alive:
                child.stopped = True
            self.pass_on(signal.SIGTERM, LAST_WORDS_SECONDS)
        if now >= self._kill_at:
            _send_signal(signal.SIGKILL, alive)
        return True

    def pass_on(self, number: int, grace_seconds: float) -> None:
        """Send a signal, and kill the processes that have not ended after `grace_seconds`."""
        _send_signal(number, running(self.children))
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)

    def _start(self, command: Sequence[str], rank: int, variables: dict[str, str], outputs: Outputs) -> Child:
        process = subprocess.Popen(
            ending_with_parent(command),
            env=variables,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if outputs.separate(rank) else subprocess.STDOUT,
            process_group=0,
        )
        pipes: list[IO[bytes]] = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        child = Child(rank, process, outputs.streams(rank, pipes))
        for stream in child.streams:
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)
        return child

    def _forward_output(self, seconds: float) -> bool:
        """Forward output from the pipes, waiting for at most `seconds`; return True if there was any."""
        if not self._selector.get_map():  # all pipes are closed, but a process lives on
            time.sleep(seconds)
            return False
        events = self._selector.select(seconds)
        for key, _ in events:
            stream: Stream = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                stream.pipe.close()
            stream.write(data)
        return bool(events)


def running(children: list[Child]) -> list[Child]:
    """Return the running processes; record the end of the others, and kill their child programs.

    These are killed before waiting for the ended process, because until then its number is not reused.
    """
    for child in children:
        if child.ended == math.inf and os.waitid(os.P_PID, child.process.pid, _PEEK):
            _send_signal(signal.SIGKILL, [child])
            child.process.wait()
            child.ended = time.monotonic()
    return [child for child in children if child.ended == math.inf]


def _send_signal(number: int, children: list[Child]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


# Runs in each process before the program: it asks the kernel to kill the process when the parent dies. The parent may
# have died before that call, so its number is compared. It is a separate program: code between fork and exec in a
# process with threads (JAX has many) may deadlock.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and ends with this process; start it from the main thread."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, str(os.getpid()), *command]


# The environment of each process.

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
    rank: int  # of this node, from 0
    coordinator: str  # "HOST:PORT" of process 0, which is on node 0

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise UserError(
                f"Nodes are numbered from 0 to --nodes - 1; given --node-rank {self.rank} of --nodes {self.count}. "
                "Give each machine its own number."
            )
        split_address(self.coordinator)


def environments(
    environment: Mapping[str, str],
    nodes: Nodes | None,
    processes: int,
    devices: int | None,
    *,
    restarts: int,
    folder: Path,
) -> dict[int, dict[str, str]]:
    """Return the environment of each of this machine's processes, by its number in the cluster.

    It has the number, the coordinator's address (on a single machine a free port), and the process' devices. `restarts`
    is the number of previous attempts; the processes report their progress in `folder`.
    """
    if nodes is None:
        with listen(LOOPBACK, 0) as server:
            nodes = Nodes(1, 0, f"{LOOPBACK}:{server.getsockname()[1]}")
    shared = dict(environment) | {
        "JDP_COORDINATOR": nodes.coordinator,
        "JDP_NUM_PROCESSES": str(nodes.count * processes),
        "JDP_RESTARTS": str(restarts),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = visible_gpus(environment)
    if gpus:
        own = [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _split_gpus(gpus, processes, devices)]
    elif devices is not None:
        own = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}] * processes
    else:
        own = [{"JAX_PLATFORMS": "cpu"} if cpu_only(environment) else {}] * processes
    return {
        rank: shared | {"JDP_PROCESS_ID": str(rank), PROGRESS_FILE: str(folder / f"progress.{rank}")} | devices_of
        for rank, devices_of in enumerate(own, nodes.rank * processes)
    }


def _split_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[Sequence[str]]:
    share = len(gpus) // processes if each is None else each
    if share < 1 or share * processes > len(gpus):
        raise UserError(
            f"Every process needs its own GPUs: {processes} processes × {max(share, 1)} = "
            f"{processes * max(share, 1)}, but there are {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu to run on "
            "virtual CPU devices."
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]
