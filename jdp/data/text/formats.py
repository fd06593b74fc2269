"""The formats of text: what each needs, and what is reported of its samples."""

from collections.abc import Sequence
from typing import Literal

from jdp.base.notices import notice
from jdp.data.text.chat import ChatTokenizer
from jdp.data.text.documents import Found, PathLike, find_conversations, find_text, find_token_ids
from jdp.data.text.packing import PackedSamples
from jdp.data.text.preference_samples import PreferenceSamples, PreferenceTokenizer
from jdp.data.text.token_array import MappedTokens, TokenArray
from jdp.data.text.tokenizers import NONE

Packing = Literal["stream", "documents"]
Format = Literal["text", "chat", "preferences"]
TEMPLATED: dict[str, type[ChatTokenizer]] = {"chat": ChatTokenizer, "preferences": PreferenceTokenizer}
"""The formats of rows of messages, with their tokenizers."""


def check_format(format: str, tokenizer: str, packing: str | None, field: str | None) -> None:
    """Check options of `text_data` that must fit each other. Raises ValueError."""
    if packing not in (None, "stream", "documents"):
        raise ValueError(f'packing must be "stream" or "documents"; given "{packing}": give one of them')
    if format not in ("text", *TEMPLATED):
        raise ValueError(f'format must be "text", "chat" or "preferences"; given "{format}": give one of them')
    if format in TEMPLATED and (tokenizer == NONE or packing == "stream"):
        given = 'tokenizer "none"' if tokenizer == NONE else 'packing "stream"'
        raise ValueError(f'a chat has a tokenizer with a chat template, and packing "documents"; given {given}')
    if format == "preferences" and field is not None:
        raise ValueError(
            f'preferences are the columns "prompt", "chosen" and "rejected"; given field {field!r}: leave it out, and '
            "rename the columns"
        )


def find(source: PathLike | Sequence[PathLike], format: str, tokenizer: str, suffixes: Sequence[str] | None) -> Found:
    """Find what a source names; nothing is read."""
    of = find_token_ids if tokenizer == NONE else find_conversations if format in TEMPLATED else find_text
    return of(source, suffixes=suffixes)


def packed_samples(tokens: TokenArray, length: int, format: str) -> PackedSamples | PreferenceSamples:
    """Return the samples of documents that stay apart."""
    ids: MappedTokens = tokens.ids
    if format == "preferences":
        return PreferenceSamples(ids, tokens.bounds, length)
    return PackedSamples(ids, tokens.bounds, length, chat=format == "chat")


def report_cut(name: str, documents: int, sides: Sequence[object]) -> None:
    """Report conversations that are longer than a row."""
    length = next((side.length for side in sides if isinstance(side, PackedSamples | PreferenceSamples)), 0)
    cut = sum(side.too_long for side in sides if isinstance(side, PackedSamples | PreferenceSamples))
    left_out = sum(side.left_out for side in sides if isinstance(side, PreferenceSamples))
    more = f"more than {length:,} tokens"
    if any(isinstance(side, PreferenceSamples) for side in sides):
        if cut:
            notice(f"{name}: {cut:,} of {documents:,} pairs have {more} in an answer with its prompt; its end is cut")
        if left_out:
            notice(
                f"{name}: {left_out:,} of {documents:,} pairs are left out: with {more} the prompt leaves no room for "
                "an answer, or the answers are alike as far as they fit; give a larger length"
            )
    elif cut:
        notice(
            f"{name}: {cut:,} of {documents:,} conversations have {more} and are cut; pieces without an answer are "
            "left out"
        )
