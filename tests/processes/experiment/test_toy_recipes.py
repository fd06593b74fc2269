"""Recipes of `experiments/` at the size of a toy: each trains by the command of its note, and keeps what it promises.

A toy changes sizes and folders, and `fp32` where a number is compared with another library's.
"""

import json
import math
import os
import re

import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from guide_folders import TEXTS, write_llama
from own_process import ROOT, python
from paths import EXPERIMENTS
from safetensors.numpy import save_file
from tiny_runs import rows

import jdp
from jdp.checkpoint.safetensors.names import hf_names
from jdp.cli.main import main
from jdp.data.held_out import content_score
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load, shipped
from jdp.export import gpt_config_from_hf, import_safetensors
from jdp.models import GPT

RECIPES = {
    "finetune_hf_llama", "finetune_lora", "continue_pretraining", "sft_chat", "imagenet_resnet50",
    "imagenet_vit", "digits_resnet", "gpt2_124m", "gpt_1b", "plugin/rings",
}  # fmt: skip
HEADER = ("Data:", "Hardware:", "Cost:", "Expected:", "Measured 20")
"""What each note has, in this order, after what is trained and the command."""


def trained(name, folder, **given):
    """Train a recipe by `jdp train NAME` with other values of keys; return the folder of its run."""
    flags = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    assert main(["train", name, *flags, "--train.log_every", "1", "--run-dir", str(folder / "runs")]) == 0
    [run] = (folder / "runs").iterdir()
    return run


# --- the notes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_note_has_its_command_and_parts(name):
    note = (EXPERIMENTS / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in note)
    command = next(number for number, line in enumerate(note) if line.startswith("#   jdp train experiments/"))
    at = [next((number for number, line in enumerate(note) if line.startswith(f"# {word}")), -1) for word in HEADER]
    assert at == sorted(at) and command < at[0], dict(zip(HEADER, at, strict=True))
    table = (ROOT / "jdp/experiment/README.md").read_text(encoding="utf-8")
    assert f"experiments/{name}.toml" in table
    assert name in shipped() or name == "plugin/rings"


# --- text -----------------------------------------------------------------------------------------------------------

TEXT = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16, "data.length": 16}
TEXT |= {"train.batch_size": 16, "train.steps": 30, "optimizer.warmup_steps": 2, "data.heldout_fraction": 0.2}
TEXT |= {"model.vocab_size": 320, "optimizer.lr": 1e-2}


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt2_124m", "gpt_1b"])
def test_pre_training_reads_text_with_its_tokenizer(name, tmp_path, capsys):
    write_llama(tmp_path / "gpt2", ["<|endoftext|>"], TEXTS)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    given = {"data.source": f"{tmp_path}/texts.txt", "data.tokenizer": f"{tmp_path}/gpt2", "sample.length": 8}
    given |= {"model.kv_heads": 2, "model.mlp_width": 32} if name == "gpt_1b" else {}
    run = trained(name, tmp_path, **TEXT, **given)
    losses = rows(run, "loss")
    assert losses[1] == pytest.approx(math.log(320), abs=0.1) and losses[30] < losses[1] - 0.5
    assert "sample:" in capsys.readouterr().out


@pytest.mark.rest
def test_continued_pre_training_leaves_an_export(tmp_path, capsys):
    """On a folder of text, and on rows of JSONL; the rate rises to its peak again; the export writes text."""
    write_llama(tmp_path / "llama", ["<|end_of_text|>"], TEXTS)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    given = {"model.name": f"hf:{tmp_path}/llama", "train.init_from": f"{tmp_path}/llama", "model.context": 64}
    given |= {"data.source": f"{tmp_path}/texts", "data.length": 32, "data.heldout_fraction": 0.1}
    given |= {"train.batch_size": 32, "train.steps": 30, "train.eval_every": 10, "optimizer.warmup_steps": 10}
    given |= {"optimizer.lr": 1e-2, "sample.length": 8}
    run = trained("continue_pretraining", tmp_path, **given)
    out = capsys.readouterr().out
    held_out, rates = rows(run, "eval_loss"), rows(run, "lr")
    assert held_out[30] < rows(run, "loss")[1] - 1
    assert rates[1] == pytest.approx(1e-3) and rates[10] == pytest.approx(1e-2) and rates[30] < 2e-3
    assert "llama/tokenizer.json (300 tokens, <|end_of_text|> closes a document)" in out
    assert json.loads((run / "export" / "jdp.json").read_text())["step"] == min(held_out, key=held_out.__getitem__)
    same = [(tmp_path / "llama" / "tokenizer.json").read_bytes(), (run / "export" / "tokenizer.json").read_bytes()]
    assert same[0] == same[1]
    assert main(["generate", str(run / "export"), "--prompt", "In chapter", "--length", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("In chapter")


@pytest.mark.rest
def test_lora_watches_what_is_forgotten(tmp_path, capsys):
    (tmp_path / "old.txt").write_text("\n".join(TEXTS))
    (tmp_path / "new.txt").write_text("\n".join(f"Another tale, the {number}th: " * 6 for number in range(60)))
    small = {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.kv_heads": 1, "model.context": 32}
    small |= {"data.length": 32, "train.batch_size": 16, "train.eval_every": 20, "devices": "none"}
    old = {"data.source": tmp_path / "old.txt", "train.steps": 60, "sample": "none", "train.checkpoint_every": 0}
    first = trained("quickstart", tmp_path / "first", **small, **old)
    new = {"data.source": tmp_path / "new.txt", "eval.stdlib.source": tmp_path / "old.txt", "train.init_from": first}
    run = trained("finetune_lora", tmp_path, **small, **new, **{"train.steps": 40, "sample.length": 8})
    said = capsys.readouterr().out
    assert f"parameters from {first}, except" in said and "start fresh" in said and "lora_a" in said
    learnt, kept = rows(run, "eval_loss"), rows(run, "eval_stdlib_loss")
    assert learnt[40] < learnt[20] and learnt.keys() == kept.keys()


# --- models of Hugging Face -----------------------------------------------------------------------------------------

STORED = json.loads(hf_reference.FILE.read_text(encoding="utf-8"))
FORMS = {"full": {"optimizer.lr": 1e-2}, "lora": {"model.lora_rank": 4, "train.wrt": "*/lora_*", "optimizer.lr": 3e-2}}


def fine_tuned(folder, family, form):
    """Fine-tune a model as transformers writes it on one row of tokens; return the folder of the run."""
    (folder / family).mkdir()
    (folder / family / "config.json").write_text(json.dumps(STORED[family]["config"]))
    (folder / family / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    save_file(hf_reference.weights(STORED[family]["shapes"]), folder / family / "model.safetensors")
    row, random = hf_reference.TOKENS[0], np.random.default_rng(1)
    others = (random.integers(0, hf_reference.VOCABULARY, len(row)) for _ in range(1000))
    score = content_score(row.astype(np.int32).tobytes())
    held_out = [other for other in others if content_score(other.astype(np.int32).tobytes()) < score][:2]
    np.savez(folder / "rows.npz", tokens=np.stack([*[row] * 16, *held_out]))
    given = {"model.name": f"hf:{folder}/{family}", "train.init_from": f"{folder}/{family}", "precision": "fp32"}
    given |= {"data.source": f"{folder}/rows.npz", "data.length": 31, "data.heldout_fraction": score}
    given |= {"train.batch_size": 8, "train.steps": 6, "optimizer.warmup_steps": 1, "train.export": "hf"}
    given |= {"train.eval_every": 2, "train.checkpoint_every": 2}
    return trained("finetune_hf_llama", folder, **given, **FORMS[form])


def logits(model):
    return jax.jit(lambda model: model(jnp.asarray(hf_reference.TOKENS)))(model)[0, list(hf_reference.POSITIONS)]


def logits_of_run(run):
    """The logits of the checkpoint that was exported: with LoRA, as a product beside the frozen weights."""
    assembly = Assembly.on_devices(load(run / "experiment.toml"))
    step = json.loads((run / "export" / "jdp.json").read_text())["step"]
    return logits(jdp.restore(run / "checkpoints" / str(step), assembly.training.abstract_state).model)


def logits_of_export(folder):
    config = gpt_config_from_hf(folder)
    assert config.lora_rank is None
    params = nnx.to_pure_dict(nnx.state(jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), params)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, import_safetensors(folder, abstract, names=hf_names(config)))
    return logits(model)


ATOL = 5e-5
"""Logits up to 5, in float32: LoRA's update is rounded into the weights, and other libraries sum in other orders.
6.3e-6 was measured of the export, 4.3e-6 of transformers."""


@pytest.mark.rest
@pytest.mark.parametrize(("family", "form"), [("llama", "lora"), ("qwen3", "full")])
def test_a_hugging_face_model_round_trip(tmp_path, family, form):
    run = fine_tuned(tmp_path, family, form)
    losses = rows(run, "loss")
    assert losses[1] == pytest.approx(STORED[family]["loss"], rel=3e-6)  # transformers', rounded to 1e-6
    assert losses[6] < losses[1] - 0.5
    np.testing.assert_allclose(logits_of_export(run / "export"), logits_of_run(run), rtol=0, atol=ATOL)
    keys, ends = (json.loads((run / "export" / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert keys.items() >= STORED[family]["config"].items() and ends["eos_token_id"] == [2, 9]
    assert (keys["max_position_embeddings"], keys["torch_dtype"]) == (64, "float32")


# --- pictures -------------------------------------------------------------------------------------------------------

PICTURES = {
    "imagenet_vit": {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.patch": 8, "train.steps": 80},
    "imagenet_resnet50": {"model.blocks": "[1, 1]", "model.width": 8, "optimizer.lr": 0.1},
}


@pytest.fixture(scope="module")
def textures(tmp_path_factory):
    """Class folders of JPEGs, by the program that the notes name."""
    folder = tmp_path_factory.mktemp("textures")
    done = python(EXPERIMENTS / "pictures.py", "--textures", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("name", PICTURES)
def test_an_image_folder_is_learnt_from_resized_crops(name, textures, tmp_path, capsys):
    """Four classes, so chance is a quarter. Held-out pictures are not cropped at random."""
    small = {"model.classes": 4, "model.image_size": 32, "train.batch_size": 32, "train.steps": 40}
    small |= {"optimizer.warmup_steps": 10, "train.eval_every": 5, "train.checkpoint_every": 0, "precision": "fp32"}
    source = f"hf:imagefolder:{textures}"
    sides = {"data.source": f"{source}:train", "data.heldout": f"{source}:validation"}
    run = trained(name, tmp_path, **sides, **(small | PICTURES[name]))
    accuracy = [*rows(run, "eval_accuracy").values()]
    assert accuracy[-1] > 0.7 and accuracy[-1] > accuracy[0] + 0.1
    assert re.search(r"crops of 0\.08 of the area or more, flipped half the time", capsys.readouterr().out)


@pytest.mark.rest
def test_digits_are_learnt(tmp_path):
    small = {"model.blocks": "[1, 1]", "model.width": 16, "train.steps": 100, "optimizer.warmup_steps": 5}
    run = trained("digits_resnet", tmp_path, **small, **{"train.eval_every": 20, "devices": "none"})
    assert rows(run, "eval_accuracy")[100] > 0.3  # chance is a tenth; averaged weights lag in a short run


# --- a plug-in ------------------------------------------------------------------------------------------------------


@pytest.mark.rest
def test_a_plug_in_is_found_by_its_package(tmp_path):
    """In a process of its own, as it is imported; a file alone runs no code."""
    words = ["--plugin", "rings", "--run-dir", tmp_path, "--devices", "none", "--train.steps", "60"]
    path = os.pathsep.join((str(EXPERIMENTS / "plugin"), str(ROOT)))
    file = EXPERIMENTS / "plugin/rings.toml"
    done = python("-m", "jdp", "train", file, *words, "--data.points", "600", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    losses = rows(tmp_path / "rings", "eval_accuracy")
    assert losses[60] > 0.8  # chance is a third
