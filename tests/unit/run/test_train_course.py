"""The course of a run that an experiment file can ask for: early stopping, which checkpoints stay, where weights start,
what is trained, and what becomes of a run that cannot go on. On points of three classes, so that a step is cheap."""

import json
import os
import socket
from contextlib import ExitStack

import jax
import numpy as np
import pytest
from damage import files_of_at_most, vouch
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused, rows, saved_steps, stopped_at, train

import jdp
from jdp.base import notices
from jdp.checkpoint import Checkpoints
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.guard.diagnosis import diagnose
from jdp.guard.watch import Watch
from jdp.launch.events import history, read
from jdp.run.folder import LOCK, Claim

TRAIN = {"steps": 6, "batch_size": 16, "log_every": 1, "eval_batches": "all"}
POINTS = points_text(tables(optimizer={"name": "sgd", "lr": 0.1}, train=TRAIN))
STILL = ("--optimizer.lr", "1e-30")
"""A rate at which nothing changes, so that no evaluation improves on the first."""


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path, POINTS)


def refusal(capsys, file, *arguments):
    return refused(capsys, "train", file, "--run-dir", file.parent / "runs", *arguments)


def summary_of(capsys):
    return json.loads(capsys.readouterr().out)


def test_early_stop_is_the_same_after_resumes(file, capsys):
    patience = (*STILL, "--train.eval_every", "1", "--train.stop_after", "2", "--json")
    code, folder = train(file, *patience)
    summary = summary_of(capsys)
    assert code == 0 and (summary["steps"], summary["stopped_early"]) == (3, True) and saved_steps(folder) == [3]
    assert summary["best"]["step"] == 1
    for name, step in (("twice", 2), ("late", 3)):  # the stop at 3 comes before the evaluation that ends the run
        with stopped_at(step):
            assert train(file, *patience, name=name)[0] == 130
        capsys.readouterr()
        train(file, *patience, name=name)
        assert summary_of(capsys)["steps"] == 3
    train(file, *patience, name="twice")
    assert "all of its 3 steps, stopped early: nothing to do" in capsys.readouterr().err
    longer = [*patience[:4], "--train.stop_after", "4", "--json"]
    train(file, *longer, name="twice")
    assert summary_of(capsys)["steps"] == 5, "more patience goes on"


@pytest.mark.parametrize("step", [3, 6], ids=["between", "last"])
@pytest.mark.default_ids("between")
def test_an_evaluation_after_a_resume_has_one_row(file, monkeypatch, step):
    """Its checkpoint precedes it, so each visit makes it up until a later checkpoint is there."""
    every = ("--train.eval_every", "3")
    with stopped_at(step):
        _, folder = train(file, *every)
    assert step not in rows(folder, "eval_loss")
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr("jdp.run.visit.Visit.before", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            train(file, *every)
    assert train(file, *every)[0] == 0
    _, calm = train(file, *every, name="calm")
    for name in ("loss", "eval_loss"):
        assert rows(folder, name) == rows(calm, name)


def test_early_stop_uses_the_best_checkpoints_metric(file, capsys):
    """And the best of equals is on disk."""
    patience = (*STILL, "--train.eval_every", "1", "--train.stop_after", "2", "--train.log_every", "100")
    best = ("--train.keep_best", "eval_accuracy", "--train.keep_checkpoints", "1")
    code, folder = train(file, *patience, *best, "--json")
    assert code == 0
    shown, accuracies = capsys.readouterr(), rows(folder, "eval_accuracy")
    summary = json.loads(shown.out)
    assert list(accuracies) == [1, 2, 3]
    assert summary["best"] == {"metric": "eval_accuracy", "value": accuracies[1], "step": 1}
    assert summary["best_checkpoint"] in saved_steps(folder)
    assert "eval_accuracy has not improved in 2 evaluations; its best was" in shown.err and "at step 1" in shown.err
    assert [*rows(folder, "loss").items()][-1] == (3, summary["final_loss"])


def test_the_best_checkpoint_stays_whatever_else_goes(file, capsys):
    """The rate is far too high from the first step on: later evaluations are worse."""
    worse = ("--optimizer.lr", "30.0", "--train.eval_every", "1", "--train.keep_checkpoints", "1")
    code, folder = train(file, *worse, "--train.keep_best", "true", "--json")
    assert code == 0 and set(rows(folder, "examples_per_second", "accuracy", "weight")) == {1, 2, 3, 4, 5, 6}
    summary, losses = summary_of(capsys), rows(folder, "eval_loss")
    assert summary["final_eval_accuracy"] == rows(folder, "eval_accuracy")[6] and not summary["stopped_early"]
    best = min(losses, key=losses.__getitem__)
    assert best < 6 and summary["best_checkpoint"] == best and saved_steps(folder) == [best, 6]


def test_newest_checkpoints_stay_and_settings_may_change(file, capsys):
    _, folder = train(file, "--train.checkpoint_every", "1", "--train.keep_checkpoints", "2")
    assert saved_steps(folder) == [5, 6]
    more = ("--eval.all.source", str(file.parent / "points.npz"), "--mesh.replica", "2", "--compiler", "overlap")
    capsys.readouterr()
    assert train(file, *more, "--train.steps", "7", "--json")[0] == 0, "what computes and evaluates may change"
    assert summary_of(capsys)["eval_sets"].keys() == {"eval_all_loss", "eval_all_accuracy"}
    first, _, resumed, _ = history(read(folder / "events" / "rank-00000.jsonl"))
    assert (first["platform"], first["devices"], first["hosts"]) == ("cpu", 8, 1)
    assert resumed["changed"]["compiler"] == ["auto", "overlap"] and resumed["changed"]["train.steps"] == [6, 7]
    assert train(file, "--optimizer.ema_decay", "0.5")[0] == 2, "what is learnt may not"


@pytest.mark.rest
def test_weights_start_from_another_run(file, capsys):
    _, first = train(file, "--json")
    before = summary_of(capsys)
    adam = ("--optimizer.name", "adamw", "--optimizer.ema_decay", "0.9", *STILL)
    code, _ = train(file, *adam, "--train.init_from", str(first), "--json", name="second")
    shown = capsys.readouterr()
    assert code == 0 and f"parameters from {first}" in shown.err
    # The average of the parameters begins at them too; 0.9 p + 0.1 p is p but for a rounding.
    assert json.loads(shown.out)["final_eval_loss"] == pytest.approx(before["final_eval_loss"], rel=1e-6)
    other = ("--model.hidden", "[4]", "--model.activation", "gelu", "--train.init_from", first, "--name", "third")
    wanted = f'by the record of {first}: set model.hidden = [8] (given [4]), model.activation = "relu" (given "gelu")'
    assert wanted in refusal(capsys, file, *other) and not first.with_name("third").exists()


def test_a_resumed_run_may_have_another_batch_size(file):
    """Three steps of 16 rows, then three of 8: the samples go on where they were, and steps count on."""
    assert train(file, "--train.steps", "3")[0] == 0
    code, folder = train(file, "--train.batch_size", "8")
    large, small = Assembly.on_devices(load(file, {})), Assembly.on_devices(load(file, {"train.batch_size": "8"}))
    state, losses = large.training.state(), {}
    for assembly, start in ((large, (0, 0)), (small, (6, 48))):  # 6: the seventh batch of 8, had all had 8
        with assembly.inputs.train_feed(*start) as feed:
            for _ in range(3):
                state, metrics = assembly.training.step(state, next(feed))
                losses[len(losses) + 1] = float(metrics["loss"])
    assert code == 0 and rows(folder, "loss") == losses and set(rows(folder, "weight").values()) == {16, 8}
    with Checkpoints(folder / "checkpoints") as saved:
        assert saved.restore(small.training.abstract_state)[1]["samples"] == 72


def test_only_what_wrt_names_is_trained(file):
    _, folder = train(file, "--train.wrt", '"layers/1/*"', "--optimizer.name", "adamw")
    assembly = Assembly.on_devices(load(file, {"train.wrt": '"layers/1/*"', "optimizer.name": "adamw"}))
    begun = jax.device_get(assembly.training.state().params)
    trained = jax.device_get(jdp.restore(folder, assembly.training.abstract_state).params)
    np.testing.assert_array_equal(trained["layers"]["0"]["kernel"], begun["layers"]["0"]["kernel"])
    assert np.abs(trained["layers"]["1"]["kernel"] - begun["layers"]["1"]["kernel"]).max() > 0.1


def test_overflowing_updates_name_the_rate(file, capsys):
    with np.load(file.parent / "points.npz") as points:
        np.savez(file.parent / "points.npz", features=points["features"] * np.float32(1e3), labels=points["labels"])
    error = refusal(capsys, file, "--optimizer.lr", "3e38", "--train.steps", "20", "--train.log_every", "20")
    assert "the gradients were finite, and the updates of 10 steps in a row were not finite" in error
    assert "lower optimizer.lr" in error
    said = diagnose(file.parent / "runs" / "points").words
    assert any("The gradient of step 1 is finite; the optimizer's update is not." in words for words in said)


@pytest.mark.parametrize(
    ("lr", "steps", "skipped"),
    [
        ("1e30", "20", "10 steps in a row were not finite (a run ends after 10)"),
        ("1e38", "2", "1 step were not finite (and the run ended with them)"),
    ],
)
def test_skipped_steps_end_a_run(file, capsys, lr, steps, skipped):
    """The first update makes the weights huge, and no later step has finite gradients: one error, no NaN weights."""
    error = refusal(capsys, file, "--optimizer.lr", lr, "--train.steps", steps)
    assert f"the gradients of {skipped}" in error and "lower optimizer.lr" in error
    folder = file.parent / "runs" / "points"
    assert not saved_steps(folder) and not (folder / "summary.json").exists()


def test_a_rule_over_data_under_ddp_warns(file, capsys):
    pattern = "layers/0/k*nel"
    notices._said.clear()
    assert train(file, f"--rules.{pattern}", '["", "data"]')[0] == 0
    assert capsys.readouterr().err.count(f"the rule for '{pattern}' shards over data, which ddp does not") == 1


@pytest.mark.parametrize("size", [500, 4000], ids=["experiment", "metrics"])
def test_a_full_disk_is_one_error(file, capsys, size):
    with files_of_at_most(size):
        error = refusal(capsys, file, "--train.steps", "60")
    assert "cannot be written: File too large" in error
    assert (file.parent / "runs" / "points").exists() == (size == 4000)
    code, folder = train(file, "--train.steps", "60")
    assert code == 0 and saved_steps(folder) == [60]


# Whose folder it is.


def after_step(monkeypatch, step, do):
    """Call `do` in the run after a step, once."""
    real = Watch.step
    monkeypatch.setattr(Watch, "step", lambda self, done: (done == step and do(), real(self, done))[1])


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_in_a_folder_is_refused(file, capsys, monkeypatch):
    _, folder = train(file, "--train.steps", "1")
    with Claim(folder) as claim:
        assert claim.lock()
        before = contents(folder)
        error = refusal(capsys, file, "--train.steps", "1")
        assert f"{folder} is in use by a run, process {os.getpid()} on {socket.gethostname()} since 20" in error
        assert contents(folder) == before

    refusals = []
    after_step(monkeypatch, 3, lambda: refusals.append(refusal(capsys, file)))
    assert train(file)[0] == 0, "a first one that takes steps goes on"
    assert len(refusals) == 1 and f"{folder} is in use by a run, process " in refusals[0]
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6] and saved_steps(folder)[-1] == 6


def test_files_deleted_during_a_run_are_restored(file, capsys, monkeypatch):
    folder = file.parent / "runs" / "points"

    def lose():
        for name in ("experiment.toml", LOCK):
            (folder / name).unlink()

    after_step(monkeypatch, 3, lose)
    assert train(file)[0] == 0
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    assert f"{folder}/{LOCK} was deleted during the run: the lock is taken again" in said
    assert f"{folder}/experiment.toml was deleted during the run: it is written again" in said
    assert train(file)[0] == 0, "it is the run's folder still"


def test_a_run_that_lost_its_lock_ends_unsaved(file, capsys, monkeypatch):
    taken = ExitStack()

    def steal():
        (file.parent / "runs" / "points" / LOCK).unlink()
        taken.enter_context(Claim(file.parent / "runs" / "points")).lock()

    after_step(monkeypatch, 3, steal)
    with taken:
        error = refusal(capsys, file)
    assert f"{LOCK} was deleted during this run, which has ended: a folder is for one run at a time; " in error
    assert saved_steps(file.parent / "runs" / "points") == []


def test_a_folder_without_steps_is_taken_over(file, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("jdp.run.loop._steps", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr("jdp.run.folder._discard_unused", lambda folder: None)  # a killed process cleans up nothing
        code, folder = train(file)
    left = {"experiment.toml", "metrics.jsonl", "checkpoints", LOCK}
    assert code == 130 and left <= {path.name for path in folder.iterdir()}
    code, _ = train(file, "--optimizer.lr", "0.2", "--train.steps", "1")
    assert code == 0 and saved_steps(folder) == [1] and "lr = 0.2" in (folder / "experiment.toml").read_text()
    said = capsys.readouterr().err
    assert "was left before its first step" in said and "optimizer.lr was 0.1, is 0.2" in said
    assert [event["event"] for event in read(folder / "events" / "rank-00000.jsonl")].count("start") == 1
    assert train(file, "--optimizer.lr", "0.3")[0] == 2, "now there is a step in it"


def test_an_early_end_removes_only_own_files(file, monkeypatch):
    folder = file.parent / "runs" / "points"
    users = {folder / "logs" / "slurm-1.out": b"1", folder / "events" / "notes.txt": b"2"}
    for path, text in users.items():
        path.parent.mkdir(parents=True)
        path.write_bytes(text)
    monkeypatch.setattr("jdp.run.loop._steps", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert train(file)[0] == 130 and contents(folder) == users
    assert not (folder / "checkpoints").exists()


@pytest.mark.rest
def test_what_a_damaged_record_lacks_is_said(file, capsys):
    with stopped_at(3):
        _, folder = train(file, "--train.eval_every", "3", "--train.keep_best", "true")
    described = folder / "checkpoints" / "3" / "checkpoint.json"
    description = json.loads(described.read_bytes())
    whole = description["record"]
    damages = {
        "fingerprint is missing": {key: value for key, value in whole.items() if key != "fingerprint"},
        "done is 2": whole | {"done": 2},
        "evals is [1]": whole | {"evals": [1]},
        "watched.metric is missing": whole | {"watched": {"value": 1.0}},
    }
    for said, damage in damages.items():
        described.write_text(json.dumps(description | {"record": damage}))
        vouch(folder / "checkpoints" / "3")
        assert f"is damaged, or not from a run of jdp train: {said}" in refusal(capsys, file)
    described.write_text(json.dumps(description))
    vouch(folder / "checkpoints" / "3")
    assert train(file, "--train.eval_every", "3", "--train.keep_best", "true")[0] == 0
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_set_has_the_classes_of_training(file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    with np.load("points.npz") as points:
        np.savez("other.npz", features=points["features"], labels=points["labels"] + 1)
    error = refusal(capsys, file, "--eval.other.source", "other.npz", "--model.features_out", "4")
    assert "eval.other must have the 3 classes of training" in error
    assert not (file.parent / "runs" / "points").exists()
