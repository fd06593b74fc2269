"""Images as samples.

`sources.py` opens what a user names with `from_folders.py`, `from_tables.py`, `from_tars.py` or `from_arrays.py`;
`decode.py` turns an encoded picture into pixels; `samples.py` makes a data set; `augment.py` crops and flips its
training side.
"""
