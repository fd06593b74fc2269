"""jdp: data-parallel training on JAX sharding.

Wrap the Flax training loop you have, change one word (`ddp`, `zero1`, `zero2`, `zero3`), and know before you launch
what every device will hold, send and wait for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp import export as export
    from jdp.averages import ema_params as ema_params
    from jdp.averages import with_ema as with_ema
    from jdp.checkpoint.directory import Checkpoints as Checkpoints
    from jdp.checkpoint.errors import CheckpointError as CheckpointError
    from jdp.checkpoint.single import restore as restore
    from jdp.checkpoint.single import restore_params as restore_params
    from jdp.checkpoint.single import save as save
    from jdp.data.feed import Feed as Feed
    from jdp.data.feed import process_rows as process_rows
    from jdp.data.feed import shard_batches as shard_batches
    from jdp.distributed import initialize as initialize
    from jdp.foresight.foresee import foresee as foresee
    from jdp.foresight.verify import verify as verify
    from jdp.init import abstract_state as abstract_state
    from jdp.init import init_state as init_state
    from jdp.layers import scan_layers as scan_layers
    from jdp.mesh import make_mesh as make_mesh
    from jdp.placement import Placement as Placement
    from jdp.plan import Plan as Plan
    from jdp.precision import Precision as Precision
    from jdp.schedules import scaled_lr as scaled_lr
    from jdp.schedules import warmup as warmup
    from jdp.state import TrainState as TrainState
    from jdp.step import Step as Step
    from jdp.step import make_eval_step as make_eval_step
    from jdp.step import make_train_step as make_train_step
    from jdp.types import Loss as Loss

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "checkpoint.errors",
    "Checkpoints": "checkpoint.directory",
    "Feed": "data.feed",
    "Loss": "types",
    "Placement": "placement",
    "Plan": "plan",
    "Precision": "precision",
    "Step": "step",
    "TrainState": "state",
    "abstract_state": "init",
    "ema_params": "averages",
    "foresee": "foresight.foresee",
    "init_state": "init",
    "initialize": "distributed",
    "make_eval_step": "step",
    "make_mesh": "mesh",
    "make_train_step": "step",
    "process_rows": "data.feed",
    "restore": "checkpoint.single",
    "restore_params": "checkpoint.single",
    "save": "checkpoint.single",
    "scaled_lr": "schedules",
    "scan_layers": "layers",
    "shard_batches": "data.feed",
    "verify": "foresight.verify",
    "warmup": "schedules",
    "with_ema": "averages",
}
_MODULES = ("export",)
"""Modules that `import jdp` alone makes reachable, when they are first used."""
__all__ = ["__version__", *_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `jdp --help` then needs no JAX."""
    if name not in (*_HOMES, *_MODULES):
        raise AttributeError(f"module 'jdp' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"jdp.{name}")
    value = getattr(importlib.import_module(f"jdp.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
