"""Everything jdp knows of Flax NNX.

`adapter`: how a module becomes plain trees of arrays, and back. `changes`: what a call changes in modules that it gets
as copies. `norms`: batch statistics over several devices. `structure`: when two modules are made alike.
"""

from jdp.core.flax_nnx.adapter import Adapter as Adapter
from jdp.core.flax_nnx.adapter import built as built
from jdp.core.flax_nnx.adapter import matches as matches
from jdp.core.flax_nnx.adapter import split as split
