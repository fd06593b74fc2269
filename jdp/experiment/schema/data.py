"""The tables [data], [data.mixture.NAME] and [eval.NAME]: the data to train and to evaluate on."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.fields import (
    NONE,
    AboveZero,
    Count,
    MaybeSource,
    Part,
    PathText,
    Section,
    Source,
    named,
    words_of,
)
from jdp.experiment.schema.make import Made
from jdp.experiment.schema.model import Learns


def _read_for(*kinds: Learns) -> OnlyFor:
    """Mark a key that is read for these kinds of data."""
    return OnlyFor(" and ".join(kinds), lambda x: x.kind in kinds, ", and {x.model.chosen} learns {x.kind}")


_TEXT = _read_for("text")


class Ingredient(Section):
    """[data.mixture.NAME]: one of several sources of text or images to train on. Its held-out side is also evaluated
    alone, as eval_NAME."""

    source: Source
    """As data.source."""
    weight: AboveZero = 1.0
    """Share of the samples, relative to the other ingredients."""
    field: str | None = None
    """As data.field; none = the same."""


class Data(Made):
    """[data]: the data set; the model decides whether to read text, images or tables of numbers. Or `make`, a function
    of keywords that returns a sequence (len and [index]) of dicts of arrays, or two: training and held-out samples."""

    _shared: ClassVar[tuple[str, ...]] = ("heldout_fraction", "shuffle")

    source: MaybeSource = "stdlib"
    """Source of the samples. Text: "stdlib" (the source code of Python's library), text files (.txt, .md, .rst, .py),
    globs or folders, or an .npz of tokens. Images: "digits" (scikit-learn's), or an .npz. Features of an MLP: an .npz,
    or images. `datasets` reads everything else: "hf:json:PATH" (or parquet, csv, arrow, imagefolder, webdataset),
    "hf:NAME" from the hub, or a split, "hf:imagefolder:PATH:train". "hf-stream:NAME:train[:100000]" tokenises text
    while fetching it, here the first 100000 rows. Tokens of 64 MiB of text or more are cached below JDP_CACHE_DIR
    (~/.cache/jdp). Paths are relative to the experiment file, on the command line to the working directory. "none" with
    [data.mixture.NAME]."""
    mixture: Annotated[dict[str, Ingredient], named("text"), _read_for("text", "images")] = Field(default={})
    """Several sources of text, or of images with the same classes, mixed by weight; replaces source."""
    field: Annotated[str | None, OnlyFor("text and arrays", lambda x: x.data.ids is None, ", not data.ids")] = None
    """Column or array to learn from; none = the usual: "text", the only images, "features"."""
    label: Annotated[str | None, _read_for("images", "features")] = None
    """Column or array of the classes; none = the usual: the only classes, "labels"."""
    ids: Annotated[str | None, _TEXT] = None
    """Column or array of token ids in place of text, such as "input_ids" in "hf:parquet:PATH" or an .npz.
    experiments/prepare/ makes them from text and chats."""
    weights: Annotated[str | None, _TEXT] = None
    """With ids: column of each token's weight as a target, 0 to 1, such as "loss_mask"; none = all count."""
    labels: Annotated[str | None, _TEXT] = None
    """With ids, in place of weights: column that repeats the ids, with -100 for tokens that do not count."""
    attention_mask: Annotated[str | None, _TEXT] = None
    """With ids: column that is 0 at padding tokens, which are left out."""
    tokenizer: Annotated[PathText, _TEXT] = "bytes"
    """Tokenizer of text: "bytes", or a tokenizer.json of Hugging Face tokenizers or its folder; paths as in source.
    Default: the tokenizer in the folder of a model "hf:FOLDER", else bytes. With ids: the tokenizer that made them."""
    packing: Annotated[Literal["stream", "documents"], _TEXT] = "stream"
    """How documents fill a sample: end to end and cut anywhere; or whole, each with its own attention and positions."""
    length: Annotated[Count, _TEXT] = 0
    """Tokens per sample; 0 = the model's context."""
    heldout: Annotated[
        PathText | None,
        _read_for("images", "features"),
        OnlyFor("one source", lambda x: not x.data.mixture, ", not [data.mixture.NAME]"),
    ] = None
    """Separate held-out set, named as in source; none = heldout_fraction of the source."""
    heldout_fraction: Part = 0.05
    """Share of the data held out for evaluation, chosen by content."""
    shuffle: bool = True
    """Reshuffle the training samples each epoch."""
    augment: Annotated[Literal["crop", "resized_crop"] | None, _read_for("images")] = None
    """Crop training images at random and flip half of them from left to right, differently in each epoch. "crop", for
    small images: pad each side with an eighth of black pixels, then crop to the image's size. "resized_crop", for
    photographs: at least 8 % of the area, aspect ratio 3:4 to 4:3, resized to model.image_size. none = neither."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_three(cls, table: Any) -> Any:
        """Drop the default source if a mixture or a function replaces it."""
        replaced = isinstance(table, Mapping) and (table.get("mixture") or table.get("make") not in (None, NONE))
        if replaced and "source" not in table:
            return {**table, "source": None}
        return table

    @property
    def knows_text(self) -> bool:
        """Whether the tokenizer of the tokens is known: not for an .npz, nor for ids without a tokenizer."""
        if self.ids:
            return self.tokenizer != BYTES
        sources = [self.source, *(text.source for text in self.mixture.values())]
        return not any(word.endswith(ARRAYS) for source in sources for word in words_of(source))


BYTES, ARRAYS = "bytes", ".npz"


class EvalSet(Section):
    """[eval.NAME]: a further data set, evaluated in full beside the held-out side of [data]. Its metrics are
    eval_NAME_loss and so on."""

    source: Source
    """As data.source."""
    field: str | None = None
    """As data.field; none = the same."""
