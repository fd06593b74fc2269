"""Equivalence with one device.

`prove` tests that a step learns the same on one device and on many, under every strategy.
"""

from jdp.prove.equivalence import Proof, Run, Setting, prove

__all__ = ["Proof", "Run", "Setting", "prove"]
