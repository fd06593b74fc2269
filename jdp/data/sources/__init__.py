"""What a user names, and the formats behind it.

`files.py` and `hub.py` find it; `tables.py`, `array_files.py` and `compressed.py` read it; `optional_packages.py`
imports what only some formats need.
"""
