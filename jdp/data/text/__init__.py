"""Text as samples.

`documents.py` reads a source, some documents at a time, and `tokenizers.py` turns them into tokens; `id_rows.py` reads
rows of ids and their weights. `sides.py` splits the documents, and joins each side in three arrays: ids, bounds and
weights (`token_array.py`), in memory or in files that processes map. `samples.py` makes samples of fixed length, cut
anywhere or packed.
"""
