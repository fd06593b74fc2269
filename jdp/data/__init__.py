"""Data: text in, the same global batches out on any number of processes.

documents.py  a source is read into documents (bytes), in an order every process agrees on
split.py      each document falls on the training side or the held-out side, by its content
text.py       the documents of a side become samples of fixed length, by random access
order.py      which sample stands at which position of an endless, reshuffled run: a pure function
batches.py    global batches: each process reads its own rows of them, ahead of time, in threads

`global_batches` takes anything with a length and random access (a `grain.MapDataset` too), so another kind of data
needs only its own source; another kind of text (JSONL, parquet, a tokenizer) needs only its own documents or samples.
"""

from jdp.data.batches import NumpyBatch, Source, batch_count, global_batches
from jdp.data.order import sample_index
from jdp.data.text import VOCAB_SIZE, TextData, TextSamples, decode, encode, text_data

__all__ = [
    "VOCAB_SIZE",
    "NumpyBatch",
    "Source",
    "TextData",
    "TextSamples",
    "batch_count",
    "decode",
    "encode",
    "global_batches",
    "sample_index",
    "text_data",
]
