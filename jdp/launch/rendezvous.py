"""Several machines: where their supervisors meet. Node 0's keeps the place, in a thread; all, it too, are its guests.

1. Gather: wait for all nodes. If some do not come in time, go on with those that are there, if there are enough, and
   with as many of them as the experiment's mesh and batch allow; the others stand by.
2. Run: tell each node its part of a new cluster, at a new port. When a process fails, or a node is lost, tell all
   others to stop.
3. When all have stopped, decide (`Restarts`): gather again, or tell all to end, with one exit code and one reason.

Who may connect may also end the job: nothing is authenticated, as at JAX's own coordinator. It listens at the
coordinator's address only.
"""

import contextlib
import errno
import math
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from jdp.base.machine import listen
from jdp.launch.messages import Lost, Wire, split_address
from jdp.launch.output import say
from jdp.launch.process_environment import free_port
from jdp.launch.processes import ORDERLY, ORDERLY_SECONDS
from jdp.launch.restarts import MISMATCH, SOFTWARE_ERROR, TRY_AGAIN, Restarts

TURN_SECONDS = 0.2
STOP_SECONDS = 20  # how long a node may take to end its processes before it counts as lost
FAREWELL_SECONDS = 5  # how long node 0 stays for the others to hear how it ended


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which of them this is.

    Attributes:
        count: number of nodes.
        rank: which one this is, from 0.
        coordinator: "HOST:PORT" of node 0, where the supervisors meet.
        least: number of nodes with which to go on if others stay away; None: all.
        rejoin_seconds: how long to wait for nodes, at the start and after a failure.

    Raises:
        ValueError: they contradict each other.
    """

    count: int
    rank: int
    coordinator: str
    least: int | None = None
    rejoin_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(
                f"Nodes are numbered from 0 to --nodes - 1; given --node-rank {self.rank} of --nodes {self.count}. "
                "Give each machine a number of its own."
            )
        if self.least is not None and not 1 <= self.least <= self.count:
            raise ValueError(
                f"--min-nodes is 1 to --nodes; given {self.least} of {self.count}. Leave it out to need all of them."
            )
        if not 0 < self.rejoin_seconds < math.inf:
            raise ValueError(
                f"--rejoin-seconds must be positive and finite; given {self.rejoin_seconds:g}. 300 is five minutes."
            )
        split_address(self.coordinator)

    @property
    def needed(self) -> int:
        """How many nodes there must be."""
        return self.count if self.least is None else self.least


@dataclass
class Guest:
    """A connection, and the node at its other end once it has said which."""

    wire: Wire
    host: str
    node: int | None = None


@dataclass
class Failure:
    """Why an attempt ended: lost nodes come first, then failed processes, then those that aborted with their peers."""

    status: int
    text: str
    weight: int


@dataclass
class _State:
    """What the thread knows."""

    guests: list[Guest] = field(default_factory=list)
    running: set[int] = field(default_factory=set)  # nodes of this attempt whose processes have not ended
    of_attempt: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    gathering_until: float = 0.0
    stop_at: float = math.inf  # when to tell the nodes of the attempt to stop
    stopping_until: float = math.inf  # once they were told
    leaving: int | None = None  # node 0 was told to stop: the exit code of its processes
    gathering: bool = True
    ended: bool = False


class Rendezvous:
    """The meeting place of the supervisors, kept by node 0. In `with`."""

    def __init__(self, nodes: Nodes, here: int, restarts: Restarts, fits: Callable[[int], bool]) -> None:
        self._nodes, self._here, self._restarts, self._fits = nodes, here, restarts, fits
        self._state = _State()
        self._facts: Mapping[str, str] | None = None
        self._farewell: dict[str, Any] | None = None
        self._host, port = split_address(nodes.coordinator)
        self._binds = True
        try:
            self._server = listen(self._host, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise ValueError(
                    f"Node 0 listens at --coordinator; given {nodes.coordinator}, where it cannot: {error.strerror}. "
                    "Give an address of this machine and a free port."
                ) from None
            self._binds = False  # a name of this machine that is another's address inside, as behind a gateway
            self._server = listen("", port)
        self.address = (self._host if self._binds else "localhost", port)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jdp rendezvous", daemon=True)

    def __enter__(self) -> Self:
        self._state.gathering_until = time.monotonic() + self._nodes.rejoin_seconds
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._state.ended:
            self._thread.join(FAREWELL_SECONDS)
        self._closing.set()
        self._thread.join()
        self._server.close()
        for guest in self._state.guests:
            guest.wire.close()

    def _run(self) -> None:
        """Serve until all guests of a run that has ended are gone; a fault of this program ends the run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, None)
            while not self._closing.is_set() and not (self._state.ended and not self._state.guests):
                try:
                    self._serve(selector)
                except Exception as error:  # the supervisors wait for this thread's word
                    if self._state.ended:
                        raise
                    traceback.print_exc()
                    self._end(SOFTWARE_ERROR, f"the supervisors' meeting place failed: {error!r}")

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TURN_SECONDS):
            if key.data is None:
                self._welcome(selector)
            else:
                self._hear(key.data, selector)
        self._advance()

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it has left already
            connection, address = self._server.accept()
            guest = Guest(Wire(connection), str(address[0]))
            self._state.guests.append(guest)
            selector.register(guest.wire.connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: Guest, selector: selectors.BaseSelector) -> None:
        """Act on what a guest says; one that is lost, or talks nonsense, is dropped."""
        try:
            for message in guest.wire.receive():
                self._act(guest, message)
        except (Lost, KeyError, TypeError, ValueError) as error:
            selector.unregister(guest.wire.connection)
            self._drop(guest, str(error))

    def _act(self, guest: Guest, message: Mapping[str, Any]) -> None:
        state, kind = self._state, message["kind"]
        if kind == "join":
            self._join(guest, int(message["node"]), dict(message["facts"]))
        elif kind == "failed" and guest.node in state.of_attempt:
            self._fail(int(message["status"]), str(message["text"]), 2 if message["aborted"] else 1)
        elif kind == "ended" and guest.node in state.running:
            state.running.discard(guest.node)
            if message["leaving"] and guest.node == 0:
                state.leaving = int(message["code"])

    def _join(self, guest: Guest, node: int, facts: Mapping[str, str]) -> None:
        """Take a node in, or refuse it."""
        here = {other.node: other for other in self._state.guests if other.node is not None}
        if node in here:
            guest.wire.send("taken", why=f"node {node} is here already, from {here[node].host}")
            return None
        if self._farewell is not None:
            return guest.wire.send("end", **self._farewell)
        if self._facts is None:
            self._facts = facts
        for name, value in self._facts.items():
            if facts.get(name) != value:
                why = f"{name} must be the same on every node; node {node} has {facts.get(name)}, others have {value}"
                return self._end(MISMATCH, why) if not self._state.of_attempt else self._refuse(guest, why)
        if not 0 <= node < self._nodes.count:
            return self._refuse(guest, f"nodes are numbered 0 to {self._nodes.count - 1}; given {node}")
        guest.node = node
        if self._state.of_attempt and not self._state.gathering:
            say(f"node {node} is here; it takes part after the next restart")
        return None

    def _refuse(self, guest: Guest, why: str) -> None:
        guest.wire.send("end", code=MISMATCH, why=why)

    def _drop(self, guest: Guest, why: str) -> None:
        """Forget a guest whose connection is gone; the attempt that its node was in has failed."""
        state = self._state
        guest.wire.close()
        state.guests.remove(guest)
        if guest.node is not None and guest.node in state.running and not state.ended:
            state.running.discard(guest.node)
            self._fail(SOFTWARE_ERROR, f"node {guest.node} ({guest.host}) is lost: {why}", 0)

    def _fail(self, status: int, text: str, weight: int) -> None:
        """Record a failure; the other nodes are told to stop, soon if they should be leaving by themselves."""
        state = self._state
        state.failures.append(Failure(status, text, weight))
        if state.stopping_until == math.inf:
            state.stop_at = min(state.stop_at, time.monotonic() + ORDERLY_SECONDS * (status in ORDERLY))

    def _tell(self, nodes: set[int] | None, kind: str, **message: Any) -> None:
        """Send a message to these nodes, or all guests; who cannot be told is noticed when its connection is read."""
        for guest in self._state.guests:
            if nodes is None or guest.node in nodes:
                with contextlib.suppress(Lost):
                    guest.wire.send(kind, **message)

    def _advance(self) -> None:
        """Go from gathering to running, from running to the end, or from stopping to what is next, if it is time."""
        state = self._state
        if state.ended:
            return
        if state.gathering:
            self._gather()
        elif not state.running:
            self._decide()
        elif time.monotonic() > state.stop_at:
            state.stop_at, state.stopping_until = math.inf, time.monotonic() + STOP_SECONDS
            self._tell(state.of_attempt, "stop")
        elif time.monotonic() > state.stopping_until:
            for guest in [guest for guest in state.guests if guest.node in state.running]:
                with contextlib.suppress(OSError):
                    guest.wire.connection.shutdown(socket.SHUT_RDWR)  # it is then dropped as lost

    def _gather(self) -> None:
        """Start an attempt if all nodes are here, or enough of them at the end of the time; or give up."""
        state, nodes = self._state, self._nodes
        present = sorted(guest.node for guest in state.guests if guest.node is not None)
        late = time.monotonic() > state.gathering_until
        if len(present) < nodes.count and not late:
            return None
        missing = [str(node) for node in range(nodes.count) if node not in present]
        away = f"node {', '.join(missing)} of {nodes.count} did not come within {nodes.rejoin_seconds:g} seconds"
        counts = range(len(present), nodes.needed - 1, -1)
        usable = next((count for count in counts if not missing or self._fits(count * self._here)), None)
        if usable is None or 0 not in present:
            enough = len(present) >= nodes.needed
            why = "the mesh and batch fit no smaller number" if enough else f"{nodes.needed} are needed"
            return self._end(TRY_AGAIN, f"{away}, and {why}" if missing else why)
        if missing:
            say(f"{away}: going on with {usable} of {nodes.count}")
        return self._start(present[:usable], present[usable:])

    def _start(self, taken: list[int], spare: list[int]) -> None:
        """Tell each node its place in a new cluster."""
        state = self._state
        state.gathering, state.stop_at, state.stopping_until, state.failures = False, math.inf, math.inf, []
        state.running, state.of_attempt = set(taken), set(taken)
        host = f"[{self._host}]" if ":" in self._host else self._host
        place = {
            "coordinator": f"{host}:{free_port(self._host if self._binds else '')}",
            "processes": len(taken) * self._here,
            "binds": self._binds,
            "restarts": self._restarts.made,
        }
        for index, node in enumerate(taken):
            self._tell({node}, "start", **place, first=index * self._here)
        self._tell(set(spare), "spare")

    def _decide(self) -> None:
        """End the run, now that all processes have ended, or gather for another attempt."""
        state = self._state
        if state.leaving is not None:
            return self._end(state.leaving, "node 0 was told to stop")
        if not state.failures:
            return self._end(0, "")
        cause = min(state.failures, key=lambda failure: failure.weight)
        if not self._restarts.another(cause.status):
            return self._end(self._restarts.exit_code(cause.status), cause.text)
        state.gathering, state.gathering_until = True, time.monotonic() + self._nodes.rejoin_seconds
        return self._tell(None, "again", why=f"restart {self._restarts.made}: {cause.text}")

    def _end(self, code: int, why: str) -> None:
        self._state.ended, self._farewell = True, {"code": code, "why": why}
        if why:
            say(why)
        self._tell(None, "end", **self._farewell)
