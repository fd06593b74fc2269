"""Text as samples.

`documents.py` reads a source, some documents at a time, and `tokenizers.py` turns them into tokens; `id_rows.py` reads
rows of ids, and their weights. `tokens.py` joins
those in one array for each side (`token_array.py`). It is in memory, with a copy on disk for the next run, or in files
that processes map (`token_files.py`). `samples.py` and `packing.py` make samples of fixed length.
"""
