"""The weights that a run starts from (`train.init_from`), and the export of its weights (`train.export`).

Initial weights are read onto the state's shardings before the optimizer's state is made for them; LoRA parameters that
they lack keep their initial values. The export, a folder for `transformers` and `jdp generate`, has the best checkpoint
if the run keeps it, else the last state. It is written beside its place and moved when complete; its `jdp.json` names
the step, so a finished run exports nothing twice, and a continued run replaces the earlier export.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jdp.base.toml import parse
from jdp.base.tree_paths import path_of
from jdp.base.user_path import PathError, user_path
from jdp.checkpoint import CheckpointError, Checkpoints, restore_params
from jdp.checkpoint.errors import on_first_process
from jdp.checkpoint.safetensors import files
from jdp.checkpoint.safetensors.config import NAME as CONFIG
from jdp.checkpoint.safetensors.config import check_written, compared, differences, read
from jdp.checkpoint.safetensors.files import read_json, write_json
from jdp.checkpoint.safetensors.names import Names, gpt2_names, llama_names
from jdp.checkpoint.safetensors.transfer import GENERATION, export_hf, import_safetensors, merge_lora
from jdp.checkpoint.single import read_at, replace_folder
from jdp.core.cluster.barrier import from_every_process
from jdp.core.plan import Plan
from jdp.core.state import TrainState, trained_part
from jdp.core.update.optimizer import first_state
from jdp.data.text.tokenizers import BESIDE, BYTES, byte_tokenizer, open_tokenizer
from jdp.data.text.tokenizers import FILE as TOKENIZER
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.model import HF, MadeModel, model_table
from jdp.models.configs import GPTConfig, ModelConfig
from jdp.run.folder import EXPORT
from jdp.run.progress import Progress, Record

LORA = ("*lora_*",)
"""Parameters that only a model with LoRA has."""
SAFETENSORS = ".safetensors"
_IN_FOLDER = (f"model{SAFETENSORS}", f"model{SAFETENSORS}.index.json")
"""Files that identify a folder of safetensors."""
MARK = "jdp.json"
"""The file that marks a run's export, with its step."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: None}


def check_initial(init_from: str, config: Any) -> None:
    """Check that the weights exist, and that `config.json` or the record beside them describes this model."""
    keys, by, whole = list[str](), f"the record of {init_from}", ""
    try:
        place = user_path(init_from)
        path = _safetensors(place)
        if path is None:
            stored = _recorded(read_at(place, lambda source: source.table()["record"]))
            keys = compared(stored, config) if stored is not None and type(stored) is type(config) else []
        elif _is_hugging_face(path, config):
            keys, folder = differences(path, config), path if path.is_dir() else path.parent
            by, whole = str(folder / CONFIG), f'; or use its whole config, model.name = "hf:{folder}"'
    except (CheckpointError, PathError) as error:
        raise ExperimentError(f"train.init_from: {error}") from error
    if keys:
        named = ", ".join(f"model.{key}" for key in keys)
        raise ExperimentError(f"train.init_from has the weights of another model, by {by}: set {named}{whole}")


def load_initial(init_from: str, state: TrainState, config: Any, plan: Plan) -> tuple[TrainState, str]:
    """Return the state with these parameters and a new optimizer state, and a line that names them."""
    path = _safetensors(user_path(init_from))
    try:
        if path is None:
            read = restore_params(init_from, state, missing=LORA)
        else:
            names = names_of(path, config) if _is_hugging_face(path, config) else None
            read = import_safetensors(path, state, names=names, missing=LORA)
    except ValueError as error:  # of another architecture too
        raise ExperimentError(f"train.init_from: {error}") from error
    before, after = jax.tree.leaves_with_path(state.params), jax.tree.leaves(read.params)
    fresh = [path_of(leaf_path) for (leaf_path, old), new in zip(before, after, strict=True) if old is new]
    message = f"parameters from {init_from}"
    if fresh:
        shown = ", ".join(fresh[:2]) + ", …" * (len(fresh) > 2)
        message += f", except {len(fresh)} that it lacks and that start fresh: {shown}"
    tx, trained, shardings = state.static.tx, state.static.trained, plan.shardings(state).opt_state
    begin = jax.jit(lambda params: first_state(tx, trained_part(params, trained)), out_shardings=shardings)
    opt_state = begin(read.params)
    return replace(state, params=read.params, model_state=read.model_state, opt_state=opt_state), message


def original_folder(experiment: Experiment) -> Path | None:
    """Return the folder of the Hugging Face model that the weights began as; None if it no longer exists."""
    name, place = experiment.model.name, experiment.train.init_from
    for path in map(user_path, (place, name.removeprefix(HF) if name.startswith(HF) else place) if place else ()):
        folder = path if path.is_dir() else path.parent
        if path.exists() and read(folder) is not None:
            return folder
    return None


def _recorded(record: Mapping[str, Any]) -> ModelConfig | None:
    """Return the model's configuration by the record of a run's checkpoint; None for a user's model or loop."""
    table = parse(record["experiment"])["model"] if record.keys() >= Record.__annotations__.keys() else None
    schema = model_table(table)
    return schema.model_validate(table).config if schema is not None and schema is not MadeModel else None


def _safetensors(place: Path) -> Path | None:
    """Return the path of a safetensors file, or of a folder of them; None if it is a run or a checkpoint."""
    if not place.exists():
        raise ExperimentError(
            f"train.init_from must be a {SAFETENSORS} file, the folder of a run or a checkpoint; there is no {place}: "
            "fix the path, or remove the key"
        )
    return place if place.suffix == SAFETENSORS or any((place / file).exists() for file in _IN_FOLDER) else None


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


# The export.


def check_export(folder: Path, config: Any) -> None:
    """Raise ExperimentError if `export` in the run's folder was not made by a run, or the model cannot be exported."""
    try:
        check_written(config)
    except CheckpointError as error:
        raise ExperimentError(f"train.export is for models that transformers has: remove the key. {error}") from None
    export = folder / EXPORT
    if export.exists() and "step" not in _mark(export):
        raise ExperimentError(
            f"train.export replaces only a folder that it made; {export} has no {MARK}: move it, or remove the key"
        )


def _mark(export: Path) -> dict[str, Any]:
    table = read_json(export / MARK)
    return table if isinstance(table, dict) else {}


def export(assembly: Assembly, state: TrainState, progress: Progress, saved: Checkpoints, folder: Path) -> str:
    """Export the run's model unless this is done; return a line with the folder. The state is deleted.

    Every process calls this.
    """
    experiment, step = assembly.experiment, progress.done
    if progress.kept is not None and progress.kept.step in saved.steps:
        step = progress.kept.step
    target, fresh, dtype = folder / EXPORT, folder / f".{EXPORT}.new", experiment.train.export_dtype
    there = {} if progress.done > progress.resumed_from else _mark(target)  # a checkpoint may be written anew
    if from_every_process("what was exported", f"{there.get('step')} {there.get('dtype')}")[0] == f"{step} {dtype}":
        return f"{target} has the model of step {step}"
    if step != progress.done:
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # two states may not fit
        state, _ = saved.restore(assembly.training.abstract_state, step)
    params, config = assembly.training.averaged(state), assembly.training.config
    if config.lora_rank is not None:
        params, config = merge_lora(params, config)
    on_first_process(lambda: shutil.rmtree(fresh, ignore_errors=True))  # from a killed run
    original, began = original_folder(experiment), experiment.train.init_from
    export_hf(fresh, params, config, original=original, dtype=_DTYPES[dtype])
    mark = {"name": experiment.name, "step": step, "dtype": dtype}
    on_first_process(lambda: _complete(experiment, fresh, target, mark))
    is_best = progress.kept is not None and progress.kept.step == step
    best = f", the best by {experiment.train.best_metric}" if is_best else ""
    without = "" if (target / TOKENIZER).exists() else f"; the run has no tokenizer: add a {TOKENIZER}"
    if original is None and began is not None and not user_path(began).exists():
        without += f"; {began} is gone, so config.json lacks the other keys of the original"
    return f"exported the model of step {step}{best}, to {target}{without}"


def _complete(experiment: Experiment, fresh: Path, target: Path, mark: Mapping[str, Any]) -> None:
    """Add the tokenizer and the mark, and move the export to its place. Only process 0 calls this."""
    data = experiment.data
    if experiment.kind == "text" and data.knows_text:
        _write_tokenizer(data.tokenizer, fresh)
    (fresh / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
    check_export(target.parent, experiment.model.config)
    replace_folder(target, fresh)


def _write_tokenizer(name: str, folder: Path) -> None:
    """Write the run's tokenizer into an export, and name the tokens that begin and end a text in its other files."""
    if name == BYTES:
        for file, table in byte_tokenizer().items():
            (folder / file).write_text(json.dumps(table, ensure_ascii=False, indent=1), encoding="utf-8")
    else:
        path = user_path(name)
        file = path / TOKENIZER if path.is_dir() else path
        shutil.copyfile(file, folder / TOKENIZER)
        for beside in filter(Path.is_file, map(file.with_name, BESIDE)):
            shutil.copyfile(beside, folder / beside.name)
    tokenizer = open_tokenizer(name)
    for file in filter(Path.is_file, (folder / CONFIG, folder / GENERATION)):
        table, ends = read_json(file), [*tokenizer.ends]
        named = table.get("eos_token_id")
        if not set(ends) <= {*(named if isinstance(named, list) else [named])}:
            table["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        if tokenizer.bos is not None:
            table["bos_token_id"] = tokenizer.bos
        write_json(file, table)
