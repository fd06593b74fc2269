"""Metrics on disk hold every step once, whatever happened to the processes that wrote them."""

import importlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import files_of_at_most

from jdp.run.outputs.metrics import Metrics, numbers, read, replace_file
from jdp.run.outputs.terminal import Display


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
    return [kind.FromString(one) for file in sorted(folder.glob("events.out.tfevents.*")) for one in records(file)]


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
    rows, half = Metrics(tmp_path), jnp.bfloat16(1.5)
    rows.write(3, {"loss": jnp.float32(0.5), "half": half, "skipped": jnp.int32(2), "n": np.int64(7), "x": 1})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row.pop("time") > 1.6e9
    assert row == {"step": 3, "loss": 0.5, "half": 1.5, "skipped": 2, "n": 7, "x": 1}
    (event,) = [event for event in events(tmp_path) if event.summary.value]
    assert event.step == 3
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert values == {"loss": 0.5, "half": 1.5, "skipped": 2, "n": 7, "x": 1}
    rows.close()


def test_non_finite_values_read_back(tmp_path):
    with Metrics(tmp_path) as rows:
        rows.write(1, {"loss": math.nan, "norm": jnp.inf, "low": -math.inf, "lr": 0.1})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (row["loss"], row["norm"], row["lr"]) == (None, None, 0.1)
    assert row["nonfinite"] == {"loss": "nan", "norm": "inf", "low": "-inf"}
    (again,) = read(tmp_path / "metrics.jsonl")
    assert math.isnan(again["loss"]) and again["norm"] == math.inf and again["low"] == -math.inf
    assert "nonfinite" not in again


@pytest.mark.parametrize("value", [np.zeros(2), "text", None])
def test_a_metric_is_one_number(tmp_path, value):
    with Metrics(tmp_path) as rows, pytest.raises(ValueError, match="A metric is one number; given loss, "):
        rows.write(1, {"loss": value})


def test_arrays_are_left_out_of_rows(capsys):
    assert numbers({"loss": jnp.float32(0.5), "confusion": jnp.zeros((3, 3))}) == {"loss": 0.5}
    assert "metric 'confusion' has shape (3, 3): rows of metrics hold only numbers" in capsys.readouterr().err


def test_a_resumed_run_has_every_step_once(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 11), resumed_step=4, loss=100.0)
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["loss"] for row in rows] == [*range(2, 6), *range(105, 111)]
    assert scalars(tmp_path) == {row["step"]: row["loss"] for row in rows}


def test_a_repeated_evaluation_replaces_its_row(tmp_path):
    """The second one is of other data: with the same settings it has the same values."""
    write(tmp_path, range(1, 5))
    for name, loss in (("eval_loss", math.inf), ("eval_loss", 7.5), ("eval_other_loss", 8.5)):
        with Metrics(tmp_path, resumed_step=3) as rows:
            rows.replace_evaluation(3, {name: loss})
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
