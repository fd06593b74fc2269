"""Sources of data.

`files.py` finds files of text, `hub.py` reads data sets with `datasets`, and `array_files.py` reads arrays.
"""
