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


# Text.

OF_TEXT = {
    "train": {"steps": 4, "batch_size": 8, "accumulate": 1, "eval_batches": "all", "eval_every": 2}
    | {"eval_metrics": ["perplexity", "bits_per_byte"]},
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


@pytest.mark.parametrize("batches", ["all", "1", "2"])
def test_text_is_measured_by_domain(tmp_path, batches):
    """Bits are divided by the bytes of the samples read. The token that closes a document has no bytes."""
    assembly = assembled(write_documents(tmp_path, packing="documents"), **{"train.eval_batches": batches})
    sets = assembly.inputs.eval_sets
    sets["eval_half"] = [{**sample, "weights": sample["weights"] / 2} for sample in sets["eval_web"]]
    row = Evaluation(assembly).of(assembly.training.state())
    for name in ("web", "books", "half"):
        source = global_batches(sets[f"eval_{name}"], batch_size=8, seed=0, epochs=1)
        read = itertools.islice(source, None if batches == "all" else int(batches))
        counted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in read])
        nats, bits = row[f"eval_{name}_loss"], row[f"eval_{name}_bits_per_token"]
        assert bits == pytest.approx(nats / math.log(2))
        assert row[f"eval_{name}_perplexity"] == pytest.approx(math.exp(nats))
        assert row[f"eval_{name}_bits_per_byte"] == pytest.approx(bits * len(counted) / (counted != 0).sum(), rel=1e-6)
    assert row["eval_web_loss"] != row["eval_books_loss"]


def test_tokens_that_drop_text_have_no_bytes(tmp_path, capsys):
    """bits_per_byte is refused before the run begins."""
    words = word_tokenizer(tmp_path / "words.json", "</s>", "data", "gerät", "mesh", "x")
    file = write_documents(tmp_path, tokenizer=words, packing="documents")
    error = refused(capsys, "train", file)
    assert "bits_per_byte" in error and "adds or drops" in error and not (tmp_path / "runs").exists()
