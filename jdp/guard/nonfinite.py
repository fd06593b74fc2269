"""Find the leaf and the batch of a step that is not finite.

The step itself only skips: it changes nothing, and counts. `Inspection` recomputes its gradient and update, and checks
every leaf. It names the first bad leaf in the order of computation: the batch, the parameters, the loss, the gradients
from the last layer to the first, the update. `save_batch` keeps the batch, for inspection or to repeat the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jdp.base.formatting import listed
from jdp.base.tree_paths import path_of
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.views import view_gradients
from jdp.core.reading import places_made
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on
from jdp.core.state import TrainState, trained_part
from jdp.core.step import Step
from jdp.core.types import Batch, PyTree
from jdp.core.update.optimizer import broken, clipped_update, fetched

SHOWN = 4  # leaves, and rows, in a sentence


@dataclass(frozen=True)
class Bad:
    """A leaf with NaN or infinities."""

    path: str
    places: tuple[int, ...]  # along its first dimension (rows of a batch, layers of a stack)
    size: int  # of that dimension

    def __str__(self) -> str:
        if len(self.places) == self.size:
            return self.path
        more = ", …" if len(self.places) > SHOWN else ""
        shown = ", ".join(map(str, self.places[:SHOWN]))
        return f"{self.path} (at {shown}{more} of {self.size} along its first dimension)"


@dataclass(frozen=True)
class Finding:
    """The leaves that are not finite in a step; each group is in the order of computation."""

    step: int  # number of the step
    batch: tuple[Bad, ...]  # leaves of the batch
    processes: tuple[int, ...]  # processes that read these rows of the batch
    params: tuple[Bad, ...]  # parameters that were not finite before the step
    loss: float  # the mean loss of the batch
    gradients: tuple[Bad, ...]  # the gradients, from the last layer to the first
    leaves: int  # number of gradients
    updated: tuple[Bad, ...] = ()  # new parameters and optimizer state, if the gradients are finite

    @property
    def sentences(self) -> list[str]:
        """The findings in words, the root cause first."""
        said: list[str] = []
        if self.batch:
            read = f", read by process {_listed(self.processes)}" if jax.process_count() > 1 else ""
            said.append(f"The batch of step {self.step} has NaN or infinities: {_listed(self.batch)}{read}.")
        if self.params:
            said.append(f"Before step {self.step} parameters were not finite: {_listed(self.params)}.")
        if not np.isfinite(self.loss):
            said.append(f"The loss of step {self.step} is {self.loss:g}: the forward pass broke.")
        elif self.gradients:
            said.append(f"The loss of step {self.step} is finite, {self.loss:.4g}: the backward pass broke.")
        if self.gradients:
            first = f"in the order of the backward pass first {_listed(self.gradients)}"
            said.append(f"{len(self.gradients)} of {self.leaves} gradients are not finite, {first}.")
        elif self.updated:
            said.append(
                f"The gradient of step {self.step} is finite; the optimizer's update is not. It would leave NaN or "
                f"infinities in {_listed(self.updated)}. Look at the learning rate (optimizer.lr)."
            )
        elif np.isfinite(self.loss):
            said.append(
                f"The gradient of step {self.step} is finite when it is recomputed on the weights of some steps later: "
                "it overflowed narrowly, or a device computed wrong."
            )
        return said


class Inspection:
    """Recomputes a step's gradient and update to find leaves that are not finite. The first call compiles."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._order: list[str] = []

    def of(self, state: TrainState, batch: Batch, done: int) -> Finding:
        """Recompute the gradient and update of step `done` on `state`. Every process must call it."""
        self._order = self._order or self._backward_order(state, batch)
        with tracing_on(self._step.plan.mesh):
            flags = jax.device_get(self._flags(state, batch, jnp.int32(done - 1)))
        inputs, gradients = _bad(flags["batch"]), _bad(flags["gradients"], self._order)
        rows = {place for leaf in inputs for place in leaf.places}
        readers, array = {0} if rows else set[int](), jax.tree.leaves(batch)[0]
        if rows and isinstance(array, jax.Array):
            held = array.sharding.devices_indices_map(array.shape).items()
            spans = [(device, range(*index[0].indices(array.shape[0]))) for device, index in held]
            readers = {device.process_index for device, span in spans if not rows.isdisjoint(span)}
        return Finding(
            done,
            inputs,
            tuple(sorted(readers)),
            _bad(flags["params"]),
            float(flags["loss"]),
            gradients,
            len(self._order),
            () if gradients else _bad(flags["updated"]),
        )

    @cached_property
    def _flags(self) -> Any:
        step = self._step

        def flags(state: TrainState, batch: Batch, consumed: jax.Array) -> dict[str, Any]:
            view = step.loss.view(state, batch)
            spec = step.loss.gradient_spec(state, view)
            spec = replace(spec, settings=replace(spec.settings, wire=None))  # before it is encoded
            key, params = jax.random.fold_in(state.rng, consumed), state.params
            grads, sums, _ = view_gradients(view.partitioning, spec, params, state.model_state, batch, key)
            found: dict[str, Any] = {"loss": sums.total / sums.weight}
            for name, tree in {"batch": batch, "params": params, "gradients": grads}.items():
                leaves = [(path_of(path), x) for path, x in jax.tree.leaves_with_path(tree) if x.size]
                floats = {path: x for path, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}
                found[name] = {path: _by_place(~jnp.isfinite(x)) for path, x in floats.items()}
            return found | {"updated": self._updated(state, grads, sums)}

        return jax.jit(flags, out_shardings=NamedSharding(step.plan.mesh, PartitionSpec()))

    def _updated(self, state: TrainState, grads: PyTree, sums: Sums) -> dict[str, jax.Array]:
        """Return path -> bool [n]: the rows of each leaf of the state that the update makes non-finite."""
        step, fields = self._step, ("params", "opt_state")
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, grads)
        state, grads = fetched(step.plan, state, grads)
        norm, loss = optax.tree.norm(grads), sums.total / sums.weight
        new = clipped_update(step.settings.clip_norm, state, grads, norm, loss)
        before = tuple(getattr(state, name) for name in fields)
        flags = dict(zip(fields, broken(before, new), strict=True))
        return {path_of(path): _by_place(x) for path, x in jax.tree.leaves_with_path(flags) if x.size}

    def _backward_order(self, state: TrainState, batch: Batch) -> list[str]:
        step = self._step
        spec = step.loss.gradient_spec(state)
        spec = replace(spec, settings=replace(spec.settings, accumulate=1, wire=None))

        def grads(params: PyTree) -> PyTree:
            return view_gradients("auto", spec, on_device(params), state.model_state, batch, state.rng)[0]

        with tracing_on(step.plan.mesh):
            jaxpr = jax.make_jaxpr(grads)(state.params)
        trained = jax.tree.leaves_with_path(trained_part(state.params, state.static.trained))
        places = dict(zip((path_of(path) for path, _ in trained), places_made(jaxpr.jaxpr), strict=True))
        return sorted(places, key=places.__getitem__)


def _by_place(flags: jax.Array) -> jax.Array:
    return flags.reshape(flags.shape[0] if flags.ndim else 1, -1).any(axis=1)


def _bad(flags: dict[str, NDArray[Any]], order: Sequence[str] | None = None) -> tuple[Bad, ...]:
    known = ((path, flags[path]) for path in order or flags if path in flags)
    leaves = (Bad(path, tuple(np.flatnonzero(where).tolist()), len(where)) for path, where in known)
    return tuple(leaf for leaf in leaves if leaf.places)


# The batch on disk.


def save_batch(folder: Path, done: int, batch: Batch) -> Path:
    """Write this process' rows of a batch to `batch-STEP.npz`, with several processes `batch-STEP-rank-00001.npz`."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"-rank-{jax.process_index():05}" if jax.process_count() > 1 else ""
    file = folder / f"batch-{done}{rank}.npz"
    arrays: dict[str, NDArray[Any]] = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        rows, values = _own_rows(leaf)
        values = values.astype(np.float32) if values.dtype.kind == "V" else values  # NumPy has no bfloat16
        arrays |= {"rows": rows, f"batch/{path_of(path)}": values}
    new = file.with_suffix(".new")
    with new.open("wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    new.replace(file)
    return file


def _own_rows(leaf: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices and values of this process' rows of a leaf."""
    if not isinstance(leaf, jax.Array):
        return np.arange(len(leaf)), np.asarray(leaf)
    blocks = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
    rows = [np.arange(start, start + blocks[start].shape[0]) for start in sorted(blocks)]
    return np.concatenate(rows), np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def _listed(things: Sequence[Any]) -> str:
    return listed(map(str, things), SHOWN)
