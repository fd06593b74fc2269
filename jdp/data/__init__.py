"""Make global batches from files, rows, images and arrays.

They are the same on any number of processes.

A source becomes a data set, by its kind:
  sources.py     files, and rows that `datasets` reads
  text/          documents -> tokens, or rows of ids with weights -> samples of fixed length, cut anywhere or packed
  pictures.py    pictures with classes, decoded when a sample is read
  images.py      pictures as samples, cropped and flipped differently in every epoch
  arrays.py      rows of NumPy arrays; the numbers of the classes of arrays and images
  held_out.py    training or held out, by a hash of a sample's content
  mixtures.py    several data sets mixed by weight
Its samples become batches:
  batches.py     the sample at each position of an endless, reshuffled run: a pure function; global batches, of which
                 each process reads its own rows ahead, in threads
  feed.py        puts the rows on devices, as global arrays

`global_batches` takes anything with a length and random access (a `grain.MapDataset` too). A data set is two such
sources, `train` and `heldout`, and a `fingerprint`; a new kind of data needs only these. Packages for formats
(datasets, tokenizers, pillow) are imported for the first source that needs one.
"""

from jdp.data.arrays import ArrayData, array_data
from jdp.data.batches import (
    EpochSource,
    NumpyBatch,
    OrderedSource,
    Source,
    batch_count,
    global_batches,
    sample_at,
    sample_index,
)
from jdp.data.images import AugmentedImages, ImageData, augmented, image_data
from jdp.data.mixtures import Mixture, mixture
from jdp.data.text.samples import TextData, TextSamples, text_data
from jdp.data.text.tokenizers import VOCAB_SIZE, open_tokenizer

__all__ = [
    "VOCAB_SIZE",
    "ArrayData",
    "AugmentedImages",
    "EpochSource",
    "ImageData",
    "Mixture",
    "NumpyBatch",
    "OrderedSource",
    "Source",
    "TextData",
    "TextSamples",
    "array_data",
    "augmented",
    "batch_count",
    "global_batches",
    "image_data",
    "mixture",
    "open_tokenizer",
    "sample_at",
    "sample_index",
    "text_data",
]
