"""Text as samples.

`documents.py` reads a source, `tokenizers.py` makes tokens of it, `tokens.py` one array of all of them (kept for the
next run by `token_cache.py`), `samples.py` and `packing.py` samples of fixed length.
"""
