"""What evaluations measure beside the loss: each is compared with NumPy, on one device and on eight."""

import itertools
import json
import math

import jax
import numpy as np
import pytest
import tokenizers
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused

from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.run.evaluation import Evaluation

WAYS = [("ddp", 1, None), ("ddp", 8, "manual"), ("zero3", 8, None), ("zero3", 8, "manual")]
OF_CLASSES = tables(
    train={"steps": 2, "batch_size": 16, "accumulate": 2, "eval_batches": "all"}
    | {"eval_metrics": ["top2_accuracy", "top3_accuracy"]},
)


def assembled(file, strategy, devices, partitioning, **settings):
    placed = {"strategy": strategy, **({"partitioning": partitioning} if partitioning else {})}
    return Assembly.on_devices(load(file, {**placed, **settings}), jax.devices()[:devices])


def logits_of_points(state, source):
    """Labels, and logits in float64."""
    samples = [source[index] for index in range(len(source))]
    x = np.stack([sample["features"] for sample in samples]).astype(np.float64)
    params = jax.device_get(state.params)
    first, last = (jax.tree.map(lambda p: np.asarray(p, np.float64), params["layers"][i]) for i in ("0", "1"))
    return (
        np.array([int(sample["labels"]) for sample in samples]),
        np.maximum(x @ first["kernel"] + first["bias"], 0) @ last["kernel"] + last["bias"],
    )


@pytest.mark.parametrize(("strategy", "devices", "partitioning"), WAYS)
def test_classes_are_counted_to_the_example(tmp_path, strategy, devices, partitioning):
    assembly = assembled(write_points(tmp_path, points_text(OF_CLASSES)), strategy, devices, partitioning)
    state, source = assembly.training.state(), assembly.inputs.data.heldout
    assert len(source) % 16, "a batch is padded"
    row = Evaluation(assembly).of(state)
    labels, logits = logits_of_points(state, source)
    order = np.argsort(-logits, axis=1)
    assert list(row) == ["eval_loss", "eval_accuracy", "eval_top2_accuracy", "eval_top3_accuracy"]
    for name, most in (("eval_accuracy", 1), ("eval_top2_accuracy", 2), ("eval_top3_accuracy", 3)):
        among = (order[:, :most] == labels[:, None]).any(axis=1)
        assert row[name] == pytest.approx(among.mean(), abs=1e-7)


OF_TEXT = {
    "train": {"steps": 4, "batch_size": 8, "accumulate": 1, "eval_batches": "all", "eval_every": 2}
    | {"eval_metrics": ["perplexity", "bits_per_byte", "accuracy", "top3_accuracy"]},
}


def write_documents(folder, **data):
    """Text of forty documents of 1 to 60 bytes, among them letters of two bytes, in two files that are mixed."""
    rng, words = np.random.default_rng(0), ["data", "gerät", "mesh", "x"]
    for name, count in (("web", 25), ("books", 15)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                text = " ".join(rng.choice(words, rng.integers(1, 12)))
                print(json.dumps({"text": text}, ensure_ascii=False), file=file)
    file = write_tiny(folder, tables(**OF_TEXT))
    mixed = {name: {"source": f"hf:json:{name}.jsonl"} for name in ("web", "books")}
    table = tables(data={"heldout_fraction": 0.4, "mixture": mixed, **data})
    text = file.read_text().replace('[data]\nsource = "text.txt"\nheldout_fraction = 0.1\n', table)
    file.write_text(text)
    return file


LENGTH = 8


def nats_of_document(forward, tokens):
    """The nats of every token of a document but the first, read a row at a time, in float64; and the ranks."""
    nats, ranks = [], []
    for start in range(0, len(tokens) - 1, LENGTH):
        piece = tokens[start : start + LENGTH + 1]
        padded = np.pad(piece[:-1], (0, LENGTH + 1 - len(piece)))  # the model is causal
        logits = np.asarray(forward(padded[None]), np.float64)[0, : len(piece) - 1]
        at = np.arange(len(piece) - 1), piece[1:]
        nats += [*(np.log(np.exp(logits).sum(axis=1)) - logits[at])]
        ranks += [*(logits > logits[at][:, None]).sum(axis=1)]
    return np.array(nats), np.array(ranks)


def forward_of(file):
    """The initial model, which is the same on any mesh, on one device."""
    model = assembled(file, "ddp", 1, None).training.state().model
    forward = jax.jit(lambda model, tokens: model(tokens))
    return lambda tokens: forward(model, tokens)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The file of a mixture whose documents are packed, and the nats and ranks of each held-out document by NumPy."""
    file = write_documents(tmp_path_factory.mktemp("packed"), packing="documents")
    forward, parts = forward_of(file), assembled(file, "ddp", 1, None).inputs.data.parts
    spans = [list(zip(part.heldout.bounds[:-1], part.heldout.bounds[1:], strict=True)) for part in parts]
    found = [
        [nats_of_document(forward, np.asarray(part.heldout.ids[a:b], np.int32)) for a, b in inside]
        for part, inside in zip(parts, spans, strict=True)
    ]
    return file, spans, found


@pytest.mark.parametrize(("strategy", "devices", "partitioning"), WAYS)
@pytest.mark.default_ids("zero3-8-manual")
def test_text_is_measured_by_domain(packed, strategy, devices, partitioning):
    """Bound: float32 cross-entropies of some 5 nats, added up in float64. A document's first byte is no target, and
    its last token, which closes it, has no bytes."""
    file, spans_of, nats_of = packed
    assembly = assembled(file, strategy, devices, partitioning)
    row = Evaluation(assembly).of(assembly.training.state())
    for number, name in enumerate(("web", "books")):
        nats, ranks = (np.concatenate(parts) for parts in zip(*nats_of[number], strict=True))
        size = sum(int(end - start) - 2 for start, end in spans_of[number])
        assert row[f"eval_{name}_loss"] == pytest.approx(nats.mean(), rel=1e-6)
        assert row[f"eval_{name}_perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-5)
        assert row[f"eval_{name}_bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-6)
        assert row[f"eval_{name}_accuracy"] == pytest.approx((ranks == 0).mean(), abs=1e-6)
        assert row[f"eval_{name}_top3_accuracy"] == pytest.approx((ranks < 3).mean(), abs=1e-6)


@pytest.mark.parametrize("batches", ["1", "2"])
def test_bytes_are_those_of_the_samples_that_are_read(packed, batches):
    """A number of batches draws some samples: their bits are divided by their bytes."""
    assembly = assembled(packed[0], "ddp", 8, None, **{"train.eval_batches": batches})
    source, row = assembly.inputs.data.parts[0].heldout, Evaluation(assembly).of(assembly.training.state())
    read = list(itertools.islice(global_batches(source, batch_size=8, seed=0, epochs=1), int(batches)))
    counted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in read])
    bits = row["eval_web_bits_per_token"] * len(counted)
    assert len(read) == int(batches) and 8 * len(read) < len(source)
    assert row["eval_web_bits_per_byte"] == pytest.approx(bits / (counted != 0).sum(), rel=1e-6)


@pytest.mark.rest
def test_images_are_counted_with_statistics_and_microbatches(tmp_path):
    """A ResNet under zero3, in two microbatches: accuracies are whole numbers of images."""
    model = {"name": "resnet-digits", "width": 8, "blocks": [1, 1]}
    text = tables(
        model=model,
        data={"source": "digits"},
        train={"steps": 1, "batch_size": 32, "accumulate": 2, "eval_batches": "all", "eval_metrics": "top3_accuracy"},
    )
    (tmp_path / "images.toml").write_text(f'name = "images"\n{text}')
    assembly = assembled(tmp_path / "images.toml", "zero3", 8, None)
    row, size = Evaluation(assembly).of(assembly.training.state()), len(assembly.inputs.data.heldout)
    right = row["eval_accuracy"] * size
    assert right == pytest.approx(round(right), abs=1e-4)
    assert row["eval_accuracy"] <= row["eval_top3_accuracy"] < 1


def test_tokens_that_are_no_pieces_of_text_have_no_bytes(tmp_path, capsys):
    """bits_per_byte is refused before the run begins."""
    file = write_documents(tmp_path, tokenizer=str(words_json(tmp_path)), packing="documents")
    error = refused(capsys, "train", file)
    assert "bits_per_byte" in error and "adds or drops" in error and not (tmp_path / "runs").exists()


def words_json(folder):
    """A tokenizer of whole words."""
    words = {word: number for number, word in enumerate(("</s>", "data", "gerät", "mesh", "x"))}
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    level.save(str(folder / "words.json"))
    return folder / "words.json"
