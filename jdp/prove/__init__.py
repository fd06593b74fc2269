"""Equivalence with one device.

Does a step learn the same on one device and on many, whatever is sharded and how?
"""

from jdp.prove.equivalence import Difference, Made, Proof, Run, Setting, Skip, Training, prove, prove_training, space_of

__all__ = [
    "Difference",
    "Made",
    "Proof",
    "Run",
    "Setting",
    "Skip",
    "Training",
    "prove",
    "prove_training",
    "space_of",
]
