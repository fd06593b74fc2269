"""The traffic of a step, compared with its strategy's promise: `theory.py`, `contract.py`.

`origin.py` finds the line and the parameter of a tensor, `faults.py` reports faults and symptoms.
"""
