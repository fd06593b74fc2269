"""Metrics on disk hold every step once; W&B gets a copy of them, goes on with a resumed run, and cannot end one."""

import importlib
import json
import math
import signal
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from damage import files_of_at_most
from tiny_experiment import tables, write_tiny
from tiny_runs import refused, rows, stopped_at, train

from jdp.run import metrics as trackers
from jdp.run.metrics import Metrics, numbers, read, replace_file
from jdp.run.outputs import Display


def write(folder, steps, *, resumed_step=0, loss=1.0):
    with Metrics(folder, resumed_step=resumed_step) as rows:
        for step in steps:
            rows.write(step, {"loss": loss + step, "lr": 0.1})


def records(file):
    """The records of a TFRecord file: u64 length, u32 checksum, data, u32 checksum."""
    data = file.read_bytes()
    while data:
        end = 12 + int.from_bytes(data[:8], "little")
        yield data[12:end]
        data = data[end + 4 :]


def events(folder):
    """All events of a folder's TensorBoard files, in the order TensorBoard reads them."""
    kind = importlib.import_module("tensorboardX.proto.event_pb2").Event
    return [kind.FromString(one) for file in sorted(folder.glob("events.*tfevents.*")) for one in records(file)]


def scalars(folder, name="loss"):
    """What TensorBoard shows of a metric: a START purges its own step and those after it (2.21, `EventAccumulator`)."""
    found: list[tuple[int, float]] = []
    for event in events(folder):
        if event.session_log.status == event.session_log.START:
            found = [row for row in found if row[0] < event.step]
        found += [(event.step, value.simple_value) for value in event.summary.value if value.tag == name]
    assert len(dict(found)) == len(found), "a step twice"
    return dict(found)


def test_rows_are_flushed_json_lines(tmp_path):
    rows, values = Metrics(tmp_path), {"loss": 0.5, "skipped": 2}
    rows.write(3, values)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row.pop("time") > 1.6e9 and row == {"step": 3, **values}
    (event,) = [event for event in events(tmp_path) if event.summary.value]
    assert event.step == 3
    assert {value.tag: value.simple_value for value in event.summary.value} == values
    rows.close()


def test_non_finite_values_read_back(tmp_path):
    with Metrics(tmp_path) as rows:
        rows.write(1, {"loss": math.nan, "low": -math.inf, "lr": 0.1})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (row["loss"], row["lr"], row["nonfinite"]) == (None, 0.1, {"loss": "nan", "low": "-inf"})
    (again,) = read(tmp_path / "metrics.jsonl")
    assert math.isnan(again["loss"]) and again["low"] == -math.inf and "nonfinite" not in again


def test_arrays_are_left_out_of_rows(capsys):
    assert numbers({"loss": jnp.float32(0.5), "confusion": jnp.zeros((3, 3))}) == {"loss": 0.5}
    assert "metric 'confusion' has shape (3, 3): rows of metrics hold only numbers" in capsys.readouterr().err


def test_a_resumed_run_has_every_step_once(tmp_path, monkeypatch):
    write(tmp_path, range(1, 8))
    monkeypatch.setattr("time.time", lambda: 1.6e9)  # the clock of another machine
    write(tmp_path, range(5, 11), resumed_step=4, loss=100.0)
    rows = read(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [*enumerate([*range(2, 6), *range(105, 111)], 1)]
    assert scalars(tmp_path) == {row["step"]: row["loss"] for row in rows}


def test_a_repeated_evaluation_replaces_its_row(tmp_path):
    """The second one is of other data: with the same settings it has the same values."""
    write(tmp_path, range(1, 5))
    for name, loss in (("eval_loss", math.inf), ("eval_loss", 7.5), ("eval_other_loss", 8.5)):
        with Metrics(tmp_path, resumed_step=3, evaluates=True) as rows:
            rows.write(3, {name: loss})
        assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3]
        assert scalars(tmp_path) == {1: 2.0, 2: 3.0, 3: 4.0} and scalars(tmp_path, name) == {3: loss}
    assert scalars(tmp_path, "eval_loss") == {}
    assert scalars(tmp_path, "lr").keys() == {1, 2, 3}


@pytest.mark.parametrize("end", [b'{"step": 4, "lo', b'{"step": 4', b"\0\0\0"])
def test_a_last_row_half_written_is_dropped(tmp_path, end):
    file = tmp_path / "metrics.jsonl"
    write(tmp_path, range(1, 4))
    file.write_bytes(file.read_bytes() + end)
    write(tmp_path, range(4, 5), resumed_step=3)
    assert [row["step"] for row in read(file)] == [1, 2, 3, 4]


def test_only_process_0_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path, range(1, 3))
    with Display(5) as display:
        display.step(1)
        display.log(1, {"loss": 1.0})
        display.say("x")
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    replace_file(tmp_path / "a.json", "old")
    with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
        replace_file(tmp_path / "a.json", "new" * 10)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "old")]


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


def test_wandb_has_one_run_with_all_rows(folder, monkeypatch):
    told = {}

    def init(*, id, config, entity, project, **_):
        runs = told.setdefault((entity, project, id, config["optimizer"]["lr"]), [])
        log = lambda values, step: runs.append((step, values))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda exit_code: None)

    monkeypatch.setattr(pytest.importorskip("wandb"), "init", init)
    visit(folder, range(1, 5), wandb="team/project")
    visit(folder, range(5, 7), after=4, wandb="team/project")
    (known,) = json.loads((folder / trackers.TRACKERS).read_text()).values()
    assert told.keys() == {("team", "project", known, 0.1)}, "one run over there, in two visits"
    (rows,) = told.values()
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == [(step, 1.0 + step) for step in range(1, 7)]
    assert [(step, row["eval_loss"]) for step, row in rows if "eval_loss" in row] == [(2, 4.0), (4, 8.0), (6, 12.0)]


class Failing:
    """A tracker that takes two rows, and fails then."""

    def __init__(self, *_, **settings):
        self.rows, self.settings = 0, settings

    def log(self, values, step):
        self.rows += 1
        if self.rows > 2:
            raise RuntimeError("gone\nand more")

    def finish(self, exit_code):
        assert self.settings["settings"].finish_timeout == 60 and self.settings["settings"].finish_timeout_raises
        raise TimeoutError("Timed out finishing run.")


def test_a_failed_tracker_is_reported_once(folder, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "start_wandb", Failing)
    visit(folder, range(1, 6))
    said = capsys.readouterr().err
    assert said.count("wandb failed (gone)") == 1 and "continues without it" in said and "Traceback" not in said
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5]


def test_waiting_for_unsent_rows_is_limited(folder, monkeypatch, capsys):
    monkeypatch.setattr(pytest.importorskip("wandb"), "init", Failing)
    visit(folder, range(1, 2))
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
    (known,) = json.loads((folder / "trackers.json").read_text()).values()
    assert {path.stem for path in folder.glob("wandb/offline-run-*/run-*.wandb")} == {f"run-{known}"}
    assert train(file)[0] == 0, "a finished run has nothing to tell"
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
