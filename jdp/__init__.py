"""jdp: data-parallel training on JAX sharding.

Wrap the Flax training loop you have, change one word (`ddp`, `zero1`, `zero2`, `zero3`), and know before you launch
what every device will hold, send and wait for.
"""

from jdp.checkpoint import Checkpoints as Checkpoints
from jdp.data.feed import Feed as Feed
from jdp.data.feed import process_rows as process_rows
from jdp.data.feed import shard_batches as shard_batches
from jdp.distributed import initialize as initialize
from jdp.init import abstract_state as abstract_state
from jdp.init import init_state as init_state
from jdp.layers import scan_layers as scan_layers
from jdp.mesh import make_mesh as make_mesh
from jdp.placement import Placement as Placement
from jdp.plan import Plan as Plan
from jdp.precision import Precision as Precision
from jdp.state import TrainState as TrainState
from jdp.step import Step as Step
from jdp.step import make_eval_step as make_eval_step
from jdp.step import make_train_step as make_train_step
from jdp.types import Loss as Loss

__version__ = "0.1.0"
