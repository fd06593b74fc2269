"""Memory of a device at a step's peak, by class (`peak.py`).

`aliasing.py`: which arrays share memory. `liveness.py`: when each buffer is held. `roles.py`: which are weights, which
gradients. `zero_formula.py`: the closed form of the ZeRO paper.
"""
