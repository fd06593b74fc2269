"""Several processes on this machine, as one: torchrun for JAX.

`launch` gives each process its place in the cluster through the environment (`distributed.initialize` reads it), starts
them all, and then one loop runs until the last has ended: it forwards their output line by line, and SIGINT and
SIGTERM to them, and when one fails it ends the others and reports which failed, and why.

Output: a process writes stdout and stderr into one pipe, so its lines stay in the order written, and they come out on
this process' stdout as `[0] line`. With `clean_stdout` (for `--json`) that is process 0's stdout, byte for byte, and
all else goes to stderr with its prefix.

Death: the processes end with this one, even if it gets SIGKILL (Linux: PR_SET_PDEATHSIG). Each has its own process
group, so Ctrl-C reaches it once, forwarded by this one, and what it started itself ends with it.
"""

import contextlib
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from jdp.core.machine import cpu_only, visible_gpus
from jdp.launch.parent_death import ending_with_parent

POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0  # after an abort (a peer died), how long the peer that caused it has to end by itself
LAST_WORDS_SECONDS = 3.0  # after a failure, from SIGTERM to SIGKILL: JAX ignores SIGTERM, and waiting peers hang
LAST_LINES = 20
_GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks[^\[]*")  # printed for every new group: left out
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass
class Child:
    """One process and its state."""

    rank: int
    process: "subprocess.Popen[bytes]"
    tail: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=LAST_LINES))
    ended: float = math.inf  # time.monotonic() when its end was noticed
    stopped: bool = False  # it was sent SIGTERM because another had failed

    @property
    def status(self) -> int:
        """Exit code, or -n after signal n."""
        return self.process.returncode

    @property
    def aborted(self) -> bool:
        """True if it ended by SIGABRT, with which JAX ends a process whose peer died: never the cause itself."""
        return self.status == -signal.SIGABRT

    @property
    def failed(self) -> bool:
        """True if it ended with an error, and not because it was stopped."""
        return self.ended < math.inf and self.status != 0 and not self.stopped


@dataclass
class Stream:
    """One output pipe of a process, and the stream to which its lines are written."""

    child: Child
    pipe: IO[bytes]
    target: IO[bytes]
    prefix: bytes
    unfinished: bytes = b""


def launch(
    command: Sequence[str],
    processes: int,
    *,
    devices_per_process: int | None = None,
    clean_stdout: bool = False,
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `command` as `processes` processes of one cluster, and wait for all of them. Call it in the main thread.

    Args:
        command: program and arguments, the same for all.
        processes: number of processes.
        devices_per_process: on a machine with NVIDIA GPUs, number of GPUs of each process (default: an equal share);
            else number of virtual CPU devices (default: JAX's, one).
        clean_stdout: write process 0's stdout unchanged to stdout, and everything else to stderr.
        grace_seconds: how long the processes may take to save and end after SIGINT or SIGTERM before they are killed.
        environment: variables to start from (default: those of this process).

    Returns:
        0 if all ended with 0, else the exit code of the first that failed (128 + n for signal n); a process that
        aborted because a peer had died counts only if no other failed.

    Raises:
        ValueError: fewer than one process, or fewer GPUs than the processes need.
    """
    if processes < 1:
        raise ValueError(f"jdp launch starts 1 or more processes; given -n {processes}. Start at least one.")
    start = dict(os.environ if environment is None else environment)
    variables = _variables(start, processes, devices_per_process)
    children: list[Child] = []
    with selectors.DefaultSelector() as selector, _recorded_signals() as signals:
        try:
            for rank, own in enumerate(variables):
                children.append(_start(command, rank, own, clean_stdout, selector))
            _watch(children, selector, signals, grace_seconds)
        finally:  # leave no process behind, whatever was raised
            _send_signal(signal.SIGKILL, _running(children))
            for key in list(selector.get_map().values()):
                key.data.pipe.close()
    failed = sorted((child for child in children if child.failed), key=lambda child: (child.aborted, child.ended))
    if not failed:
        return 0
    _report(failed[0], processes, signals)
    return 128 - failed[0].status if failed[0].status < 0 else failed[0].status


def _variables(environment: dict[str, str], processes: int, devices: int | None) -> list[dict[str, str]]:
    """Return the environment of each process: its number, the coordinator's address, and its devices."""
    shared = environment | {
        "JDP_COORDINATOR": f"127.0.0.1:{_free_port()}",
        "JDP_NUM_PROCESSES": str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = visible_gpus(environment)
    if gpus:
        own = [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in _split_gpus(gpus, processes, devices)]
    elif devices is not None:
        own = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}] * processes
    else:
        own = [{"JAX_PLATFORMS": "cpu"} if cpu_only(environment) else {}] * processes
    return [shared | {"JDP_PROCESS_ID": str(rank)} | devices_of for rank, devices_of in enumerate(own)]


def _split_gpus(gpus: Sequence[str], processes: int, each: int | None) -> list[Sequence[str]]:
    """Return consecutive GPUs for every process. Raises ValueError if there are too few."""
    share = len(gpus) // processes if each is None else each
    if share < 1 or share * processes > len(gpus):
        raise ValueError(
            f"Every process needs GPUs of its own: {processes} processes × {max(share, 1)} = "
            f"{processes * max(share, 1)}, but there are {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu to run on "
            "virtual CPU devices."
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]


def _free_port() -> int:
    """Return a port of the loopback interface that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _start(
    command: Sequence[str], rank: int, variables: dict[str, str], clean: bool, selector: selectors.BaseSelector
) -> Child:
    """Start one process in a group of its own and register its pipes."""
    separate = clean and rank == 0
    process = subprocess.Popen(
        ending_with_parent(command),
        env=variables,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if separate else subprocess.STDOUT,
        process_group=0,
    )
    child = Child(rank, process)
    prefix, shared = f"[{rank}] ".encode(), sys.stderr.buffer if clean else sys.stdout.buffer
    assert process.stdout is not None
    streams = [Stream(child, process.stdout, sys.stdout.buffer if separate else shared, b"" if separate else prefix)]
    if process.stderr is not None:
        streams.append(Stream(child, process.stderr, shared, prefix))
    for stream in streams:
        selector.register(stream.pipe, selectors.EVENT_READ, stream)
    return child


def _watch(children: list[Child], selector: selectors.BaseSelector, signals: list[int], grace_seconds: float) -> None:
    """Forward output and signals until all processes have ended; when one fails, end the others."""
    forwarded = 0
    kill_at = math.inf  # set once all have been asked to end
    while running := _running(children):
        _forward_output(selector, POLL_SECONDS)
        now = time.monotonic()
        if now >= _stop_at(children) and kill_at == math.inf:
            for child in running:
                child.stopped = True
            _send_signal(signal.SIGTERM, running)
            kill_at = now + LAST_WORDS_SECONDS
        if len(signals) > forwarded:  # the first is forwarded; a second one kills
            _send_signal(signal.SIGKILL if forwarded else signals[0], running)
            forwarded = len(signals)
            kill_at = min(kill_at, now + grace_seconds)
        if now >= kill_at:
            _send_signal(signal.SIGKILL, running)
    while _forward_output(selector, 0):
        pass


def _running(children: list[Child]) -> list[Child]:
    """Return the processes that run; record the end of the others, and kill what these started themselves.

    Killing comes before waiting for the ended process: until then its number cannot become another's.
    """
    for child in children:
        if child.ended == math.inf and os.waitid(os.P_PID, child.process.pid, _PEEK):
            _send_signal(signal.SIGKILL, [child])
            child.process.wait()
            child.ended = time.monotonic()
    return [child for child in children if child.ended == math.inf]


def _stop_at(children: list[Child]) -> float:
    """Return when to end those still running: at the first failure; after an abort, whose cause may follow, later."""
    return min((child.ended + SETTLE_SECONDS * child.aborted for child in children if child.failed), default=math.inf)


def _send_signal(number: int, children: list[Child]) -> None:
    """Send a signal to the process group of each child."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def _forward_output(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Forward what is in the pipes, waiting for at most `seconds`; return True if there was anything."""
    if not selector.get_map():  # all pipes are closed, but a process lives on
        time.sleep(seconds)
        return False
    events = selector.select(seconds)
    for key, _ in events:
        stream: Stream = key.data
        data = os.read(key.fd, 1 << 16)
        if not data:
            selector.unregister(key.fileobj)
            stream.pipe.close()
        _write(stream, data)
    return bool(events)


def _write(stream: Stream, data: bytes) -> None:
    """Write whole lines with their prefix and keep an unfinished one; empty `data` is the end of the stream."""
    if not stream.prefix:
        stream.target.write(data)
    else:
        *lines, stream.unfinished = (stream.unfinished + data).split(b"\n")
        if not data and stream.unfinished:
            lines.append(stream.unfinished)
        lines = [kept for line in lines if (kept := _GLOO.sub(b"", line)) or not line]
        stream.child.tail.extend(lines)
        stream.target.write(b"".join(stream.prefix + line + b"\n" for line in lines))
    stream.target.flush()


@contextlib.contextmanager
def _recorded_signals() -> Generator[list[int]]:
    """Append SIGINT and SIGTERM to the list that is returned, instead of ending this process."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(cause: Child, processes: int, signals: list[int]) -> None:
    """Report on stderr which process failed first, how, and its last lines of output."""
    status = cause.status
    how = f"exit code {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
    who = f"jdp launch: process {cause.rank} of {processes} ended with {how}"
    if signals:
        print(f"{who}, after {signal.Signals(signals[0]).name}.", file=sys.stderr, flush=True)
        return
    tail = [f"    {line.decode(errors='replace')}" for line in cause.tail]
    why = " (JAX aborts a process when a peer is gone; no process failed in another way)" if cause.aborted else ""
    print(f"{who}{why}. Its last output:", *tail, sep="\n", file=sys.stderr, flush=True)
