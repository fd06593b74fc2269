"""Weights to start from: another run's, a checkpoint's or a safetensors file's, read onto a fresh state.

1. Find what the path leads to, before anything is written.
2. Read parameters and model state onto the state's shardings. LoRA parameters may be missing: they stay as they began.
3. The optimizer starts anew from these weights: an average of parameters begins at them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jdp.checkpoint import CheckpointError, restore_params
from jdp.checkpoint.safetensors import Names, files, gpt2_names, import_safetensors, llama_names
from jdp.checkpoint.safetensors.hugging_face_config import NAME as CONFIG
from jdp.checkpoint.safetensors.hugging_face_config import differences
from jdp.core.optim.checks import first_state
from jdp.core.paths import path_of
from jdp.core.sharding.plan import Plan
from jdp.core.state import TrainState, trained_part
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment

LORA = ("*lora_*",)
"""Parameters that the weights of a model without LoRA lack."""
SAFETENSORS = ".safetensors"


def check_init_from(experiment: Experiment) -> None:
    """What `train.init_from` leads to is there, and of this model as far as a `config.json` of Hugging Face's says.

    Raises:
        ExperimentError: it leads nowhere; or the weights are of another model: the keys to set.
    """
    if experiment.train.init_from is None:
        return
    path = Path(experiment.train.init_from)
    if not path.exists():
        raise ExperimentError(
            f"train.init_from must be a {SAFETENSORS} file, the folder of a run or a checkpoint; there is no {path}"
        )
    config: Any = experiment.model.config
    if experiment.train.init_names == "jdp" or not _is_safetensors(path):
        return
    try:
        found = differences(path, config)
    except CheckpointError as error:
        raise ExperimentError(f"train.init_from: {error}") from error
    if found:
        folder = path if path.is_dir() else path.parent
        raise ExperimentError(
            f"train.init_from leads to weights of another model, as {folder / CONFIG} says: set "
            f'{", ".join(f"model.{one}" for one in found)}; or take all of it, model.name = "hf:{folder}"'
        )


def _is_safetensors(path: Path) -> bool:
    folder = (path / f"model{SAFETENSORS}", path / f"model{SAFETENSORS}.index.json")
    return path.suffix == SAFETENSORS or any(file.exists() for file in folder)


def load_parameters(state: TrainState, experiment: Experiment, plan: Plan) -> tuple[TrainState, str]:
    """`state` with the parameters that `train.init_from` leads to, and what was read, in words.

    Raises:
        ValueError: there is no checkpoint, it does not fit the model (the first leaf that differs), or it is damaged.
    """
    path = Path(experiment.train.init_from or "")
    read = _import(path, state, experiment) if _is_safetensors(path) else restore_params(path, state, missing=LORA)
    before, after = jax.tree.leaves_with_path(state.params), jax.tree.leaves(read.params)
    kept = [path_of(place) for (place, old), new in zip(before, after, strict=True) if old is new]
    words = f"parameters from {path}"
    if kept:
        words += (
            f", but for {len(kept)} that it lacks and that start fresh: {', '.join(kept[:2])}{', …' * (len(kept) > 2)}"
        )
    return _with_fresh_optimizer(replace(state, params=read.params, model_state=read.model_state), plan), words


def _import(path: Path, state: TrainState, experiment: Experiment) -> TrainState:
    """From a safetensors file; what does not fit may be a matter of names, which a key of the experiment chooses."""
    try:
        return import_safetensors(path, state, names=_names(experiment, path), missing=LORA)
    except CheckpointError as error:
        if experiment.kind != "text":
            raise
        raise ExperimentError(
            f'train.init_from: {error} (Names were read as train.init_names = "{experiment.train.init_names}" says; a '
            'GPT from Hugging Face has those of "gpt2" or "llama".)'
        ) from error


def _names(experiment: Experiment, path: Path) -> Names | None:
    """Which tensor of the file holds which parameter; None: the parameters' own paths."""
    config: Any = experiment.model.config
    match experiment.train.init_names:
        case "gpt2":  # the hub's own files of GPT-2 lack the prefix that Hugging Face's library writes
            prefixed = any(name.startswith("transformer.") for name in files.read(path))
            return gpt2_names(config, prefix="transformer." if prefixed else "")
        case "llama":
            return llama_names(config)
        case "jdp":
            return None


def _with_fresh_optimizer(state: TrainState, plan: Plan) -> TrainState:
    tx, trained = state.static.tx, state.static.trained
    begin = jax.jit(
        lambda params: first_state(tx, trained_part(params, trained)), out_shardings=plan.shardings(state).opt_state
    )
    return replace(state, opt_state=begin(state.params))
