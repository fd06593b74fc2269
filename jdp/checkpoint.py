"""Checkpoints: written in the background, always restored onto the plan at hand.

A checkpoint holds the state's arrays by path and a small JSON record beside them. It knows nothing of meshes,
strategies or processes: `restore` takes an abstract state (`jdp.abstract_state`) and fills its leaves with the
shardings they ask for, so any strategy, mesh and device count reads what any other wrote. Orbax writes; a step counts
only once its commit file is there, so a run killed while saving finds the step before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jdp.plan import path_of
from jdp.state import TrainState
from jdp.types import PyTree


class Checkpoints:
    """A directory of checkpoints, one a step.

    Args:
        directory: made if it is not there. All processes must see the same one.
        keep: how many of the newest to keep; None keeps all.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3) -> None:
        self.directory = Path(directory).absolute()
        policy = ocp.checkpoint_managers.LatestN(keep) if keep is not None else None
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "leaves": ocp.JsonCheckpointHandler(),
                "record": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                cleanup_tmp_directories=True,
                atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE),
            ),
        )

    @property
    def latest(self) -> int | None:
        """The newest step: committed, or being written by this process; None when there is none."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps there are, committed or being written by this process, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, record: dict[str, Any] | None = None) -> None:
        """Save `state` under the number of batches it has consumed, in the background; `record` is any small JSON
        object.

        The arrays are copied off the devices before this returns, so the next step may donate them. A step that is
        there already is left as it is.
        """
        step = int(state.consumed)
        if step in self.steps:
            return
        arrays = _arrays(state)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            leaves=ocp.args.JsonSave(_leaves(arrays)),
            record=ocp.args.JsonSave(record or {}),
        )
        self._manager.save(step, args=items, force=True)

    def restore(self, target: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Read a checkpoint onto the shardings of `target`.

        Args:
            target: `jdp.abstract_state(...)`, or a real state; its values are not read.
            step: which one; None takes the newest.

        Raises:
            ValueError: there is no such checkpoint, or it does not fit `target`.
        """
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            have = ", ".join(map(str, self.steps)) or "none"
            which = "" if step is None else f" {step}"
            raise ValueError(f"There is no checkpoint{which} in {self.directory}; there are: {have}.")
        arrays = _arrays(target)
        texts = ocp.args.Composite(leaves=ocp.args.JsonRestore(), record=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=texts)
        _check_same(found["leaves"], _leaves(arrays), self.directory / str(step))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]
        rng = jax.random.wrap_key_data(arrays.pop("rng"), impl=_key_impl(target.rng))
        return replace(target, **arrays, rng=rng), found["record"]

    def wait(self) -> None:
        """Return when everything saved so far is committed; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arrays(state: TrainState) -> dict[str, PyTree]:
    """The state as plain arrays: the typed key as its words."""
    words = jax.eval_shape(jax.random.key_data, state.rng) if _abstract(state.rng) else jax.random.key_data(state.rng)
    if _abstract(state.rng):
        words = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=state.rng.sharding)
    names = ("step", "params", "opt_state", "model_state", "skipped")
    return {**{name: getattr(state, name) for name in names}, "rng": words}


def _leaves(arrays: PyTree) -> dict[str, str]:
    """What a checkpoint holds, leaf by leaf: path -> "float32[4,8]"."""
    return {path_of(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(arrays)}


def _check_same(saved: dict[str, str], wanted: dict[str, str], where: Path) -> None:
    """Compare leaf by leaf, parameters first, and name the first that differs."""
    for path in sorted(saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params"), path)):
        if saved.get(path) != wanted.get(path):
            raise ValueError(
                f"A checkpoint is restored into the same model and optimizer; {where} has {path} as "
                f"{saved.get(path, 'nothing')}, and {wanted.get(path, 'nothing')} is wanted."
            )


def _key_impl(rng: Any) -> Any:
    """The PRNG implementation of a typed key, abstract or not."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), rng)
    return found[0]


def _abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
