"""The connections of a server whose port a stranger may reach: one that says nothing, or rubbish, is dropped.

A stranger is a connection whose number is not known yet. It is dropped after `STRANGER_SECONDS`, and the oldest when
there are more than `MOST_STRANGERS`. A client joins within milliseconds, so many strangers do not keep it out.
"""

import contextlib
import errno
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Self

from jdp.launch.message_fields import Message
from jdp.launch.messages import Lost, Wire, WrongSecret

STRANGER_SECONDS = 5.0
MOST_STRANGERS = 256
_AT_ONCE = 32  # connections accepted before those that are there are read
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class Client:
    """A connection, and the number of the node or process at its other end (None until it is known)."""

    wire: Wire
    host: str
    until: float  # time.monotonic() at which it is dropped if its number is not known
    number: int | None = None


class Door:
    """Accepts, reads and drops the connections of a server. In `with`."""

    def __init__(self, server: socket.socket, secret: bytes | None) -> None:
        self.clients: list[Client] = []
        self._server, self._secret = server, secret
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in list(self.clients):
            self.drop(client)
        self._selector.close()

    def known(self) -> list[Client]:
        """Return the clients whose numbers are known."""
        return [client for client in self.clients if client.number is not None]

    def turn(self, seconds: float) -> list[tuple[Client, Message | Lost]]:
        """Wait up to so long; return the messages that came, and for each client that was dropped why."""
        events: list[tuple[Client, Message | Lost]] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self.clients:
                events += self._read(key.data)
        now = time.monotonic()
        for client in self._strangers():
            if now > client.until:
                self.drop(client)
        return events

    def drop(self, client: Client) -> None:
        """Close a connection."""
        self.clients.remove(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.wire.connection)
        client.wire.close()

    def _strangers(self) -> list[Client]:
        """Return the clients whose numbers are not known, oldest first."""
        return [client for client in self.clients if client.number is None]

    def _accept(self) -> None:
        """Accept some of those who wait, and drop the oldest strangers if there are too many."""
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._server.accept()
            except OSError as error:  # nobody waits, or who waited has left
                if error.errno in _NO_MORE_FILES and (strangers := self._strangers()):
                    self.drop(strangers[0])
                return
            try:
                wire = Wire(connection, self._secret, serves=True)
            except OSError:  # it has left already
                connection.close()
                continue
            client = Client(wire, str(address[0]), time.monotonic() + STRANGER_SECONDS)
            self.clients.append(client)
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(strangers := self._strangers()) > MOST_STRANGERS:
                self.drop(strangers[0])

    def _read(self, client: Client) -> list[tuple[Client, Message | Lost]]:
        """Return a client's messages; one that is lost, or sends nonsense, is dropped."""
        wire, new = client.wire, not client.wire.greeted
        try:
            messages = wire.receive()
            if new and wire.greeted:
                wire.send("welcome")
        except Lost as lost:
            self.drop(client)
            if wire.greeted and not wire.proven and self._secret is not None:  # it left when it saw another secret
                lost = WrongSecret(str(lost))
            return [(client, lost)]
        return [(client, message) for message in messages]
