"""The command `jdp doctor`, alone and as several processes: report, exit code, and that it always comes back."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from damage import flip
from paths import ROOT
from tiny_runs import refused

import jdp
from jdp.cli import main as cli
from jdp.launch import doctor as checks
from jdp.launch import launch

SHORT, SMALL = 0.1, (2**16, 2**18)  # seconds of all-reduces, in place of two, and bytes of each


@pytest.fixture(autouse=True)
def all_reduces_are_few(monkeypatch):
    monkeypatch.setattr(checks, "SECONDS", SHORT)
    monkeypatch.setitem(checks.PAYLOADS, "cpu", SMALL)


def doctor(tmp_path, *arguments, before=""):
    """The command line of `jdp doctor`; `before` is run first, by each process, with its number as `rank`."""
    path = tmp_path / "doctor.py"
    path.write_text(
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "rank = int(os.environ.get('JDP_PROCESS_ID', 0))\n"
        f"{before}\n"
        "from jdp.cli.main import main\n"
        "from jdp.launch import doctor as checks\n"
        f"checks.SECONDS, checks.PAYLOADS['cpu'] = {SHORT}, {SMALL}\n"
        f"sys.exit(main(['doctor', *{list(arguments)!r}]))\n"
    )
    return [sys.executable, str(path)]


def statuses(printed):
    return {each["check"]: (each["status"], each["found"]) for each in json.loads(printed)["findings"]}


def environment():
    """As a user's, without the tests' eight devices."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


def test_two_processes_that_are_well(folder, capfd):
    command = doctor(folder, "--json")
    code = launch(command, 2, devices_per_process=2, clean_stdout=True, environment=environment())
    printed = capfd.readouterr()
    assert code == 0, printed
    found = json.loads(printed.out)
    assert found["healthy"] and found["processes"] == 2
    checks = statuses(printed.out)
    assert checks["devices"][1] == "4 × cpu" and checks["collectives"][1] == "Gloo, over TCP"
    assert checks["all-reduce"][1].startswith("4 devices, right; 64 KiB in ")
    assert [path.name for path in folder.iterdir()] == ["doctor.py"]


@pytest.mark.rest
def test_a_process_that_stops_in_the_all_reduce(tmp_path, capfd):
    """Nothing in JAX ends that wait; here it is told, with all that was found before."""
    before = """
from jdp.launch import doctor as checks
if rank == 1: checks.time_all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
"""
    command = doctor(tmp_path, "--json", "--timeout", "8", before=before)
    code = launch(command, 2, devices_per_process=1, clean_stdout=True, environment=environment())
    assert code == 1
    found = json.loads(capfd.readouterr().out)
    (reduced,) = (each for each in found["findings"] if each["check"] == "all-reduce")
    assert reduced["status"] == "wrong" and reduced["found"].startswith("not done after 8 seconds")
    assert "try NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1" in reduced["mend"]
    assert found["processes"] == 2, "what the other found before is told too"


@pytest.mark.rest
def test_process_1_does_not_come(monkeypatch, capfd):
    """It is missed before JAX joins anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"JDP_COORDINATOR": f"127.0.0.1:{port}", "JDP_NUM_PROCESSES": "2", "JDP_PROCESS_ID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--timeout", "1"]) == 1
    out = capfd.readouterr().out
    assert out.startswith("jdp doctor: process 0 of 2, alone\n")
    assert f"1 of 2 processes is here: process 1 did not come to 127.0.0.1:{port} within 1 seconds" in out


def test_alone_with_eight_devices(tmp_path, capfd):
    assert cli.main(["doctor", "--run-dir", str(tmp_path / "runs")]) == 0
    out = capfd.readouterr().out
    assert out.startswith("jdp doctor: 1 process on ") and out.endswith("Nothing is wrong.\n")
    assert "8 devices, right" in out
    assert list(tmp_path.iterdir()) == []


def test_a_platform_that_does_not_start(folder):
    variables = environment() | {"JAX_PLATFORMS": "nosuch"}
    done = subprocess.run(doctor(folder), env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and not done.stderr, done
    assert "WRONG  devices   JAX starts none: " in done.stdout


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"JDP_NUM_PROCESSES": "many"}, "must be whole numbers; given 'many'"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JDP_NUM_PROCESSES; it is not set"),
        ({"JDP_COORDINATOR": "node1:x", "JDP_NUM_PROCESSES": "2", "JDP_PROCESS_ID": "0"}, "A coordinator is HOST:PORT"),
    ],
)
def test_an_environment_of_no_cluster_is_a_finding(variables, expected, monkeypatch, capfd):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 1
    out = capfd.readouterr().out
    assert "\nWRONG  cluster  " in out and expected in out


def test_the_checkpoints_of_a_run_are_verified(tmp_path, capfd):
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert f"there are none in {tmp_path}" in capfd.readouterr().out
    folder, tree = tmp_path / "runs" / "mine", {"w": np.random.default_rng(0).normal(size=(300, 300)).astype("f4")}
    with jdp.Checkpoints(folder / "checkpoints") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(tree, step=step)
            checkpoints.wait()
    assert cli.main(["doctor", "mine", "--run-dir", str(tmp_path / "runs"), "--json"]) == 0
    before = statuses(capfd.readouterr().out)
    assert [before[f"checkpoint {step}"][0] for step in (1, 2, 3)] == ["ok"] * 3
    assert "; a checkpoint takes 3" in before["next checkpoint"][1], "some 350 KiB"
    flip(max((folder / "checkpoints" / "3").rglob("*"), key=lambda path: path.stat().st_size), 1000)
    assert cli.main(["doctor", str(folder)]) == 1
    out = capfd.readouterr().out
    assert "\nWRONG  checkpoint 3 " in out and "\nok     checkpoint 2 " in out
    assert f"rm -r {folder / 'checkpoints' / '3'}" in out and out.endswith("1 thing is wrong.\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nosuchrun"], "there is no run nosuchrun, neither as a folder nor in runs: name its folder"),
        (["a\0b"], "must have no NUL character"),
        (["--timeout", "0"], "--timeout takes seconds"),
        (["--run-dir", "gs://bucket"], "mount it"),
    ],
)
def test_a_mistake_is_one_error_and_exit_2(arguments, expected, capfd):
    error = refused(capfd, "doctor", *arguments)
    assert expected in error and error.count("\n") == 1
