"""The keys of an experiment file: strict, frozen models, each field with its line of `jdp train --help-all`.

`experiment.py` is the whole file, with the rules between keys; `model.py` and `tables.py` are its tables; `fields.py`
has the kinds of value, `make.py` the user's functions.
"""
