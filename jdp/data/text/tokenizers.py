"""Text as token ids: bytes, or a file of Hugging Face's `tokenizers`.

All documents of a source become one array of ids, in the smallest unsigned integers that hold them; reading a sample
makes int32 rows. A file's own truncation and padding are turned off. Two special tokens are added: the separator that
closes a document, and the token that opens it if the tokenizer adds one.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.base.errors import UserError, public
from jdp.base.toml import cut
from jdp.base.user_path import user_path
from jdp.data.sources import optional
from jdp.data.text.tokens import TokenArray, smallest_uint

VOCAB_SIZE = 256
SEPARATOR = 0  # the byte that closes each document: text does not use it (but UTF-16 and binaries do)
BYTES = "bytes"
FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENS = "special_tokens_map.json"
BESIDE = (SETTINGS, TOKENS, TEMPLATE)
"""Optional files beside it."""
_OF_MODEL = ("generation_config.json", "config.json")
"""Optional files of a model beside it; the first that names end-of-text tokens counts."""
_AGAIN = 4
"""Tokens that are decoded again with the next one."""

# Tokens that close a document in published tokenizers, if no tokenizer_config.json names it.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_SPACE, _BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")  # of SentencePiece


@dataclass(frozen=True)
class Tokenizer(ABC):
    """Text to ids and back."""

    name: str  # for messages
    identity: str  # distinguishes it from other tokenizers, for caches
    vocab_size: int  # ids are below it
    separator: int  # the id that closes a document
    bos: int | None = None  # the id that opens a text
    adds_bos: bool = False  # `bos` is added to texts
    ends: tuple[int, ...] = ()  # the ids that end a generated text, the separator first

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int32]:
        """Return text as tokens: int32 [n]."""

    def opened(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the ids of a text [n], preceded by `bos` if the tokenizer adds it and they lack it."""
        if not self.adds_bos or ids[:1].tolist() == [self.bos]:
            return ids
        return np.concatenate([np.array([self.bos], ids.dtype), ids])

    def decode(self, tokens: ArrayLike) -> str:
        """Return tokens [n] as text. Raises ValueError for one outside the vocabulary."""
        values = np.asarray(tokens)
        if values.size and not 0 <= values.min() <= values.max() < self.vocab_size:
            kind = "must be a byte," if self.name == BYTES else f"of {self.name} must be"
            given = f"{values.min()} to {values.max()}"
            raise UserError(f"a token {kind} 0 to {self.vocab_size - 1}; given {given}: use the model's own tokenizer")
        return self._text(values)

    def decode_stream(self, tokens: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of tokens as they arrive; a character of several tokens when it is complete.

        `after` has the preceding tokens, because some tokenizers decode a token by its predecessors.
        """
        kept = [*after[-_AGAIN:]]
        shown = len(self.decode(kept))
        for token in tokens:
            kept.append(token)
            text = self.decode(kept)
            if text.endswith("\ufffd"):
                continue
            yield text[shown:]
            kept = kept[-_AGAIN:]
            shown = len(self.decode(kept))
        yield self.decode(kept)[shown:]

    @abstractmethod
    def _text(self, values: NDArray[Any]) -> str: ...

    @abstractmethod
    def byte_counts(self) -> NDArray[np.int64] | None:
        """Return the bytes of UTF-8 text of each token: int64 [vocab_size], 0 for special tokens.

        None if tokens are not pieces of text.
        """

    @abstractmethod
    def tokenize(self, documents: Sequence[bytes], names: Sequence[str]) -> TokenArray:
        """Return documents, at least one, as ids without separators; `names` are for errors."""


@public()
def open_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer.

    Args:
        name: "bytes", or the path of a tokenizer.json of Hugging Face tokenizers, or its folder.

    Raises:
        ValueError: a file that does not exist or is not a tokenizer, or a tokenizer without a token that closes
            documents.

    >>> tokenizer = open_tokenizer("bytes")
    >>> tokenizer.decode(tokenizer.encode("text")), tokenizer.vocab_size
    ('text', 256)
    """
    if name == BYTES:
        return Bytes()
    path = user_path(name)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        given = f"{path}, looked for at {file.absolute()}"
        raise UserError(f'tokenizer must be "{BYTES}", or a tokenizer.json or its folder; given {given}: fix the path')
    tokenizers = optional("tokenizers", str(file))
    content = file.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare ones
        words = " ".join(str(error).split())
        rule = "a tokenizer must be a file of Hugging Face tokenizers"
        raise UserError(f"{rule}; given {file}: {words}; fix it") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    separator = _separator(vocabulary, file, [str(token) for token in tokenizer.get_added_tokens_decoder().values()])
    bos, adds_bos = _bos(tokenizer, vocabulary, file)
    opens = f", {tokenizer.id_to_token(bos)} opens it" if adds_bos else ""
    return FileTokenizer(
        tokenizer=tokenizer,
        file=file,
        name=f"{file} ({len(vocabulary):,} tokens, {separator} closes a document{opens})",
        identity=hashlib.sha256(content).hexdigest() + f" {tokenizers.__version__}{opens}",
        vocab_size=max(vocabulary.values()) + 1,  # ids may leave gaps
        separator=vocabulary[separator],
        bos=bos,
        adds_bos=adds_bos,
        ends=_ends(vocabulary, file, vocabulary[separator]),
    )


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """The tokenizer whose tokens are bytes, of UTF-8 or of any file; invalid UTF-8 is decoded as �."""

    name: str = BYTES
    identity: str = BYTES
    vocab_size: int = VOCAB_SIZE
    separator: int = SEPARATOR
    ends: tuple[int, ...] = (SEPARATOR,)

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def _text(self, values: NDArray[Any]) -> str:
        return values.astype(np.uint8).tobytes().decode(errors="replace")

    def byte_counts(self) -> NDArray[np.int64]:
        return (np.arange(VOCAB_SIZE) != SEPARATOR).astype(np.int64)

    def tokenize(self, documents: Sequence[bytes], names: Sequence[str]) -> TokenArray:
        return TokenArray(np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)]))


@dataclass(frozen=True, eq=False, kw_only=True)
class FileTokenizer(Tokenizer):
    """A tokenizer.json; special tokens are encoded only if the text contains them, and decoded like all others."""

    tokenizer: Any  # the `tokenizers.Tokenizer`
    file: Path

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def _text(self, values: NDArray[Any]) -> str:
        return self.tokenizer.decode(values.tolist(), skip_special_tokens=False)

    def byte_counts(self) -> NDArray[np.int64] | None:
        size = _size_of_pieces(json.loads(self.tokenizer.to_str())["decoder"])
        if size is None:
            return None
        counts = np.zeros(self.vocab_size, np.int64)
        for piece, token in self.tokenizer.get_vocab(with_added_tokens=True).items():
            counts[token] = size(piece)
        for token, added in self.tokenizer.get_added_tokens_decoder().items():
            counts[token] = 0 if added.special else len(added.content.encode())
        counts[[self.separator, self.separator if self.bos is None else self.bos]] = 0
        return counts

    def tokenize(self, documents: Sequence[bytes], names: Sequence[str]) -> TokenArray:
        texts = list[str]()
        for document, name in zip(documents, names, strict=True):
            try:
                texts.append(document.decode())
            except UnicodeDecodeError as error:
                given = f"{document[error.start]:#04x} at byte {error.start} of {name}"
                fix = f'convert it, leave it out, or use tokenizer = "{BYTES}"'
                raise UserError(f"text must be UTF-8 for a tokenizer; given {given}: {fix}") from error
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [self.opened(np.array(encoding.ids, smallest_uint(self.vocab_size))) for encoding in encodings]
        return TokenArray(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))


def _size_of_pieces(decoder: dict[str, Any] | None) -> Callable[[str], int] | None:
    """Return a function that counts a piece's bytes; None if the decoder does more than join pieces."""
    parts = (decoder or {}).get("decoders", [decoder] if decoder else [])
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return len  # a letter is a byte
    spaces = [part for part in parts if part["type"] in ("Metaspace", "Replace")]
    if kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} and len(spaces) == 1:
        has_bytes = "ByteFallback" in kinds
        return lambda piece: 1 if has_bytes and _BYTE.fullmatch(piece) else len(piece.replace(_SPACE, " ").encode())
    return None


def byte_tokenizer() -> dict[str, dict[str, Any]]:
    """Return the tokenizer of bytes as Hugging Face's libraries read it: name of each file -> its JSON.

    The table from bytes to letters is GPT-2's (openai/gpt-2, `src/encoder.py`): printable bytes map to themselves, the
    others to letters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (code for code in range(256) if code not in printable)
    letters = {code: chr(code) for code in printable} | {code: chr(256 + i) for i, code in enumerate(others)}
    form = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {letters[code]: code for code in range(VOCAB_SIZE)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    table = {"version": "1.0", "added_tokens": [], "pre_tokenizer": form, "decoder": form, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": letters[SEPARATOR]}
    return {FILE: table, SETTINGS: settings}


def _separator(vocabulary: dict[str, int], file: Path, added: Sequence[str]) -> str:
    """Return the eos_token that files beside a tokenizer name, else the first of the usual names that it has."""
    config, named = _named(file, "eos_token")
    names = _SEPARATORS if named is None else (named,)
    for name in names:
        if name in vocabulary:
            return name
    problem = f"{config} names {named}, which is not in" if named else f"none of {', '.join(names)} is in"
    raise UserError(
        f"a tokenizer must have a token that closes documents; given {file}: {problem} its vocabulary; name one of its "
        f'added tokens ({cut(", ".join(added), 200) or "none"}) as "eos_token" in tokenizer_config.json beside it; or '
        "add one to tokenizer and model"
    )


def _bos(tokenizer: Any, vocabulary: dict[str, int], file: Path) -> tuple[int | None, bool]:
    """Return the token that opens a text, and whether to add it: by `add_bos_token`, else by the file."""
    text, (config, adds), (_, named) = tokenizer.encode("a"), _named(file, "add_bos_token"), _named(file, "bos_token")
    own = text.ids[0] if text.special_tokens_mask[:1] == [1] and len(text.ids) > 1 else None
    bos = vocabulary.get(named, own)
    if adds and bos is None:
        raise UserError(
            f'a tokenizer with add_bos_token must have a "bos_token" of its vocabulary; given {named} in {config}: '
            "name one, or set add_bos_token to false"
        )
    return (own, True) if adds is None and own is not None else (bos, bool(adds))


def _ends(vocabulary: dict[str, int], file: Path, separator: int) -> tuple[int, ...]:
    """Return the separator, and the ids that the model's files beside the tokenizer name."""
    _, named = _named(file, "eos_token_id", _OF_MODEL)
    of_model = [token for token in (named if isinstance(named, list) else [named]) if token in vocabulary.values()]
    return tuple(dict.fromkeys([separator, *of_model]))


def _named(file: Path, key: str, beside: Sequence[str] = (SETTINGS, TOKENS)) -> tuple[Path, Any]:
    """Return the first file beside a tokenizer that has a value for a key, and the value or None."""
    for config in filter(Path.is_file, map(file.with_name, beside)):
        try:
            value = json.loads(config.read_bytes()).get(key)
        except (OSError, ValueError, AttributeError) as error:
            rule = "a tokenizer's configuration must be a JSON object"
            raise UserError(f"{rule}; given {config}: {error}; fix it") from error
        if value is not None and value != "":
            return config, value.get("content") if isinstance(value, dict) else value
    return file, None
