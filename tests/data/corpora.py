"""All documents of a source in memory, as `text_data` reads them."""

from jdp.data.text.documents import corpus_of, find_text, find_token_ids, text_parts, token_id_parts


def read_corpus(source, *, suffixes=None, field="text"):
    found = find_text(source, suffixes=suffixes)
    return corpus_of(found.name, text_parts(found, field))


def read_token_ids(source, *, suffixes=None, field="input_ids"):
    found = find_token_ids(source, suffixes=suffixes)
    return corpus_of(found.name, token_id_parts(found, field))
