"""What a step sends, compared with what its strategy promises.

`theory.py` is the promise and `contract.py` the comparison. `origin.py` finds the source line and the parameter of a
collective's tensors. `breaches.py` and `symptoms.py` report what is wrong, `sends.py` each tensor by source line.
"""
