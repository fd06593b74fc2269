"""Text as samples.

`documents.py` reads a source; `tokenizers.py` turns its documents into tokens, which `token_cache.py` keeps for the
next run; `tokens.py` joins them in one array (`token_array.py`); `samples.py` and `packing.py` make samples of
fixed length.
"""
