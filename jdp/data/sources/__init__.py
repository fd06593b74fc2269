"""Sources of data.

`files.py` finds files of text, `hub.py` what `datasets` reads, and `array_files.py` reads arrays. `columns.py` checks
the names of columns; `optional_packages.py` imports packages that only some sources need.
"""
