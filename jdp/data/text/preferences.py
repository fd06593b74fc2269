"""Rows of preferences as documents: a prompt, the answer that was chosen, and the one that was rejected.

1. Each of the three is text, or a list of messages. Text as a prompt is a user's message, as an answer an assistant's.
2. Without a prompt, or with it repeated in both answers, the messages that both begin with are the prompt.
3. A row whose two answers are the same teaches nothing: it becomes an empty document, which is left out and counted.
"""

import json
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from jdp.base.shorten import cut
from jdp.data.sources.tables import Table
from jdp.data.text.conversations import ASSISTANT, TOOLS, Messages, as_json, messages_in, tools_in

PROMPT, CHOSEN, REJECTED = COLUMNS = ("prompt", "chosen", "rejected")


class Preference(NamedTuple):
    """What one row holds."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: list[Any] | None = None


def preferences(table: Table, alike: Callable[[str], None]) -> list[bytes]:
    """Return rows as JSON; one whose answers are the same is empty, and its name is given to `alike`."""
    columns = (table.values(column) for column in (*COLUMNS, TOOLS))
    found: list[bytes] = []
    for row, (prompt, chosen, rejected, tools) in enumerate(zip(*columns, strict=True)):
        name = table.name_of(row)
        pair = _pair(prompt, chosen, rejected, name)
        if pair.chosen == pair.rejected:
            alike(name)
        pair = pair._replace(tools=tools_in(tools, name))
        found.append(b"" if pair.chosen == pair.rejected else as_json(pair._asdict(), name))
    return found


def preference_of(document: bytes) -> Preference:
    """Return what `preferences` wrote."""
    return Preference(**json.loads(document))


def _pair(prompt: Any, chosen: Any, rejected: Any, name: str) -> Preference:
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        raise ValueError(
            f'a preference must have a "{PROMPT}", or answers that are lists of messages and begin with it; given '
            f"text, {cut(repr(chosen), 60)}, in {name}: add the column"
        )
    before = [] if prompt is None else _messages(prompt, "user", PROMPT, name)
    answers = [_messages(given, ASSISTANT, column, name) for column, given in ((CHOSEN, chosen), (REJECTED, rejected))]
    if not before:
        before = [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False))]
        if answers[0] == answers[1]:
            return Preference(before, [], [])
        if not before:
            raise ValueError(
                f"chosen and rejected must answer one prompt; given no message that both begin with, in {name}: add a "
                'column "prompt", or fix the row'
            )
    chosen, rejected = (answer[len(before) :] if answer[: len(before)] == before else answer for answer in answers)
    for column, answer in ((CHOSEN, chosen), (REJECTED, rejected)):
        if not answer or answer[0]["role"] != ASSISTANT:
            begins = f"begins with a message of {answer[0]['role']}" if answer else "has none"
            raise ValueError(
                f"{column} must answer the prompt, with an assistant's message first; given one that {begins}, in "
                f"{name}: fix it, or leave the row out"
            )
    return Preference(before, chosen, rejected)


def _messages(given: Any, role: str, column: str, name: str) -> Messages:
    """Return text as one message, or a list as messages; none are an error."""
    messages = [{"role": role, "content": given}] if isinstance(given, str) else messages_in(given, name, column)
    if not messages:
        raise ValueError(f"{column} must be text, or hold messages; given an empty list in {name}: fix it")
    return messages
