"""The only code of jdp's core that knows Flax NNX.

adapter.py    splits a module into plain trees of arrays, and merges them again
changes.py    carries changes that a call makes in modules out of a scan or a checkpoint
norms.py      batch statistics over several devices
structure.py  compares the structure of two modules
"""

from jdp.core.flax_nnx.adapter import Adapter as Adapter
from jdp.core.flax_nnx.adapter import built as built
from jdp.core.flax_nnx.adapter import matches as matches
from jdp.core.flax_nnx.adapter import split as split
