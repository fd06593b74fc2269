"""W&B gets a copy of the metrics, a resumed run goes on over there, and it cannot end a run."""

import json
import signal
import struct
import sys
import time

import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import refused, rows, stopped_at, train

from jdp.run.outputs import metrics as trackers
from jdp.run.outputs.metrics import Metrics

CONFIG = {"name": "tiny", "optimizer": {"lr": 0.1}, "rules": {"*/kernel": ["", "model"]}, "mesh": {"data": -1}}


@pytest.fixture(autouse=True)
def offline(monkeypatch, fresh_notices):
    """Nothing leaves this machine."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    return tmp_path / "tiny"


def visit(folder, steps, *, after=0, loss=1.0, wandb="project"):
    """One process's part of a run: a row for each step."""
    started = trackers.start_tracker(folder, CONFIG, resumed_step=after, wandb=wandb)
    with Metrics(folder, resumed_step=after, tracker=started) as metrics:
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


def test_wandb_has_one_run_with_all_rows(folder):
    pytest.importorskip("wandb")
    visit(folder, range(1, 5), wandb="team/project")
    visit(folder, range(5, 7), after=4, wandb="team/project")
    runs = logged_to_wandb(folder)
    assert len(runs) == 1, "one run over there, in two visits"
    ((known, records),) = runs.items()
    assert json.loads((folder / trackers.TRACKERS).read_text()) == {"wandb:team/project": known}
    # W&B's writer need not repeat a config that it has: there is the first visit's, and all that there are agree.
    configs = [record["optimizer"] for record in records if "optimizer" in record]
    assert configs and all(config == {"lr": 0.1} for config in configs)
    rows = [record for record in records if "_step" in record]
    assert [(row["_step"], row.get("loss"), row.get("eval_loss")) for row in rows] == [
        (step, 1.0 + step, 2.0 * step if step % 2 == 0 else None) for step in range(1, 7)
    ]


class Failing:
    """A tracker that takes two rows, and fails then."""

    def __init__(self, *_):
        self.rows = 0

    def log(self, values, step):
        self.rows += 1
        if self.rows > 2:
            raise RuntimeError("gone\nand more")

    def finish(self, exit_code):
        raise AssertionError


def test_a_failed_tracker_is_reported_once(folder, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "start_wandb", Failing)
    visit(folder, range(1, 6))
    said = capsys.readouterr().err
    assert said.count("wandb failed (gone)") == 1 and "continues without it" in said and "Traceback" not in said
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5]


class Unanswered:
    """A run whose server takes no row: it ends as W&B's settings say."""

    def __init__(self, *, settings, **_):
        self.settings = settings

    def log(self, values, step):
        pass

    def finish(self, exit_code):
        time.sleep(self.settings.finish_timeout or 3600)
        if self.settings.finish_timeout_raises:
            raise TimeoutError("Timed out finishing run.")


def test_waiting_for_unsent_rows_is_limited(folder, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    assert trackers.CLOSE_SECONDS == 60
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(wandb, "init", Unanswered)
    visit(folder, range(1, 3))
    assert "wandb failed (Timed out finishing run.): this run continues" in capsys.readouterr().err


def test_a_tracker_must_start_with_a_fresh_run(folder, monkeypatch, capsys):
    def never(*_):
        raise RuntimeError("no such server")

    monkeypatch.setattr(trackers, "start_wandb", never)
    with pytest.raises(ValueError, match=r"train\.wandb = 'project' did not start: no such server .*WANDB_MODE"):
        trackers.start_tracker(folder, CONFIG, wandb="project")
    assert not (folder / trackers.TRACKERS).exists()
    (folder / trackers.TRACKERS).write_text(json.dumps({"wandb:project": "1"}))
    visit(folder, range(3, 5), after=2)
    assert "wandb did not continue its run" in capsys.readouterr().err
    assert list(rows(folder, "loss")) == [3, 4]


@pytest.fixture
def file(tmp_path):
    train = {"steps": 4, "batch_size": 8, "log_every": 1, "eval_batches": 1, "wandb": "project"}
    return write_tiny(tmp_path, tables(train=train))


def test_a_missing_package_ends_the_command(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refused(capsys, "train", file, "--run-dir", file.parent / "runs")
    assert error.startswith("error: train.wandb needs the package wandb") and error.count("\n") == 1
    assert not (file.parent / "runs").exists()


@pytest.mark.rest
def test_wandb_continues_a_run_after_a_signal(file):
    pytest.importorskip("wandb")
    with stopped_at(2, signal.SIGTERM):
        code, folder = train(file)
    assert code == 75
    assert train(file)[0] == 0
    ((_, records),) = logged_to_wandb(folder).items()
    assert [record["_step"] for record in records if "_step" in record] == [1, 2, 3, 4]
    assert json.loads((folder / "trackers.json").read_text()).keys() == {"wandb:project"}
    assert train(file)[0] == 0, "a finished run has nothing to tell"
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
