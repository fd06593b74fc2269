"""Equivalence with one device.

Does a step learn the same on one device and on many, whatever is sharded and how?
"""

from jdp.prove.equivalence import Difference as Difference
from jdp.prove.equivalence import Made as Made
from jdp.prove.equivalence import Proof as Proof
from jdp.prove.equivalence import Run as Run
from jdp.prove.equivalence import Setting as Setting
from jdp.prove.equivalence import Skip as Skip
from jdp.prove.equivalence import Training as Training
from jdp.prove.equivalence import prove as prove
from jdp.prove.equivalence import prove_training as prove_training
from jdp.prove.equivalence import space_of as space_of
