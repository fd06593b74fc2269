"""Sources of data.

`files.py` finds files of text, `hub.py` what `datasets` reads, and `array_files.py` reads arrays.
"""
