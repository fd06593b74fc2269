"""The export at the end of a run (`train.export`): its folder `export`, for `transformers` and `jdp generate`.

1. The state: of the best checkpoint, else the last. Its averaged parameters, if the run has them; LoRA's updates added.
2. It is written to `.export.new` beside, with the keys of the model of Hugging Face's that it began as, and moved when
   it is complete. `jdp.json` in it names the step. A run that is finished already exports nothing twice; one that went
   on replaces the export of the step before.
3. The run's tokenizer goes along, and the tokens that open and end its texts are named as `transformers` reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jdp.base.user_path import user_path
from jdp.checkpoint import Checkpoints
from jdp.checkpoint.errors import on_first_process
from jdp.checkpoint.safetensors.config_table import read_json, write_json
from jdp.checkpoint.safetensors.hugging_face_config import NAME as CONFIG
from jdp.checkpoint.safetensors.lora import merge_lora
from jdp.checkpoint.safetensors.transfer import GENERATION, export_hf
from jdp.core.cluster.barrier import from_every_process
from jdp.core.state import TrainState
from jdp.data.text.tokenizers import BESIDE, BYTES, byte_tokenizer, open_tokenizer
from jdp.data.text.tokenizers import FILE as TOKENIZER
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment
from jdp.run.folder import EXPORT, EXPORTED
from jdp.run.initial_weights import original_folder
from jdp.run.progress import Progress

MARK = Path(EXPORTED).name
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: None}


def check_free(folder: Path) -> None:
    """Raise ExperimentError if the run's folder `export` is not one that a run made."""
    export = folder / EXPORT
    if export.exists() and exported_step(export) is None:
        raise ExperimentError(
            f"train.export replaces only a folder that it made; {export} has no {MARK}: move it, or remove the key"
        )


def exported_step(export: Path) -> int | None:
    """Return the step of an export; None if a run did not make it, or there is none."""
    step = _mark(export).get("step")
    return step if isinstance(step, int) else None


def _mark(export: Path) -> dict[str, Any]:
    table = read_json(export / MARK)
    return table if isinstance(table, dict) else {}


def export(assembly: Assembly, state: TrainState, progress: Progress, saved: Checkpoints, folder: Path) -> str:
    """Export the run's model unless this is done; return the line that says where. The state is given up.

    Every process calls this.
    """
    experiment, step = assembly.experiment, progress.done
    if progress.kept is not None and progress.kept.step in saved.steps:
        step = progress.kept.step
    target, fresh, dtype = folder / EXPORT, folder / f".{EXPORT}.new", experiment.train.export_dtype
    there = _mark(target)
    if from_every_process("what was exported", f"{there.get('step')} {there.get('dtype')}")[0] == f"{step} {dtype}":
        return f"{target} has the model of step {step}"
    if step != progress.done:
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # two states may not fit
        state, _ = saved.restore(assembly.abstract_state(), step)
    params, config = assembly.averaged(state), assembly.config
    if config.lora_rank is not None:
        params, config = merge_lora(params, config)
    on_first_process(lambda: shutil.rmtree(fresh, ignore_errors=True))  # of a run that was killed
    original, began = original_folder(experiment), experiment.train.init_from
    export_hf(fresh, params, config, original=original, dtype=_DTYPES[dtype])
    mark = {"name": experiment.name, "step": step, "dtype": dtype}
    on_first_process(lambda: _complete(experiment, fresh, target, mark))
    is_best = progress.kept is not None and progress.kept.step == step
    best = f", the best by {experiment.train.best_metric}" if is_best else ""
    without = "" if (target / TOKENIZER).exists() else f"; it has no tokenizer, as the run has none: add a {TOKENIZER}"
    if original is None and began is not None and not user_path(began).exists():
        without += f"; {began} is gone, so its config.json has none of the original's other keys"
    return f"exported the model of step {step}{best}, to {target}{without}"


def _complete(experiment: Experiment, fresh: Path, target: Path, mark: Mapping[str, Any]) -> None:
    """Add the tokenizer and the mark, and move the export to its place. Process 0 alone calls this."""
    data = experiment.data
    if experiment.kind == "text" and data.knows_text:
        _write_tokenizer(data.tokenizer, fresh)
        _name_tokens(data.tokenizer, fresh)
    (fresh / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
    old = fresh.with_name(f".{EXPORT}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        check_free(target.parent)
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _write_tokenizer(name: str, folder: Path) -> None:
    """Write the run's tokenizer, with the token that closes documents, into a folder."""
    if name == BYTES:
        for file, table in byte_tokenizer().items():
            (folder / file).write_text(json.dumps(table, ensure_ascii=False, indent=1), encoding="utf-8")
        return
    path = user_path(name)
    file = path / TOKENIZER if path.is_dir() else path
    shutil.copyfile(file, folder / TOKENIZER)
    for beside in filter(Path.is_file, map(file.with_name, BESIDE)):
        shutil.copyfile(beside, folder / beside.name)


def _name_tokens(name: str, folder: Path) -> None:
    """Write which tokens open and end a text, by the run's tokenizer, into the files where `transformers` reads it."""
    tokenizer = open_tokenizer(name)
    for file in filter(Path.is_file, (folder / CONFIG, folder / GENERATION)):
        table, ends = read_json(file), [*tokenizer.ends]
        named = table.get("eos_token_id")
        if not set(ends) <= {*(named if isinstance(named, list) else [named])}:
            table["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        if tokenizer.bos is not None:
            table["bos_token_id"] = tokenizer.bos
        write_json(file, table)
