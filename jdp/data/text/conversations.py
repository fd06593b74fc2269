"""Rows of messages as conversations: checked, and each as JSON, so that they are documents like any others.

A message is {"role": …, "content": …}, or as ShareGPT has it {"from": "human", "value": …}. What else a message has is
kept for the template; what is null is left out, as Arrow has every key in every row. Only a message that calls tools
may have null as its content. The row's `tools`, a list or its JSON, is for the template too.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from jdp.base.hints import nearest
from jdp.base.shorten import cut
from jdp.data.sources.tables import Field, Table

FIELDS = ("messages", "conversations")
"""The columns that are looked for."""
TOOLS = "tools"
"""The column that a row may have beside its messages: what an assistant can call."""
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
_SHAREGPT = {"human": "user", "gpt": ASSISTANT}
_SHAPE = 'a list of {"role": …, "content": …}, or of {"from": …, "value": …}'
_CALLS = "tool_calls"

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """What a template makes text of."""

    messages: Messages
    tools: list[Any] | None = None


def conversations(table: Table, field: str | None) -> list[bytes]:
    """Return conversations, each as the UTF-8 of a JSON list of messages, or of a table of messages and tools.

    They are of the column `field`; None: of the first of `FIELDS` that a row has.
    """
    columns = [table.values(each) for each in ((field,) if field else FIELDS)]
    found: list[bytes] = []
    for row, (tools, *values) in enumerate(zip(table.values(TOOLS), *columns, strict=True)):
        name = table.name_of(row)
        messages = messages_in(next((each for each in values if each is not None), None), name)
        held = tools_in(tools, name)
        found.append(as_json(messages if held is None else Conversation(messages, held)._asdict(), name))
    return found


def columns_of(field: str | None) -> tuple[Field, tuple[str, ...]]:
    """Return the column that a row of a conversation must have, and those that it may have."""
    return (FIELDS, (*FIELDS, TOOLS)) if field is None else (field, (TOOLS,))


def conversation_of(document: bytes) -> Conversation:
    """Return the conversation that `conversations` wrote."""
    found = json.loads(document)
    return Conversation(found) if isinstance(found, list) else Conversation(**found)


def messages_in(value: Any, name: str, what: str = "messages") -> Messages:
    """Return a column's value as messages. Raises ValueError, which names the row and `what` it is."""
    if not isinstance(value, list):
        raise _wrong(value, name, what)
    return [_message(message, name, what) for message in cast("list[Any]", value)]


def tools_in(value: Any, name: str) -> list[Any] | None:
    """Return the tools of a row, a list or its JSON; None if it has none. Raises ValueError."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError):
            value = given
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{TOOLS} must be a list, or its JSON; given {cut(repr(given), 80)} in {name}: fix it")
    return _filled(value) or None


def as_json(value: Any, name: str) -> bytes:
    """Return what a row holds as the UTF-8 of JSON. Raises ValueError."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"messages must be text; given half a surrogate pair, {error.object[error.start]!r}, in {name}: fix it"
        ) from error
    except (TypeError, RecursionError) as error:  # a column of Arrow may hold dates or bytes, which JSON has not
        raise ValueError(f"messages must hold what JSON can; given {error} in {name}: leave it out") from error


def _message(given: Any, name: str, what: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(given, name, what)
    message = {key: value for key, value in cast("Mapping[str, Any]", given).items() if value is not None}
    keys = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = (message.pop(key, None) for key in keys)
    calls = content is None and bool(message.get(_CALLS))
    if not isinstance(role, str) or not (calls or isinstance(content, str)):
        raise _wrong(given, name, what)
    role = _SHAREGPT.get(role, role)
    if role not in ROLES:
        raise ValueError(
            f"a message's role must be one of {', '.join((*ROLES, *_SHAREGPT))}; given {cut(repr(role))} in "
            f"{name}{nearest(role, ROLES)}: rename it, or leave the row out"
        )
    if _CALLS in message:
        message[_CALLS] = _filled(message[_CALLS])
    return {"role": role, "content": content, **message}


def _filled(value: Any) -> Any:
    """Return a value without the null entries of tables in it, which Arrow gives to every row."""
    if isinstance(value, list):
        return [_filled(each) for each in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return {key: _filled(each) for key, each in table.items() if each is not None}
    return value


def _wrong(given: Any, name: str, what: str) -> ValueError:
    return ValueError(f"{what} must be {_SHAPE}, all text; given {cut(repr(given), 80)} in {name}: fix it")
