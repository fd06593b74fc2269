"""Rendezvous of the supervisors of several machines. Node 0 runs the server in a thread; every node is a client.

1. Gather: wait for all nodes. If some do not come in time, go on with enough others, as many as the experiment's mesh
   and batch allow; the rest stand by.
2. Run: tell each node its part of a new cluster, at a new port. When a process fails, or a node is lost, tell all
   others to stop.
3. When all have stopped, decide (`Restarts`): gather again, or tell all to end, with one exit code and one reason.

A stranger who connects and says nothing, or rubbish, is dropped (`door`). With a secret only nodes that know it can
join, so a node that was started otherwise ends the run. Without one that node is turned away alone, as it may be a
stranger; but whoever sends jdp's own messages can still join or end the run. It listens at the coordinator's address
only.
"""

import contextlib
import errno
import hmac
import math
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from jdp.base.machine import listen
from jdp.launch.door import Client, Door
from jdp.launch.message_fields import Message, plain
from jdp.launch.messages import Lost, WrongSecret, split_address, without_secret
from jdp.launch.output import say
from jdp.launch.process_environment import free_port
from jdp.launch.processes import ORDERLY, ORDERLY_SECONDS
from jdp.launch.restarts import MISMATCH, SOFTWARE_ERROR, TRY_AGAIN, Restarts

TURN_SECONDS = 0.2
STOP_SECONDS = 20  # how long a node may take to end its processes before it counts as lost
FAREWELL_SECONDS = 5  # how long node 0 stays for the others to hear how it ended
MOST_REFUSALS = 20  # so many are reported: a stranger must not fill the output


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
class Failure:
    """Why an attempt ended; by weight: 0 a lost node, 1 a failed process, 2 one that aborted as a peer had died."""

    status: int
    text: str
    weight: int


@dataclass
class _State:
    """The state of the server."""

    running: set[int] = field(default_factory=set)  # nodes of this attempt whose processes have not ended
    of_attempt: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    gathering_until: float = 0.0
    stop_at: float = math.inf  # when to tell the nodes of the attempt to stop
    stopping_until: float = math.inf  # once they were told
    refused: dict[int, str] = field(default_factory=dict)  # nodes that were started otherwise, without a secret
    wrong: set[str] = field(default_factory=set)  # hosts whose secret is another
    leaving: int | None = None  # node 0 was told to stop: the exit code of its processes
    gathering: bool = True
    ended: bool = False


class Rendezvous:
    """The server of the supervisors, on node 0. In `with`."""

    def __init__(
        self,
        nodes: Nodes,
        here: int,
        restarts: Restarts,
        fits: Callable[[int], bool],
        facts: Mapping[str, str],
        secret: bytes | None,
    ) -> None:
        self._nodes, self._here, self._restarts, self._fits = nodes, here, restarts, fits
        self._facts = {plain(name): plain(value) for name, value in facts.items()}  # as they come from other nodes
        self._secret = secret
        self.token = secrets.token_hex(16)  # node 0 is the supervisor of this process, and no other
        self._state = _State()
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
        self._door = Door(self._server, secret)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jdp rendezvous", daemon=True)

    def __enter__(self) -> Self:
        if self._secret is None:
            say(without_secret(self._nodes.coordinator))
        self._state.gathering_until = time.monotonic() + self._nodes.rejoin_seconds
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._state.ended:
            self._thread.join(FAREWELL_SECONDS)
        self._closing.set()
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        """Serve until the run has ended and all nodes are gone; a fault of this program ends the run."""
        with self._door:
            while not self._closing.is_set() and not (self._state.ended and not self._door.known()):
                try:
                    self._serve()
                except Exception as error:  # the supervisors wait for this thread
                    if self._state.ended:
                        raise
                    traceback.print_exc()
                    self._end(SOFTWARE_ERROR, f"the supervisors' rendezvous failed: {error!r}")

    def _serve(self) -> None:
        """Act on what came from the clients, and go on if it is time."""
        for client, message in self._door.turn(TURN_SECONDS):
            try:
                if isinstance(message, Lost):
                    self._lost(client, message)
                elif client in self._door.clients:
                    self._act(client, message)
            except Lost as lost:  # it left before it had its answer
                if client in self._door.clients:
                    self._door.drop(client)
                self._lost(client, lost)
        self._advance()

    def _act(self, client: Client, message: Message) -> None:
        state, kind = self._state, message["kind"]
        if kind == "join" and client.number is None:
            self._join(client, message["node"], message["facts"], message["token"])
        elif kind == "failed" and client.number in state.of_attempt:
            self._fail(message["status"], message["text"], 2 if message["aborted"] else 1)
        elif kind == "ended" and client.number in state.running:
            state.running.discard(client.number)
            if message["leaving"] and client.number == 0:
                state.leaving = message["code"]

    def _join(self, client: Client, node: int, facts: Mapping[str, str], token: str) -> None:
        """Accept a node, or refuse it."""
        here = {other.number: other for other in self._door.known()}
        if node in here or (node == 0 and not hmac.compare_digest(token.encode(), self.token.encode())):
            whence = f", from {here[node].host}" if node in here else ""
            return client.wire.send("taken", why=f"node {node} is here already{whence}")
        if self._farewell is not None:
            return client.wire.send("end", **self._farewell)
        for name, value in self._facts.items():
            if facts.get(name) != value:
                why = f"{name} must be the same on every node; node {node} has {facts.get(name)}, others have {value}"
                return self._mismatch(client, node, why)
        if node >= self._nodes.count:
            return self._refuse(client, f"nodes are numbered 0 to {self._nodes.count - 1}; given {node}")
        client.number = node
        if self._state.of_attempt and not self._state.gathering:
            say(f"node {node} is here; it takes part after the next restart")
        return None

    def _mismatch(self, client: Client, node: int, why: str) -> None:
        """Refuse a node that was started otherwise; it ends a run that has not begun, if it is no stranger."""
        self._refuse(client, why)
        if self._state.of_attempt:
            return
        if self._secret is not None:
            self._end(MISMATCH, why)
        elif node < self._nodes.count and node not in self._state.refused:
            self._state.refused[node] = why
            say(f"refused, as without a secret it may be a stranger: {why}")

    def _refuse(self, client: Client, why: str) -> None:
        client.wire.send("end", code=MISMATCH, why=why)

    def _lost(self, client: Client, why: Lost) -> None:
        """Record that a connection is gone; an attempt with its node has failed."""
        state = self._state
        if isinstance(why, WrongSecret) and client.host not in state.wrong and len(state.wrong) < MOST_REFUSALS:
            state.wrong.add(client.host)
            say(f"a supervisor on {client.host} was refused: it has another secret than this node, or none")
        if client.number in state.running and not state.ended:
            state.running.discard(client.number)
            self._fail(SOFTWARE_ERROR, f"node {client.number} ({client.host}) is lost: {why}", 0)

    def _fail(self, status: int, text: str, weight: int) -> None:
        """Record a failure; the other nodes are told to stop: at once, or later if they may exit by themselves."""
        state = self._state
        state.failures.append(Failure(status, text, weight))
        if state.stopping_until == math.inf:
            state.stop_at = min(state.stop_at, time.monotonic() + ORDERLY_SECONDS * (status in ORDERLY))

    def _tell(self, nodes: set[int] | None, kind: str, **message: Any) -> None:
        """Send a message to these nodes, or to all; a lost connection is noticed when it is read."""
        for client in self._door.known():
            if nodes is None or client.number in nodes:
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
            for client in [client for client in self._door.known() if client.number in state.running]:
                with contextlib.suppress(OSError):
                    client.wire.connection.shutdown(socket.SHUT_RDWR)  # it is then dropped as lost

    def _gather(self) -> None:
        """Start an attempt if all nodes are here, or enough of them when the time is up; or give up."""
        state, nodes = self._state, self._nodes
        present = sorted(client.number for client in self._door.clients if client.number is not None)
        late = time.monotonic() > state.gathering_until
        if len(present) < nodes.count and not late:
            return None
        missing = [str(node) for node in range(nodes.count) if node not in present]
        away = f"node {', '.join(missing)} of {nodes.count} did not come within {nodes.rejoin_seconds:g} seconds"
        counts = range(len(present), nodes.needed - 1, -1)
        usable = next((count for count in counts if not missing or self._fits(count * self._here)), None)
        if usable is None or 0 not in present:
            if refused := [why for node, why in state.refused.items() if node not in present]:
                return self._end(MISMATCH, refused[0])
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
