"""Rendezvous of the supervisors of several machines. Node 0 runs the server in a thread; every node is a client.

1. Gather: wait for all nodes. If some do not come in time, go on with enough others, as many as the experiment's mesh
   and batch allow; the rest stand by.
2. Run: tell each node its part of a new cluster, at a new port. When a process fails, or a node is lost, tell all
   others to stop.
3. When all have stopped, decide (`Restarts`): gather again, or tell all to end, with one exit code and one reason.

Nothing is authenticated, as at JAX's own coordinator: whoever can connect can end the job. It listens at the
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
        rank: number of this one, from 0.
        coordinator: "HOST:PORT" of node 0, where the supervisors connect.
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
        """The number of nodes that the run needs."""
        return self.count if self.least is None else self.least


@dataclass
class Client:
    """A connection, and the node at its other end (None until it joined)."""

    wire: Wire
    host: str
    node: int | None = None


@dataclass
class Failure:
    """Why an attempt ended; by weight: 0 a lost node, 1 a failed process, 2 one that aborted as a peer had died."""

    status: int
    text: str
    weight: int


@dataclass
class _State:
    """The state of the server."""

    clients: list[Client] = field(default_factory=list)
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
    """The server of the supervisors, on node 0. In `with`."""

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
        for client in self._state.clients:
            client.wire.close()

    def _run(self) -> None:
        """Serve until the run has ended and all clients are gone; a fault of this program ends the run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, None)
            while not self._closing.is_set() and not (self._state.ended and not self._state.clients):
                try:
                    self._serve(selector)
                except Exception as error:  # the supervisors wait for this thread
                    if self._state.ended:
                        raise
                    traceback.print_exc()
                    self._end(SOFTWARE_ERROR, f"the supervisors' rendezvous failed: {error!r}")

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TURN_SECONDS):
            if key.data is None:
                self._accept(selector)
            else:
                self._receive(key.data, selector)
        self._advance()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it has left already
            connection, address = self._server.accept()
            client = Client(Wire(connection), str(address[0]))
            self._state.clients.append(client)
            selector.register(client.wire.connection, selectors.EVENT_READ, client)

    def _receive(self, client: Client, selector: selectors.BaseSelector) -> None:
        """Act on a client's messages; one that is lost, or sends nonsense, is dropped."""
        try:
            for message in client.wire.receive():
                self._act(client, message)
        except (Lost, KeyError, TypeError, ValueError) as error:
            selector.unregister(client.wire.connection)
            self._drop(client, str(error))

    def _act(self, client: Client, message: Mapping[str, Any]) -> None:
        state, kind = self._state, message["kind"]
        if kind == "join":
            self._join(client, int(message["node"]), dict(message["facts"]))
        elif kind == "failed" and client.node in state.of_attempt:
            self._fail(int(message["status"]), str(message["text"]), 2 if message["aborted"] else 1)
        elif kind == "ended" and client.node in state.running:
            state.running.discard(client.node)
            if message["leaving"] and client.node == 0:
                state.leaving = int(message["code"])

    def _join(self, client: Client, node: int, facts: Mapping[str, str]) -> None:
        """Accept a node, or refuse it."""
        here = {other.node: other for other in self._state.clients if other.node is not None}
        if node in here:
            client.wire.send("taken", why=f"node {node} is here already, from {here[node].host}")
            return None
        if self._farewell is not None:
            return client.wire.send("end", **self._farewell)
        if self._facts is None:
            self._facts = facts
        for name, value in self._facts.items():
            if facts.get(name) != value:
                why = f"{name} must be the same on every node; node {node} has {facts.get(name)}, others have {value}"
                return self._end(MISMATCH, why) if not self._state.of_attempt else self._refuse(client, why)
        if not 0 <= node < self._nodes.count:
            return self._refuse(client, f"nodes are numbered 0 to {self._nodes.count - 1}; given {node}")
        client.node = node
        if self._state.of_attempt and not self._state.gathering:
            say(f"node {node} is here; it takes part after the next restart")
        return None

    def _refuse(self, client: Client, why: str) -> None:
        client.wire.send("end", code=MISMATCH, why=why)

    def _drop(self, client: Client, why: str) -> None:
        """Forget a client whose connection is gone; an attempt with its node has failed."""
        state = self._state
        client.wire.close()
        state.clients.remove(client)
        if client.node is not None and client.node in state.running and not state.ended:
            state.running.discard(client.node)
            self._fail(SOFTWARE_ERROR, f"node {client.node} ({client.host}) is lost: {why}", 0)

    def _fail(self, status: int, text: str, weight: int) -> None:
        """Record a failure; the other nodes are told to stop: at once, or later if they may exit by themselves."""
        state = self._state
        state.failures.append(Failure(status, text, weight))
        if state.stopping_until == math.inf:
            state.stop_at = min(state.stop_at, time.monotonic() + ORDERLY_SECONDS * (status in ORDERLY))

    def _tell(self, nodes: set[int] | None, kind: str, **message: Any) -> None:
        """Send a message to these nodes, or to all clients; a lost connection is noticed when it is read."""
        for client in self._state.clients:
            if nodes is None or client.node in nodes:
                with contextlib.suppress(Lost):
                    client.wire.send(kind, **message)

    def _advance(self) -> None:
        """Go on from gathering, from running or from stopping, if it is time."""
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
            for client in [client for client in state.clients if client.node in state.running]:
                with contextlib.suppress(OSError):
                    client.wire.connection.shutdown(socket.SHUT_RDWR)  # it is then dropped as lost

    def _gather(self) -> None:
        """Start an attempt if all nodes are here, or enough of them when the time is up; or give up."""
        state, nodes = self._state, self._nodes
        present = sorted(client.node for client in state.clients if client.node is not None)
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
        """Tell each node its part of a new cluster."""
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
