"""Memory of a device at its peak, by class.

`peak.py` sums `aliasing.py`, `liveness.py` and `roles.py`; `zero_formula.py` is the closed form of the ZeRO paper.
"""
