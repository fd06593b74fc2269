"""What happened to a run is recorded visit by visit, and only added to."""

import json
from types import SimpleNamespace

import jax
import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import train

from jdp.core.sharding.mesh import make_mesh
from jdp.experiment.file import load, to_toml
from jdp.run.outputs.history import HISTORY, read_history, recorded
from jdp.run.progress import Progress
from jdp.run.signals import Stopped

EXPERIMENT = SimpleNamespace(train=SimpleNamespace(steps=10, stop_after=0))


def visit(folder, *, begin, end, error=None):
    """One visit that does the steps from `begin` to `end`, and ends with an error if one is given."""
    progress = Progress(done=begin)
    with recorded(folder, EXPERIMENT, progress, make_mesh(data=4, devices=jax.devices()[:4])):
        progress.done = end
        if error is not None:
            raise error


def events(folder):
    return [(event["event"], event["step"]) for event in read_history(folder / HISTORY)]


def test_each_visit_has_its_beginning_and_its_end(tmp_path):
    with pytest.raises(Stopped):
        visit(tmp_path, begin=0, end=3, error=Stopped(75, {"stopped": "SIGTERM"}))
    with pytest.raises(ValueError, match="diverged"):
        visit(tmp_path, begin=3, end=5, error=ValueError("diverged " + "x" * 5000))
    with pytest.raises(KeyboardInterrupt):
        visit(tmp_path, begin=3, end=6, error=KeyboardInterrupt())
    visit(tmp_path, begin=3, end=10)
    visit(tmp_path, begin=10, end=10)
    assert events(tmp_path) == [
        ("started", 0),
        ("stopped", 3),
        ("resumed", 3),
        ("failed", 5),
        ("resumed", 3),
        ("failed", 6),
        ("resumed", 3),
        ("finished", 10),
    ], "and nothing for a visit to a finished run"
    first, stopped, _, failed, _, interrupted, _, finished = read_history(tmp_path / HISTORY)
    assert (first["platform"], first["devices"], first["hosts"]) == ("cpu", 4, 1)
    assert stopped["signal"] == "SIGTERM" and finished["stopped_early"] is False
    assert len(failed["error"]) < 1100 and interrupted["error"] == "KeyboardInterrupt"
    assert first["time"] <= finished["time"]


def test_a_half_written_line_costs_that_line_only(tmp_path):
    visit(tmp_path, begin=0, end=10)
    file = tmp_path / HISTORY
    file.write_text(file.read_text() + '{"time": 1, "event": "res')
    visit(tmp_path, begin=4, end=10)
    assert events(tmp_path) == [("started", 0), ("finished", 10), ("resumed", 4), ("finished", 10)]


def test_a_full_disk_does_not_hide_why_a_visit_failed(tmp_path):
    visit = recorded(tmp_path, EXPERIMENT, Progress(), make_mesh(data=8))
    with pytest.raises(ValueError, match="the reason"), visit:
        (tmp_path / HISTORY).unlink()
        (tmp_path / HISTORY).mkdir()  # what is no file cannot be appended to
        raise ValueError("the reason")


def test_a_run_that_was_taken_over_begins_anew_and_is_resumed(tmp_path):
    once = {"eval_batches": 1, "log_every": 1, "checkpoint_every": 1}
    file = write_tiny(tmp_path, tables(train={"steps": 2, "batch_size": 8, **once}))
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)  # by a visit of another experiment that was killed before its first row
    (folder / "experiment.toml").write_text(to_toml(load(file, {"seed": "7"})))
    (folder / HISTORY).write_text(json.dumps({"time": 1.0, "event": "started", "step": 0}) + "\n")
    (folder / ".lock").touch()
    assert train(file)[0] == 0
    assert events(folder) == [("started", 0), ("finished", 2)]
    assert train(file, "--train.steps", "3", "--compiler", "overlap")[0] == 0
    assert events(folder) == [("started", 0), ("finished", 2), ("resumed", 2), ("finished", 3)]
    resumed = read_history(folder / HISTORY)[2]
    assert resumed["changed"] == {"compiler": ["auto", "overlap"], "train.steps": [2, 3]}
