"""Images as samples.

`sources.py` opens arrays and chooses among the kinds of sources; `from_hub.py` opens data sets for `datasets`.
`decode.py` turns an encoded picture into pixels, `samples.py` makes a data set, and `augment.py` crops and flips images
for training.
"""
