"""Conversations as tokens, each with whether it is learnt: a token of an assistant's answer, or of its end.

A conversation's text is encoded once, as a whole, and the tokenizer's offsets say which tokens are of an answer: one
that holds any character of it. So ids are those that a model sees when it answers. Two numbers become one: a token is
stored as 2·id, and 2·id + 1 where it is learnt. Splits, files and fingerprints then are those of any tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jdp.data.sources.in_bucket import local_path
from jdp.data.sources.optional_packages import optional
from jdp.data.text.conversations import Conversation, conversation_of
from jdp.data.text.token_array import TokenArray, bounds_of, smallest_uint
from jdp.data.text.tokenizers import FileTokenizer, Tokenizer

if TYPE_CHECKING:
    from jdp.data.text.chat_template import ChatTemplate, Span

_BATCH_CHARACTERS = 2**20  # of text that is tokenised at a time: offsets take more memory than ids


def with_template(
    tokenizer: Tokenizer, template: str | None, day: date | None, *, kind: "type[ChatTokenizer] | None" = None
) -> "ChatTokenizer":
    """Return a tokenizer of conversations.

    Args:
        tokenizer: of text.
        template: the file of a chat template; None: the tokenizer's own.
        day: that a template's `strftime_now` writes; None: today.
        kind: of the tokenizer; None: that of conversations.
    """
    kind = kind or ChatTokenizer
    if not isinstance(tokenizer, FileTokenizer):
        raise ValueError(
            f'data.format = "{kind.format}" needs a tokenizer with a chat template; given "{tokenizer.name}": name the '
            "folder of a model of Hugging Face, or its tokenizer.json, in data.tokenizer"
        )
    optional("jinja2", str(tokenizer.file))
    from jdp.data.text.chat_template import open_template  # late: jinja2 is of an extra

    opened = open_template(tokenizer.file, None if template is None else local_path(template), day)
    special = np.zeros(tokenizer.vocab_size, bool)
    special[list(tokenizer.tokenizer.get_added_tokens_decoder())] = True
    return kind(
        name=f"{tokenizer.file} and the chat template in {opened.name}",
        identity=f"{kind.format} 2 {tokenizer.identity} {opened.identity}",
        vocab_size=tokenizer.vocab_size,
        separator=None,
        text=tokenizer,
        template=opened,
        special=special,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ChatTokenizer(Tokenizer):
    """A tokenizer and its chat template. Documents are conversations; one without an answer gets no tokens."""

    text: FileTokenizer
    template: "ChatTemplate"
    special: NDArray[np.bool_]  # bool [vocab_size], of the tokens that were added to the vocabulary, such as ends
    format: ClassVar[str] = "chat"  # as in data.format

    @property
    def stored(self) -> int:
        return 2 * self.vocab_size

    @property
    def answer_end(self) -> int | None:
        """The token that ends an answer, as far as the tokenizer's settings say: its eos_token."""
        return self.text.separator

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.text.encode(text)

    def prompt(self, text: str) -> NDArray[np.int32]:
        """Return a user's message, ready for the answer."""
        return self.encode(self.template.render([{"role": "user", "content": text}], "the prompt", prompt=True))

    def _text(self, values: NDArray[Any]) -> str:
        return self.text.decode(values)

    def byte_counts(self) -> NDArray[np.int64] | None:
        return self.text.byte_counts()

    def tokenize(self, documents: Sequence[bytes], name_of: Callable[[int], str]) -> TokenArray:
        dtype = smallest_uint(self.stored)
        rows: list[NDArray[Any]] = [np.zeros(0, dtype)]
        for texts, spans in self._batches(documents, name_of):
            encodings = self.text.tokenizer.encode_batch(texts, add_special_tokens=False)
            encoded = [self._stored(*row) for row in zip(encodings, texts, spans, strict=True)]
            rows += [row.astype(dtype) for row in self._documents(encoded)]
        return TokenArray(np.concatenate(rows), bounds_of(rows[1:]))

    def _conversations(self, document: bytes) -> Iterator[tuple[Conversation, int]]:
        """Yield the conversations of a document, each with the message from which on answers are learnt."""
        yield conversation_of(document), 0

    def _documents(self, encoded: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return the tokens of documents from those of their conversations."""
        return encoded

    def _batches(
        self, documents: Sequence[bytes], name_of: Callable[[int], str]
    ) -> Iterator[tuple[list[str], list[list["Span"]]]]:
        """Yield conversations as text, and the spans of their answers, some at a time."""
        texts, spans, size = list[str](), list[list["Span"]](), 0
        for number, document in enumerate(documents):
            for (messages, tools), since in self._conversations(document):
                text, found = self.template.answers(messages, name_of(number), tools=tools, since=since)
                texts.append(text)
                spans.append(found)
                size += len(text)
            if size >= _BATCH_CHARACTERS:
                yield texts, spans
                texts, spans, size = [], [], 0
        yield texts, spans

    def _stored(self, encoding: Any, text: str, spans: "list[Span]") -> NDArray[np.int64]:
        """Return 2·id + learnt: int64 [tokens], or [0] if no token that is a target is learnt."""
        ids = np.array(encoding.ids, np.int64)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(ids), bool)
        for start, end in spans:
            inside = (starts < end) & (ends > start)
            if not self.template.marks:  # what a template writes after an answer's end, a line break, is no answer
                closing = np.flatnonzero(inside & self.special[ids])
                if len(closing) and not text[ends[closing[-1]] : end].strip():
                    inside[closing[-1] + 1 :] = False
            learnt |= inside
        return 2 * ids + learnt if learnt[1:].any() else ids[:0]
