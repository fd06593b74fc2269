"""Several processes as one: whose line it was, who failed first and why, and that nobody is left behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from own_process import python, start_python

from jdp.base import machine
from jdp.cli import launch as command
from jdp.cli import main as cli
from jdp.launch import launch, processes

WHO = "import os, signal, sys, time; rank = int(os.environ['JDP_PROCESS_ID'])\n"


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(WHO + text)
    return [sys.executable, str(path)]


def lines_of(rank, output):
    return [line.removeprefix(f"[{rank}] ") for line in output.splitlines() if line.startswith(f"[{rank}] ")]


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=60):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def pids_written(tmp_path, count, seconds=120):
    """Process numbers that programs wrote as files named pid.*, once all are there."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in tmp_path.glob("pid.*")]
        if len(texts) == count and all(text.endswith("\n") for text in texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"only {list(tmp_path.glob('pid.*'))} came up")


WAIT = """
def wait_for(name):
    for _ in range(3000):
        if os.path.exists(f"{sys.argv[1]}/{name}"): return
        time.sleep(0.02)
    sys.exit(f"no {name} came")
"""
WRITE_PID = "open(f'{sys.argv[1]}/pid.{rank}', 'w').write(f'{os.getpid()}\\n')\n"


def test_lines_bear_their_process_in_order(tmp_path, capfd):
    text = """
for i in range(20):
    print("out", i)
    print("err", i, file=sys.stderr)
os.write(1, b"caf\\xe9, and no newline")
"""
    assert launch(program(tmp_path, text), 2) == 0
    shown = capfd.readouterr()
    expected = [f"{stream} {i}" for i in range(20) for stream in ("out", "err")]
    for rank in (0, 1):
        assert lines_of(rank, shown.out)[:-1] == expected
        assert lines_of(rank, shown.out)[-1].endswith("and no newline")
    assert not shown.err


def test_gloos_chatter_is_left_out(tmp_path, capfd):
    text = "gloo = '[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1'\n"
    assert launch(program(tmp_path, text + "print(gloo); print(); print('loss 3', gloo)"), 1) == 0
    assert capfd.readouterr().out == "[0] \n[0] loss 3 \n"


def test_processes_learn_who_they_are(tmp_path, capfd):
    names = ("JDP_COORDINATOR", "JDP_NUM_PROCESSES", "JDP_PROCESS_ID", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    text = f"print(*(os.environ.get(name) for name in {names}))"
    assert launch(program(tmp_path, text), 2, devices_per_process=3, environment=no_gpus()) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    address = lines[0].split()[1]
    assert address.startswith("127.0.0.1:") and lines == [f"[{rank}] {address} 2 {rank} cpu 3" for rank in (0, 1)]


def no_gpus():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_gpus_are_dealt_out(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "4,5,6,7,9"}
    command = program(tmp_path, "print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert launch(command, 2, environment=environment) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 4,5", "[1] 6,7"]
    assert launch(command, 2, devices_per_process=1, environment=environment) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 4", "[1] 5"]
    with pytest.raises(ValueError, match=r"2 processes × 3 = 6, but there are 5"):
        launch(command, 2, devices_per_process=3, environment=environment)


def test_a_cuda_plugin_without_gpus_stays_off(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(machine, "has_nvidia", lambda: False)
    monkeypatch.setattr(machine, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    environment = {name: value for name, value in no_gpus().items() if name != "JAX_PLATFORMS"}
    assert launch(program(tmp_path, "print(os.environ.get('JAX_PLATFORMS'))"), 1, environment=environment) == 0
    assert capfd.readouterr().out == "[0] cpu\n"


def test_the_first_failure_ends_all_processes(tmp_path, capfd):
    text = WAIT + WRITE_PID + "if rank == 1: wait_for('pid.0'); raise RuntimeError('the cause')\nwait_for('nothing')"
    assert launch([*program(tmp_path, text), str(tmp_path)], 2) == 1
    report = capfd.readouterr().err
    assert report.startswith("jdp launch: process 1 of 2 ended with exit code 1. Its last output:")
    assert "no nothing came" not in report
    assert "    RuntimeError: the cause\n" in report
    assert gone(pids_written(tmp_path, 2))


def test_aborts_are_no_cause_beside_failures(tmp_path, capfd):
    text = (
        WAIT
        + WRITE_PID
        + """
if rank == 0: open(f"{sys.argv[1]}/came", "w"); os.abort()
wait_for("came")
pid = int(open(f"{sys.argv[1]}/pid.0").read())
try:
    while True: os.kill(pid, 0); time.sleep(0.01)
except ProcessLookupError:  # the launcher has seen its end
    sys.exit(7)
"""
    )
    assert launch([*program(tmp_path, text), str(tmp_path)], 2) == 7
    assert "process 1 of 2 ended with exit code 7" in capfd.readouterr().err


def test_an_abort_alone_is_reported(tmp_path, capfd, monkeypatch):
    """The other one is up and waits: were it still starting, what ends it could be its own error."""
    monkeypatch.setattr(processes, "SETTLE_SECONDS", 0.2)
    text = WAIT + WRITE_PID + "if rank == 0: wait_for('pid.1'); os.abort()\ntime.sleep(60)"
    assert launch([*program(tmp_path, text), str(tmp_path)], 2) == 128 + signal.SIGABRT
    report = capfd.readouterr().err
    assert "process 0 of 2 ended with signal 6 (SIGABRT) (JAX aborts a process when a peer" in report
    assert "no process failed in another way; process 1 had not ended, and may hang)" in report


def test_a_process_that_will_not_end_is_killed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(processes, "LAST_WORDS_SECONDS", 0.5)
    text = "signal.signal(signal.SIGTERM, lambda *_: print('no'))\n" + WAIT + WRITE_PID
    text += "if rank == 1: wait_for('pid.0'); sys.exit(3)\nwhile True: time.sleep(1)"
    assert launch([*program(tmp_path, text), str(tmp_path)], 2) == 3
    assert lines_of(0, capfd.readouterr().out) == ["no"]
    assert gone(pids_written(tmp_path, 2))


def test_what_a_process_leaves_behind_ends_with_it(tmp_path, capfd):
    text = """
import subprocess
ended = f"{sys.argv[1]}/ended"
child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60); open({ended!r}, 'w')"])
open(f"{sys.argv[1]}/pid.{rank}", "w").write(f"{child.pid}\\n")
"""
    assert launch([*program(tmp_path, text), str(tmp_path)], 1) == 0
    assert not (tmp_path / "ended").exists()
    assert gone(pids_written(tmp_path, 1))


def start_launcher(tmp_path, text, grace=20):
    command = [*program(tmp_path, text), str(tmp_path)]
    code = f"import sys; from jdp.launch import launch; sys.exit(launch({command!r}, 2, grace_seconds={grace}))"
    return start_python("-c", code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_once(tmp_path, number):
    text = """
got = []
signal.signal(signal.SIGINT, lambda number, _: got.append(number))
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
open(f"{sys.argv[1]}/pid.{rank}", "w").write(f"{os.getpid()}\\n")
while not got: time.sleep(0.02)
time.sleep(0.2 + rank / 2)  # saving takes one of them longer
print("saved after", got)
sys.exit(75)
"""
    with start_launcher(tmp_path, text) as launcher:
        pids = pids_written(tmp_path, 2)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 75
    assert sorted(out.splitlines()) == [f"[{rank}] saved after [{int(number)}]" for rank in (0, 1)]
    assert f"ended with exit code 75, after {number.name}." in err
    assert gone(pids)


@pytest.mark.parametrize("second", [False, True])
def test_the_grace_period_ends_in_a_kill(tmp_path, second):
    text = "signal.signal(signal.SIGINT, lambda *_: print('not yet'))\n" + WRITE_PID + "while True: time.sleep(1)"
    with start_launcher(tmp_path, text, grace=20 if second else 0.5) as launcher:
        pids = pids_written(tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None and launcher.stdout.readline().endswith("not yet\n")
        if second:
            launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_no_process_outlives_a_killed_launcher(tmp_path):
    with start_launcher(tmp_path, WRITE_PID + "time.sleep(60)") as launcher:
        pids = pids_written(tmp_path, 2)
        launcher.kill()
        launcher.communicate(timeout=120)
    assert gone(pids)


KINDS = {
    "a program": ["program.py"],
    "a module": ["-m", "package.inner"],
    "a command": [sys.executable, "program.py"],
    "a command on the PATH": ["sh", "-c", f'exec {sys.executable} program.py "$@"', "sh"],
    "in the home folder": ["~/program.py"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_launched(kind, tmp_path, monkeypatch, capfd):
    """With arguments of its own, one of which is jdp's too and one of which is the mark between the two."""
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "program.py", tmp_path / "package" / "inner.py"):
        path.write_text(WHO + "print(sys.argv[1:])")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert command.run(["-n", "2", "--", *KINDS[kind], "--run-dir=x", "--", "-n"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{rank}] ['--run-dir=x', '--', '-n']" for rank in (0, 1)]


NOT_THERE = {
    "no program": (["nothing.py"], "there is no program nothing.py, seen from "),
    "no command": (["pyhton", "train.py"], "there is no file and no command 'pyhton': fix its name"),
    "no experiment": (["nothing.toml"], "nothing.toml"),
    "no module": (["-m", "no_such_package.train"], "given 'no_such_package.train': fix its name"),
    "nothing after -m": (["-m"], "-m needs a module of "),
    "no such user": (["~nosuchuser/train.py"], 'given "~nosuchuser/train.py": ~nosuchuser has none; write the folder'),
}


@pytest.mark.parametrize(("command", "words"), NOT_THERE.values(), ids=NOT_THERE)
def test_missing_things_are_named_once(command, words, capfd):
    assert cli.main(["launch", "-n", "2", "--", *command]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ") and words in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_launched_commands_exit_code_is_the_commands(tmp_path):
    path = tmp_path / "program.py"
    text = "print(sys.argv[1:]); print('note', file=sys.stderr); time.sleep(rank); sys.exit(5 * rank)"
    path.write_text(WHO + text)
    done = python("-m", "jdp", "launch", "-n", "2", "--", path, "--json", "-x")
    assert done.returncode == 5
    assert done.stdout == "['--json', '-x']\n", "the program asked for --json: its stdout alone"
    assert lines_of(0, done.stderr)[:1] == ["note"]
    assert lines_of(1, done.stderr) == ["['--json', '-x']", "note"]
