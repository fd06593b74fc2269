"""One checkpoint in a folder of its own: `jdp.save`, and reading it or any other that a path leads to.

It is written beside its place and moved there when it is whole, so that a crash at any moment leaves the path as it was
or as it should be (between two moves, with `overwrite`: absent, and what was there before under `.NAME.old`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jdp.checkpoint import content, ours
from jdp.checkpoint.directory import Checkpoints
from jdp.checkpoint.errors import CheckpointError, write_error
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.core.user_path import user_path

RUN_FOLDER = "checkpoints"
"""Where the folder of a run has them."""


def save(path: str | Path, state: TrainState, *, overwrite: bool = False) -> None:
    """Write `state` to the folder `path`, and return when it is there. Every process calls this.

    Args:
        path: a folder that does not exist or is empty. All processes must see the same one.
        state: the whole state, of any plan.
        overwrite: replace the checkpoint that is there; anything else is never replaced.

    Raises:
        CheckpointError: there is something at `path`, it cannot be written, or the state is abstract; nothing was
            changed.
    """
    content.check_values(content.leaves_of(state, ("params", "step")))
    path = _absolute(path)
    path = path.resolve() if path.is_symlink() else path
    _check_free(path, overwrite)
    beside, old = path.with_name(f".{path.name}.saving"), _old(path)
    if old.is_symlink() or (old.exists() and not content.is_checkpoint(old)):
        raise CheckpointError(f"{old} is where the checkpoint before is kept for a moment, and is none. Move it away.")
    _on_first_process(lambda: ours.clear(beside))
    try:
        with Checkpoints(beside, keep=None) as checkpoints:
            checkpoints.save(state)
        _on_first_process(lambda: _move(beside / str(int(state.consumed)), path))
    except (CheckpointError, OSError) as error:
        cause = error.__cause__ if isinstance(error, CheckpointError) and error.__cause__ else error
        raise write_error(f"{path} was not saved", cause) from error
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(beside, ignore_errors=True)


def restore(path: str | Path, target: TrainState) -> TrainState:
    """Read a checkpoint onto the shardings of `target`: any strategy, mesh and number of devices.

    Args:
        path: what `jdp.save` wrote; or a directory of `jdp.Checkpoints` or the folder of a run, whose newest is read;
            or the folder of one step.
        target: `jdp.abstract_state(...)`, or a real state; its values are not read.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit `target` (the first leaf that differs), or it is
            damaged.
    """
    folder, fix = _find(_absolute(path))
    return content.read_state(folder, target, fix)


def restore_params(
    path: str | Path, target: PyTree, *, missing: Sequence[str] = (), ignore: Sequence[str] = ()
) -> PyTree:
    """Read the parameters and the model state only, for inference or to start anew from them.

    Nothing else is read from disk, so no memory is taken by the optimizer's state: onto `jdp.abstract_state(...)` the
    result has arrays in `params` and `model_state`, `.model` works, and all other leaves stay abstract. Onto a real
    state those keep their values; an optimizer whose state holds the parameters (an average of them) still holds the
    target's.

    Args:
        path: as for `restore`.
        target: a state, real or abstract, with any optimizer; or a tree of parameters that have shardings, such as
            `jdp.abstract_state(...).params`: then a tree of parameters is returned.
        missing: path patterns (`fnmatch`, as in `Plan.rules`) of parameters that the checkpoint may lack, such as
            `("*/lora_*",)`; they keep the values of `target`, which must be real.
        ignore: path patterns of those in the checkpoint that are left unread, as if it lacked them; each must match.
            `("*/lora_*",)` reads the base weights of a model with LoRA into the plain model.

    Raises:
        CheckpointError: as for `restore`; or a pattern of `ignore` matches nothing.
    """
    folder, fix = _find(_absolute(path))
    return content.read_params(folder, target, fix, missing=missing, ignore=ignore)


def _check_free(path: Path, overwrite: bool) -> None:
    """Nothing but a checkpoint is ever replaced, and that only where it is asked for."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not content.is_checkpoint(path):
        raise CheckpointError(f"{path} is there already and is not a checkpoint, so it is left alone. Choose another.")
    if not overwrite:
        raise CheckpointError(f"{path} holds a checkpoint already. Choose another path, or pass overwrite=True.")


def _move(fresh: Path, path: Path) -> None:
    """Put `fresh` where `path` is."""
    old = _old(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _absolute(path: str | Path) -> Path:
    return user_path(path).absolute()


def _on_first_process(act: object) -> None:
    """Process 0 acts, all go on when it has."""
    if jax.process_index() == 0:
        act()  # pyright: ignore[reportCallIssue]
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jdp.save")


def _find(path: Path) -> tuple[Path, str]:
    """The folder of the checkpoint that `path` leads to, and what to do where it is damaged."""
    if content.is_checkpoint(path):
        return path, "Restore another checkpoint"
    for directory in (path, path / RUN_FOLDER):
        steps = ours.steps_of(directory)
        if steps:
            others = ", ".join(map(str, steps[:-1]))
            fix = f"Restore an earlier one, {directory}/STEP (there are: {others})" if others else "There is no other"
            return directory / str(steps[-1]), fix
    raise CheckpointError(f"{path} {_why_not(path)}. {_FIX}")


_FIX = "Pass what jdp.save wrote, a directory of jdp.Checkpoints, one of its steps' folders, or the folder of a run."


def _why_not(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if (path / "state").is_dir():
        return "is a checkpoint that was never finished: the process that wrote it died"
    return "is not a checkpoint and holds none"
