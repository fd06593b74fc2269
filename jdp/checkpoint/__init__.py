"""Weights on disk: checkpoints, and safetensors under other libraries' names.

Checkpoints are written in the background, and always restored onto the plan at hand.

`errors` reports what went wrong in one sentence; `trees` is what is saved, and `content` how it is held and read onto a
target; `checksums` finds what has changed on the disk since it was saved, and `damage` reads the newest that is whole
in its place; `ownership` decides what in a directory may be moved or deleted; `directory` keeps several checkpoints,
one a step; `single` is one in a folder of its own. `held` is what stands on this host for checkpoints behind an address
such as s3://bucket/run, and `remote` a directory of such. `safetensors` is weights alone, in files that other libraries
read.
"""

from jdp.checkpoint.damage import Checked, check
from jdp.checkpoint.directory import Checkpoints
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.remote import RemoteCheckpoints
from jdp.checkpoint.single import restore, restore_params, save

__all__ = [
    "Checked",
    "CheckpointError",
    "Checkpoints",
    "RemoteCheckpoints",
    "check",
    "restore",
    "restore_params",
    "save",
]
