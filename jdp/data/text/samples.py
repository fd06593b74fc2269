"""Text as samples of fixed length, by random access.

The documents of a side are joined end to end, each closed by a separator. "stream" cuts them anywhere. The last target
of a sample is the first token of the next, so every token but the first is a target exactly once. "documents" packs
whole documents side by side in rows, so that attention and targets can stay inside each document:

1. A document of n tokens has n - 1 pairs of a token and its target. Its last token is only a target, so every token in
   a row has a target.
2. A document with more pairs than a row is cut into pieces of a full row and a shorter last piece. The last target of a
   piece is the first token of the next, so every token of a document but its first is a target exactly once.
3. Last pieces are packed by best fit, longest first: each into the row with the least remaining space that holds it.
   That takes at most 11/9 of the fewest rows possible, plus 4 (Johnson, Demers, Ullman, Garey and Graham 1974, SIAM
   J. Comput. 3:4). It is a function of the tokens alone, so every process packs the same rows.
4. With weights, a piece without a weighted target is left out.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jdp.base.errors import UserError, public
from jdp.base.formatting import format_bytes, format_percent
from jdp.base.notices import notice
from jdp.data.batches import NumpyBatch
from jdp.data.held_out import fingerprint
from jdp.data.sources import PathLike
from jdp.data.text.documents import text_tokens
from jdp.data.text.id_rows import id_tokens
from jdp.data.text.tokenizers import BYTES, Tokenizer, open_tokenizer
from jdp.data.text.tokens import MappedTokens, TokenArray, text_sides

Packing = Literal["stream", "documents"]


def packed_rows(tokens: TokenArray, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pack documents into rows of `length` pairs; at least one document must have two tokens.

    Returns int64 arrays: the first token of each piece, in order of rows; its number of pairs; and the first piece of
    each row, then the number of pieces.
    """
    starts, pairs = tokens.bounds[:-1], np.diff(tokens.bounds) - 1
    full, remainder = np.divmod(np.maximum(pairs, 0), length)
    before = np.repeat(np.cumsum(full) - full, full)  # full rows of the documents before
    full_starts = np.repeat(starts, full) + (np.arange(full.sum()) - before) * length
    lasts = np.argsort(-remainder, kind="stable")
    lasts = lasts[remainder[lasts] > 0]
    starts = np.concatenate([full_starts, starts[lasts] + full[lasts] * length])
    sizes = np.concatenate([np.full(len(full_starts), length), remainder[lasts]])
    if tokens.weights is not None:
        counts = [bool(tokens.weights[s + 1 : s + n + 1].any()) for s, n in zip(starts, sizes, strict=True)]
        starts, sizes = starts[counts], sizes[counts]
    count = int((sizes == length).sum())
    fitted = np.array(best_fit(sizes[count:].tolist(), length), np.int64)
    rows = np.concatenate([np.arange(count), fitted + count])
    order = np.argsort(rows, kind="stable")
    return starts[order], sizes[order], np.searchsorted(rows[order], np.arange(rows.max() + 2))


def best_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the row for each size: the row with the least remaining space that holds it, else a new row."""
    rows: list[int] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity)]
    spaces = opened = 0  # bit r of `spaces` is set if a row has r left: the search takes constant time
    for size in sizes:
        if fitting := spaces >> size:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[left].pop()
            spaces ^= (not rows_by_space[left]) << left
        else:
            row, left = opened, capacity
            opened += 1
        rows.append(row)
        if left > size:
            rows_by_space[left - size].append(row)
            spaces |= 1 << (left - size)
    return rows


@dataclass(frozen=True, eq=False)
class TextSamples:
    """One side of the text, as a sequence of samples of fixed length.

    Attributes:
        ids: unsigned integers [tokens], the documents of this side end to end.
        length: targets in a sample.
        bounds: int64 [documents + 1], the start of each document, and the end of the last; None: one document.
        weights: float32 [tokens], from 0 to 1, the weight of each token as a target; None: all 1.
        packing: "stream" cuts anywhere; "documents" keeps documents whole and separate.

    Sample i is a dict of "tokens" int32 [length], "targets" int32 [length] (the tokens shifted by one) and "weights"
    float32 [length] (of the targets). "documents" packing adds "segments" int32 [length]: 1, 2, … for the pieces in a
    row. Positions without text are at the end: token 0, weight 0, segment 0.

    Raises:
        ValueError: a length below 1, or no document with two tokens.

    >>> samples = TextSamples(np.arange(7), length=3)
    >>> samples[1]["tokens"].tolist(), samples[1]["targets"].tolist()
    ([3, 4, 5], [4, 5, 6])
    >>> rows = TextSamples(np.arange(9), length=6, bounds=np.array([0, 4, 6, 9]), packing="documents")
    >>> rows[0]["tokens"].tolist(), rows[0]["segments"].tolist()
    ([0, 1, 2, 6, 7, 4], [1, 1, 1, 2, 2, 3])
    """

    ids: NDArray[Any] | MappedTokens
    length: int
    bounds: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | MappedTokens | None = None
    packing: Packing = "stream"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"length must be at least 1; given {self.length}: set it to the targets in a sample")
        tokens = self._tokens
        if len(self.ids) < 2 or (self.packing == "documents" and (np.diff(tokens.bounds) < 2).all()):
            given = f"{len(self.ids)} token(s) in {len(tokens.documents)} document(s)"
            raise UserError(f"text must hold at least one token and its target; given {given}: add text")

    @property
    def _tokens(self) -> TokenArray:
        bounds = np.array([0, len(self.ids)]) if self.bounds is None else self.bounds
        return TokenArray(self.ids, bounds, self.weights)

    @functools.cached_property
    def _packed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        return packed_rows(self._tokens, self.length)

    @property
    def waste(self) -> float:
        """The fraction of all positions that are empty."""
        pairs = len(self.ids) - 1 if self.packing == "stream" else int(self._packed[1].sum())
        return 1 - pairs / (len(self) * self.length)

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.length) if self.packing == "stream" else len(self._packed[2]) - 1

    def __getitem__(self, index: int, /) -> NumpyBatch:
        row = range(len(self))[index]
        if self.packing == "stream":
            pieces = [(row * self.length, min(self.length, len(self.ids) - 1 - row * self.length))]
        else:
            starts, sizes, rows = self._packed
            own = slice(*rows[row : row + 2])
            pieces = zip(starts[own].tolist(), sizes[own].tolist(), strict=True)
        tokens, targets, segments = np.zeros((3, self.length), np.int32)
        weights, end = np.zeros(self.length, np.float32), 0
        for segment, (start, size) in enumerate(pieces, 1):
            place, end = slice(end, end + size), end + size
            piece = self.ids[start : start + size + 1]
            tokens[place], targets[place], segments[place] = piece[:-1], piece[1:], segment
            weights[place] = 1 if self.weights is None else self.weights[start + 1 : start + size + 1]
        sample = {"tokens": tokens, "targets": targets, "weights": weights}
        return sample if self.packing == "stream" else {**sample, "segments": segments}


@dataclass(frozen=True, eq=False)
class TextData:
    """A text split in two: `train` and `heldout` are sources for `global_batches`; `str()` is one line of text.

    Attributes:
        name: the source's name.
        documents: number of files or rows with text.
        train: the samples to train on.
        heldout: the samples held out.
        whole: True if whole documents are held out, False if the tail of each.
        vocab_size: every token is below it.
        tokenizer: the tokenizer; None if the source held token ids.
        digest: hash of all tokens, bounds of documents and weights.
        folder: folder of the tokens; None: they are in memory.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = pathlib.Path(folder, "book.txt").write_text("All work and no play. " * 20)
    ...     data = text_data(folder, length=16)
    >>> data.documents, data.vocab_size, data.whole
    (1, 256, False)
    """

    name: str
    documents: int
    train: TextSamples
    heldout: TextSamples
    whole: bool
    vocab_size: int
    tokenizer: Tokenizer | None
    digest: str
    folder: Path | None = None

    def __str__(self) -> str:
        train, heldout = self.train, self.heldout
        rule = "whole documents, by a hash of their content" if self.whole else "the tail of each document"
        by = "" if self.tokenizer is None else f" by {self.tokenizer.name}"
        size, place = train.ids.nbytes + heldout.ids.nbytes, "memory" if self.folder is None else "files"
        packed = "" if train.packing == "stream" else f", {format_percent(train.waste)} of them empty"
        if train.weights is not None:
            packed += f", {format_percent(float(np.mean(train.weights[:] > 0)))} of its tokens count"
        return (
            f"{self.name}: {self.documents:,} documents, {len(train.ids) + len(heldout.ids):,} tokens{by} "
            f"({format_bytes(size)} in {place}); train {len(train.ids):,} tokens in {len(train):,} samples of "
            f"{train.length}{packed}, held out {len(heldout.ids):,} tokens in {len(heldout):,} ({rule})"
        )

    @property
    def fingerprint(self) -> str:
        """16 hex digits: equal on two machines, or before and after a resume, only if all samples are equal."""
        return fingerprint(f"{self.digest} {self.train.length} {self.train.packing}")


@public()
def text_data(
    source: PathLike | Sequence[PathLike] = "stdlib",
    *,
    length: int,
    heldout_fraction: float = 0.05,
    field: str = "text",
    tokenizer: str | None = None,
    packing: Packing = "stream",
    ids: str | None = None,
    weights: str | None = None,
    labels: str | None = None,
    attention_mask: str | None = None,
    vocab_size: int | None = None,
    in_files: bool | None = None,
) -> TextData:
    """Read text and make samples from it.

    Args:
        source: files of text (.txt, .md, .rst, .py), globs or directories; or "stdlib", the source text of Python's
            standard library, about 12 MB. `datasets` reads "hf:json:PATH", "hf:NAME" etc., and "hf-stream:NAME:train"
            as rows arrive. With `ids` also .npz files.
        length: targets in a sample.
        heldout_fraction: in (0, 1), about the share of the text to hold out, by a hash of the content.
        field: the column of text in rows.
        tokenizer: "bytes", the default for text; a tokenizer.json of Hugging Face tokenizers, or its folder. Optional
            for rows of ids, which it decodes.
        packing: "stream" joins documents end to end and cuts anywhere; "documents" keeps them whole and separate, with
            "segments" in each sample.
        ids: the column or array of token ids, in place of text. A row is a document; no token is added.
        weights: the column of each id's weight as a target, from 0 to 1. Rows without a weighted target are left out.
        labels: in place of weights, a column that repeats the ids, with -100 for weight 0.
        attention_mask: a column of 1, and 0 for padding, which is left out.
        vocab_size: the model's: token ids are below it. By default that of the tokenizer, or of the source.
        in_files: True keeps the tokens in files in jdp's cache folder, which the processes of a host share; False in
            the memory of each process. None: in files from 64 MiB on, and for streams, whose size is unknown.

    Returns:
        The data, with `train`, `heldout`, `vocab_size`, `tokenizer`, `fingerprint`.

    Raises:
        ValueError: text that does not exist, cannot be read, is empty or shorter than one training sample. A token that
            is not below vocab_size (the message names the file and row). A number out of its range.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = pathlib.Path(folder, "book.txt").write_text("All work and no play. " * 20)
    ...     data = text_data(folder, length=16)
    >>> data.tokenizer.decode(data.train[0]["tokens"])
    'All work and no '
    """
    if packing not in ("stream", "documents"):
        raise UserError(f'packing must be "stream" or "documents"; given "{packing}": use one of these')
    columns = {"ids": ids, "weights": weights, "labels": labels, "attention_mask": attention_mask}
    read = {key: name for key, name in columns.items() if name is not None}
    if ids is None and read:
        raise UserError(f'{", ".join(read)} require rows of ids; given none: set ids = "input_ids"')
    opened = None if ids is not None and tokenizer is None else open_tokenizer(tokenizer or BYTES)
    if opened is not None and vocab_size is not None and opened.vocab_size > vocab_size:
        size = opened.vocab_size
        raise UserError(
            f"a model must have all tokens of its tokenizer; given vocab_size {vocab_size} and {size} in "
            f"{opened.name}: set vocab_size to {size} (importing a safetensors file, such as a run's export, pads its "
            "weights)"
        )
    if ids is None and opened is not None:
        tokens = text_tokens(source, field, opened)
    else:
        tokens = id_tokens(source, read, vocab_size if opened is None else vocab_size or opened.vocab_size)
    sides = text_sides(tokens, heldout_fraction, in_files)
    size = len(sides.train.ids)
    if packing == "stream" and size <= length:
        raise UserError(
            f"training text must fill one sample: length {length} needs {length + 1} tokens; given {size} (of "
            f"{size + len(sides.heldout.ids)} in {tokens.name}, the others held out): use a smaller length"
        )
    if not sides.whole:
        notice(f"{tokens.name}: too few documents to hold out whole ones, so the tail of each is held out")
    train, heldout = (
        TextSamples(side.ids, length, side.bounds, side.weights, packing) for side in (sides.train, sides.heldout)
    )
    size, digest, folder = sides.vocab_size, sides.digest, sides.folder
    return TextData(tokens.name, sides.documents, train, heldout, sides.whole, size, opened, digest, folder)
