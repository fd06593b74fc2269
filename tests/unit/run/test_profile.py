"""`--profile 3:5` traces these steps and no others, into the run's folder; and MFU is there where the peak is known."""

import dataclasses
import gzip
import json
import signal

import jax
import pytest
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused, rows, stopped_at, train

from jdp.base import chips
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.foresight.timing.model_flops import model_flops, peak_flops, seconds_at_peak
from jdp.run.metrics import read
from jdp.run.outputs import profiled_steps

TRAIN = tables(train={"steps": 6, "batch_size": 8, "log_every": 1, "eval_batches": 1})


@pytest.fixture
def file(tmp_path):
    return write_tiny(tmp_path, TRAIN)


@pytest.fixture
def points(tmp_path):
    """Cheaper to compile, where the model does not matter."""
    return write_points(tmp_path, points_text(TRAIN))


def traced_steps(folder):
    """The steps that a trace is marked with, by the loop's own annotations."""
    (trace,) = folder.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted({int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "args" in e})


@pytest.mark.parametrize(("text", "steps"), [("10:13", [10, 11, 12, 13]), (" 3 : 3 ", [3]), ("7", [7]), (None, [])])
def test_both_ends_are_profiled(text, steps):
    assert list(profiled_steps(text, of=20) or []) == steps


@pytest.mark.parametrize("text", ["5:3", "0:2", "2:7", "1:", "-1:2"])
def test_a_bad_range_is_one_error(text, file, capsys):
    error = refused(capsys, "train", file, "--run-dir", file.parent / "runs", f"--profile={text}")
    assert error.startswith("error: --profile takes FIRST:LAST") and error.count("\n") == 1
    assert not (file.parent / "runs").exists()


@pytest.mark.rest
def test_a_signal_ends_the_trace_for_good(points, capsys):
    """Stopped by SIGTERM in step 3 of 2:5, with the summary so far on stdout; resumed, steps 4 and 5 are left."""
    with stopped_at(3, signal.SIGTERM):
        code, folder = train(points, "--profile", "2:5", "--json")
    assert code == 75
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["stopped"], told["steps"], told["of_steps"]) == ("SIGTERM", 3, 6)
    assert "mfu" not in told, "nobody knows the peak of a CPU"
    assert not any("mfu" in row for row in read(folder / "metrics.jsonl"))
    assert "profiled steps 2 to 3, " in shown.err and traced_steps(folder) == [2, 3]
    assert not (folder / "summary.json").exists(), "it has not finished"
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()
    assert train(points, "--profile", "1:3", "--json")[0] == 0
    shown = capsys.readouterr()
    assert "nothing to profile: step 3 is done, this visit starts after step 3" in shown.err
    assert traced_steps(folder) == [2, 3]
    written = json.loads((folder / "summary.json").read_text())
    assert written == json.loads(shown.out) and (written["steps"], written["resumed_from"]) == (6, 3)
    assert train(points, "--json")[0] == 0, "nothing is left to do"
    assert json.loads((folder / "summary.json").read_text()) == written, "and a visit without steps has no speed"


def test_a_peak_belongs_to_a_devices_name():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float32") == peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    assert peak_flops("TPU v5 lite", "bfloat16") == peak_flops("TPU v5e", "bfloat16") == 197e12
    for unknown in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100", "NVIDIA GeForce RTX 4090"):
        assert peak_flops(unknown, "bfloat16") is None


def step_of(file, **overrides):
    """The step of an experiment with its abstract arguments."""
    assembly = Assembly.on_devices(load(file, overrides))
    return assembly.training.step, assembly.training.abstract_state, assembly.inputs.abstract_batch


@pytest.fixture
def known_cpu(monkeypatch):
    """A described kind: the CPU, with a peak of 1 GFLOP/s in fp32 and 4 in bf16."""
    peaks = {"f32": 1e9, "bf16": 4e9}
    chip = dataclasses.replace(chips.GPUS["h100"], name=jax.devices()[0].device_kind, matmul_flops=peaks)
    monkeypatch.setitem(chips.GPUS, "described", chip)


def test_seconds_at_peak_count_flops_over_devices(file, known_cpu):
    flops = model_flops(*step_of(file))
    assert seconds_at_peak(*step_of(file)) == pytest.approx(flops / (8 * 1e9))
    assert seconds_at_peak(*step_of(file, precision="bf16")) == pytest.approx(flops / (8 * 4e9))


def test_a_trace_has_its_steps_and_mfu(points, known_cpu, capsys):
    code, folder = train(points, "--profile", "2:4", "--json")
    assert code == 0
    shown = capsys.readouterr()
    assert traced_steps(folder) == [2, 3, 4]
    assert "profiled steps 2 to 4, " in shown.err and "iB: open " in shown.err
    assert "https://ui.perfetto.dev" in shown.err and f"xprof --logdir {folder}/profile" in shown.err
    logged = rows(folder, "loss", "mfu", "step_seconds")
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    fastest, summary = seconds_at_peak(*step_of(points)), json.loads(shown.out)
    assert [mfu for _, mfu, _ in logged.values()] == pytest.approx([fastest / row[2] for row in logged.values()])
    assert summary["mfu"] == pytest.approx(fastest * summary["examples_per_second"] / 8)
