"""The keys of an experiment file: strict, frozen models, each field with its line of `jdp train --help-all`.

`experiment.py` is the whole file, `rules.py` has the rules between keys, `fields.py` the kinds of value; the others
are a table or a few.
"""
