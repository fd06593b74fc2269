"""What saves and restarts took, read from events; from a real run in `tests/run/test_measured_times.py`."""

import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import refused

from jdp.guard.save_times import Measured, measured

START = {"event": "start", "time": 12.0, "began": 10.0}


def save(seconds):
    return {"event": "end", "doing": "save", "time": 50.0, "seconds": seconds}


def step(time):
    return {"event": "step", "time": time, "step": 1, "seconds": 1.0}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], Measured(None, None)),
        ([START, save(5.0)], Measured(5.0, None)),
        ([START, save(5.0), save(1.0), save(3.0), START, save(9.0), save(2)], Measured(2.0, None)),
        ([START, {"event": "resumed", "time": 14, "step": 0}, step(20.0)], Measured(None, None)),
        ([START, {"event": "resumed", "time": 14, "step": 7}, step(20.0), step(90.0)], Measured(None, 10.0)),
        ([{"event": "resumed", "time": 14, "step": 7}, step(20.0)], Measured(None, None)),
    ],
)
def test_medians_of_what_there_is(events, expected):
    assert measured(events) == expected


def test_a_run_without_recorders_is_one_error(tmp_path, capfd):
    file = write_tiny(tmp_path, tables(train={"steps": 4, "batch_size": 8}))
    said = refused(capfd, "plan", file, "--target", "cpu:8", "--mtbf", "9h", "--measured", tmp_path)
    assert said.startswith("error: --measured takes a run that has a flight recorder") and said.count("\n") == 1
