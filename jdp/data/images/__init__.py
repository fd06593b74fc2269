"""Images as samples.

`sources.py` opens arrays, and data sets that `datasets` reads. `decode.py` turns an encoded picture into pixels,
`samples.py` makes a data set, and `augment.py` crops and flips images for training.
"""
