"""Tables in files, and all documents of a source in memory, as `text_data` reads them."""

import pyarrow
import pyarrow.parquet

from jdp.data.text.documents import corpus_of, find_text


def parquet(file, table):
    pyarrow.parquet.write_table(table, file, row_group_size=3)


def arrow(file, table, new=pyarrow.ipc.new_stream):
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def arrow_file(file, table):
    arrow(file, table, pyarrow.ipc.new_file)


def read_corpus(source, *, field="text"):
    return corpus_of(find_text(source), field)
