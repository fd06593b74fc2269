"""An evaluation is the mean over examples, exact to the example, on any number of devices; and remembers its best."""

import math
from dataclasses import asdict

import jax
import numpy as np
import pytest

from jdp.core.update.ema import ema_params
from jdp.data.feed import shard_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import from_table
from jdp.run.evaluation import Best, Evaluation

FEATURES, CLASSES, BATCH = 6, 3, 8


def write_points(file, count, seed):
    """Points of three classes, as features and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    labels[:CLASSES] = np.arange(CLASSES)
    features = rng.normal(size=(count, FEATURES)) + labels[:, None]
    np.savez(file, features=features.astype(np.float32), labels=labels)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """An experiment whose held-out side (of 203) and evaluation set (of 37) fill no whole number of batches."""
    folder = tmp_path_factory.mktemp("points")
    write_points(folder / "points.npz", 203, 0)
    write_points(folder / "others.npz", 37, 1)
    return {
        "name": "points",
        "model": {"name": "mlp", "features_in": FEATURES, "hidden": [8], "features_out": CLASSES},
        "data": {"source": str(folder / "points.npz"), "heldout_fraction": 0.2},
        "eval": {"others": {"source": str(folder / "others.npz")}},
        "optimizer": {"ema_decay": 0.9, "lr": 0.1},
        "train": {"steps": 4, "batch_size": BATCH, "eval_batches": "all", "eval_every": 1},
    }


def assembled(table, devices, **train):
    experiment = from_table({**table, "train": {**table["train"], **train}})
    return Assembly.on_devices(experiment, jax.devices()[:devices])


def by_hand(params, source):
    """Mean loss and accuracy over all examples, in float64."""
    samples = [source[index] for index in range(len(source))]
    x = np.stack([sample["features"] for sample in samples]).astype(np.float64)
    labels = np.array([int(sample["labels"]) for sample in samples])
    first, last = (jax.tree.map(lambda p: np.asarray(p, np.float64), params["layers"][i]) for i in ("0", "1"))
    logits = np.maximum(x @ first["kernel"] + first["bias"], 0) @ last["kernel"] + last["bias"]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    return losses.mean(), (logits.argmax(axis=1) == labels).mean()


@pytest.mark.parametrize("devices", [1, 8])
def test_an_evaluation_is_the_mean_over_examples(table, devices):
    """Bound: float32 sums of some ten terms of about 1."""
    assembly = assembled(table, devices)
    state = assembly.training.state()
    sets = {"eval": assembly.inputs.data.heldout, "eval_others": whole(assembly.inputs.eval_sets["eval_others"])}
    assert all(len(source) % BATCH for source in sets.values()), "uneven"
    row = Evaluation(assembly).of(state)
    assert list(row) == ["eval_loss", "eval_accuracy", "eval_others_loss", "eval_others_accuracy"]
    for name, source in sets.items():
        loss, accuracy = by_hand(jax.device_get(state.params), source)
        assert row[f"{name}_loss"] == pytest.approx(loss, rel=1e-6)
        assert row[f"{name}_accuracy"] == pytest.approx(accuracy, abs=1e-7)
    assert Evaluation(assembly).coverage is None


def whole(source):
    """All of a set is evaluated, whichever side its samples fall on."""
    assert len(source) == 37
    return source


def test_a_number_of_batches_reads_so_many_and_says_so(table):
    assembly = assembled(table, 8, eval_batches=2)
    state = assembly.training.state()
    evaluation = Evaluation(assembly)
    row = evaluation.of(state)
    assert row == evaluation.of(state), "always the same samples"
    assert row["eval_loss"] != Evaluation(assembled(table, 8)).of(state)["eval_loss"]
    assert "eval 2 of " in evaluation.coverage and "eval_others 2 of 5 batches" in evaluation.coverage


def test_evaluations_use_the_averaged_parameters(table):
    assembly = assembled(table, 8, batch_size=2 * BATCH)
    state = assembly.training.state()
    rows = [assembly.inputs.data.train[index] for index in range(2 * BATCH)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    with shard_batches([batch] * 3, assembly.training.plan) as feed:
        for one in feed:
            state, _ = assembly.training.step(state, one)
    row, averaged = Evaluation(assembly).of(state), jax.device_get(ema_params(state).params)
    assert row["eval_loss"] == pytest.approx(by_hand(averaged, assembly.inputs.data.heldout)[0], rel=1e-6)
    assert row["eval_loss"] != pytest.approx(
        by_hand(jax.device_get(state.params), assembly.inputs.data.heldout)[0], rel=1e-4
    )


def test_the_best_of_a_loss_is_the_smallest_and_of_an_accuracy_the_largest():
    loss, accuracy = Best("eval_loss"), Best("eval_x_accuracy")
    seen = [(loss.seen(step, {"eval_loss": value})) for step, value in enumerate([2.0, 1.0, 1.5, math.nan, 0.5], 1)]
    assert seen == [True, True, False, False, True] and (loss.value, loss.step, loss.waiting) == (0.5, 5, 0)
    assert [accuracy.seen(step, {"eval_x_accuracy": v}) for step, v in ((1, 0.5), (2, 0.6), (3, 0.6))] == [
        True,
        True,
        False,
    ]
    assert (accuracy.mode, accuracy.waiting, accuracy.step) == ("max", 1, 2)
    accuracy.seen(4, {"eval_x_accuracy": 0.6}, newest=True)
    accuracy.seen(5, {"eval_x_accuracy": 0.5}, newest=True)
    assert accuracy.step == 4


def test_what_was_seen_survives_a_resume_unless_the_metric_changed():
    best = Best("eval_loss", 1.0, 3, 2)
    assert Best.resumed("eval_loss", asdict(best)) == best
    assert Best.resumed("eval_accuracy", asdict(best)) == Best("eval_accuracy")
    assert Best.resumed("eval_loss", None) == Best("eval_loss")
