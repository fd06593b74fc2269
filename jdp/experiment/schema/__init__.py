"""The keys of an experiment file: strict, frozen models, each field with its line of `jdp train --help-all`.

`experiment.py` is the whole file and the rules between tables; `fields.py` the kinds of value; the others a table each.
"""
