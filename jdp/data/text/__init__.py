"""Text as samples.

`documents.py` reads a source, some documents at a time; `tokenizers.py` turns them into tokens; `tokens.py` joins them
in one array of each side (`token_array.py`): in memory, of which `token_cache.py` keeps a copy for the next run, or in
files that processes map (`token_files.py`); `samples.py` and `packing.py` make samples of fixed length.
"""
