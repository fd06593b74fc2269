"""A GPT for writing text, from a run's folder or an export: located and checked first, its weights read later.

A run's averaged parameters are used if it has them (`optimizer.ema_decay`), as in its evaluations. An export is a
folder of Hugging Face's format: `config.json`, `model.safetensors` or shards, `tokenizer.json`. One device has it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jdp.base.toml import parse
from jdp.base.user_path import user_path
from jdp.checkpoint import Checkpoints, restore, restore_params
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.config import NAME as CONFIG
from jdp.checkpoint.safetensors.config import gpt_config_from_hf
from jdp.checkpoint.safetensors.transfer import import_safetensors
from jdp.checkpoint.upkeep import read_newest
from jdp.core.init.train_state import abstract_state
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import make_mesh
from jdp.core.state import TrainState
from jdp.core.types import Device
from jdp.data.text.tokenizers import FILE as TOKENIZER
from jdp.data.text.tokenizers import Tokenizer, open_tokenizer
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, load
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.fields import NONE
from jdp.models import GPT, GPTConfig
from jdp.run.evaluation import Best
from jdp.run.folder import CHECKPOINTS, FILE
from jdp.run.read_folder import find_run
from jdp.run.weights import names_of

BEST = "best"


@dataclass(frozen=True)
class TextModel:
    config: GPTConfig
    tokenizer: Tokenizer
    load: Callable[[Device], tuple[GPT, str]]  # reads the weights; with the folder and the step, for messages


def find_model(
    place: str, runs: Path, step: str | None = None, plugin: str | None = None, tokenizer: str | None = None
) -> TextModel:
    """Return the model of an export or a run, by its folder or by its name in `runs`, without the weights.

    `step` is a number, "best", or None for the newest; `tokenizer` replaces the one in the folder, or the run's. Raises
    ExperimentError if the folder, the model, the step or the tokenizer does not exist.
    """
    folder = user_path(place)
    if not (folder / CONFIG).is_file() or (folder / FILE).exists():
        return _of_run(place, runs, step, {} if plugin is None else {"plugin": plugin}, tokenizer)
    if step is not None:
        raise ExperimentError(f"an export has one model; given {folder} and step {step}: name the run, or no step")
    if tokenizer is None and not (folder / TOKENIZER).is_file():
        raise ExperimentError(
            f"text needs the model's tokenizer; {folder} has no {TOKENIZER}: copy it there from the original model, or "
            "give its folder (--tokenizer FOLDER)"
        )
    config = _on_any_device(gpt_config_from_hf(folder))
    opened = open_tokenizer(tokenizer or str(folder))
    return TextModel(config, opened, lambda device: (_imported(folder, config, device), str(folder)))


def _imported(folder: Path, config: GPTConfig, device: Device) -> GPT:
    """Read an export in float32; on GPUs and TPUs bfloat16 weights stay bfloat16."""
    names, target = names_of(folder, config), _abstract(config, device)
    stored = next(iter(files.read(folder).values())).dtype
    if stored == jnp.bfloat16 and device.platform != "cpu":
        target = replace(target, params=jax.tree.map(lambda leaf: leaf.update(dtype=stored), target.params))
    return import_safetensors(folder, target, names=names).model


# A run.


def _of_run(place: str, runs: Path, step: str | None, plugin: Mapping[str, str], tokenizer: str | None) -> TextModel:
    folder = find_run(place, runs)
    experiment = _experiment(folder, plugin)
    if tokenizer is None and not experiment.data.knows_text:
        raise ExperimentError(
            f"text needs the model's tokenizer; {folder} learned token ids, and names none: give the folder of the "
            f"{TOKENIZER} that made them (--tokenizer FOLDER)"
        )
    config = _on_any_device(experiment.model.config)
    saved = sorted(int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal())
    there = ", ".join(map(str, saved))
    if not saved:
        raise ExperimentError(f"a model is read from a checkpoint; {folder} has none yet: wait for one, or train on")
    chosen = _best(experiment, folder / CHECKPOINTS, there) if step == BEST else step
    if chosen is not None and chosen not in map(str, saved):
        raise ExperimentError(f'--step must be a checkpoint of {folder}, {there}, or "{BEST}"; given {chosen}')
    try:
        opened = open_tokenizer(tokenizer or experiment.data.tokenizer)
    except ValueError as error:
        raise ExperimentError(f"{error}; if it was moved, give its folder (--tokenizer FOLDER)") from error

    def load(device: Device) -> tuple[GPT, str]:
        read = partial(_restored, experiment=experiment, config=config, device=device)
        if chosen is not None:
            return read(folder / CHECKPOINTS / chosen), f"{folder}, step {chosen}"
        newest, model = read_newest(folder / CHECKPOINTS, lambda source: read(source.folder), aside=False)
        return model, f"{folder}, step {newest}"

    return TextModel(config, opened, load)


def _experiment(folder: Path, plugin: Mapping[str, str]) -> Experiment:
    """Return a run's experiment. Raises ExperimentError unless it trains one of jdp's GPTs on text."""
    rule = f"text is written by a GPT that learned text; {folder} has"
    try:
        table = parse((folder / FILE).read_text("utf-8"))
        made = table["model"].get("make", NONE)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        made = NONE  # `load` reports the problem
    if made != NONE:
        raise ExperimentError(f"{rule} model.make = {made!r}: name another run")
    experiment = load(folder / FILE, plugin)
    if not experiment.model.is_gpt:
        raise ExperimentError(f"{rule} {experiment.model.chosen}: name another run")
    if experiment.kind != "text":
        raise ExperimentError(f"{rule} data.make = {experiment.data.make!r}, whose tokens only it knows: export it")
    return experiment


def _best(experiment: Experiment, checkpoints: Path, there: str) -> str:
    metric = experiment.train.best_metric
    if not experiment.train.keep_best:
        raise ExperimentError(
            f"--step {BEST} needs a run that keeps its best checkpoint; this one has no train.keep_best: name a step, "
            f"{there}"
        )
    with Checkpoints(checkpoints, keep=None, best=metric, mode=Best(metric).mode) as saved:
        best = saved.best
    if best is None:
        raise ExperimentError(f"--step {BEST} needs a checkpoint with a finite {metric}; given {there}: name one")
    return str(best)


def _restored(path: Path, experiment: Experiment, config: GPTConfig, device: Device) -> GPT:
    """Read the parameters of a checkpoint; with averaged parameters, the complete state, which has the average."""
    if experiment.optimizer.ema_decay is None:
        return restore_params(path, _abstract(config, device)).model
    alone = {"mesh": {DATA: 1}, "strategy": "ddp", "rules": {}, "offload": None, "wire": None}
    assembly = Assembly.on_devices(experiment.model_copy(update=alone), [device])
    return assembly.training.averaged(restore(path, assembly.training.abstract_state)).model


def _abstract(config: GPTConfig, device: Device) -> TrainState:
    plan = Plan(make_mesh(devices=[device], data=1))
    return abstract_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.identity(), plan, rng=jax.random.key(0))


def _on_any_device(config: GPTConfig) -> GPTConfig:
    """Return the configuration without the choices for training and its devices."""
    return replace(config, attention="auto", remat=None, dropout=0.0)
