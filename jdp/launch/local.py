"""Several processes on this machine, as one: torchrun for JAX.

`launch` gives each process its place in the cluster through the environment (`distributed.initialize` reads it), starts
them all, and then one loop does everything until the last has ended: it passes their output on line by line, forwards
SIGINT and SIGTERM, and when one fails ends the others and says who failed and why.

Output: a process writes stdout and stderr into one pipe, so its lines stay in the order written, and they come out on
our stdout as `[0] line`. With `clean_stdout` (for `--json`) our stdout is process 0's stdout, byte for byte, and all
else goes to stderr with its prefix.

Death: processes end with us even when we are killed outright (Linux: PR_SET_PDEATHSIG). Each has its own process group,
so Ctrl-C reaches it once, through us, and what it started itself ends with it.
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
from jdp.launch.parent_death import bound

POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0  # after an abort (a peer died), how long the peer that caused it has to end by itself
LAST_WORDS_SECONDS = (
    3.0  # after a failure, from SIGTERM to SIGKILL: JAX swallows SIGTERM, and waiting peers cannot go on
)
LAST_LINES = 20
_GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks[^\[]*")  # printed for every new group: left out
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


@dataclass
class Child:
    """One process: its number, and what is known of it while it runs."""

    rank: int
    process: "subprocess.Popen[bytes]"
    tail: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=LAST_LINES))
    ended: float = math.inf  # when it was seen to have ended
    stopped: bool = False  # we told it to end because another had failed

    @property
    def status(self) -> int:
        """0, an exit code, or -n after signal n."""
        return self.process.returncode

    @property
    def aborted(self) -> bool:
        """Ended by SIGABRT: how JAX ends a process whose peer died. Never the cause itself."""
        return self.status == -signal.SIGABRT

    @property
    def failed(self) -> bool:
        """Ended badly, and not because we told it to end."""
        return self.ended < math.inf and self.status != 0 and not self.stopped


@dataclass
class Stream:
    """One pipe out of a process, and where its lines go."""

    child: Child
    pipe: IO[bytes]
    target: IO[bytes]
    prefix: bytes
    rest: bytes = b""


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
        processes: how many.
        devices_per_process: on a machine with NVIDIA GPUs, how many of them each process gets (default: an equal
            part); else virtual CPU devices (default: JAX's, one).
        clean_stdout: pass on process 0's stdout unchanged, and everything else to stderr.
        grace_seconds: how long the processes may take to save and end after SIGINT or SIGTERM before they are killed.
        environment: variables to start from (default: ours).

    Returns:
        0 when all ended well, else the exit code of the first that failed (128 + n for signal n), where a process that
        aborted because a peer had died counts only if no other failed.

    Raises:
        ValueError: fewer than one process, or more GPUs asked for than there are.
    """
    if processes < 1:
        raise ValueError(f"jdp launch starts 1 or more processes; got -n {processes}.")
    start = dict(os.environ if environment is None else environment)
    variables = _variables(start, processes, devices_per_process)
    children: list[Child] = []
    with selectors.DefaultSelector() as selector, _signals_noted() as signals:
        try:
            for rank, mine in enumerate(variables):
                children.append(_start(command, rank, mine, clean_stdout, selector))
            _watch(children, selector, signals, grace_seconds)
        finally:  # nobody is left behind, whatever went wrong here
            _send(signal.SIGKILL, _running(children))
            for key in list(selector.get_map().values()):
                key.data.pipe.close()
    failed = sorted((child for child in children if child.failed), key=lambda child: (child.aborted, child.ended))
    if not failed:
        return 0
    _report(failed[0], processes, signals)
    return 128 - failed[0].status if failed[0].status < 0 else failed[0].status


def _variables(environment: dict[str, str], processes: int, devices: int | None) -> list[dict[str, str]]:
    """The environment of each process: who it is, where the others are, and which devices are its own."""
    shared = environment | {
        "JDP_COORDINATOR": f"127.0.0.1:{_free_port()}",
        "JDP_NUM_PROCESSES": str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = visible_gpus(environment)
    if gpus:
        own = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in _parts(gpus, processes, devices)]
    elif devices is not None:
        own = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}] * processes
    else:
        own = [{"JAX_PLATFORMS": "cpu"} if cpu_only(environment) else {}] * processes
    return [shared | {"JDP_PROCESS_ID": str(rank)} | mine for rank, mine in enumerate(own)]


def _parts(gpus: Sequence[str], processes: int, each: int | None) -> list[Sequence[str]]:
    """Consecutive GPUs for every process."""
    share = len(gpus) // processes if each is None else each
    if share < 1 or share * processes > len(gpus):
        raise ValueError(
            f"Every process needs GPUs of its own: {processes} processes × {max(share, 1)} = "
            f"{processes * max(share, 1)}, but there are {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu to run on "
            "virtual CPU devices."
        )
    return [gpus[rank * share : (rank + 1) * share] for rank in range(processes)]


def _free_port() -> int:
    """A port that was free a moment ago, on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _start(
    command: Sequence[str], rank: int, variables: dict[str, str], clean: bool, selector: selectors.BaseSelector
) -> Child:
    """Start one process in a group of its own and register its pipes."""
    separate = clean and rank == 0
    process = subprocess.Popen(
        bound(command),
        env=variables,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if separate else subprocess.STDOUT,
        process_group=0,
    )
    child = Child(rank, process)
    prefix, ours = f"[{rank}] ".encode(), sys.stderr.buffer if clean else sys.stdout.buffer
    assert process.stdout is not None
    streams = [Stream(child, process.stdout, sys.stdout.buffer if separate else ours, b"" if separate else prefix)]
    if process.stderr is not None:
        streams.append(Stream(child, process.stderr, ours, prefix))
    for stream in streams:
        selector.register(stream.pipe, selectors.EVENT_READ, stream)
    return child


def _watch(children: list[Child], selector: selectors.BaseSelector, signals: list[int], grace_seconds: float) -> None:
    """Until all have ended: pass output on, pass signals on, and end the others when one fails."""
    forwarded = 0
    kill_at = math.inf  # once it is set, all have been told to end
    while running := _running(children):
        _pass_on(selector, POLL_SECONDS)
        now = time.monotonic()
        if now >= _stop_at(children) and kill_at == math.inf:
            for child in running:
                child.stopped = True
            _send(signal.SIGTERM, running)
            kill_at = now + LAST_WORDS_SECONDS
        if len(signals) > forwarded:  # the first is passed on; a second one means: now
            _send(signal.SIGKILL if forwarded else signals[0], running)
            forwarded = len(signals)
            kill_at = min(kill_at, now + grace_seconds)
        if now >= kill_at:
            _send(signal.SIGKILL, running)
    while _pass_on(selector, 0):
        pass


def _running(children: list[Child]) -> list[Child]:
    """Those still running; the end of the others is noted, and what they started themselves is killed.

    That is done while the process has ended but was not waited for: until then its number cannot become another's.
    """
    for child in children:
        if child.ended == math.inf and os.waitid(os.P_PID, child.process.pid, _PEEK):
            _send(signal.SIGKILL, [child])
            child.process.wait()
            child.ended = time.monotonic()
    return [child for child in children if child.ended == math.inf]


def _stop_at(children: list[Child]) -> float:
    """When to end those still running: at the first failure. After an abort its cause may still be on its way out."""
    return min((child.ended + SETTLE_SECONDS * child.aborted for child in children if child.failed), default=math.inf)


def _send(number: int, children: list[Child]) -> None:
    """Send a signal to each process and all it started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def _pass_on(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Pass on what the pipes hold, waiting at most so long for something; whether there was any."""
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
    """Write whole lines with their prefix, keeping an unfinished one; no data means the end of the stream."""
    if not stream.prefix:
        stream.target.write(data)
    else:
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        if not data and stream.rest:
            lines.append(stream.rest)
        lines = [rest for line in lines if (rest := _GLOO.sub(b"", line)) or not line]
        stream.child.tail.extend(lines)
        stream.target.write(b"".join(stream.prefix + line + b"\n" for line in lines))
    stream.target.flush()


@contextlib.contextmanager
def _signals_noted() -> Generator[list[int]]:
    """SIGINT and SIGTERM are put into a list instead of ending us."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(cause: Child, processes: int, signals: list[int]) -> None:
    """Say on stderr who failed first, how, and what it said last."""
    status = cause.status
    how = f"exit code {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
    who = f"jdp launch: process {cause.rank} of {processes} ended with {how}"
    if signals:
        print(f"{who}, after {signal.Signals(signals[0]).name}.", file=sys.stderr, flush=True)
        return
    why = " (JAX aborts a process when a peer is gone; no process failed in another way)" if cause.aborted else ""
    print(f"{who}{why}. The last it said:", *(f"    {_text(line)}" for line in cause.tail), sep="\n", file=sys.stderr)
    sys.stderr.flush()


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
