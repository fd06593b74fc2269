"""The only code of jdp's core that knows Flax.

adapter.py    splits a module into plain trees of arrays, and merges them again
changes.py    carries changes that a call makes in modules out of a scan or a checkpoint
norms.py      batch statistics over several devices
several.py    one or several modules in a custom loop
structure.py  compares the structure of two modules
"""

from jdp.core.flax_nnx.adapter import Adapter as Adapter
from jdp.core.flax_nnx.adapter import built as built
from jdp.core.flax_nnx.adapter import is_pattern as is_pattern
from jdp.core.flax_nnx.adapter import matches as matches
from jdp.core.flax_nnx.adapter import metadata as metadata
from jdp.core.flax_nnx.adapter import split as split
from jdp.core.flax_nnx.several import Models as Models
from jdp.core.flax_nnx.several import gradient_state as gradient_state
from jdp.core.flax_nnx.several import is_module as is_module
from jdp.core.flax_nnx.several import is_optimizer as is_optimizer
from jdp.core.flax_nnx.several import map_parameters as map_parameters
from jdp.core.flax_nnx.several import module_inside as module_inside
from jdp.core.flax_nnx.several import opened as opened
from jdp.core.flax_nnx.several import parameters as parameters
from jdp.core.flax_nnx.several import plain as plain
from jdp.core.flax_nnx.several import shared as shared
from jdp.core.flax_nnx.several import write_back as write_back
