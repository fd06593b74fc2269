"""A chat template: it makes text of messages, as `transformers` does, and says which parts of it are answers.

1. Find it: a file that is named, else chat_template.jinja beside the tokenizer, else tokenizer_config.json.
2. Render it in jinja2's immutable sandbox, with what `transformers` adds: `raise_exception`, `strftime_now`, `tojson`,
   the tokenizer's special tokens, `{% break %}`. It reads no files and changes no messages.
3. Answers are what stands in `{% generation %}` blocks. In a template without them, an answer begins where the
   conversation before it with the generation prompt ends, and ends where the conversation up to it does.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jdp.base.notices import notice
from jdp.base.shorten import cut
from jdp.base.user_path import check_regular
from jdp.data.text.conversations import ASSISTANT, Messages
from jdp.data.text.tokenizers import SETTINGS, TEMPLATE, TOKENS

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_OPEN, _CLOSE = (f"\ufdd0{secrets.token_hex(16)}{end}" for end in "[]")
"""What stands around an answer until it is found. No text has them: they are drawn anew in every process."""
_MARKS = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")

Tools = list[Any] | None
Span = tuple[int, int]
"""Characters of a text, from and up to."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A compiled template."""

    name: str  # the file it is in, for people
    identity: str  # all that its text depends on, for caches
    marks: bool  # whether it has {% generation %} blocks
    template: Template
    tokens: Mapping[str, Any]  # the names and texts of special tokens

    def render(self, messages: Messages, row: str, *, tools: Tools = None, prompt: bool = False) -> str:
        """Return messages as text; `prompt`: ready for an answer. `row` is the conversation's name for errors."""
        try:
            return _MARKS.sub("", self._render(messages, tools, prompt))
        except Exception as error:  # a template raises what it likes
            raise self._failed(error, row) from error

    def answers(self, messages: Messages, row: str, *, tools: Tools = None, since: int = 0) -> tuple[str, list[Span]]:
        """Return messages as text, and the spans of the assistant's answers in it, from message `since` on."""

        def up_to(end: int, *, prompt: bool = False) -> str:
            return self.render(messages[:end], row, tools=tools, prompt=prompt)

        if self.marks:
            try:
                text, spans = _unmarked(self._render(messages, tools, False))
            except Exception as error:
                raise self._failed(error, row) from error
            before = up_to(since) if since else ""
            if not text.startswith(before):
                raise self._differs(since, row)
            return text, [span for span in spans if span[0] >= len(before)]
        text, spans = up_to(len(messages)), list[Span]()
        for index, message in enumerate(messages):
            if index >= since and message["role"] == ASSISTANT:
                before, after = up_to(index, prompt=True), up_to(index + 1)
                if not after.startswith(before) or not text.startswith(after):
                    raise self._differs(index + 1, row)
                spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: Messages, tools: Tools, prompt: bool) -> str:
        return self.template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.tokens
        )

    def _differs(self, message: int, row: str) -> ValueError:
        return ValueError(
            "where an answer begins and ends must show by what its template writes before and after it; given "
            f"{self.name}, which writes message {message} of {row} in another way when others follow, or without its "
            "prompt: put {% generation %} and {% endgeneration %} around the answers in a copy of it, and name that in "
            "data.chat_template"
        )

    def _failed(self, error: Exception, row: str) -> ValueError:
        words = cut(" ".join(str(error).split()).rstrip(".") or type(error).__name__, 300)
        return ValueError(
            f"a chat template must render every conversation; given {self.name} with {row}: {words}; leave the row "
            "out, or name another template in data.chat_template"
        )


def open_template(tokenizer: Path, given: Path | None, day: date | None) -> ChatTemplate:
    """Return the template of a tokenizer.json, or of a file that is given, whose `strftime_now` is of a day."""
    file, text = (given, _read(given)) if given else _own(tokenizer)
    environment, tokens = _environment(day or date.today()), _special_tokens(tokenizer.parent)
    try:
        parsed = environment.parse(text)
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"a chat template must be one of jinja2; given {file}: line {error.lineno}: {error.message}; fix it"
        ) from error
    reader = next(parsed.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)), None)
    if reader is not None:
        raise ValueError(
            f"a chat template must read no other file; given {file}: line {reader.lineno} does "
            f"({type(reader).__name__.lower()}): put the text of that file in its place"
        )
    dated = f" {day or date.today()}" if "strftime_now" in text else ""
    if dated and day is None:
        notice(
            f"{file} writes the day into conversations, today{dated}: a run that resumes on another day finds other "
            f'data, unless data.chat_date = "{dated.strip()}"'
        )
    identity = repr((text, tokens, dated))
    marks = next(parsed.find_all(nodes.ExtensionAttribute), None) is not None  # which {% generation %} alone makes
    return ChatTemplate(str(file), identity, marks, template, tokens)


class _Generation(Extension):
    """The tag `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _environment(day: date) -> ImmutableSandboxedEnvironment:
    """Return the environment that `transformers` renders in."""
    midnight = datetime.combine(day, time())

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": midnight.strftime}
    environment.globals.update(functions)
    return environment


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """Return text without its marks, and the spans that they enclosed."""
    texts, spans = list[str](), list[Span]()
    depth = size = start = 0
    for piece in _MARKS.split(marked):
        if piece == _OPEN:
            start = start if depth else size
            depth += 1
        elif piece == _CLOSE:
            depth -= 1
            if not depth:
                spans.append((start, size))
        else:
            texts.append(piece)
            size += len(piece)
    return "".join(texts), spans


def _own(tokenizer: Path) -> tuple[Path, str]:
    """Return the template beside a tokenizer.json, and the file that has it."""
    file, settings = tokenizer.with_name(TEMPLATE), tokenizer.with_name(SETTINGS)
    if file.is_file():
        return file, _read(file)
    template = _table(settings).get("chat_template")
    if isinstance(template, list):  # several by name
        named = {
            each.get("name"): each.get("template") for each in cast("list[Any]", template) if isinstance(each, dict)
        }
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"a chat needs a chat template; given {tokenizer}, and beside it neither a {TEMPLATE} nor a "
            f'"chat_template" in {SETTINGS}: take the folder of an instruction-tuned model, or name a file in '
            "data.chat_template"
        )
    return settings, template


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens that the files beside a tokenizer name: "bos_token" and so on, as text."""
    table = {**_table(folder / TOKENS), **_table(folder / SETTINGS)}
    tokens = {name: _content(table.get(name)) for name in (f"{kind}_token" for kind in _SPECIAL)}
    if isinstance(more := table.get("additional_special_tokens"), list):
        tokens["additional_special_tokens"] = [_content(each) for each in cast("list[Any]", more)]
    return {name: token for name, token in tokens.items() if token is not None}


def _content(token: Any) -> Any:
    return cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token


def _table(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if there is no file."""
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"a tokenizer's settings must be a JSON object; given {file}: {error}; fix it") from error
    if not isinstance(table, dict):
        raise ValueError(f"a tokenizer's settings must be a JSON object; given {file}: fix it")
    return cast("dict[str, Any]", table)


def _read(file: Path) -> str:
    try:
        check_regular(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ValueError(
            f"a chat template must be a file of text; given {file}: {words}; fix data.chat_template"
        ) from error
