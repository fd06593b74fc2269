"""Tables and tokenizers in files, and all documents of a source, as `text_data` reads them."""

from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import tokenizers

from jdp.data.text.documents import find, text_documents, text_files


def parquet(file, table):
    pyarrow.parquet.write_table(table, file, row_group_size=3)


def arrow(file, table, new=pyarrow.ipc.new_stream):
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def arrow_file(file, table):
    arrow(file, table, pyarrow.ipc.new_file)


def word_tokenizer(file, *words):
    """Write a tokenizer of these words, the first of which stands for all others; return its path."""
    numbers = {word: number for number, word in enumerate(words)}
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=words[0]))
    level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    level.save(str(file))
    return str(file)


def read_corpus(source, *, field="text"):
    found = find(source, text_files)
    names, documents = zip(*text_documents(found, field), strict=True)
    return SimpleNamespace(name=found.name, names=names, documents=documents)
