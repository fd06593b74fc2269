"""An evaluation is the mean over examples, exact to the example, on any number of devices; and remembers its best."""

import itertools
import json
import math

import jax
import numpy as np
import pytest
from corpora import word_tokenizer
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused

from jdp.core.update.ema import ema_params
from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, load
from jdp.run.evaluation import Best, Evaluation

WAYS = [("ddp", 1, None), ("ddp", 8, "manual"), ("zero3", 8, None), ("zero3", 8, "manual")]
OF_CLASSES = tables(
    eval={"others": {"source": "others.npz"}},
    optimizer={"ema_decay": 0.9, "lr": 0.1},
    train={"steps": 2, "batch_size": 16, "accumulate": 2, "eval_batches": "all"}
    | {"eval_metrics": ["top2_accuracy", "top3_accuracy"]},
)


def assembled(file, strategy="ddp", devices=8, partitioning=None, **settings):
    placed = {"strategy": strategy, **({"partitioning": partitioning} if partitioning else {})}
    return Assembly.on_devices(load(file, {**placed, **settings}), jax.devices()[:devices])


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """The file of an experiment whose held-out side and evaluation set fill no whole number of batches."""
    folder = tmp_path_factory.mktemp("points")
    file = write_points(folder, points_text(OF_CLASSES))
    with np.load(folder / "points.npz") as arrays:
        np.savez(folder / "others.npz", **{name: array[:37] for name, array in arrays.items()})
    return file


def by_hand(params, source):
    """Mean loss, and accuracies among the one, two and three likeliest classes, over all examples in float64."""
    samples = [source[index] for index in range(len(source))]
    x = np.stack([sample["features"] for sample in samples]).astype(np.float64)
    labels = np.array([int(sample["labels"]) for sample in samples])
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(params))
    first, last = (params["layers"][index] for index in ("0", "1"))
    logits = np.maximum(x @ first["kernel"] + first["bias"], 0) @ last["kernel"] + last["bias"]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    among = (np.argsort(-logits, axis=1) == labels[:, None]).cumsum(axis=1)
    return [losses.mean(), *among.mean(axis=0)]


@pytest.mark.parametrize(("strategy", "devices", "partitioning"), WAYS)
def test_an_evaluation_is_the_mean_over_examples(points, strategy, devices, partitioning):
    """Bound: float32 sums of some ten terms of about 1."""
    assembly = assembled(points, strategy, devices, partitioning)
    state, sets, evaluation = assembly.training.state(), assembly.inputs.eval_sets, Evaluation(assembly)
    assert all(len(source) % 16 for source in sets.values()) and len(sets["eval_others"]) == 37
    row, names = evaluation.of(state), ("loss", "accuracy", "top2_accuracy", "top3_accuracy")
    assert list(row) == [f"{prefix}_{name}" for prefix in sets for name in names] and evaluation.coverage is None
    for prefix, source in sets.items():
        assert [row[f"{prefix}_{name}"] for name in names] == pytest.approx(by_hand(state.params, source), rel=1e-6)


def test_a_number_of_batches_is_reported(points):
    assembly = assembled(points, **{"train.eval_batches": "1"})
    state, evaluation = assembly.training.state(), Evaluation(assembly)
    row = evaluation.of(state)
    assert row == evaluation.of(state), "always the same samples"
    assert row["eval_loss"] != Evaluation(assembled(points)).of(state)["eval_loss"]
    assert "eval 1 of 2 batches, eval_others 1 of 3 batches" in evaluation.coverage


def test_evaluations_use_the_averaged_parameters(points):
    assembly = assembled(points)
    state, heldout = assembly.training.state(), assembly.inputs.data.heldout
    with assembly.inputs.train_feed(0, 0) as feed:
        for _ in range(3):
            state, _ = assembly.training.step(state, next(feed))
    loss = Evaluation(assembly).of(state)["eval_loss"]
    assert loss == pytest.approx(by_hand(ema_params(state).params, heldout)[0], rel=1e-6)
    assert loss != pytest.approx(by_hand(state.params, heldout)[0], rel=1e-4)


def test_an_evaluation_without_weights_is_refused(tmp_path):
    with np.load(write_points(tmp_path, points_text(OF_CLASSES)).with_name("points.npz")) as arrays:
        np.savez(tmp_path / "others.npz", **arrays, weights=np.zeros(len(arrays["labels"]), np.float32))
    for batches, fix in (("all", "$"), ("1", ', or set train.eval_batches = "all"$')):
        assembly = assembled(tmp_path / "points.toml", **{"train.eval_batches": batches})
        with pytest.raises(ExperimentError, match=f"weights above 0; given eval_others, .*: correct its weights{fix}"):
            Evaluation(assembly).of(assembly.training.state())


def test_best_is_the_smallest_loss_or_largest_accuracy():
    loss, accuracy = Best("eval_loss"), Best("eval_x_accuracy")
    seen = [loss.seen(step, {"eval_loss": value}) for step, value in enumerate([2.0, 1.0, 1.5, math.nan, 0.5], 1)]
    assert seen == [True, True, False, False, True] and (loss.value, loss.step, loss.waiting) == (0.5, 5, 0)
    seen = [accuracy.seen(step, {"eval_x_accuracy": value}) for step, value in enumerate([0.5, 0.6, 0.6], 1)]
    assert seen == [True, True, False]
    assert (accuracy.mode, accuracy.waiting, accuracy.step) == ("max", 1, 2)
    accuracy.seen(4, {"eval_x_accuracy": 0.6}, newest=True)
    accuracy.seen(5, {"eval_x_accuracy": 0.5}, newest=True)
    assert accuracy.step == 4


def test_best_survives_a_resume_with_its_metric():
    best = Best("eval_loss", 1.0, 3, 2)
    assert Best.resumed("eval_loss", best) == best
    assert Best.resumed("eval_accuracy", best) == Best("eval_accuracy")
    assert Best.resumed("eval_loss", None) == Best("eval_loss")


# Text and images.

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
    model = assembled(file, devices=1).training.state().model
    forward = jax.jit(lambda model, tokens: model(tokens))
    return lambda tokens: forward(model, tokens)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The file of a mixture whose documents are packed, and the nats and ranks of each held-out document by NumPy."""
    file = write_documents(tmp_path_factory.mktemp("packed"), packing="documents")
    forward, parts = forward_of(file), assembled(file, devices=1).inputs.data.parts
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
def test_bytes_are_of_the_samples_read(packed, batches):
    """A number of batches draws some samples: their bits are divided by their bytes."""
    assembly = assembled(packed[0], **{"train.eval_batches": batches})
    source, row = assembly.inputs.data.parts[0].heldout, Evaluation(assembly).of(assembly.training.state())
    read = list(itertools.islice(global_batches(source, batch_size=8, seed=0, epochs=1), int(batches)))
    counted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in read])
    bits = row["eval_web_bits_per_token"] * len(counted)
    assert len(read) == int(batches) and 8 * len(read) < len(source)
    assert row["eval_web_bits_per_byte"] == pytest.approx(bits / (counted != 0).sum(), rel=1e-6)


@pytest.mark.rest
def test_images_are_counted_with_statistics_and_microbatches(tmp_path):
    """A ResNet under zero3, in two microbatches: accuracies are whole numbers of images."""
    model, data = {"name": "resnet-digits", "width": 8, "blocks": [1, 1]}, {"source": "digits"}
    train = {"steps": 1, "batch_size": 32, "accumulate": 2, "eval_batches": "all", "eval_metrics": "top3_accuracy"}
    text = tables(model=model, data=data, train=train)
    (tmp_path / "images.toml").write_text(f'name = "images"\n{text}')
    assembly = assembled(tmp_path / "images.toml", "zero3")
    row, size = Evaluation(assembly).of(assembly.training.state()), len(assembly.inputs.data.heldout)
    right = row["eval_accuracy"] * size
    assert right == pytest.approx(round(right), abs=1e-4)
    assert row["eval_accuracy"] <= row["eval_top3_accuracy"] < 1


def test_tokens_that_drop_text_have_no_bytes(tmp_path, capsys):
    """bits_per_byte is refused before the run begins."""
    words = word_tokenizer(tmp_path / "words.json", "</s>", "data", "gerät", "mesh", "x")
    file = write_documents(tmp_path, tokenizer=words, packing="documents")
    error = refused(capsys, "train", file)
    assert "bits_per_byte" in error and "adds or drops" in error and not (tmp_path / "runs").exists()
