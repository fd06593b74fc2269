"""Signals and hangs in a run of two real processes, injected by (rank, step)."""

import json
import os
import re
import signal
import subprocess
import threading
import time

import jax
import pytest
from coordination import Store
from own_process import python, start_python
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows

from jdp.guard.diagnosis import diagnose
from jdp.launch.events import ENDS, read_logs
from jdp.run.signals import _Agreement

TRAIN = {"steps": 12, "batch_size": 8, "log_every": 1, "eval_every": 6, "eval_batches": 3, "checkpoint_every": 5}
PROGRAM = """
import json, os, signal, sys, threading
from collections import Counter
from pathlib import Path
import jax, jdp
from jdp.core.cluster import agreement, barrier
from jdp.experiment.file import load
from jdp.guard.deadline import Deadline
from jdp.guard.watch import Watch
from jdp.run import loop
from jdp.run.signals import Stopped, _Agreement

jdp.initialize(timeout_seconds=60)
rank, folder = jax.process_index(), Path(sys.argv[1])
agreed, fault = threading.Event(), []

class Visits(Counter):
    '''Numbers of meetings that begin anew with each visit: who leaves at once may have come to one more than others,
    and a process of a real run ends there.'''

    visits = 0

    def __missing__(self, name):
        return 1000 * self.visits

agreement._rounds, barrier._rounds = Visits(), Visits()

def run(name):
    Visits.visits += 1
    agreement._rounds.clear(), barrier._rounds.clear()
    agreed.clear()
    try:
        summary = loop.run(load(folder / "points.toml", {"name": name}), root=folder, quiet=True)
        return ["finished", summary["steps"]]
    except Stopped as stopped:
        return [stopped.code, stopped.summary["stopped"], stopped.summary.get("steps")]

def inject(place, number):
    '''Process 1 gets the signal here; all wait until they have agreed on what to do.'''
    if fault and (fault[0], fault[1]) == (place, number):
        _, _, name = fault.copy()
        fault.clear()
        if rank == 1:
            os.kill(os.getpid(), signal.Signals[name])
        agreed.wait(30)

def hooked(kind, name, place, number):
    real = getattr(kind, name)

    def method(self, *arguments):
        result = real(self, *arguments)
        inject(place, number(self, *arguments))
        return result

    setattr(kind, name, method)

hooked(Watch, "step", "step", lambda self, step: step)
hooked(Deadline, "beat", "batch", lambda self, doing: self._step)
hooked(Watch, "mark", "compile", lambda self, part: self._step if self._first and part == "data" else None)
hooked(_Agreement, "agree", "", lambda self, *_: self.signal and agreed.set())
hooked(loop, "resumed", "restore", lambda *_: 0)
reported = {"calm": run("calm")}  # first: it imports all modules; a signal in an import would leave half a module
fault[:] = ["compile", 0, "SIGHUP"]
reported["compile"] = run("storm")
jdp.core.cluster.barrier.meet("after the first")
reported["left behind"] = (folder / "storm").exists()
for fault[:] in (["step", 3, "SIGTERM"], ["restore", 0, "SIGTERM"], ["batch", 6, "SIGUSR1"], ["compile", 6, "SIGINT"]):
    case = f"{fault[0]} {fault[2]}"
    reported[case] = run("storm")
reported["last"] = run("storm")
print("REPORTED", json.dumps(reported), flush=True)
"""


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """What each process reported of a run that was stopped in every phase; and the folder of the runs."""
    folder = tmp_path_factory.mktemp("storm")
    write_points(folder, points_text(tables(train=TRAIN)))
    (folder / "program.py").write_text(PROGRAM)
    done = python("-m", "jdp", "launch", "-n", "2", "--", folder / "program.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\[(\d)\] REPORTED (.*)$", done.stdout, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in found}, folder


@pytest.mark.rest
def test_a_signal_stops_all_processes_together(storm):
    """In training after step 3, in an evaluation at its second batch; while restoring or compiling, at once."""
    reported, _ = storm
    assert reported[0] == reported[1]
    assert reported[0] == {
        "compile": [75, "SIGHUP", None],
        "left behind": False,
        "step SIGTERM": [75, "SIGTERM", 4],
        "restore SIGTERM": [75, "SIGTERM", None],
        "batch SIGUSR1": [75, "SIGUSR1", 6],
        "compile SIGINT": [130, "SIGINT", None],
        "last": ["finished", 12],
        "calm": ["finished", 12],
    }


@pytest.mark.rest
def test_the_stopped_run_equals_the_calm_one(storm):
    _, folder = storm
    assert rows(folder / "storm", "loss", "grad_norm") == rows(folder / "calm", "loss", "grad_norm")
    assert rows(folder / "storm", "eval_loss") == rows(folder / "calm", "eval_loss")
    assert list(rows(folder / "calm", "eval_loss")) == [6, 12]


@pytest.mark.parametrize(
    ("other", "stops"), [("7", True), ("-1", False), (None, False)], ids=["later", "first", "gone"]
)
def test_processes_stop_at_a_future_poll(monkeypatch, other, stops):
    """The other one has polled more often, is before its first step, or has taken all its steps and does not answer."""
    service, done = Store(), threading.Event()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("jdp.run.signals.coordination_client", lambda: service)
    agreement = _Agreement()
    agreement.store.put("asked", str(int(signal.SIGUSR1)))
    if other is None:
        threading.Timer(0.2, done.set).start()
    else:
        service[f"{agreement.store.prefix}/polls/1"] = other
    assert (agreement.agree(lambda: True, done.wait) is None) == (other != "-1")
    assert [agreement.poll() is not None for _ in range(8)] == [stops and polls == 8 for polls in range(1, 9)]


LATE = """
import os, signal, sys, time
import jax, jdp
from jdp.core.cluster.barrier import meet
from jdp.run.signals import StopRequest

jdp.initialize(timeout_seconds=60)
with StopRequest() as stop:
    stop.began = True
    meet("their last step")
    if jax.process_index() == 0:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
print("done", flush=True)
"""


@pytest.mark.rest
def test_a_signal_after_the_last_step_changes_nothing(tmp_path):
    """Process 1 has left by then; a thread of process 0 that waits for its answer in JAX would abort it with 134."""
    (tmp_path / "late.py").write_text(LATE)
    done = python("-m", "jdp", "launch", "-n", "2", "--", tmp_path / "late.py")
    heard = "[0] SIGUSR1: the run saves and ends after its current work; a second signal ends it at once"
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [heard, "[0] done", "[1] done"]), done.stdout


@pytest.mark.rest
def test_a_hanging_process_is_named_and_all_leave(tmp_path):
    """On stderr, in the event log with the stack, and by `jdp why`, after a SIGSTOP to process 1.

    The deadline is 8 seconds: more than a step takes beside a launch that loads its libraries on busy cores, less than
    a silent process has (20), or than JAX needs, which aborts 30 to 60 after the stop and names nobody.
    """
    train = TRAIN | {"steps": 1_000_000, "eval_every": 0, "checkpoint_every": 0}  # a save has an hour
    write_points(tmp_path, points_text(tables(train=train)))
    command = ["-m", "jdp", "launch", "-n", "2", "--devices-per-process", "1", "--", "points.toml"]
    command += ["--run-dir", tmp_path, "--guard.deadline_seconds", "8"]
    events = tmp_path / "points" / "events"
    with start_python(*command, cwd=tmp_path, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 300
        while not any(event["event"] == "step" for event in read_logs(events, "rank").get(1, [])):
            if time.monotonic() > deadline or process.poll() is not None:
                process.kill()  # else it trains a million steps
                pytest.fail(process.communicate()[0])
            time.sleep(0.1)
        start = next(event for event in read_logs(events, "rank")[1] if event["event"] == "start")
        os.kill(start["pid"], signal.SIGSTOP)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert re.search(r"process 0 of 2: deadline: After step \d+, .* did not end in 8 seconds\. ", output), output
    assert re.search(r"Process 1 does not answer: \d+ seconds ago it was at step [\d,]+, ", output), output
    assert "most recent call first" in output and "loop.py" in output

    ranks = read_logs(events, "rank")
    last = ranks[0][-1]
    assert last["event"] == "deadline" and "Process 1 does not answer" in last["words"]
    assert any("loop.py" in frame for frame in last["stack"])
    assert ranks[1][-1]["event"] not in ENDS, "it was stopped in the middle"
    ((supervisor,),) = read_logs(events, "node").values()
    assert supervisor["event"] == "ended" and supervisor["words"].startswith("process 0 of 2 ended with exit code 75")

    found = diagnose(tmp_path / "points")
    assert (found.state, found.began) == ("deadline", 1)
    assert found.words[0].startswith("It hung: After step ")


STUCK = """
import ctypes, os, signal, sys, threading
from jdp.run.signals import StopRequest

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with StopRequest() as stop:
    if sys.argv[1] == "second":
        stop.began = True
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # as in a compiler: no Python runs in the main thread
"""


@pytest.mark.parametrize(
    ("when", "words"), [("compile", "before the first step there is nothing to"), ("second", "a second signal came")]
)
@pytest.mark.default_ids("second-*")
def test_leaving_at_once_without_the_main_thread(tmp_path, when, words):
    (tmp_path / "program.py").write_text(STUCK)
    with start_python(tmp_path / "program.py", when) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if when == "second":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            process.send_signal(signal.SIGUSR1)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 75
    assert f"stopped by SIGTERM, at once: {words}" in error and "; the files on disk are complete" in error


COLLECTING = """
import os, signal, time, weakref
from jdp.run.signals import StopRequest

def run():
    print("ready", flush=True)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:  # Python runs here, and prints what is raised
        pass

with StopRequest():
    if not (worker := os.fork()):
        os._exit(time.sleep(20) or 1)
    time.sleep(1)
    os.kill(worker, signal.SIGTERM)  # as a pool ends its workers
    os.waitpid(worker, 0)
    collected = lambda: None
    weakref.finalize(collected, run)
    del collected
    try:
        time.sleep(20)
    except SystemExit:
        raise ImportError("as a library reports it")
"""


def test_leaving_at_once_waits_for_a_destructor(tmp_path):
    """Python ignores an exception in one, or in a callback of the collector; a worker's signal is its own."""
    (tmp_path / "program.py").write_text(COLLECTING)
    with start_python(tmp_path / "program.py") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped by SIGINT, at once" in error and "Traceback" not in error
