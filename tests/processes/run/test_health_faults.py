"""Two real processes of two devices each: NaN in the data of one, a flipped bit on a device of one, a slow one."""

import json
import os

import numpy as np
import pytest
from own_process import ROOT, python
from paths import SUPPORT
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows

from jdp.guard.diagnosis import diagnose
from jdp.launch.events import history, read

# Two processes a fault; `test_health.py` has the faults in one.
pytestmark = pytest.mark.rest


TABLES = tables(
    optimizer={"name": "sgd", "momentum": 0.9, "lr": 0.01},
    train={"steps": 10, "batch_size": 16, "log_every": 1, "eval_batches": 1, "checkpoint_every": 3},
)
PROGRAM = """
import dataclasses, json, sys, time
from pathlib import Path
import jax
import numpy as np
import jdp
from damage import flipped
from jdp.core.step import Step
from jdp.experiment import assembly as assemblies
from jdp.experiment.file import load
from jdp.guard.replicas import CorruptState
from jdp.run import loop

jdp.initialize(timeout_seconds=60)
rank, folder = jax.process_index(), Path(sys.argv[1])
real_batches, real_step, fault = assemblies.global_batches, Step.__call__, {}


def batches(source, *, start=0, epochs=None, **given):
    for step, batch in enumerate(real_batches(source, start=start, epochs=epochs, **given), start + 1):
        here = epochs is None and rank == 1
        if here and fault.get("sleep"):
            time.sleep(fault["sleep"])
        is_nan = here and step in fault.get("nan", ())
        yield {**batch, "features": batch["features"] * np.float32("nan" if is_nan else 1)}


def flipped_state(state):
    bias = state.params["layers"]["0"]["bias"]
    device = jax.local_devices()[1] if rank == 1 else None
    layers = {**state.params["layers"], "0": {**state.params["layers"]["0"], "bias": flipped(bias, device, bit=3)}}
    return dataclasses.replace(state, params={"layers": layers})


def step(self, state, batch):
    result = real_step(self, state, batch)
    if self.settings.train and fault.get("flip") == int(result[0].consumed):
        state, values = result
        return flipped_state(state), values
    return result


assemblies.global_batches, Step.__call__ = batches, step


def run(name, overrides, **given):
    fault.clear()
    fault.update(given)
    experiment = load(folder / "points.toml", {"name": name, **overrides})
    try:
        return loop.run(experiment, root=folder, quiet=True)["skipped"]
    except CorruptState as error:
        return str(error)


often = {"guard.check_replicas_every": "4"}
results = {
    "nan": run("nan", {}, nan=(5, 6)),
    "calm": run("calm", often),
    "wrong device": run("flip", often, flip=5),
    "flip": run("flip", often),
    "slow": run("slow", {"train.steps": "70"}, sleep=0.5),
}
(folder / f"results-{rank}").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("health")
    write_points(folder, points_text(TABLES))
    (folder / "program.py").write_text(PROGRAM)
    launched = ["-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--", folder / "program.py", folder]
    ran = python(*launched, cwd=folder, PYTHONPATH=f"{ROOT}{os.pathsep}{SUPPORT}")
    assert ran.returncode == 0, ran.stderr[-3000:]
    (folder / "stderr").write_text(ran.stdout + ran.stderr)
    return folder


def results(folder, rank):
    return json.loads((folder / f"results-{rank}").read_text())


def test_nan_on_one_rank_is_named(folder):
    said = diagnose(folder / "nan").words
    found = "The batch of step 5 has NaN or infinities: features (at 8, 9, 10, 11, … of 16 along its first dimension)"
    assert any(f"{found}, read by process 1." in words for words in said)
    assert [results(folder, rank)["nan"] for rank in (0, 1)] == [2, 2], "skipped"


def test_both_processes_keep_their_rows_of_the_batch(folder):
    names = [f"batch-5-rank-{rank:05}.npz" for rank in (0, 1)]
    assert sorted(file.name for file in (folder / "nan" / "events").glob("*.npz")) == names
    for rank, name in enumerate(names):
        with np.load(folder / "nan" / "events" / name) as batch:
            assert batch["rows"].tolist() == [*range(8 * rank, 8 * rank + 8)]
            assert np.isnan(batch["batch/features"]).all() == (rank == 1)


def test_a_flipped_bit_ends_the_run_everywhere(folder):
    """Of four copies in two processes one is wrong from step 5 on, and the comparison before step 6's save finds it."""
    said = [results(folder, rank)["wrong device"] for rank in (0, 1)]
    assert said[0] == said[1] and "given after step 6 device " in said[0]
    assert "(cpu, number 1 of process 1) differ" in said[0]
    assert ", on host " in said[0] and "It is device 3 of the only host, " in said[0]
    events = [event["event"] for event in history(read(folder / "flip" / "events" / "rank-00000.jsonl"))]
    assert events == ["started", "corrupt", "failed", "resumed", "finished"]
    assert rows(folder / "flip", "loss", "grad_norm") == rows(folder / "calm", "loss", "grad_norm")
    assert [results(folder, rank)["flip"] for rank in (0, 1)] == [0, 0], "skipped"


def test_a_slow_process_is_named(folder):
    """It sleeps 0.5 s a batch; a step takes a hundredth of a second on an idle machine, and 0.3 s on a busy one."""
    shown = (folder / "stderr").read_text()
    assert "process 1 is late: its host takes 0." in shown and "process 0 is late" not in shown
    assert results(folder, 0)["slow"] == 0, "a warning only"
    *_, (process, seconds) = rows(folder / "slow", "late_process", "late_seconds").values()
    assert process == 1 and seconds > 0.1
    assert any(words.startswith("Process 1 is late: ") for words in diagnose(folder / "slow").words)
