"""[wire] of an experiment file: what is refused, in one error; and a run with int8 gradients, stopped and resumed."""

import shutil

import jax
import numpy as np
import pytest
from own_process import python
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows, stopped_at

from jdp.base import notices
from jdp.checkpoint import Checkpoints
from jdp.cli.main import main
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load, to_toml

TRAIN = {"steps": 4, "batch_size": 16, "log_every": 1, "checkpoint_every": 100}
POINTS = points_text(tables(train=TRAIN, optimizer={"name": "sgd", "lr": 0.1}), hidden=256)
BLOCK = ("--wire.block", "8")
INT8 = ("--wire.gradients", "int8", *BLOCK)
TOPK = ("--wire.gradients", "topk")

BUCKETS = '--wire.buckets must be a number of bytes, 1 to 1099511627776, or "auto"'
WRONG = {
    "buckets of 0": (["--wire.buckets", "0"], BUCKETS + "; given 0"),
    "buckets below 0": (["--wire.buckets", "-1"], BUCKETS + "; given -1"),
    "buckets of half a byte": (["--wire.buckets", "0.5"], BUCKETS + "; given 0.5"),
    "word for buckets": (["--wire.buckets", "big"], BUCKETS + '; given "big"'),
    "rank 0": (["--wire.gradients", "powersgd", "--wire.rank", "0"], "--wire.rank must be"),
    "fraction above 1": ([*TOPK, "--wire.fraction", "1.5"], "--wire.fraction must be"),
    "fraction 0": ([*TOPK, "--wire.fraction", "0"], "--wire.fraction must be"),
    "fraction nan": ([*TOPK, "--wire.fraction", "nan"], "--wire.fraction: it should be a finite number"),
    "block of 4": (["--wire.block", "4"], "--wire.block must be"),
    "int7": (["--wire.gradients", "int7"], 'given "int7"; did you mean int8?'),
    "weights in fp8": (["--wire.weights", "fp8"], '--wire.weights must be int8, the only one there is; given "fp8"'),
    "reduce in int8": (["--reduce", "int8"], "--reduce must be one of fp32, bf16"),
    "unknown key": (["--wire.gradient", "int8"], "did you mean --wire.gradients?"),
    "a word for the table": (["--wire", "int8"], "--wire must be"),
    "auto": (["--wire.gradients", "int8", "--partitioning", "auto"], '[wire] is for partitioning = "manual"'),
    "buckets under auto": (["--wire.buckets", "auto", "--partitioning", "auto"], 'given "auto": remove that key'),
    "topk under zero3": ([*TOPK, "--strategy", "zero3"], "zero3 has none: take zero2"),
    "powersgd under zero3": (["--wire.gradients", "powersgd", "--strategy", "zero3"], "zero3 has none: take zero2"),
    "topk without feedback": (
        [*TOPK, "--wire.error_feedback", "false"],
        'wire.gradients = "topk" needs wire.error_feedback = true; given false: remove that key',
    ),
    "rank of int8": ([*INT8, "--wire.rank", "2"], 'wire.rank is a setting of wire.gradients = "powersgd"'),
    "fraction of nothing": (["--wire.fraction", "0.1"], 'wire.fraction is a setting of wire.gradients = "topk"'),
    "nothing to feed back": (["--wire.error_feedback", "maybe"], "--wire.error_feedback must be true or false"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.values(), ids=WRONG)
def test_a_bad_value_is_one_error_and_exit_2(arguments, expected, tmp_path, capfd):
    file = write_points(tmp_path, POINTS)
    assert main(["train", str(file), "--run-dir", str(tmp_path / "runs"), *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and not shown.out, shown.err
    assert expected in shown.err
    assert not (tmp_path / "runs").exists()


def train(file, runs, *arguments):
    code = main(["train", str(file), "--run-dir", str(runs), "--strategy", "zero1", *arguments])
    return code, runs / "points"


def losses(folder):
    return rows(folder, "loss", "grad_norm")


def state_at(file, folder, step):
    """The state in a checkpoint, with what encoding lost."""
    experiment = load(file, {"wire.gradients": "int8", "wire.block": "8", "strategy": "zero1"})
    target = Assembly.on_devices(experiment).abstract_state()
    with Checkpoints(folder / "checkpoints") as saved:
        restored, _ = saved.restore(target, step)
    return jax.device_get(restored)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """An experiment file, and the folder of its run with int8 gradients, which a signal stopped after two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    file = write_points(folder, POINTS)
    with stopped_at(2):
        code, run = train(file, folder / "runs", *INT8)
    assert code == 130 and max(losses(run)) == 2
    return file, run


def resumed(stopped, runs, *arguments):
    """Copy the stopped run, and go on with it."""
    file, run = stopped
    shutil.copytree(run.parent, runs)
    notices._said.clear()
    return train(file, runs, *arguments)


def test_stopped_and_resumed_is_bitwise_the_undisturbed_run(stopped, tmp_path):
    code, whole = train(stopped[0], tmp_path / "whole", *INT8)
    assert code == 0
    code, again = resumed(stopped, tmp_path / "again", *INT8)
    assert code == 0
    assert losses(again) == losses(whole) and max(losses(whole)) == 4
    states = [state_at(stopped[0], folder, 4) for folder in (again, whole)]
    jax.tree.map(np.testing.assert_array_equal, *[(s.params, s.opt_state, s.sync) for s in states])
    kept = [np.abs(error).max() for error in jax.tree.leaves(states[0].sync)]
    assert kept and min(kept) > 0, "error feedback is saved and restored"


def test_resumed_without_wire_it_goes_on_and_says_what_it_leaves(stopped, tmp_path, capsys):
    code, folder = resumed(stopped, tmp_path / "runs")
    shown = capsys.readouterr()
    assert code == 0 and max(losses(folder)) == 4
    assert "left unread" in shown.err and "error:" not in shown.err


def test_resumed_on_other_devices_it_shares_out_what_was_lost(stopped, tmp_path):
    """As a process of its own: the number of devices is one for the life of a process."""
    file, run = stopped
    shutil.copytree(run.parent, tmp_path / "runs")
    words = ["train", file, "--run-dir", tmp_path / "runs", "--strategy", "zero1", "--devices", "4", *INT8]
    done = python("-m", "jdp", *words)
    assert done.returncode == 0, done.stderr
    assert "what encoding lost on 8 devices is shared out over 4, its sum unchanged" in done.stderr
    assert max(losses(tmp_path / "runs" / "points")) == 4
    assert np.isfinite([loss for loss, _ in losses(tmp_path / "runs" / "points").values()]).all()


@pytest.mark.parametrize("wire", [(), INT8])
def test_an_experiment_as_resolved_is_read_back(wire, tmp_path):
    """It names settings of every encoding, with their defaults."""
    overrides = {wire[i].removeprefix("--"): wire[i + 1] for i in range(0, len(wire), 2)}
    experiment = load(write_points(tmp_path, POINTS), overrides)
    (tmp_path / "resolved.toml").write_text(to_toml(experiment))
    assert load(tmp_path / "resolved.toml") == experiment
