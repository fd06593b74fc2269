"""Memory of a device at a step's peak, by class.

`peak.py` adds up what `aliasing.py` (which arrays share memory), `liveness.py` (when each buffer is held) and
`roles.py` (which are weights, which gradients) find; `zero_formula.py` is the closed form of the ZeRO paper.
"""
