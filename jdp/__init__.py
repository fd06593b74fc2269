"""jdp: data-parallel training on JAX sharding.

Wrap the Flax training loop you have, change one word (`ddp`, `zero1`, `zero2`, `zero3`), and know before you launch
what every device will hold, send and wait for.

The examples of the reference go on from these lines:

    >>> import jax, jax.numpy as jnp, numpy as np, optax, jdp
    >>> from flax import nnx
    >>> plan = jdp.Plan(jdp.make_mesh(data=-1), "zero3")
    >>> def init(rng):
    ...     return nnx.Linear(64, 32, rngs=nnx.Rngs(rng))
    >>> def loss_fn(model, batch, rng):
    ...     error = (model(batch["x"]) - batch["y"]) ** 2
    ...     return jdp.Loss(total=error.sum(), weight=len(batch["x"]))
    >>> batch = {"x": np.ones((16, 64), "float32"), "y": np.zeros((16, 32), "float32")}
    >>> state = jdp.init_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp import checkpoint as checkpoint
    from jdp import data as data
    from jdp import export as export
    from jdp import guard as guard
    from jdp import models as models
    from jdp import prove as prove
    from jdp.base.machine import keep_memory as keep_memory
    from jdp.checkpoint.directory import Checkpoints as Checkpoints
    from jdp.checkpoint.errors import CheckpointError as CheckpointError
    from jdp.checkpoint.single import restore as restore
    from jdp.checkpoint.single import restore_params as restore_params
    from jdp.checkpoint.single import save as save
    from jdp.core.cluster.initialize import initialize as initialize
    from jdp.core.compiling.persistent_cache import keep_programs as keep_programs
    from jdp.core.gather_rows import gather_rows as gather_rows
    from jdp.core.init.train_state import abstract_state as abstract_state
    from jdp.core.init.train_state import init_state as init_state
    from jdp.core.init.trees import init as init
    from jdp.core.init.trees import place as place
    from jdp.core.layers import scan_layers as scan_layers
    from jdp.core.plan import Plan as Plan
    from jdp.core.precision import Precision as Precision
    from jdp.core.sharding.mesh import make_mesh as make_mesh
    from jdp.core.sharding.placement import Placement as Placement
    from jdp.core.state import TrainState as TrainState
    from jdp.core.step import Step as Step
    from jdp.core.step import make_eval_step as make_eval_step
    from jdp.core.step import make_train_step as make_train_step
    from jdp.core.types import Loss as Loss
    from jdp.core.update.ema import ema_params as ema_params
    from jdp.core.update.ema import with_ema as with_ema
    from jdp.core.update.muon import muon as muon
    from jdp.core.update.schedules import scaled_lr as scaled_lr
    from jdp.core.update.schedules import warmup as warmup
    from jdp.core.value_and_grad import ValueAndGrad as ValueAndGrad
    from jdp.core.value_and_grad import value_and_grad as value_and_grad
    from jdp.data.feed import Feed as Feed
    from jdp.data.feed import process_rows as process_rows
    from jdp.data.feed import shard_batches as shard_batches
    from jdp.foresight.foresee import foresee as foresee
    from jdp.foresight.verify import verify as verify
    from jdp.guard.deadline import Deadline as Deadline

__version__ = "0.1.0"

_PUBLIC = {
    "base.machine": ("keep_memory",),
    "checkpoint.directory": ("Checkpoints",),
    "checkpoint.errors": ("CheckpointError",),
    "checkpoint.single": ("restore", "restore_params", "save"),
    "core.cluster.initialize": ("initialize",),
    "core.compiling.persistent_cache": ("keep_programs",),
    "core.gather_rows": ("gather_rows",),
    "core.init.train_state": ("abstract_state", "init_state"),
    "core.init.trees": ("init", "place"),
    "core.layers": ("scan_layers",),
    "core.plan": ("Plan",),
    "core.precision": ("Precision",),
    "core.sharding.mesh": ("make_mesh",),
    "core.sharding.placement": ("Placement",),
    "core.state": ("TrainState",),
    "core.step": ("Step", "make_eval_step", "make_train_step"),
    "core.types": ("Loss",),
    "core.update.ema": ("ema_params", "with_ema"),
    "core.update.muon": ("muon",),
    "core.update.schedules": ("scaled_lr", "warmup"),
    "core.value_and_grad": ("ValueAndGrad", "value_and_grad"),
    "data.feed": ("Feed", "process_rows", "shard_batches"),
    "foresight.foresee": ("foresee",),
    "foresight.verify": ("verify",),
    "guard.deadline": ("Deadline",),
}
"""Module -> its public names."""
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
_MODULES = ("checkpoint", "data", "export", "guard", "models", "prove")
"""Modules that `import jdp` alone makes reachable, when they are first used."""
__all__ = ["__version__", *_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # else each name would be there, misspelt ones too

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
