"""Images as samples.

The modules `from_folders.py`, `from_tables.py`, `from_tars.py` and `from_arrays.py` each open one kind of source, and
`sources.py` chooses among them. `decode.py` turns an encoded picture into pixels, `samples.py` makes a data set, and
`augment.py` crops and flips images to train on.
"""
