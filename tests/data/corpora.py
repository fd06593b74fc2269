"""Tables in files, and all documents of a source in memory, as `text_data` reads them."""

import pyarrow
import pyarrow.parquet

from jdp.data.text.documents import corpus_of, find_text, find_token_ids, text_parts, token_id_parts


def parquet(file, table):
    pyarrow.parquet.write_table(table, file, row_group_size=3)


def arrow(file, table, new=pyarrow.ipc.new_stream):
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def arrow_file(file, table):
    arrow(file, table, pyarrow.ipc.new_file)


def read_corpus(source, *, suffixes=None, field="text"):
    found = find_text(source, suffixes=suffixes)
    return corpus_of(found.name, text_parts(found, field))


def read_token_ids(source, *, suffixes=None, field="input_ids"):
    found = find_token_ids(source, suffixes=suffixes)
    return corpus_of(found.name, token_id_parts(found, field))
