"""Equivalence with one device.

`prove` tests that a step learns the same on one device and on many, under every strategy.
"""

from jdp.prove.equivalence import prove
from jdp.prove.proof import Proof, Run
from jdp.prove.runs import Setting

__all__ = ["Proof", "Run", "Setting", "prove"]
