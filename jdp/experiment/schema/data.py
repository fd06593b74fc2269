"""The tables [data], [data.mixture.NAME] and [eval.NAME]: the data to train and to evaluate on."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from jdp.experiment.schema.fields import NONE, Count, MaybeSource, Part, PathText, Section, Single, Source, named
from jdp.experiment.schema.made import Made


class Ingredient(Section):
    """[data.mixture.NAME]: one of several texts, or sets of images, that training draws from; its held-out side is also
    evaluated on its own, as eval_NAME."""

    source: Source
    """As data.source."""
    weight: Annotated[float, Field(gt=0), Single] = 1.0
    """Share of the samples, relative to the other ingredients."""
    field: str | None = None
    """As data.field; none = the same."""


class Data(Made):
    """[data]: what to learn from; the model decides whether that is text, images or tables of numbers. Or `make`, a
    function of keywords that returns samples with len and [index], dicts of arrays; a pair is the training side and the
    held-out side."""

    _shared: ClassVar[tuple[str, ...]] = ("heldout_fraction", "shuffle")

    source: MaybeSource = "stdlib"
    """Where the samples come from. Text: "stdlib" (Python's own library source), files of text (.txt, .md, .rst, .py),
    globs or directories, or an .npz of tokens. Images: "digits" (scikit-learn's), or an .npz. Features of an MLP: an
    .npz, or images. Everything else is read by `datasets`: "hf:json:PATH", and parquet, csv, arrow, imagefolder,
    webdataset in its place; "hf:NAME" of the hub; a split of it, "hf:imagefolder:PATH:train".
    "hf-stream:NAME:train[:100000]" is text that is fetched as it is tokenised, here its first rows. Tokens of 64 MiB of
    text or more are kept in files below JDP_CACHE_DIR (~/.cache/jdp). Paths are relative to the experiment file, or
    when given on the command line to the working directory; "none" with [data.mixture.NAME]."""
    mixture: dict[str, Ingredient] = Field(default={})
    """Several texts, or sets of images of the same classes, mixed by weight, in place of source."""
    field: str | None = None
    """Column or array that is learnt from; none = the usual: "text", the only images, "features"."""
    label: str | None = None
    """Column or array of the classes (images, features); none = the usual: the only classes, "labels"."""
    ids: str | None = None
    """Column or array of token ids, in place of text, such as "input_ids": of "hf:parquet:PATH" and its like, or of an
    .npz. experiments/prepare/ makes them of text and of chats."""
    weights: str | None = None
    """Of rows of ids, the column of each token's weight as a target, 0 to 1, such as "loss_mask"; none = all count."""
    labels: str | None = None
    """Of rows of ids, in place of weights: the column of the ids again, and -100 where a token does not count."""
    attention_mask: str | None = None
    """Of rows of ids, the column that is 0 at padding, which is left out."""
    tokenizer: PathText = "bytes"
    """Tokenizer of text: "bytes", or a tokenizer.json of Hugging Face tokenizers or the folder that holds it, relative
    as in source. Not given: that of the folder of a model "hf:FOLDER", else bytes. Rows of ids were made by it."""
    packing: Literal["stream", "documents"] = "stream"
    """How documents fill a sample: end to end, cut anywhere; or whole, attention and positions within each only."""
    length: Count = 0
    """Tokens a sample; 0 = the model's context."""
    size: Count = 0
    """Height and width in pixels to which images of an MLP are fitted, 0 = as they are; for a ResNet or ViT that is
    model.image_size."""
    heldout: PathText | None = None
    """A held-out set of its own (images, features), named as in source; none = heldout_fraction of the source."""
    heldout_fraction: Part = 0.05
    """Share of the data kept for evaluation, by content."""
    shuffle: bool = True
    """Shuffle the training samples anew each epoch."""
    augment: Literal["crop", "resized_crop"] | None = None
    """Crop training images at random and flip half of them from left to right, anew each epoch. "crop", for small
    images: a window of the image's size, of the image with an eighth of black pixels on each side. "resized_crop", for
    photographs: 8 % of the area or more, sides from 3:4 to 4:3, resized to model.image_size. none = neither."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_three(cls, table: Any) -> Any:
        """Leave out the default source where a mixture or a function replaces it."""
        replaced = isinstance(table, Mapping) and (table.get("mixture") or table.get("make") not in (None, NONE))
        if replaced and "source" not in table:
            return {**table, "source": None}
        return table

    @field_validator("mixture")
    @classmethod
    def _names(cls, mixture: dict[str, Ingredient]) -> dict[str, Ingredient]:
        named("text", mixture)
        return mixture

    @property
    def knows_text(self) -> bool:
        """Whether the tokens are those of the tokenizer: not of an .npz, nor of ids where none is named."""
        return self.tokenizer != BYTES if self.ids else not any(source.endswith(ARRAYS) for source in self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source that is named, those of the mixture too."""
        given = [self.source, *(text.source for text in self.mixture.values())]
        return tuple(word for source in given for word in words_of(source))


def words_of(source: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the sources that a key names."""
    return (source,) if isinstance(source, str) else source or ()


BYTES, ARRAYS = "bytes", ".npz"
OF_TEXT = ("ids", "weights", "labels", "attention_mask", "tokenizer", "packing", "length")
"""The keys that text alone has."""


class EvalSet(Section):
    """[eval.NAME]: a further data set to evaluate on, all of it, beside the held-out side of [data]; its metrics are
    eval_NAME_loss and so on."""

    source: Source
    """As data.source."""
    field: str | None = None
    """As data.field; none = the same."""
