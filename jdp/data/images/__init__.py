"""Images as samples.

`from_arrays.py` and `from_hub.py` each open one kind of source, and `sources.py` chooses among them. `decode.py` turns
an encoded picture into pixels, `samples.py` makes a data set, and `augment.py` crops and flips images to train on.
"""
