"""Initial weights from another run, a checkpoint or a safetensors file, read onto a fresh state.

1. Check the path before anything is written.
2. Read parameters and model state onto the state's shardings. Missing LoRA parameters keep their initial values.
3. Make the optimizer's state for these weights; averaged parameters start from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jdp.base.tree_paths import path_of
from jdp.base.user_path import PathError, user_path
from jdp.checkpoint import CheckpointError, restore_params
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.hugging_face import gpt2_names, llama_names
from jdp.checkpoint.safetensors.hugging_face_config import NAME as CONFIG
from jdp.checkpoint.safetensors.hugging_face_config import differences, read
from jdp.checkpoint.safetensors.names import Names
from jdp.checkpoint.safetensors.transfer import import_safetensors
from jdp.core.plan import Plan
from jdp.core.state import TrainState, trained_part
from jdp.core.types import PyTree
from jdp.core.update.optimizer_checks import first_state
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment, Train
from jdp.experiment.schema.model import HF
from jdp.models.configs import GPTConfig

LORA = ("*lora_*",)
"""Parameters that only a model with LoRA has."""
SAFETENSORS = ".safetensors"
_IN_FOLDER = (f"model{SAFETENSORS}", f"model{SAFETENSORS}.index.json")
"""Files that identify a folder of safetensors."""


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from: `train.init_from`.

    Attributes:
        train: the table with their keys.
        place: a run, a checkpoint, a safetensors file or a folder of them.
    """

    train: Train
    place: Path

    @staticmethod
    def of(train: Train) -> InitialWeights:
        """Return the weights of train.init_from, which must be set."""
        assert train.init_from is not None
        return InitialWeights(train, user_path(train.init_from))

    def check(self, config: Any) -> None:
        """Check that the weights exist, and that the `config.json` beside each describes this model."""
        try:
            path = _safetensors(self.place)
            keys = differences(path, config) if path is not None and _is_hugging_face(path, config) else []
        except (CheckpointError, PathError) as error:
            raise ExperimentError(f"train.init_from: {error}") from error
        if path is not None and keys:
            folder = path if path.is_dir() else path.parent
            raise ExperimentError(
                f"train.init_from has the weights of another model, by {folder / CONFIG}: set "
                f'{", ".join(f"model.{key}" for key in keys)}; or use its whole config, model.name = "hf:{folder}"'
            )

    def load(self, state: TrainState, config: Any, plan: Plan) -> tuple[TrainState, str]:
        """Return the state with these parameters and a new optimizer state, and a line that names them."""
        given = self.train.init_from or ""
        path = _safetensors(self.place)
        read = restore_params(given, state, missing=LORA) if path is None else _import(path, state, config)
        before, after = jax.tree.leaves_with_path(state.params), jax.tree.leaves(read.params)
        fresh = [path_of(leaf_path) for (leaf_path, old), new in zip(before, after, strict=True) if old is new]
        message = f"parameters from {given}"
        if fresh:
            shown = ", ".join(fresh[:2]) + ", …" * (len(fresh) > 2)
            message += f", except {len(fresh)} that it lacks and that start fresh: {shown}"
        return _with_new_optimizer(replace(state, params=read.params, model_state=read.model_state), plan), message


def original_folder(experiment: Experiment) -> Path | None:
    """Return the folder of the Hugging Face model that the weights began as; None if it no longer exists."""
    name, place = experiment.model.name, experiment.train.init_from
    for path in map(user_path, (place, name.removeprefix(HF) if name.startswith(HF) else place) if place else ()):
        folder = path if path.is_dir() else path.parent
        if path.exists() and read(folder) is not None:
            return folder
    return None


def _safetensors(place: Path) -> Path | None:
    """Return the path of a safetensors file, or of a folder of them; None if it is a run or a checkpoint."""
    if not place.exists():
        raise ExperimentError(
            f"train.init_from must be a {SAFETENSORS} file, the folder of a run or a checkpoint; there is no {place}: "
            "fix the path, or remove the key"
        )
    return place if place.suffix == SAFETENSORS or any((place / file).exists() for file in _IN_FOLDER) else None


def _with_new_optimizer(state: TrainState, plan: Plan) -> TrainState:
    """Return the state with the optimizer's initial state for these parameters."""
    tx, trained = state.static.tx, state.static.trained

    def optimizer_state(params: PyTree) -> PyTree:
        return first_state(tx, trained_part(params, trained))

    begin = jax.jit(optimizer_state, out_shardings=plan.shardings(state).opt_state)
    return replace(state, opt_state=begin(state.params))


def _is_hugging_face(path: Path, config: Any) -> bool:
    """Return True if a GPT's file has Hugging Face's names, not jdp's paths such as embed/tokens."""
    return isinstance(config, GPTConfig) and not any("/" in name for name in files.read(path))


def names_of(path: Path, config: GPTConfig) -> Names:
    """Return the tensors' names in a Hugging Face file; GPT-2's names if positions are learned."""
    if config.positions != "learned":
        return llama_names(config)
    # the hub's own files lack the prefix that Hugging Face's library writes
    prefixed = any(name.startswith("transformer.") for name in files.read(path))
    return gpt2_names(config, prefix="transformer." if prefixed else "")


def _import(path: Path, state: TrainState, config: Any) -> TrainState:
    """Read a safetensors file by the names of its tensors. Raises ExperimentError if it does not fit."""
    try:
        names = names_of(path, config) if _is_hugging_face(path, config) else None
        return import_safetensors(path, state, names=names, missing=LORA)
    except ValueError as error:  # of another architecture too
        raise ExperimentError(f"train.init_from: {error}") from error
