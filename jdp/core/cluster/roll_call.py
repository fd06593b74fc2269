"""The roll call: before they join, processes wait for each other, and the missing ones are named.

JAX's own wait is silent for five minutes and ends in an abort. So process 0 first listens at the coordinator's address.
The others connect, send their numbers, and stay connected until all have come; a process that has ended is not counted.
Then process 0 closes the port, and JAX's coordinator opens it. If all processes of a node have ended with exit code 0,
the node itself takes part in a further roll call: processes that were started again then learn that they wait in vain.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jdp.base.errors import UserError
from jdp.base.machine import listen
from jdp.base.notices import notice_anywhere
from jdp.core.cluster.agreement import Mismatch
from jdp.core.cluster.barrier import PLURAL, named
from jdp.core.cluster.schedulers import is_loopback, split_address

SAY_SECONDS = 10.0  # a wait that takes longer is reported
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 2.0
_VERDICT_SECONDS = 5.0  # process 0's verdict may come this long after the deadline
_LONGEST = 4096  # bytes of a message
_MESSAGE = {"unit": str, "number": int, "count": int, "host": str}


class MissingProcesses(RuntimeError):
    """Processes did not come in time; the message names them. Another start may find them."""

    exit_code = 75


def bind_address(coordinator: str) -> str | None:
    """Return the "HOST:PORT" at which the coordinator listens; None for JAX's default, all addresses of its host."""
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (coordinator if is_loopback(coordinator) else None)


@dataclass(frozen=True)
class RollCall:
    """The roll call of processes, or of nodes, as seen by one of them."""

    coordinator: str  # "HOST:PORT" of number 0
    number: int  # of this process or node
    count: int  # of all
    unit: str = "process"  # or "node": a machine whose processes have all ended with exit code 0

    def call(self, seconds: float) -> None:
        """Wait until all are here, or raise MissingProcesses; Mismatch if this attempt can never be complete."""
        end, here = time.monotonic() + seconds, dict[int, socket.socket]()
        if self.number:
            return self._answer(end, seconds)
        try:
            with self._listening(end) as server:
                self._hear_all(server, here, end, seconds)
            _tell(here.values(), {"all": True})
        except (MissingProcesses, Mismatch) as error:
            _tell(here.values(), {"error": str(error), "code": error.exit_code})
            raise
        finally:
            for connection in here.values():
                connection.close()

    def _listening(self, end: float) -> socket.socket:
        """Return the server once the port is free: gRPC would share it with another job of this user."""
        bound = bind_address(self.coordinator)
        host, port = split_address(bound or self.coordinator)
        say_at = time.monotonic() + SAY_SECONDS
        while True:
            try:
                return listen(host if bound and host != "::" else "", port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"Process 0 listens at {bound}: {error.strerror}. Name its own host.") from None
            text = f"port {port} of the coordinator is taken on {socket.gethostname()}"
            if time.monotonic() > end:
                raise MissingProcesses(f"{text}: end the program there (ss -ltnp), or choose another port.")
            if time.monotonic() > say_at:
                notice_anywhere(f"{text}: waiting for it")
            time.sleep(_POLL_SECONDS)

    def _hear_all(self, server: socket.socket, here: dict[int, socket.socket], end: float, seconds: float) -> None:
        """Collect the others in `here`, until all are connected."""
        say_at = time.monotonic() + SAY_SECONDS
        server.settimeout(_POLL_SECONDS)
        while missing := [number for number in range(1, self.count) if number not in here]:
            found, who = self.count - len(missing), named(missing, self.unit)
            text = f"{found} of {self.count} {PLURAL[self.unit]} {'is' if found == 1 else 'are'} here"
            if time.monotonic() > end:
                raise MissingProcesses(
                    f"{text}: {who} did not come to {self.coordinator} within {seconds:g} seconds. Start them, and "
                    "check that they reach this address."
                )
            if time.monotonic() > say_at:
                notice_anywhere(f"{text}: waiting for {who}")
                say_at += 6 * SAY_SECONDS
            with contextlib.suppress(OSError):  # nobody came, or it has left again
                self._hear(server.accept()[0], here)
            for number in [number for number, connection in here.items() if not _is_connected(connection)]:
                here.pop(number).close()

    def _hear(self, connection: socket.socket, here: dict[int, socket.socket]) -> None:
        """Read the number of a new connection."""
        connection.settimeout(_CONNECT_SECONDS)
        said = _read(connection)
        connection.setblocking(False)
        if {name: type(value) for name, value in said.items()} != _MESSAGE:  # not from a process of this cluster
            connection.close()
        elif problem := self._problem(said):
            _refuse(connection, problem)
            if self.unit == "process":
                raise Mismatch(problem)
        else:
            if older := here.pop(said["number"], None):
                text = "came twice: give each process its own number, and each machine its own --node-rank."
                _refuse(older, f"{_who(said)} {text}")
            here[said["number"]] = connection

    def _problem(self, said: dict[str, Any]) -> str:
        """Return why this attempt cannot be complete, given another's message; "" if it can."""
        if said["unit"] != self.unit:
            node = said if self.unit == "process" else self._message()
            return (
                f"All processes must end together; those of {_who(node)} have ended with exit code 0, and others were "
                "started again. Find why these did not end with 0: all processes take the same steps."
            )
        if said["count"] == self.count and 0 < said["number"] < self.count:
            return ""
        return (
            f"The number of {PLURAL[self.unit]} must be the same everywhere; {self.unit} 0 has {self.count}, "
            f"{_who(said)} has {said['count']}. Start all with the same numbers (--nodes, -n)."
        )

    def _answer(self, end: float, seconds: float) -> None:
        """Connect to number 0, repeatedly, and wait for its verdict."""
        say_at = time.monotonic() + SAY_SECONDS
        me, text = f"{self.unit} {self.number} of {self.count}", ""
        while time.monotonic() < end:
            verdict, problem = {}, "another program listens there, or an earlier attempt"
            try:
                with socket.create_connection(split_address(self.coordinator), _CONNECT_SECONDS) as connection:
                    connection.sendall(json.dumps(self._message()).encode())
                    connection.settimeout(end - time.monotonic() + _VERDICT_SECONDS)
                    verdict = _read(connection)
            except OSError as error:
                problem = error.strerror or str(error)
            if "all" in verdict:
                return
            if "error" in verdict:
                raise (Mismatch if verdict["code"] == Mismatch.exit_code else MissingProcesses)(verdict["error"])
            text = f"{self.unit} 0 does not answer at {self.coordinator} ({problem})"
            if time.monotonic() > say_at:
                notice_anywhere(f"{me} is here: waiting, as {text}")
            time.sleep(_POLL_SECONDS)
        raise MissingProcesses(
            f"{me} waited {seconds:g} seconds, and {text}. Start {self.unit} 0, and check that its name has an address "
            "here and its port is open."
        )

    def _message(self) -> dict[str, Any]:
        return {"unit": self.unit, "number": self.number, "count": self.count, "host": socket.gethostname()}


def wait_for_coordinator(address: str, seconds: float) -> None:
    """Wait until JAX's coordinator listens, because gRPC waits a second after a refusal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(split_address(address), _CONNECT_SECONDS):
            return
        time.sleep(_POLL_SECONDS)


def _who(said: dict[str, Any]) -> str:
    return f"{said['unit']} {said['number']} on {said['host']}"


def _tell(connections: Iterable[socket.socket], verdict: dict[str, Any]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # its process has ended
            connection.sendall(json.dumps(verdict).encode())


def _refuse(connection: socket.socket, problem: str) -> None:
    _tell([connection], {"error": problem, "code": Mismatch.exit_code})
    connection.close()


def _is_connected(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:  # it is open, and nothing was sent
        return True
    except OSError:
        return False


def _read(connection: socket.socket) -> dict[str, Any]:
    """Return the next message; {} at the end of the connection, and for anything that is no message."""
    try:
        message = json.loads(connection.recv(_LONGEST))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
