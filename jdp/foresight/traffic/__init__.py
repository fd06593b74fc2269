"""The traffic of a step (`sends.py`), compared with its strategy's promise: `theory.py`, `contract.py`.

`origin.py` finds the line and the parameter of a tensor, `breaches.py` and `symptoms.py` report faults.
"""
