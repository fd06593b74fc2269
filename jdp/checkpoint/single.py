"""One checkpoint in its own folder: `jdp.save`, and reading any checkpoint by path.

A checkpoint is written to `.NAME.saving` beside its path and moved when it is complete. So a crash leaves either the
old or the new checkpoint at the path. With `overwrite`, only `.NAME.old` exists for a moment between two moves.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jdp.base.errors import public
from jdp.base.user_path import user_path
from jdp.checkpoint import content, upkeep
from jdp.checkpoint.content import Content, Source, check_values
from jdp.checkpoint.directory import Checkpoints
from jdp.checkpoint.errors import CheckpointError, on_first_process, write_error
from jdp.checkpoint.stored import ARRAYS, COMMITTED, Stored, is_checkpoint
from jdp.core.state import TrainState
from jdp.core.types import PyTree

_T = TypeVar("_T")


@public()
def save(path: str | Path, state: Any, *, overwrite: bool = False) -> None:
    """Write `state` to the folder `path`, and return when it is complete. Every process calls this.

        >>> jdp.save("checkpoint", state)
        >>> jdp.save("checkpoint", {"weights": state.params, "epoch": 3}, overwrite=True)  # any tree

    Args:
        path: a folder that does not exist or is empty; all processes must see the same folder.
        state: the complete train state, under any plan; or any tree of arrays, numbers, NNX modules and optimizers.
        overwrite: True replaces a checkpoint at `path`, for a loop that keeps only its last. Other files stay.

    Raises:
        CheckpointError: `path` exists, or cannot be written, or the state is abstract; nothing was changed.
    """
    path = user_path(path).absolute()
    check_values(Content.of(state).leaves)
    step = int(state.consumed) if isinstance(state, TrainState) else 0
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not is_checkpoint(path):
            raise CheckpointError(f"{path} exists and is not a checkpoint, so it is left alone. Choose another path.")
        if not overwrite:
            raise CheckpointError(f"{path} holds a checkpoint already. Choose another path, or pass overwrite=True.")
    staging = path.with_name(f".{path.name}.saving")
    on_first_process(lambda: _clear(staging, _old_path(path)))
    try:
        with Checkpoints(staging, keep=None) as checkpoints:
            checkpoints.save(state, step=step)
        on_first_process(lambda: replace_folder(path, staging / str(step)))
    except (CheckpointError, OSError) as error:
        raise write_error(f"{path} was not saved", error) from error
    finally:
        if jax.process_index() == 0:
            upkeep.remove(staging)


@public()
def restore(path: str | Path, target: _T) -> _T:
    """Read a checkpoint onto the shardings of `target`: any strategy, mesh and number of devices.

        >>> jdp.save("checkpoint", state)
        >>> four = jdp.Plan(jdp.make_mesh(data=4, devices=jax.devices()[:4]), "zero1")
        >>> target = jdp.abstract_state(init, optax.adam(1e-3), four, rng=jax.random.key(0))
        >>> state = jdp.restore("checkpoint", target)
        >>> state.params["kernel"].sharding.mesh.shape["data"]
        4

    Args:
        path: a checkpoint of `jdp.save`, or the folder of one step; or a directory of `jdp.Checkpoints` or the folder
            of a run, to read its newest complete checkpoint.
        target: `jdp.abstract_state(...)`, a real state, or a tree like the saved one; its values are not read.

    Returns:
        The state or tree, with the shardings of `target`.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit `target` (the first different leaf is named), or it is
            damaged.
        ValueError: a leaf of `target` has no sharding.
    """
    return read_at(path, lambda source: content.read_state(source, target))


@public()
def restore_params(
    path: str | Path, target: PyTree, *, missing: Sequence[str] = (), ignore: Sequence[str] = ()
) -> PyTree:
    """Read only the parameters and the model state, for inference or to start a new training.

        >>> jdp.save("checkpoint", state)
        >>> other = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(1))  # another optimizer
        >>> other = jdp.restore_params("checkpoint", other)
        >>> bool((other.params["kernel"] == state.params["kernel"]).all())
        True

    Nothing else is read from disk, so the optimizer's state takes no memory.

    Args:
        path: as for `restore`.
        target: a state, real or abstract, with any optimizer; or a tree of parameters with shardings, such as
            `jdp.abstract_state(...).params`, to get a tree of parameters.
        missing: path patterns (`fnmatch`, as in `Plan.rules`) of parameters that the checkpoint may lack. Pass
            `("*/lora_*",)` to add LoRA to a model that was saved without it. These parameters keep the values of
            `target`, which must be real.
        ignore: path patterns of parameters in the checkpoint to skip; each must match. Pass `("*/lora_*",)` to read the
            base weights of a model with LoRA into the plain model.

    Returns:
        For an abstract state: a state with arrays in `params` and `model_state`, so that `.model` works; other leaves
            stay abstract. For a real state: a state whose other leaves keep their values, also an average of the
            parameters in the optimizer state. For a tree of parameters: such a tree.

    Raises:
        CheckpointError: as `restore` does; or a pattern of `ignore` matches nothing.
        ValueError: a leaf of `target` has no sharding.
    """
    return read_at(path, lambda source: content.read_params(source, target, missing=missing, ignore=ignore))


def _clear(staging: Path, old: Path) -> None:
    """Delete an earlier save's temporary folder. Raises CheckpointError for a folder of the user's."""
    for folder in (staging, old):
        is_own = upkeep.is_marked(folder) or is_checkpoint(folder)
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if folder.is_symlink() or (folder.exists() and not is_empty and not is_own):
            raise CheckpointError(
                f"{folder} is jdp's temporary folder for a checkpoint, but jdp did not write it. Move it away, or "
                "choose another path."
            )
    upkeep.remove(staging)


def replace_folder(path: Path, fresh: Path) -> None:
    """Move the folder `fresh` to `path`, in place of a folder there, which stays if the move fails."""
    old = _old_path(path)
    shutil.rmtree(old, ignore_errors=True)
    if replaced := path.exists():
        path.rename(old)
    try:
        fresh.rename(path)
    except OSError:
        if replaced:
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _old_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def read_at(path: str | Path, read: Callable[[Source], _T]) -> _T:
    """Read the checkpoint at a path; in a directory, the newest complete one."""
    path = user_path(path).absolute()
    if is_checkpoint(path):
        return read(Stored(path, "Restore another checkpoint"))
    for directory in (path, path / upkeep.RUN_FOLDER):
        if upkeep.committed_steps(directory):
            return upkeep.read_newest(directory, read, aside=False)[1]
    problem = "is not a checkpoint and holds none"
    if not path.exists():
        problem = "does not exist"
    elif (path / ARRAYS).is_dir():
        problem = f"is a checkpoint without its {COMMITTED}, which was lost or never written"
    raise CheckpointError(
        f"{path} {problem}. Pass a checkpoint of jdp.save, a directory of jdp.Checkpoints, one of its steps' folders, "
        "or the folder of a run."
    )
