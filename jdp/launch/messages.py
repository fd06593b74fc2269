"""Messages of the rendezvous and of `jdp doctor`'s roll-call: lines over TCP that no stranger can forge or repeat.

1. Both sides send a hello: a random nonce, and whether they have a secret.
2. The server sends "welcome", which proves that it knows the secret. Only then does the client send a message.
3. Each line after the hello is one JSON object, after its HMAC (SHA-256) if there is a secret. The key is made of the
   secret and both nonces, and direction and line number are signed too. So no line can be forged, repeated, or moved
   to another connection. Nothing is encrypted.

A line is verified before it is parsed, and every field is checked (`message_fields`), so its reader need not.

A peer whose host or link is gone sends nothing: the kernel probes (keepalive) and closes the connection within
`LOST_SECONDS`, however busy the programs at its ends are.
"""

import contextlib
import hmac
import re
import secrets
import selectors
import socket
import time
from typing import Any

from jdp.launch.message_fields import Message, decoded, encoded
from jdp.launch.secret import MAKE_ONE, SECRET, SECRET_FILE

LOST_SECONDS = 15
LONGEST = 1 << 16
"""Bytes of a message; a peer that sends more is no supervisor."""

SAME_SECRET = f"set {SECRET} or {SECRET_FILE} to the same everywhere"

_HELLO = re.compile(rb"jdp/1 ([0-9a-f]{32}) (secret|open)")
_LONGEST_HELLO = 64


class Lost(ConnectionError):
    """The connection is gone, or its data is no message."""


class WrongSecret(Lost):
    """The two sides have different secrets, or only one has one. The message is one for the client."""


class Wire:
    """One end of a connection; no method blocks for long.

    Args:
        connection: the socket, which is connected.
        secret: that of the run; None for messages that nothing protects.
        serves: True at the end that was connected to.

    Raises:
        Lost: the other side has left already.
    """

    def __init__(self, connection: socket.socket, secret: bytes | None, *, serves: bool) -> None:
        self.connection = connection
        self.greeted = False  # True once the other side's hello has come
        self.proven = False  # True once a message has come: its sender knows the secret, if there is one
        self._secret, self._serves = secret, serves
        self._nonce, self._key = secrets.token_hex(16).encode(), b""
        self._sent = self._received = 0
        self._unfinished = b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Linux: after 6 s without data probe every 3 s, three times; sent data must be acknowledged as soon.
        options = {"KEEPIDLE": 6, "KEEPINTVL": 3, "KEEPCNT": 3, "USER_TIMEOUT": LOST_SECONDS * 1000}
        for name, value in options.items():
            if hasattr(socket, f"TCP_{name}"):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self._write(b"jdp/1 %s %s" % (self._nonce, b"open" if secret is None else b"secret"))

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message."""
        line = encoded(kind, fields)
        if self._secret is not None:
            line = self._signature(line, self._sent, by_server=self._serves) + b" " + line
        self._sent += 1
        self._write(line)

    def receive(self) -> list[Message]:
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
        if lines and not self.greeted:
            self._greet(lines.pop(0))
        if len(self._unfinished) > (LONGEST if self.greeted else _LONGEST_HELLO):
            raise Lost("not a message")
        return [self._read(line) for line in lines]

    def wait(self, seconds: float) -> list[Message]:
        """Wait up to so long; return the messages that have come."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while not (messages := self.receive()) and (left := end - time.monotonic()) > 0:
                selector.select(left)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _greet(self, line: bytes) -> None:
        """Read the other side's hello, and make the key."""
        hello = _HELLO.fullmatch(line)
        if hello is None:
            raise Lost("not a message")
        if (hello[2] == b"secret") != (self._secret is not None):
            has, lacks = ("it", "this one") if self._secret is None else ("this one", "it")
            raise WrongSecret(f"{has} has a secret, and {lacks} has none")
        if self._secret is not None:
            first, second = (self._nonce, hello[1]) if self._serves else (hello[1], self._nonce)
            self._key = hmac.digest(self._secret, b"jdp/1 %s %s" % (first, second), "sha256")
        self.greeted = True

    def _read(self, line: bytes) -> Message:
        """Return the message of a line, if whoever sent it knows the secret."""
        if self._secret is not None:
            given, _, line = line.partition(b" ")
            expected = self._signature(line, self._received, by_server=not self._serves)
            if not hmac.compare_digest(given, expected):
                raise WrongSecret("its secret is another")
        self._received += 1
        try:
            message = decoded(line)
        except ValueError:
            raise Lost("not a message") from None
        self.proven = True
        return message

    def _signature(self, line: bytes, number: int, *, by_server: bool) -> bytes:
        return hmac.digest(self._key, b"%d %d " % (by_server, number) + line, "sha256").hex().encode()

    def _write(self, line: bytes) -> None:
        try:
            self.connection.settimeout(LOST_SECONDS)
            self.connection.sendall(line + b"\n")
        except OSError as error:
            raise Lost(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                self.connection.setblocking(False)


def connect(address: tuple[str, int], secret: bytes | None, seconds: float) -> Wire:
    """Connect to a server; return once it has proven that it knows the secret.

    Raises:
        OSError: it does not answer in time, or something else listens there.
        WrongSecret: it is a server of jdp's with another secret, or only one of the two has one.
    """
    connection = socket.create_connection(address, seconds)
    try:
        wire = Wire(connection, secret, serves=False)
        if [message["kind"] for message in wire.wait(seconds)] != ["welcome"]:
            raise Lost("something else listens there, or it is too busy to answer")
    except BaseException:
        connection.close()
        raise
    return wire


def without_secret(address: str) -> str:
    """Return what to say where a run has no secret."""
    return (
        f"whoever reaches {address} can join or end this run, as it has no secret: {SAME_SECRET}; make one with "
        f"{MAKE_ONE}"
    )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[IPV6]:PORT"."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"A coordinator is HOST:PORT, port 1 to 65535; given {address!r}. Write node0:29500.")
    return bare, int(port)
