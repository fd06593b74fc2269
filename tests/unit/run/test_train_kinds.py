"""Every kind of model and data that an experiment file can name reaches the training step as it was said it would."""

import json

import jax
import numpy as np
import pytest
from corpora import word_tokenizer
from tiny_experiment import entries
from tiny_runs import refused

import jdp
from jdp.base.tree_paths import path_of
from jdp.cli.main import main
from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.experiment.plan import prove_experiment
from jdp.run.metrics import read

GPT = {"name": "gpt-nano", "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 8}
RESNET = {"name": "resnet-digits", "blocks": [1], "width": 4}
VIT = {"name": "vit-digits", "layers": 1, "width": 8, "heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, rows of text, a tokenizer, tokens and points in files."""
    folder = tmp_path_factory.mktemp("kinds")
    words = np.random.default_rng(0).choice(["on", "every", "device", "mesh"], (40, 30))
    lines = [" ".join(line) for line in words]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in lines[::-1]))
    word_tokenizer(folder / "tokenizer.json", "?", "on", "every", "device", "mesh", "<|endoftext|>")
    tokens = np.random.default_rng(0).integers(0, 250, (30, 9))
    np.savez(folder / "tokens.npz", tokens=tokens)
    np.savez(folder / "line.npz", tokens=tokens.ravel())
    np.savez(folder / "points.npz", points=np.eye(20, dtype=np.float32), kinds=np.arange(20) % 2)
    return folder


KINDS = {
    "text": (GPT, {"source": "a.txt"}),
    "packed text": (GPT, {"source": "hf:json:b.jsonl", "field": "body", "packing": "documents"}),
    "tokenized text": (GPT, {"source": "a.txt", "tokenizer": "tokenizer.json"}),
    "mixture": (GPT, {"mixture": {"a": {"source": "a.txt"}, "b": {"source": "hf:json:b.jsonl", "field": "body"}}}),
    "tokens": (GPT, {"source": "tokens.npz"}),
    "rows of ids": (GPT, {"source": "tokens.npz", "ids": "tokens", "packing": "documents"}),
    "a line of tokens": (GPT, {"source": "line.npz"}),
    "images": (RESNET, {"source": "digits"}),
    "fitted images": ({**VIT, "image_size": 4, "channels": 3}, {"source": "digits"}),
    "features": (
        {"name": "mlp", "features_in": 20, "hidden": [4], "features_out": 2},
        {"source": "points.npz", "field": "points", "label": "kinds"},
    ),
    "images laid flat": ({"name": "mlp", "features_in": 64, "hidden": [4]}, {"source": "digits"}),
}


def written(folder, kind):
    """An experiment file of this kind in `folder`."""
    model, data = KINDS[kind]
    file = folder / f"{kind.replace(' ', '-')}.toml"
    train = {"steps": 2, "batch_size": 16}
    file.write_text(entries({"name": "kind", "model": model, "data": data, "train": train}))
    return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.default_ids("text")
def test_what_is_compiled_for_is_what_is_read(folder, kind):
    """`jdp plan` and `jdp verify` see shapes only, `jdp train` the data: keys, shapes and dtypes of a batch agree."""
    assembly = Assembly.on_devices(load(written(folder, kind)))
    batch = next(iter(global_batches(assembly.inputs.data.train, batch_size=16, seed=0)))
    read_as = {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
    planned = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in assembly.inputs.abstract_batch.items()}
    assert planned == read_as
    training = assembly.training
    _, metrics = jax.eval_shape(training.step, training.abstract_state, assembly.inputs.abstract_batch)
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize("kind", ["packed text", "images", "fitted images", "features"])
@pytest.mark.default_ids("features")
def test_losses_of_its_own_are_sums(folder, kind):
    """A run does not try them before its first step; here the trial accepts them."""
    assembly = Assembly.on_devices(load(written(folder, kind)))
    tried = assembly.training.step.changed(check_loss=True)
    with assembly.inputs.feed(assembly.inputs.data.train, seed=0, shuffle=True) as feed:
        _, metrics = tried(assembly.training.state(), next(feed))
    assert tried.partitioning == "manual" and np.isfinite(metrics["loss"])


@pytest.mark.rest
def test_a_resnet_trains_on_digits_with_its_statistics(folder, tmp_path, capsys):
    file = written(folder, "images")
    assert main(["train", str(file), "--run-dir", str(tmp_path), "--eval.same.source", "digits", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["eval_sets"].keys() == {"eval_same_loss", "eval_same_accuracy"}
    assembly = Assembly.on_devices(load(file))
    state = jdp.restore(tmp_path / "kind", assembly.training.abstract_state)
    begun = jax.device_get(assembly.training.state().model_state)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), begun, jax.device_get(state.model_state))
    assert min(jax.tree.leaves(moved)) > 0, "running averages of BatchNorm are part of the state"


@pytest.mark.rest
def test_lora_leaves_the_weights_of_a_run(folder, tmp_path, capsys):
    """Trained on a mixture, whose texts are evaluated one by one, then fine-tuned on one of them."""
    file, runs = written(folder, "mixture"), ("--run-dir", str(tmp_path), "--train.eval_batches", "1")
    runs += ("--optimizer.name", "sgd", "--strategy", "zero3", "--model.width", "64")
    assert main(["train", str(file), *runs, "--sample.length", "1"]) == 0
    evaluated = read(tmp_path / "kind" / "metrics.jsonl")[-1]
    assert {"eval_loss", "eval_bits_per_token", "eval_a_loss", "eval_b_loss"} <= evaluated.keys()
    file = written(folder, "text")
    tune = ("--name", "tuned", "--train.init_from", str(tmp_path / "kind"), "--model.lora_rank", "2")
    tune += ("--train.wrt", "*/lora_*", "--optimizer.lr", "0.1")
    capsys.readouterr()
    assert main(["train", str(file), *runs, *tune]) == 0
    said = capsys.readouterr().out
    assert f"parameters from {tmp_path / 'kind'}, except" in said and "start fresh" in said and "lora_a" in said
    base, tuned = (weights(tmp_path / name) for name in ("kind", "tuned"))
    for path, value in base.items():
        np.testing.assert_array_equal(tuned[path], value, err_msg=path)
    added = [path for path in tuned if "lora_" in path]
    assert set(tuned) == set(base) | set(added)
    assert all(np.abs(tuned[path]).max() > 0 for path in added), "two steps move both factors"


def weights(folder):
    """The parameters of the newest checkpoint by path."""
    assembly = Assembly.on_devices(load(folder / "experiment.toml"))
    params = jdp.restore_params(folder, assembly.training.abstract_state).params
    return {path_of(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


@pytest.mark.rest
def test_prove_runs_what_the_file_trains(folder):
    """A part of the parameters, averaged: what `jdp prove` compares is what `jdp train` does."""
    optimizer = {"name": "adamw", "lr": 0.1, "ema_decay": 0.9}
    experiment = load(written(folder, "features"))
    asked = experiment.train.model_copy(update={"wrt": "layers/1/*"})
    changed = experiment.optimizer.model_copy(update=optimizer)
    experiment = experiment.model_copy(update={"train": asked, "optimizer": changed})
    proof = prove_experiment(experiment, steps=2, devices=2, only=("zero3 2 devices K=1", "resume"))
    assert proof.equal, str(proof)
    assert any("in 2 of 4 parameters" in note for note in proof.notes), proof.notes


UNFIT = {
    "vocabulary of a tokenizer": ("tokenized text", ("--model.vocab_size", "4"), "6"),
    "token ids": ("tokens", ("--model.vocab_size", "200"), "tokens.npz"),
    "length of tokens": ("tokens", ("--data.length", "4"), "set data.length = 8"),
    "classes": ("images", ("--model.classes", "3"), "set model.classes = 10"),
    "features": ("images laid flat", ("--model.features_in", "784"), "set model.features_in = 64"),
    "no labels": ("features", ("--data.label", "none", "--data.field", "points"), "labels"),
}


@pytest.mark.parametrize(("kind", "arguments", "said"), UNFIT.values(), ids=UNFIT)
def test_a_model_must_fit_its_data(folder, tmp_path, capsys, kind, arguments, said):
    assert said in refused(capsys, "train", written(folder, kind), "--run-dir", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
