"""The keys `wire` and `buckets`: what is refused, in one error; and a run with int8 gradients, stopped and resumed."""

import shutil

import jax
import numpy as np
import pytest
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows, stopped_at

from jdp.checkpoint import Checkpoints
from jdp.cli.main import main
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load

# Three runs; `test_wire.py` has the encodings of a step.
pytestmark = pytest.mark.rest


TRAIN = {"steps": 4, "batch_size": 16, "log_every": 1, "checkpoint_every": 100}
POINTS = points_text(tables(train=TRAIN, optimizer={"name": "sgd", "lr": 0.1}), hidden=4096)
INT8 = ("--wire", "int8")


def train(file, runs, *arguments):
    code = main(["train", str(file), "--run-dir", str(runs), "--strategy", "zero1", *arguments])
    return code, runs / "points"


def state_at(file, folder, step):
    target = Assembly.on_devices(load(file, {"wire": "int8", "strategy": "zero1"})).training.abstract_state
    with Checkpoints(folder / "checkpoints") as saved:
        restored, _ = saved.restore(target, step)
    return jax.device_get(restored)


def test_stopped_and_resumed_is_bitwise_the_undisturbed_run(tmp_path):
    """The rounding of a step is drawn from its key: nothing is kept beside the state."""
    file = write_points(tmp_path, POINTS)
    with stopped_at(2):
        code, run = train(file, tmp_path / "runs", *INT8)
    assert code == 130
    shutil.copytree(run.parent, tmp_path / "again")
    (code, whole), (other, again) = (train(file, tmp_path / name, *INT8) for name in ("whole", "again"))
    assert code == other == 0
    losses = [rows(folder, "loss", "grad_norm") for folder in (whole, again)]
    assert losses[0] == losses[1] and max(losses[0]) == 4
    states = [state_at(file, folder, 4) for folder in (again, whole)]
    jax.tree.map(np.testing.assert_array_equal, *[(s.params, s.opt_state) for s in states])
