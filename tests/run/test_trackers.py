"""W&B and MLflow get a copy of the metrics, a resumed run goes on over there, and neither can end a run."""

import json
import signal
import struct
import sys
import time

import jax
import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import refused, rows, stopped_at, train

from jdp.base import notices
from jdp.experiment.schema.experiment import Track
from jdp.run.outputs import trackers
from jdp.run.outputs.metrics import Metrics

CONFIG = {"name": "tiny", "optimizer": {"lr": 0.1}, "rules": {"*/kernel": ["", "model"]}, "mesh": {"data": -1}}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Nothing leaves this machine, and the file store that MLflow only keeps for those who ask is asked for."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setattr(notices, "_said", set())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    return tmp_path / "tiny"


def visit(folder, steps, *, after=0, loss=1.0, **wanted):
    """One process's part of a run: a row for each step."""
    started = trackers.start(folder, CONFIG, resumed_step=after, **wanted)
    with Metrics(folder, resumed_step=after, trackers=started) as metrics:
        for step in steps:
            metrics.write(step, {"loss": loss + step, "skipped": 0})
            if step % 2 == 0:
                metrics.write(step, {"eval_loss": 2.0 * step})


def wandb_records(file):
    """The records of a .wandb file: after 7 bytes of header, LevelDB's log: checksum u32, length u16, kind u8, data."""
    from wandb.proto import wandb_internal_pb2

    data, at = file.read_bytes(), 7
    assert len(data) < 2**15, "one block, so every record is whole (kind 1)"
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data.ljust(at + 7, b"\1"), at + 4)
        if at + 7 + length > len(data):  # it is being written
            return
        assert kind == 1
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length


def logged_to_wandb(folder):
    """What W&B's own files hold, by id of the run: for each visit its config, then its rows.

    W&B's process may still write them when the visit has ended: the last record of each is its exit.
    """
    runs, deadline = {}, time.monotonic() + 30
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        records = [*wandb_records(file)]
        while not (records and records[-1].HasField("exit")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            records = [*wandb_records(file)]
        visit = runs.setdefault(file.stem.removeprefix("run-"), [])
        for record in records:
            if record.HasField("run"):
                visit.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            elif record.HasField("history"):
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                visit.append({key: json.loads(value) for key, value in row.items()})
    return runs


def mlflow_run(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    known = json.loads((folder / trackers.FILE).read_text())["mlflow:digits"]
    run = client.get_run(known)
    points = {name: client.get_metric_history(known, name) for name in run.data.metrics}
    return run, {name: [(point.step, point.value) for point in history] for name, history in points.items()}


def test_wandb_offline_has_every_row_and_the_config_and_a_resumed_run_is_the_same_run(folder):
    pytest.importorskip("wandb")
    visit(folder, range(1, 5), wandb="team/project")
    visit(folder, range(5, 7), after=4, wandb="team/project")
    runs = logged_to_wandb(folder)
    assert len(runs) == 1, "one run over there, in two visits"
    ((known, records),) = runs.items()
    assert json.loads((folder / trackers.FILE).read_text()) == {"wandb:team/project": known}
    # W&B's writer need not repeat a config that it has: there is the first visit's, and all that there are agree.
    configs = [record["optimizer"] for record in records if "optimizer" in record]
    assert configs and all(config == {"lr": 0.1} for config in configs)
    rows = [record for record in records if "_step" in record]
    assert [(row["_step"], row.get("loss"), row.get("eval_loss")) for row in rows] == [
        (step, 1.0 + step, 2.0 * step if step % 2 == 0 else None) for step in range(1, 7)
    ]


def test_mlflow_has_every_step_once_although_a_crash_repeats_some(folder):
    pytest.importorskip("mlflow")
    visit(folder, range(1, 7), mlflow="digits")
    visit(folder, range(5, 9), after=4, mlflow="digits")
    run, points = mlflow_run(folder)
    assert run.info.run_name == "tiny" and run.info.status == "FINISHED"
    assert points["loss"] == [(step, 1.0 + step) for step in range(1, 9)]
    assert points["eval_loss"] == [(step, 2.0 * step) for step in (2, 4, 6, 8)]
    assert run.data.params["optimizer.lr"] == "0.1" and run.data.params["rules._/kernel"] == "['', 'model']"


def test_a_run_that_fails_is_a_failed_run_over_there(folder):
    pytest.importorskip("mlflow")
    started = trackers.start(folder, CONFIG, mlflow="digits")
    with pytest.raises(RuntimeError), Metrics(folder, trackers=started):
        raise RuntimeError
    assert mlflow_run(folder)[0].info.status == "FAILED"


def test_a_store_that_goes_away_is_said_once_and_the_run_goes_on(folder, tmp_path, capsys):
    """MLflow's store loses the run in the middle: rows after that are on disk, and the error is one line."""
    pytest.importorskip("mlflow")
    started = trackers.start(folder, CONFIG, mlflow="digits")
    with Metrics(folder, trackers=started) as metrics:
        metrics.write(1, {"loss": 1.0})
        (tmp_path / "store").rename(tmp_path / "gone")
        for step in range(2, 6):
            metrics.write(step, {"loss": 1.0})
    said = capsys.readouterr().err
    assert said.count("mlflow failed (") == 1 and "goes on without it" in said and "Traceback" not in said
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5]


def test_a_store_that_is_gone_at_a_resume_is_done_without_but_a_fresh_start_is_an_error(folder, tmp_path, capsys):
    pytest.importorskip("mlflow")
    visit(folder, range(1, 3), mlflow="digits")
    (tmp_path / "store").rename(tmp_path / "gone")
    visit(folder, range(3, 5), after=2, mlflow="digits")
    assert "mlflow did not go on with its run" in capsys.readouterr().err
    assert list(rows(folder, "loss")) == [1, 2, 3, 4]


def test_a_tracker_that_cannot_start_is_one_error_with_a_way_out(folder, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
    with pytest.raises(ValueError, match=r"track\.mlflow = 'digits' did not start: .*MLFLOW_TRACKING_URI"):
        trackers.start(folder, CONFIG, mlflow="digits")
    assert not (folder / trackers.FILE).exists()


class Stuck:
    """A network that never answers."""

    id = "1"

    def write(self, step, now, values):
        time.sleep(3600)

    def close(self, exit_code):
        raise AssertionError


def test_a_tracker_that_hangs_holds_up_neither_a_row_nor_the_end(folder, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "WAITING_ROWS", 3)
    late = trackers.BackgroundTracker("wandb", Stuck(), folder)
    late.write(1, {"loss": 1.0})
    late.close()
    assert "wandb failed (still sending 0 seconds after the end)" in capsys.readouterr().err
    behind = trackers.BackgroundTracker("mlflow", Stuck(), folder)
    for step in range(10):
        behind.write(step, {"loss": 1.0})
    behind.close()
    assert "mlflow failed (3 rows behind)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_said_with_the_one_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"track\.{name} needs the package {name}.*pip install 'jdp\[{name}\]'"):
        trackers.check_installed(**{name: "somewhere"})
    trackers.check_installed(**{name: None})


def test_only_process_0_tracks(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    trackers.check_installed(wandb="project")
    assert trackers.start(folder, CONFIG, wandb="project", mlflow="digits") == []
    assert not list(folder.iterdir())


def test_the_keys_of_track_are_optional_words():
    assert Track() == Track(wandb=None, mlflow=None)
    assert Track.model_validate({"wandb": "none"}).wandb is None
    with pytest.raises(ValueError):
        Track(wandb="")


TABLES = tables(
    train={"steps": 4, "batch_size": 8, "log_every": 1, "eval_batches": 1},
    track={"wandb": "project", "mlflow": "digits"},
)


@pytest.fixture
def file(tmp_path):
    return write_tiny(tmp_path, TABLES)


def test_a_missing_package_ends_the_command_before_anything_is_written(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    error = refused(capsys, "train", file, "--run-dir", file.parent / "runs", "--track.wandb", "none")
    assert error.startswith("error: track.mlflow needs the package mlflow") and error.count("\n") == 1
    assert not (file.parent / "runs").exists()


def test_a_run_that_a_signal_stops_is_stopped_over_there_and_goes_on_when_resumed(file):
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    with stopped_at(2, signal.SIGTERM):
        code, folder = train(file)
    assert code == 75
    run, points = mlflow_run(folder)
    assert run.info.status == "KILLED" and [step for step, _ in points["loss"]] == [1, 2]
    assert (run.data.params["train.steps"], run.data.params["model.width"]) == ("4", "16"), "as resolved"
    assert train(file)[0] == 0
    run, points = mlflow_run(folder)
    assert run.info.status == "FINISHED" and points["loss"] == [*rows(folder, "loss").items()]
    assert [step for step, _ in points["eval_loss"]] == [4]
    ((_, records),) = logged_to_wandb(folder).items()
    assert [record["_step"] for record in records if "_step" in record] == [1, 2, 3, 4]
    assert json.loads((folder / "trackers.json").read_text()).keys() == {"wandb:project", "mlflow:digits"}
    assert train(file)[0] == 0, "a finished run has nothing to tell"
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
