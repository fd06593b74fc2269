"""Sources of data, and their formats.

`files.py` and `hub.py` find it; `tables.py`, `array_files.py` and `compressed.py` read it; `optional_packages.py`
imports packages that only some formats need.
"""
