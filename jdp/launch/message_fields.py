"""The kinds of messages, the fields of each and what values they may have."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

LONGEST_TEXT = 1000
"""Characters of a text in a message."""

Check = Callable[[Any], bool]
Message = Mapping[str, Any]


def _number(lowest: int, highest: int) -> Check:
    return lambda value: type(value) is int and lowest <= value <= highest  # neither True nor Infinity


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable()


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= 10 and all(map(_text, (*value, *value.values())))


_count = _number(1, 10**7)
_index = _number(0, 10**7)
_exit_code = _number(0, 255)

MESSAGES: Mapping[str, Mapping[str, Check]] = {
    "welcome": {},
    # From a supervisor.
    "join": {"node": _index, "facts": _texts, "token": _text},
    "failed": {"status": _number(-128, 255), "aborted": _flag, "text": _text},
    "ended": {"leaving": _flag, "code": _exit_code},
    # From the rendezvous.
    "taken": {"why": _text},
    "start": {"coordinator": _text, "processes": _count, "first": _index, "binds": _flag, "restarts": _index},
    "spare": {},
    "stop": {},
    "again": {"why": _text},
    "end": {"code": _exit_code, "why": _text},
    # Of the roll-call: "I am here", and the answer.
    "here": {"process": _index},
    "noted": {},
}
"""The fields of each kind of message; it has these and no others."""


def plain(text: str) -> str:
    """Return text as a message may have it: printable, and cut with a checksum if it is long."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    if len(text) <= LONGEST_TEXT:
        return shown
    checksum = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{shown[: LONGEST_TEXT // 2]} … (SHA-256 {checksum})"


def encoded(kind: str, fields: Message) -> bytes:
    """Return a message as JSON."""
    message = {"kind": kind, **{name: _plain(value) for name, value in fields.items()}}
    assert _fits(message), message
    return json.dumps(message).encode()


def decoded(line: bytes) -> Message:
    """Return a message from JSON. Raises ValueError unless it is of a known kind with the fields of that kind."""
    message: Any = None
    with contextlib.suppress(RecursionError):
        message = json.loads(line)
    if not _fits(message):
        raise ValueError("not a message")
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {plain(name): plain(text) for name, text in value.items()}
    return plain(value) if isinstance(value, str) else value


def _fits(message: Any) -> bool:
    """Return True if a value is a message of a known kind, with its fields and no others."""
    if not isinstance(message, dict) or not isinstance(kind := message.get("kind"), str) or kind not in MESSAGES:
        return False
    checks = MESSAGES[kind]
    return message.keys() == {"kind", *checks} and all(check(message[name]) for name, check in checks.items())
