"""Messages between supervisors: one JSON object a line, over TCP.

A peer whose host or link is gone sends nothing: the kernel probes (keepalive) and closes the connection within
`LOST_SECONDS`, however busy the programs at its ends are.
"""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

LOST_SECONDS = 15
LONGEST = 1 << 16
"""Bytes of a message; a peer that sends more is no supervisor."""


class Lost(ConnectionError):
    """The connection is gone, or its data is no message."""


class Wire:
    """One end of a connection; no method blocks for long."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unfinished = b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux: after 6 s without data probe every 3 s, three times; sent data must be acknowledged as soon.
        options = {"KEEPIDLE": 6, "KEEPINTVL": 3, "KEEPCNT": 3, "USER_TIMEOUT": LOST_SECONDS * 1000}
        for name, value in options.items():
            if hasattr(socket, f"TCP_{name}"):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)

    def send(self, kind: str, **message: Any) -> None:
        """Send one message."""
        try:
            self.connection.settimeout(LOST_SECONDS)
            self.connection.sendall(json.dumps({"kind": kind, **message}).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                self.connection.setblocking(False)

    def receive(self) -> list[Mapping[str, Any]]:
        """Return the messages that have come."""
        try:
            data = self.connection.recv(LONGEST)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Lost(str(error)) from error
        if not data:
            raise Lost("closed")
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise Lost("not a message") from None
        if len(self._unfinished) > LONGEST or not all(isinstance(each, dict) and "kind" in each for each in messages):
            raise Lost("not a message")
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[IPV6]:PORT"."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"A coordinator is HOST:PORT, port 1 to 65535; given {address!r}. Write node0:29500.")
    return bare, int(port)
