"""The traffic of a step, compared with its strategy's promise.

`theory.py` is the promise and `contract.py` the comparison. `origin.py` finds the source line and the parameter of a
collective's tensors. `breaches.py` and `symptoms.py` report faults, `sends.py` each tensor by source line.
"""
