"""Folders behind an address such as s3://bucket/run, through fsspec.

`address` tells an address from a path; `remote` reads and writes what is behind one; `scratch` is the folder on this
host in which it is prepared, or held while it is read. Nothing of jdp takes an address for a path: see `user_path`.
"""
