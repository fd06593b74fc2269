"""Images as samples.

`sources.py` finds what reads a source (`from_folders.py`, `from_tables.py`, `from_arrays.py`), `decode.py` makes pixels
of it, `samples.py` a data set.
"""
