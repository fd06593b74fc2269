"""Equivalence with one device.

Does a step learn the same on one device and on many, whatever is sharded and how?
"""

from jdp.prove.equivalence import prove
from jdp.prove.proof import Proof, Run
from jdp.prove.runs import Setting

__all__ = ["Proof", "Run", "Setting", "prove"]
