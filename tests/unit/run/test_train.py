"""`jdp train` end to end: what it writes, that it resumes bitwise, that it stops cleanly, what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused, rows, saved_steps, stopped_at, train

import jdp
from jdp.checkpoint import Checkpoints
from jdp.guard.time_account import KINDS
from jdp.launch.events import read_logs
from jdp.run.metrics import read

TABLES = tables(
    optimizer={"name": "adamw", "lr": 1e-2, "warmup_steps": 2, "schedule": "cosine"},
    train={"steps": 8, "batch_size": 64, "accumulate": 2, "log_every": 1}
    | {"eval_every": 4, "eval_batches": 1, "checkpoint_every": 3},
)
POINTS = points_text(TABLES, hidden=256, top='strategy = "zero1"\n')
POINTS = POINTS.replace("hidden = [256]", "hidden = [256]\ndropout = 0.1")
"""What a step is made of is in it: a key for dropout, a rate of its own, microbatches, shards of a kernel."""


@pytest.fixture
def experiment(tmp_path):
    return write_points(tmp_path, POINTS)


def tree(folder):
    """Every file below and its bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an undisturbed run of eight steps."""
    code, folder = train(write_points(tmp_path_factory.mktemp("whole"), POINTS))
    assert code == 0
    return folder


def test_writes_what_it_promises(whole):
    logged = [row for row in read(whole / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 9))
    promised = {"step", "loss", "grad_norm", "weight", "lr", "step_seconds", "data_wait_seconds", "examples_per_second"}
    assert all(promised | {"skipped"} <= row.keys() for row in logged[1:])
    assert all(row["weight"] == 64 for row in logged)
    assert sorted(rows(whole, "eval_loss")) == [4, 8]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.3
    assert [row["lr"] for row in logged[:2]] == pytest.approx([0.005, 0.01])  # warm-up: half, then all of it
    assert saved_steps(whole) == [3, 6, 8]
    text = (whole / "experiment.toml").read_text()
    assert "checkpoint_every = 3" in text and "weight_decay" in text  # as resolved: defaults too
    assert list(whole.glob("events.*tfevents.*"))


def test_the_events_and_the_goodput_of_a_run(whole):
    events = read_logs(whole / "events", "rank")[0]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 9))
    phases = [event["doing"] for event in events if event["event"] == "begin"]
    assert phases[:2] == ["restore", "compile"] and phases.count("eval") == 2 and phases.count("save") == 3
    assert next(event for event in events if event["event"] == "finished")["step"] == 8
    goodput = json.loads((whole / "summary.json").read_text())["goodput"]
    assert goodput["visits"] == 1 and 0 < goodput["share"] < 1
    assert sum(goodput[name] for name in (*KINDS, "other")) == pytest.approx(goodput["seconds"])


def test_stop_and_resume_is_bitwise_the_undisturbed_run(whole, experiment, capsys):
    with stopped_at(5):
        code, folder = train(experiment)
    assert code == 130 and max(rows(folder, "loss")) == 5
    code, folder = train(experiment)
    said = capsys.readouterr().out
    assert code == 0 and "resumed after step 5" in said
    assert re.search(rf"\n3 steps in \d:\d\d; the run is in {folder}\nnext: jdp report {folder}\n$", said)
    for names in (("loss", "grad_norm"), ("eval_loss",)):
        assert rows(folder, *names) == rows(whole, *names)


def test_a_crash_repeats_steps_since_the_checkpoint(whole, experiment, capsys):
    """Nothing was saved at step 5: the run goes on from 3, and no step is there twice."""
    with stopped_at(5) as patched:
        save = Checkpoints.save

        def save_before_5(self, state, record, *metrics):
            return save(self, state, record, *metrics) if record["done"] < 5 else None

        patched.setattr(Checkpoints, "save", save_before_5)
        assert train(experiment)[0] == 130
    code, folder = train(experiment)
    assert code == 0 and "resumed after step 3" in capsys.readouterr().out
    assert list(rows(folder, "loss")) == list(range(1, 9)) and rows(folder, "loss") == rows(whole, "loss")


def test_one_word_changes_the_strategy_not_the_losses(whole, experiment, capsys):
    """Bound: float32 sums in another order, as in test_equivalence."""
    code, _ = train(experiment, "--strategy", "ddp", "--train.accumulate", "1", "--json", runs="other")
    summary = json.loads(capsys.readouterr().out)
    assert code == 0 and summary["seconds"] > 0
    assert summary["final_loss"] == pytest.approx(rows(whole, "loss")[8], abs=5e-6)
    assert {"name": "points", "steps": 8, "devices": 8, "strategy": "ddp"}.items() <= summary.items()
    assert summary["final_eval_loss"] == pytest.approx(rows(whole, "eval_loss")[8], abs=5e-6)


def test_a_finished_run_says_so_and_changes_nothing(whole, capsys):
    """Nothing is trained under the new word, so the folder's record keeps the old one."""
    before, recorded = tree(whole / "checkpoints"), (whole / "experiment.toml").read_bytes()
    code, folder = train(whole.parent.parent / "points.toml", "--json", "--strategy", "ddp")
    summary = json.loads((shown := capsys.readouterr()).out)
    assert (code, summary["steps"], summary["resumed_from"]) == (0, 8, 8)
    assert "has all of its 8 steps: nothing to do (--name NEW starts another run)" in shown.err
    assert summary["final_loss"] == rows(whole, "loss")[8] and list(rows(folder, "loss")) == list(range(1, 9))
    assert tree(whole / "checkpoints") == before and (whole / "experiment.toml").read_bytes() == recorded


@pytest.mark.rest
def test_skips_before_a_stop_are_not_counted_again(experiment, capsys, monkeypatch):
    """Two skipped steps, a stop, and after the resume one good step: a limit of one in a row is not reached."""
    with stopped_at(2) as patched:
        patched.setattr("jdp.run.bad_steps.Health._check", lambda *_: None)
        patched.setattr("jdp.experiment.losses.features_loss", lambda *_: jdp.Loss(np.float32("nan"), np.float32(1)))
        train(experiment)
    monkeypatch.setattr("jdp.run.bad_steps.MOST_SKIPPED", 1)
    code, folder = train(experiment)
    assert code == 0, capsys.readouterr().err
    assert [skipped for _, skipped in rows(folder, "loss", "skipped").values()] == [1, 2] + [2] * 6


REFUSED = {
    "missing data": (["--data.source", "nowhere.txt"], "nowhere.txt"),
    "short text": (["--data.source", "short.txt"], "length 8 needs 9 tokens"),
    "weights without ids": (["--data.weights", "loss_mask"], 'set ids = "input_ids"'),
    "rule that matches nothing": (
        ["--mesh.data", "4", "--mesh.model", "2", "--rules.*/quary", '["", "model"]'],
        "[rules]: Every rule must match a parameter; '*/quary' matches none of ",
    ),
    "nothing to train": (["--train.wrt", "*/lora_*"], "*/lora_*"),
    "no weights to start from": (["--train.init_from", "runs/none"], "there is no"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=[*REFUSED])
def test_bad_input_gets_one_error_and_no_folder(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    experiment = write_tiny(tmp_path, tables(train={"steps": 8, "batch_size": 16, "accumulate": 2}))
    assert said in refused(capsys, "train", experiment, "--run-dir", "made", *arguments)
    assert not Path("made").exists()


def test_refuses_a_folder_that_is_not_a_run(experiment, capsys):
    folder = experiment.parent / "runs" / "points"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")
    assert "is not empty and has no experiment.toml" in refused(capsys, "train", experiment, "--run-dir", folder.parent)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_refuses_to_resume_on_other_data(experiment, capsys):
    with stopped_at(3):
        _, folder = train(experiment)
    with np.load(experiment.parent / "points.npz") as points:
        np.savez(experiment.parent / "other.npz", **{**points, "features": points["features"] + 1})
    other = ("--run-dir", folder.parent, "--data.source", experiment.parent / "other.npz")
    error = refused(capsys, "train", experiment, *other)
    assert "was trained on other data" in error and "data.source was '" in error
    file = folder / "experiment.toml"  # as if a mirror had another run's checkpoints
    file.write_text(file.read_text().replace("\nseed = 0", "\nseed = 5"))
    assert "of another experiment (seed was 0, is 5)" in refused(capsys, "train", experiment, *other[:2], "--seed", "5")
