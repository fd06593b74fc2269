"""Steps that are skipped in a run: said, inspected, and their batches kept; and devices that compute wrong, which end
it. On points of three classes, so that a step is cheap."""

import dataclasses
import socket
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from damage import flipped
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows, saved_steps, train
from tiny_states import assert_same_bits

import jdp
from jdp.core.step import Step
from jdp.experiment import assembly as assemblies
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.guard.diagnosis import diagnose
from jdp.launch.events import history, read
from jdp.run.bad_steps import leave_out

TRAIN = {"steps": 12, "batch_size": 16, "log_every": 1, "eval_batches": 1}
TRAIN |= {"checkpoint_every": 3, "keep_checkpoints": 10}
TABLES = tables(optimizer={"name": "sgd", "momentum": 0.9, "lr": 0.01}, train=TRAIN)
NAN = float("nan")


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path, points_text(TABLES, hidden=256, top='strategy = "zero1"\n'))


def spoil(monkeypatch, steps):
    """Multiply the features of these steps' batches: step -> factor."""
    real = assemblies.global_batches

    def spoilt(source, *, start=0, epochs=None, **given):
        for step, batch in enumerate(real(source, start=start, epochs=epochs, **given), start + 1):
            factor = np.float32(steps.get(step, 1) if epochs is None else 1)
            yield {**batch, "features": batch["features"] * factor}

    monkeypatch.setattr(assemblies, "global_batches", spoilt)


def losses(folder):
    """Step -> loss, as text (NaN equals itself), and skipped steps, as in the metrics."""
    return {step: (repr(loss), skipped) for step, (loss, skipped) in rows(folder, "loss", "skipped").items()}


def test_a_skipped_step_is_inspected_with_its_batch(file, monkeypatch, capsys):
    spoil(monkeypatch, {4: NAN, 5: NAN, 9: NAN})
    code, folder = train(file)
    shown = capsys.readouterr().out
    assert code == 0
    assert sorted(file.name for file in (folder / "events").glob("*.npz")) == ["batch-4.npz", "batch-9.npz"]
    for step in (4, 9):  # the first one of each row
        order = "layers/1/bias, layers/1/kernel, layers/0/kernel"
        sentences = (
            f"Step {step} is skipped: its gradient or update was not finite.",
            f"The batch of step {step} has NaN or infinities: features.",
            f"The loss of step {step} is nan: the forward pass broke.",
            f"3 of 4 gradients are not finite, in the order of the backward pass first {order}.",
            f"Its batch is in {folder / 'events' / f'batch-{step}.npz'}.",
        )
        assert "\n".join(sentences) in shown
        assert " ".join(sentences) in diagnose(folder).words, "jdp why says it too"
    with np.load(folder / "events" / "batch-4.npz") as batch:
        features, labels = batch["batch/features"], batch["batch/labels"]
    assert np.isnan(features).all() and features.shape == (16, 6) and labels.shape == (16,)
    assert {step: skipped for step, (_, skipped) in losses(folder).items() if skipped}[12] == 3


def corrupt(monkeypatch, at, *, leaf="bias"):
    """Flip a bit in device 5's copy of a small leaf, which zero1 replicates, after step `at`."""
    real = Step.__call__

    def step(self, state, batch):
        result = real(self, state, batch)
        if not self.settings.train or int(result[0].consumed) != at:
            return result
        state, values = result
        path = next(path for path, _ in jax.tree.leaves_with_path(state.params) if leaf in jax.tree_util.keystr(path))
        flip = lambda p, x: flipped(x, jax.devices()[5], bit=9) if p == path else x  # noqa: E731
        return dataclasses.replace(state, params=jax.tree.map_with_path(flip, state.params)), values

    monkeypatch.setattr(Step, "__call__", step)


def test_a_differing_device_ends_the_run_unsaved(file, monkeypatch, capsys):
    """The bit flips after step 4, and the comparison before the save of step 6 finds it."""
    with monkeypatch.context() as patched:
        corrupt(patched, at=4)
        code, folder = train(file)
    error, host = capsys.readouterr().err, socket.gethostname()
    assert code == 78 and "Traceback" not in error and saved_steps(folder) == [3]
    said = "error: All copies of the state must be equal bit for bit; given after step 6 device 5 (cpu, number 5"
    assert said in error and f"/bias, on host {host}. Nothing of it was saved." in error
    assert f"It is device 5 of the only host, {host}: run on another, or without it (CUDA_VISIBLE_DEVICES)" in error
    assert any(words.startswith("After step 6 device 5 (cpu, ") for words in diagnose(folder).words)
    events = [event["event"] for event in history(read(folder / "events" / "rank-00000.jsonl"))]
    assert events == ["started", "corrupt", "failed"]
    assert train(file)[0] == 0
    code, calm = train(file, name="calm")
    assert losses(folder) == losses(calm) and saved_steps(folder) == [3, 6, 9, 12]
    state = Assembly.on_devices(load(file, {})).training.abstract_state
    assert_same_bits(*(jdp.restore(run / "checkpoints" / "12", state) for run in (folder, calm)))


@pytest.mark.rest
def test_of_two_copies_that_differ_none_is_believed(file, monkeypatch, capsys):
    corrupt(monkeypatch, at=4, leaf="kernel")
    two = ("--strategy", "zero3", "--mesh.replica", "2", "--train.checkpoint_every", "0")
    assert train(file, *two, "--guard.check_replicas_every", "2")[0] == 78
    error = capsys.readouterr().err
    assert "given after step 4 device " in error and "differ from one another in params/" in error
    assert "No majority shows which device is wrong: test both" in error
    assert train(file, *two, "--guard.check_replicas_every", "0", name="never")[0] == 0


def test_the_line_that_leaves_a_host_out():
    line = leave_out(SimpleNamespace(process_index=1), ["a", "b"])
    assert line.startswith("Leave host b out (Slurm: sbatch --exclude=b JOB.sh; Kubernetes: kubectl cordon b; ")
