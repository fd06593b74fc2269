"""Standbys: the processes of the next attempt, which have done everything up to their turn."""

import json
import os
import sys
import time

import pytest
from own_process import environment

from jdp.launch import launch, standby
from jdp.launch.output import Outputs

PROGRAM = """
import json, os, sys, time
born = time.time()
from jdp.base.progress_file import note_progress
from jdp.base.standby import wait_for_turn
wait_for_turn()
restarts, rank = os.environ["JDP_RESTARTS"], os.environ["JDP_PROCESS_ID"]
with open(f"{sys.argv[1]}/{restarts}:{rank}", "w") as file:
    json.dump([born, os.environ["JDP_COORDINATOR"], "JDP_STANDBY" in os.environ, os.getpid()], file)
note_progress(int(restarts))
if restarts == "0":
    while not {"turn", "0:0", "0:1"} <= {*os.listdir(sys.argv[1])}: time.sleep(0.02)
    sys.exit(70)
"""
"""The first attempt ends with an error once the test says so; the second ends well."""


@pytest.fixture
def soon(monkeypatch):
    """A standby starts as soon as the attempt reports progress."""
    monkeypatch.setattr(standby, "AFTER_PROGRESS_SECONDS", 0.0)


def begun(folder, attempt):
    return [json.loads((folder / f"{attempt}:{rank}").read_text()) for rank in range(2)]


def test_the_next_attempt_takes_the_standbys_with_its_own_variables(soon, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    own = standby.Standbys.turn
    started = []

    def turn(self):
        own(self)
        started[:] = self._waiting
        if len(started) == 2:
            (tmp_path / "turn").touch()

    monkeypatch.setattr(standby.Standbys, "turn", turn)
    options = {"max_restarts": 2, "reports_progress": True, "environment": environment()}
    assert launch([sys.executable, str(program), str(tmp_path)], 2, **options) == 0
    failed = (tmp_path / "turn").stat().st_mtime
    first, second = begun(tmp_path, 0), begun(tmp_path, 1)
    assert all(born < failed for born, *_ in second), "they were there before the failure"
    assert first[0][1] == first[1][1] != second[0][1] == second[1][1], "the coordinator is the next attempt's"
    assert not any(still for _, _, still, _ in first + second)
    assert [process.poll() is None for process, *_ in started] == [False, False], "no standby outlives the launcher"


def test_a_standby_that_has_died_is_replaced_by_a_new_process(tmp_path):
    with standby.Standbys([sys.executable, "-c", "pass"], tmp_path / "progress", Outputs()) as standbys:
        standbys.attempt({0: dict(os.environ)})
        standbys._due = 0.0
        standbys.turn()
        process, *_ = standbys._waiting[0]
        process.wait(20)
        assert standbys.take(dict(os.environ), merged=True) is None and not standbys._waiting


def test_no_standby_starts_before_the_run_is_under_way(tmp_path):
    with standby.Standbys([sys.executable, "-c", "pass"], tmp_path / "progress", Outputs()) as standbys:
        standbys.attempt({0: dict(os.environ)})
        standbys.turn()
        assert not standbys._waiting
        (tmp_path / "progress").write_text("1")
        standbys.turn()
        assert not standbys._waiting and standbys._due < time.monotonic() + standby.AFTER_START_SECONDS
