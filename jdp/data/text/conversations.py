"""Rows of messages as conversations: checked, and each as JSON, so that they are documents like any others.

A message is {"role": …, "content": …}, or as ShareGPT has it {"from": "human", "value": …}. What else a message has is
kept for the template; what is null is left out, as Arrow has every key in every row.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from jdp.base.hints import nearest
from jdp.base.shorten import cut
from jdp.data.sources.tables import Field, Table

FIELDS: Field = ("messages", "conversations")
"""The columns that are looked for."""
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
_SHAREGPT = {"human": "user", "gpt": ASSISTANT}
_SHAPE = 'a list of {"role": …, "content": …}, or of {"from": …, "value": …}'

Messages = list[dict[str, Any]]


def conversations(table: Table, field: Field) -> list[bytes]:
    """Return a column of conversations, each as the UTF-8 of a JSON list of messages."""
    return [_checked(value, table.name_of(row)) for row, value in enumerate(table.values(field))]


def messages_of(conversation: bytes) -> Messages:
    """Return the messages of a conversation."""
    return json.loads(conversation)


def _checked(value: Any, name: str) -> bytes:
    if not isinstance(value, list):
        raise _wrong(value, name)
    try:
        messages = [_message(message, name) for message in cast("list[Any]", value)]
        return json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"messages must be text; given half a surrogate pair, {error.object[error.start]!r}, in {name}: fix it"
        ) from error
    except (TypeError, RecursionError) as error:  # a column of Arrow may hold dates or bytes, which JSON has not
        raise ValueError(f"messages must hold what JSON can; given {error} in {name}: leave it out") from error


def _message(given: Any, name: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(given, name)
    message = {key: value for key, value in cast("Mapping[str, Any]", given).items() if value is not None}
    keys = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = (message.pop(key, None) for key in keys)
    if not isinstance(role, str) or not isinstance(content, str):
        raise _wrong(given, name)
    role = _SHAREGPT.get(role, role)
    if role not in ROLES:
        raise ValueError(
            f"a message's role must be one of {', '.join((*ROLES, *_SHAREGPT))}; given {cut(repr(role))} in "
            f"{name}{nearest(role, ROLES)}: rename it, or leave the row out"
        )
    return {"role": role, "content": content, **message}


def _wrong(given: Any, name: str) -> ValueError:
    return ValueError(f"messages must be {_SHAPE}, all text; given {cut(repr(given), 80)} in {name}: fix it")
