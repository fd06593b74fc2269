"""What the supervisor of a machine does next: decided alone on a single machine, else by the rendezvous.

Both answer three questions:

- With which part of the cluster to start, or with which exit code to end?
- Must the processes stop now, as another machine has failed?
- What follows from the end of the processes?
"""

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from jdp.launch.message_fields import Message
from jdp.launch.messages import SAME_SECRET, Lost, Wire, WrongSecret, connect, split_address
from jdp.launch.output import say
from jdp.launch.process_environment import Part, single_machine
from jdp.launch.processes import POLL_SECONDS, Child
from jdp.launch.rendezvous import Nodes, Rendezvous
from jdp.launch.restarts import INTERRUPTED, TRY_AGAIN, Restarts

CONNECT_SECONDS = 3.0  # one attempt to reach node 0
AGAIN_SECONDS = 0.5  # between two attempts


class Decisions(Protocol):
    """The questions of a supervisor."""

    def next_part(self, signals: Sequence[int]) -> Part | int:
        """Return the part to start, or the exit code to end with; `signals` has those received so far."""
        ...

    def stop(self, cause: Child | None) -> bool:
        """Return True if the processes must stop; `cause` is the first of this machine that failed, if any."""
        ...

    def ended(self, cause: Child | None, signals: Sequence[int]) -> None:
        """Record that all processes of this machine have ended."""
        ...


@dataclass
class Alone:
    """The decisions of a single machine."""

    processes: int
    restarts: Restarts
    _code: int | None = None

    def next_part(self, signals: Sequence[int]) -> Part | int:
        """Return the next attempt's part, on a new port; or the exit code."""
        if self._code is not None:
            return self._code
        return single_machine(self.processes, self.restarts.made)

    def stop(self, cause: Child | None) -> bool:
        """Return False: the processes stop each other."""
        return False

    def ended(self, cause: Child | None, signals: Sequence[int]) -> None:
        """Decide whether there is another attempt."""
        if cause is None:
            self._code = 0
        elif signals or not self.restarts.another(cause.status):
            self._code = self.restarts.exit_code(cause.status)


class Member:
    """The decisions of one of several machines, which come from the rendezvous. In `with`."""

    def __init__(
        self, nodes: Nodes, here: int, facts: Mapping[str, str], secret: bytes | None, rendezvous: Rendezvous | None
    ) -> None:
        self._nodes, self._here, self._facts, self._rendezvous = nodes, here, facts, rendezvous
        self._secret = secret
        self._wire: Wire | None = None
        self._reported, self._stop = False, False
        self._code: int | None = None
        self._refused, self._again_at = "", 0.0

    def __enter__(self) -> Self:
        if self._rendezvous is not None:
            self._rendezvous.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        if self._rendezvous is not None:
            self._rendezvous.__exit__()

    def next_part(self, signals: Sequence[int]) -> Part | int:
        """Wait for the rendezvous to start an attempt or to end the run."""
        self._reported = self._stop = False
        give_up = time.monotonic() + self._nodes.rejoin_seconds
        while self._code is None:
            if signals:
                return INTERRUPTED if signals[0] == signal.SIGINT else TRY_AGAIN
            if self._wire is None:
                if time.monotonic() > give_up:
                    return self._unanswered()
                self._connect()
            for message in self._received():
                if message["kind"] == "start":
                    self._refused = ""
                    names = ("coordinator", "processes", "first", "binds", "restarts")
                    return Part(here=self._here, **{name: message[name] for name in names})
            time.sleep(POLL_SECONDS)
        return self._code

    def stop(self, cause: Child | None) -> bool:
        """Report the first failure here, once; return True if the rendezvous, or its loss, ends the attempt."""
        if cause is not None and not self._reported:
            self._reported = True
            text = f"process {cause.rank} {cause.how} on node {self._nodes.rank} ({socket.gethostname()})"
            self._send("failed", status=cause.status, aborted=cause.aborted, text=text)
        self._received()
        return self._stop or self._wire is None

    def ended(self, cause: Child | None, signals: Sequence[int]) -> None:
        """Tell the rendezvous; a machine that got a signal leaves the run, which may go on without it."""
        self.stop(cause)
        code = 0 if cause is None else 128 - cause.status if cause.status < 0 else cause.status
        self._send("ended", leaving=bool(signals), code=code)
        if signals and self._code is None:
            self._code = code

    def _connect(self) -> None:
        """Try to reach node 0 and join, at most every `AGAIN_SECONDS`."""
        if time.monotonic() < self._again_at:
            return None
        self._again_at = time.monotonic() + AGAIN_SECONDS
        address = self._rendezvous.address if self._rendezvous else split_address(self._nodes.coordinator)
        try:
            self._wire = connect(address, self._secret, CONNECT_SECONDS)
        except WrongSecret as wrong:
            return self._refuse(f"node 0 at {self._nodes.coordinator} cannot be joined: {wrong}; {SAME_SECRET}")
        except OSError:  # it is not there yet, its name does not resolve yet, or all is busy
            return None
        token = self._rendezvous.token if self._rendezvous else ""
        return self._send("join", node=self._nodes.rank, facts=self._facts, token=token)

    def _refuse(self, why: str) -> None:
        """Report once why node 0 does not take this node, which then tries again: it may be of a job that ends."""
        if why != self._refused:
            say(why)
        self._refused = why

    def _unanswered(self) -> int:
        """Report that node 0 did not answer in time; return the exit code."""
        if self._refused:
            raise ValueError(self._refused)
        say(
            f"node 0 did not answer at {self._nodes.coordinator} within {self._nodes.rejoin_seconds:g} seconds: start "
            "it, and see that its name resolves and its port is open from here"
        )
        return TRY_AGAIN

    def _received(self) -> list[Message]:
        """Act on the messages of the rendezvous, and return them."""
        messages: list[Message] = []
        if self._wire is not None:
            try:
                messages = self._wire.receive()
            except Lost as lost:
                self._lost(lost)
        for message in messages:
            if message["kind"] == "end":
                self._code, self._stop = message["code"], True
            elif message["kind"] == "taken":
                self._refuse(f"{message['why']}: give each machine a --node-rank of its own")
                self._leave()
                continue
            elif message["kind"] in ("stop", "start"):  # a stop before a start was of the attempt before, and came late
                self._stop = message["kind"] == "stop"
            if self._nodes.rank and (why := message.get("why")):  # on node 0 the rendezvous prints it
                say(why)
            if message["kind"] == "spare":
                say("this node stands by: the run goes on with fewer, which its mesh and batch allow")
        return messages

    def _send(self, kind: str, **message: Any) -> None:
        if self._wire is not None:
            try:
                self._wire.send(kind, **message)
            except Lost as lost:
                self._lost(lost)

    def _lost(self, why: Lost) -> None:
        """Stop, as node 0 is gone, and look for it again: another supervisor may start there."""
        if self._code is None:
            say(f"the connection to node 0 ({self._nodes.coordinator}) is lost: {why}")
        self._leave()

    def _leave(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def decisions_of(
    processes: int,
    restarts: Restarts,
    nodes: Nodes | None,
    facts: Mapping[str, str],
    fits: Callable[[int], bool],
    secret: bytes | None,
) -> Alone | Member:
    """Return the decisions of this machine."""
    if nodes is None:
        return Alone(processes, restarts)
    rendezvous = None if nodes.rank else Rendezvous(nodes, processes, restarts, fits, facts, secret)
    return Member(nodes, processes, facts, secret, rendezvous)
