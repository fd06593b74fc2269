"""Faults in real processes: who is found to have failed, how soon, what is started again, and that nothing is lost.

The run that is compared with is the same one, undisturbed: its losses and its last state, bit for bit.
"""

import json
import re
import sys
import time

import jax
import numpy as np
import pytest
from own_process import environment
from paths import SUPPORT
from tiny_experiment import points_text, tables, train_here, write_points
from tiny_runs import rows

import jdp
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.guard.diagnosis import diagnose
from jdp.launch import launch, supervisor
from jdp.launch.events import EVENT_LOGS, read

STEPS = 12

TABLES = tables(
    optimizer={"name": "sgd", "momentum": 0.9, "lr": 0.01},
    train={"steps": STEPS, "batch_size": 16, "log_every": 1, "checkpoint_every": 2},
)
POINTS = points_text(TABLES, hidden=512, top='strategy = "zero1"\n')
"""With 512 hidden units: less would not be large enough to be sharded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an experiment that takes milliseconds a step."""
    made = tmp_path_factory.mktemp("faults")
    write_points(made, POINTS)
    return made


def train(folder, name, faults, **options):
    """Train as two processes of one device each, with faults; return the exit code of the launcher."""
    text = json.dumps({"folder": str(folder), **faults})
    command = [sys.executable, str(SUPPORT / "faulty.py"), text, "train", str(folder / "points.toml")]
    command += [f"--name={name}", f"--run-dir={folder}/runs"]
    options |= {"devices_per_process": 1, "reports_progress": True, "log_dir": folder / name}
    options["event_log"] = folder / "runs" / name / EVENT_LOGS / "node-00000.jsonl"
    return launch(command, 2, environment=environment(), **options)


def course(folder, name):
    """The losses of a run, by step, and the bytes of its last state."""
    run = folder / "runs" / name
    training = Assembly.on_devices(load(folder / "points.toml", {"mesh.data": "8"})).training
    state = jdp.restore(run / "checkpoints" / str(STEPS), training.abstract_state)
    leaves = jax.tree.leaves((state.params, state.opt_state, state.step))
    return rows(run, "loss"), [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.fixture(scope="module")
def undisturbed(folder):
    """Of one process with two devices, which is this one: it computes the same bits."""
    train_here(folder / "points.toml", folder / "runs", {"name": "undisturbed"}, devices=2)
    return course(folder, "undisturbed")


def written(folder, who):
    """When a fault happened."""
    return float((folder / who).read_text())


@pytest.mark.rest
def test_two_kills_cost_only_time(folder, undisturbed, capfd, monkeypatch):
    """Worker, then process 0. The launcher looks every 0.05 s whether a process has ended."""
    noticed: list[float] = []
    real = supervisor.report
    monkeypatch.setattr(supervisor, "report", lambda cause, *rest: noticed.append(cause.ended) or real(cause, *rest))
    kills = {"0:1:5": "kill", "1:0:9": "kill"}  # each save waits for the one before
    assert train(folder, "killed", kills, max_restarts=2) == 0
    out, err = capfd.readouterr()
    for at, who in zip(noticed, ("0:1", "1:0"), strict=True):
        assert 0 <= at - written(folder, who) < 15
    for rank in (1, 0):
        assert f"process {rank} of 2 ended with signal 9 (SIGKILL). Its last output:" in err
    reached = [int(step) for step in re.findall(r"restart \d of 2, from step (\d+)\n", err)]
    assert [kill - step in (1, 3) for kill, step in zip((5, 9), reached, strict=True)] == [True] * 2, reached
    assert out.count("resumed after step") == 2
    assert course(folder, "killed") == undisturbed
    first, second = [line for line in diagnose(folder / "runs" / "killed").words if "The visit that began" in line]
    assert ": Process 0 ended without a message after step 8" in first
    assert ": Process 1 ended without a message after step 4" in second
    told = read(folder / "runs" / "killed" / EVENT_LOGS / "node-00000.jsonl")
    assert [event["event"] for event in told] == ["ended", "restart"] * 2
    assert (folder / "killed" / "rank-00001.2.log").read_text().endswith("ended with signal 9 (SIGKILL)\n")


OWN_SCRIPT = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
import jdp
jdp.initialize()
mesh = jdp.make_mesh(data=-1)
x = jax.make_array_from_callback((2,), jax.NamedSharding(mesh, jax.P("data")), lambda i: np.ones(2, np.float32)[i])
total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))
rank = jax.process_index()
for step in range(4):
    if step == 2 and rank == 1:
        open(sys.argv[1], "w").write(str(time.monotonic()))
        os._exit(0)
    float(total(x))
"""


def test_a_leaving_process_is_named(tmp_path, capfd):
    """With 0, and without a word: to a supervisor it looks like success, until the others miss it."""
    (tmp_path / "script.py").write_text(OWN_SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "when")]
    code = launch(command, 2, devices_per_process=1, environment=environment())
    err = capfd.readouterr().err
    assert code and time.monotonic() - written(tmp_path, "when") < 60
    assert "(process 1 had left before it, with exit code 0: all must take the same steps)" in err


# The handshake: what differs is said by all, in the same words, and a restart is not tried.

JOIN = "import os, sys\nrank = os.environ['JDP_PROCESS_ID']\n"
MISMATCHES = {
    "versions": (
        "import importlib.metadata as m\nreal = m.version\n"
        "m.version = lambda name: '0.1' if (name, rank) == ('jaxlib', '1') else real(name)\n"
        "import jdp; jdp.initialize()",
        "The version of jaxlib must be the same on every process, at jdp.initialize; process 1 differs: process 0 has ",
    ),
    "device counts": (
        "os.environ['JAX_NUM_CPU_DEVICES'] = str(1 + int(rank))\nimport jdp; jdp.initialize(); jdp.make_mesh()",
        "Every process must have as many devices as the others; given process 1 with 2, the others with 1. ",
    ),
    "experiment": (
        "from jdp.cli.main import main\n"
        "sys.exit(main(['train', sys.argv[1], '--run-dir', '/nowhere', '--train.steps', '1' + rank]))",
        "The experiment must be the same on every process, at jdp train; process 1 differs: process 0 has steps = "
        "10, process 1 has steps = 11 (line ",
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize(("program", "words"), MISMATCHES.values(), ids=MISMATCHES)
def test_processes_started_differently_say_so(program, words, folder, tmp_path, capfd):
    """Measured on loaded cores: 3 to 9 s from the start of the launcher, 25 s once; most of it is importing JAX."""
    (tmp_path / "program.py").write_text(JOIN + program)
    command = [sys.executable, str(tmp_path / "program.py"), str(folder / "points.toml")]
    assert launch(command, 2, devices_per_process=1, environment=environment(), max_restarts=3) == 78
    out, err = capfd.readouterr()
    said = {line[:3]: line[line.index(words) :] for line in out.splitlines() if words in line}
    assert said.keys() == {"[0]", "[1]"} and said["[0]"] == said["[1]"], out
    assert "restart" not in err
