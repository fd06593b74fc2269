"""Every kind of model and data that an experiment file can name reaches the training step as it was said it would."""

import json

import jax
import numpy as np
import pytest
from corpora import word_tokenizer
from tiny_experiment import entries
from tiny_runs import refused

from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.experiment.plan import prove_experiment

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


@pytest.mark.parametrize("kind", ["packed text", "images", "features"])
@pytest.mark.default_ids("features")
def test_losses_of_its_own_are_sums(folder, kind):
    """A run does not try them before its first step; here the trial accepts them."""
    assembly = Assembly.on_devices(load(written(folder, kind)))
    tried = assembly.training.step.changed(check_loss=True)
    with assembly.inputs.feed(assembly.inputs.data.train, seed=0, shuffle=True) as feed:
        _, metrics = tried(assembly.training.state(), next(feed))
    assert tried.partitioning == "manual" and np.isfinite(metrics["loss"])


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
