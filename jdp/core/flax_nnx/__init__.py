"""The only code of jdp's core that knows Flax: modules as plain trees of arrays, and the changes that calls make."""

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
