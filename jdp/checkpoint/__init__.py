"""Weights on disk: checkpoints, and safetensors under other libraries' names.

Checkpoints are written in the background, and restored onto any plan.

single         one checkpoint in a folder
directory      several, one for each step
content        the leaves of a checkpoint, read onto a target
stored         its files: Orbax' arrays, checksums
upkeep         which entries of a directory are jdp's, which to keep, which are damaged
mirror         copies in object storage; `memory/` those in the hosts' memory
errors         errors in one sentence; retries
safetensors/   weights alone, in files that other libraries read
"""

from jdp.checkpoint.directory import Checkpoints
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.single import restore, restore_params, save
from jdp.checkpoint.upkeep import Checked, check

__all__ = ["Checked", "CheckpointError", "Checkpoints", "check", "restore", "restore_params", "save"]
