"""What happened to a run is recorded visit by visit, and only added to."""

import json
import signal

import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import stopped_at, train

from jdp.experiment.file import load, to_toml
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.launch.events import history, read
from jdp.run.signals import Stopped

EVENT_LOGS = "events/rank-00000.jsonl"


def visit(folder, *, begin, end, error=None):
    """One visit that does the steps from `begin` to `end` of 10, and ends with an error if one is given."""
    with watching(folder, Deadline(), lambda: {"step": end}) as watch:
        if begin < 10:
            watch.resumed(begin)
        if error is not None:
            raise error


def events(folder):
    return [(event["event"], event["step"]) for event in history(read(folder / EVENT_LOGS))]


def test_each_visit_has_its_beginning_and_its_end(tmp_path):
    with pytest.raises(Stopped):
        visit(tmp_path, begin=0, end=3, error=Stopped(signal.SIGTERM, {}))
    with pytest.raises(ValueError, match="diverged"):
        visit(tmp_path, begin=3, end=5, error=ValueError("diverged " + "x" * 5000))
    with pytest.raises(KeyboardInterrupt):
        visit(tmp_path, begin=3, end=6, error=KeyboardInterrupt())
    visit(tmp_path, begin=3, end=10)
    visit(tmp_path, begin=10, end=10)
    names, steps = zip(*events(tmp_path), strict=True)
    assert names == ("started", "stopped", "resumed", "failed", "resumed", "failed", "resumed", "finished")
    assert steps == (0, 3, 3, 5, 3, 6, 3, 10), "and nothing for a visit to a finished run"
    first, stopped, _, failed, _, interrupted, _, finished = history(read(tmp_path / EVENT_LOGS))
    assert stopped["code"] == 75 and first["time"] <= finished["time"]
    assert len(failed["error"]) < 1100 and interrupted["error"] == "KeyboardInterrupt"


@pytest.mark.rest
def test_a_taken_over_folder_begins_anew(tmp_path):
    once = {"eval_batches": 1, "log_every": 1, "checkpoint_every": 1}
    file = write_tiny(tmp_path, tables(train={"steps": 2, "batch_size": 8, **once}))
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)  # by a visit of another experiment that was killed before its first row
    (folder / "experiment.toml").write_text(to_toml(load(file, {"seed": "7"})))
    (folder / "events").mkdir()
    (folder / EVENT_LOGS).write_text(json.dumps({"time": 1.0, "event": "started", "step": 0}) + "\n")
    (folder / ".lock").touch()
    with stopped_at(1):
        assert train(file)[0] == 130
    assert events(folder) == [("started", 0), ("stopped", 1)]
    assert train(file, "--train.steps", "3", "--compiler", "overlap")[0] == 0
    assert events(folder) == [("started", 0), ("stopped", 1), ("resumed", 1), ("finished", 3)]
    first, stopped, resumed, finished = history(read(folder / EVENT_LOGS))
    assert (first["platform"], first["devices"], first["hosts"]) == ("cpu", 8, 1)
    assert stopped["signal"] == "SIGINT" and finished["stopped_early"] is False
    assert resumed["changed"] == {"compiler": ["auto", "overlap"], "train.steps": [2, 3]}
