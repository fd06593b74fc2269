"""The compiled program: `compiled.py` makes it, `module.py` parses its text, `collectives.py` counts its traffic."""
