"""A terminal that is closed, a reader that has gone, a full disk: output that fails never ends training."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from own_process import environment, streams
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows, saved_steps, stopped_at, train

from jdp.run import signals


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path, points_text(tables(train={"steps": 6, "batch_size": 16, "log_every": 1})))


def without_a_reader():
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("lost", ["Broken pipe", "No space left on device"])
@pytest.mark.default_ids("Broken pipe")
def test_a_run_ends_without_its_output(file, tmp_path, lost):
    stdout = without_a_reader() if lost == "Broken pipe" else os.open("/dev/full", os.O_WRONLY)
    with streams(stdout, os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT)):
        code, folder = train(file)
    assert code == 0 and list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6] and saved_steps(folder) == [6]
    said = (tmp_path / "stderr").read_text()
    assert said.count(f"jdp: stdout cannot be written ({lost}): the run goes on without it\n") == 1
    assert "rror" not in said


def test_a_run_saves_when_its_terminal_closes(file):
    """The progress bar, the last words and the notices go to the terminal, which answers each with EIO."""
    terminal, ours = pty.openpty()
    with streams(os.dup(ours), ours), stopped_at(3, signal.SIGHUP) as patched:
        stops = signals.StopRequest.at_step

        def at_step(self, now):
            if now == 2:
                os.close(terminal)
            return stops(self, now)

        patched.setattr(signals.StopRequest, "at_step", at_step)
        code, folder = train(file)
    assert code == 75 and saved_steps(folder) == [3] and list(rows(folder, "loss")) == [1, 2, 3]


def test_launch_waits_for_saves_without_a_terminal(tmp_path):
    """They may take longer than the terminal: the launcher stays until they have ended."""
    program = 'trap "sleep 0.5; echo saved > saved; exit 75" TERM; while :; do echo row; sleep 0.02; done'
    command = [sys.executable, "-m", "jdp", "launch", "-n", "1", "--", "sh", "-c", program]
    terminal, ours = pty.openpty()
    launcher = subprocess.Popen(command, stdout=ours, stderr=ours, cwd=tmp_path, env=environment())
    os.close(ours)
    shown = b""
    while b"[0] row" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(30) == 75
    assert (tmp_path / "saved").read_text() == "saved\n"
