"""Data: what people have in, the same global batches out on any number of processes.

Text:
  files.py, hub.py     what a user names becomes files, or data sets of Hugging Face
  tables.py            rows of parquet, Arrow and JSON; compressed.py: .gz and .zst
  documents.py         a source is read into documents (bytes, or token ids), in an order every process agrees on
  tokenizers.py        documents become tokens: bytes, or a file of Hugging Face tokenizers
  tokens.py            a whole source as one line of tokens; token_cache.py: kept for the next run
  split.py             each document falls on the training side or the held-out side, by its content
  text.py, packing.py  the tokens of a side become samples of fixed length, by random access
Arrays and images:
  arrays.py, images.py and what they are read from
Of any kind:
  mixtures.py          several data sets as one, drawn from by weight
  order.py             which sample stands at which position of an endless, reshuffled run: a pure function
  batches.py           global batches: each process reads its own rows of them, ahead of time, in threads
  feed.py              from them to global arrays

`global_batches` takes anything with a length and random access (a `grain.MapDataset` too). A data set is two such
sources, `train` and `heldout`, and a `fingerprint`; another kind of data needs only its own. Packages for formats
(pyarrow, zstandard, tokenizers, datasets, pillow) are imported when a source needs one.
"""

from jdp.data.arrays import ArrayData, array_data
from jdp.data.batches import NumpyBatch, OrderedSource, Source, batch_count, global_batches, sample_at
from jdp.data.images.samples import ImageData, image_data
from jdp.data.mixtures import Mixture, mixture
from jdp.data.order import sample_index
from jdp.data.text.packing import PackedSamples
from jdp.data.text.samples import TextData, TextSamples, decode, encode, text_data
from jdp.data.text.tokenizers import VOCAB_SIZE, open_tokenizer

__all__ = [
    "VOCAB_SIZE",
    "ArrayData",
    "ImageData",
    "Mixture",
    "NumpyBatch",
    "OrderedSource",
    "PackedSamples",
    "Source",
    "TextData",
    "TextSamples",
    "array_data",
    "batch_count",
    "decode",
    "encode",
    "global_batches",
    "image_data",
    "mixture",
    "open_tokenizer",
    "sample_at",
    "sample_index",
    "text_data",
]
