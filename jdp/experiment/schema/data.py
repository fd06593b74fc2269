"""The tables [data], [data.mixture.NAME] and [eval.NAME]: the data to train and to evaluate on."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from jdp.experiment.schema.fields import NONE, Count, MaybeSource, Part, PathText, Section, Single, Source, named
from jdp.experiment.schema.registered import Table


def _data_name(name: str | None) -> str | None:
    return None if name is None else DATASETS.check(name)


class Ingredient(Section):
    """[data.mixture.NAME]: one of several texts, or sets of images, that training draws from; its held-out side is also
    evaluated on its own, as eval_NAME."""

    source: Source
    """As data.source."""
    weight: Annotated[float, Field(gt=0), Single] = 1.0
    """Share of the samples, relative to the other ingredients."""
    field: str | None = None
    """As data.field; none = the same."""


class Data(Section):
    """[data]: what to learn from; the model decides whether that is text, images or tables of numbers."""

    name: Annotated[str | None, AfterValidator(_data_name)] = None
    """A data set that the plug-in registers, whose fields may be given beside it, in place of source; none = source."""
    source: MaybeSource = "stdlib"
    """Text: "stdlib" (Python's own library source), files, globs or directories (text, JSONL, parquet, Arrow; gzip or
    zstandard), or an .npz of tokens. Images: "digits" (scikit-learn's), a directory with a subdirectory for each class,
    parquet, Arrow, .tar files as WebDataset writes them. Features of an MLP: an .npz, or images. "hf:NAME" or "hf:PATH"
    is a data set of Hugging Face; "hf-stream:NAME:train[:100000]" is text that is fetched as it is tokenised, here its
    first rows. Data in a bucket, such as s3://bucket/corpus, is downloaded once to a folder of the host, below
    JDP_CACHE_DIR (~/.cache/jdp); tokens of 64 MiB of text or more are kept in files there. Paths are relative to the
    experiment file, or when given on the command line to the working directory; "none" with [data.mixture.NAME]."""
    mixture: dict[str, Ingredient] = Field(default={})
    """Several texts, or sets of images of the same classes, mixed by weight, in place of source."""
    field: str | None = None
    """Field, column or array that is learnt from, of a row of JSONL, parquet, Arrow or Hugging Face, or of an .npz, or
    the ending of images in .tar files; none = the usual: "text" or "input_ids", the only images, "features"."""
    label: str | None = None
    """Column or array of the classes (images, features), or in .tar files their ending or their key in .json; none =
    the usual: the only classes, "labels", .cls."""
    tokenizer: PathText = "bytes"
    """"bytes"; a tokenizer.json of Hugging Face tokenizers or the folder that holds it, relative as in source, or an
    address of these; or "none" where the rows of the source are lists of token ids. Not given: that of the folder of a
    model "hf:FOLDER", else bytes."""
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
    crop_padding: Count = 0
    """Black pixels added on each side of a training image before a window of its own size is cropped at random, anew
    each epoch; 0 = none. Evaluations use the original images."""
    resized_crop: Annotated[float, Field(ge=0, lt=1), Single] = 0.0
    """Least share of a training image's area that a random crop shows, anew each epoch; sides from 3:4 to 4:3, resized
    to model.image_size. 0.08 is usual for photographs; 0 = none."""
    flip: bool = False
    """Flip half of the training images from left to right, drawn anew each epoch."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_three(cls, table: Any) -> Any:
        """Leave out the default source where a mixture or a data set's name replaces it."""
        replaced = isinstance(table, Mapping) and (table.get("mixture") or table.get("name") not in (None, NONE))
        if replaced and "source" not in table:
            return {**table, "source": None}
        return table

    @field_validator("mixture")
    @classmethod
    def _names(cls, mixture: dict[str, Ingredient]) -> dict[str, Ingredient]:
        named("text", mixture)
        return mixture

    @model_validator(mode="after")
    def _one_crop(self) -> Self:
        if self.crop_padding and self.resized_crop:
            given = f"{self.crop_padding} and {self.resized_crop:g}"
            raise ValueError(f"crop_padding and resized_crop both crop; given {given}: remove one")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source that is named, those of the mixture too."""
        given = [self.source, *(text.source for text in self.mixture.values())]
        return tuple(word for source in given if source for word in ((source,) if isinstance(source, str) else source))


OF_EVERY = ("name", "heldout_fraction", "shuffle")
"""The keys that a plug-in's data set has too."""
OF_TEXT = ("tokenizer", "packing", "length")
"""The keys that text alone has."""
DATASETS = Table("data", reserved=(*OF_EVERY, "source", "mixture"))


class EvalSet(Section):
    """[eval.NAME]: a further data set to evaluate on, all of it, beside the held-out side of [data]; its metrics are
    eval_NAME_loss and so on."""

    source: Source
    """As data.source."""
    field: str | None = None
    """As data.field; none = the same."""
