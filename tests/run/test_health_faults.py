"""Two real processes of two devices each: NaN in the data of one, a flipped bit on a device of one, a slow one."""

import json
import os
import socket

import numpy as np
import pytest
from own_process import ROOT, python
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows

from jdp.guard.diagnosis import diagnose
from jdp.guard.nonfinite import read_batch
from jdp.run.outputs.history import read_history

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
from flipped import flipped
from jdp.core.step import Step
from jdp.experiment import assembly as assemblies
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.guard.healing import heal_replicas
from jdp.guard.replicas import CorruptState, fingerprints
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
    if self.train and fault.get("flip") == int(result[0].consumed) and fault["times"]:
        state, values = result
        fault["times"] -= 1
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


def by_hand(out):
    fault.clear()
    assembly = Assembly.on_devices(load(folder / "points.toml", {}))
    state, seen = assembly.state(), {}
    with assembly.feed(assembly.data.train, seed=0, shuffle=True) as feed:
        for number in range(1, 11):
            batch = next(feed)
            if number in out:
                state = dataclasses.replace(state, skipped=jax.jit(lambda x: x + 1)(state.skipped))
            else:
                state, values = assembly.train_step(state, batch)
                seen[number] = float(values["loss"])
    return seen, digest(state)


def digest(state):
    return np.asarray(fingerprints(state, every_leaf=True).values).tolist()


results = {
    "nan": run("nan", {"guard.roll_back_after": "2"}, nan=(5, 6)),
    "by hand": by_hand({4, 5, 6}),
    "calm": by_hand({}),
    "flip": run("flip", {"guard.check_replicas_every": "2"}, flip=5, times=1),
    "twice": run("twice", {"guard.check_replicas_every": "2"}, flip=4, times=2),
    "slow": run("slow", {"train.steps": "12", "guard.check_hosts_every": "2"}, sleep=1),
}
assembly = Assembly.on_devices(load(folder / "points.toml", {}))
for name in ("nan", "flip"):
    with jdp.Checkpoints(folder / name / "checkpoints") as saved:
        results[f"digest of {name}"] = digest(saved.restore(assembly.abstract_state(), 10)[0])
right = assembly.state()
healed, differences = heal_replicas(flipped_state(right))
results["healed"] = [digest(right), digest(healed), [each.path for each in differences]]
(folder / f"results-{rank}").write_text(json.dumps(results))
"""
pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("health")
    write_points(folder, points_text(TABLES))
    (folder / "program.py").write_text(PROGRAM)
    launched = ["-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--", folder / "program.py", folder]
    ran = python(*launched, cwd=folder, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    assert ran.returncode == 0, ran.stderr[-3000:]
    (folder / "stderr").write_text(ran.stdout + ran.stderr)
    return folder


def results(folder, rank):
    return json.loads((folder / f"results-{rank}").read_text())


def test_nan_on_one_rank_is_named_and_gone_back_from_with_the_bits_of_a_run_without_it(folder):
    said = diagnose(folder / "nan").words
    found = "The batch of step 5 has NaN or infinities: features (at 8, 9, 10, 11, … of 16 along its first dimension)"
    assert any(f"{found}, read by process 1." in words for words in said)
    seen, digest = results(folder, 0)["by hand"]
    losses = {str(step): loss for step, loss in rows(folder / "nan", "loss").items()}
    assert losses == seen and list(losses) == ["1", "2", "3", "7", "8", "9", "10"]
    for rank in (0, 1):
        own = results(folder, rank)
        assert own["nan"] == 3 and own["digest of nan"] == digest and own["by hand"][0] == seen


def test_both_processes_keep_their_rows_of_the_batch(folder):
    names = [f"batch-5-rank-{rank:05}.npz" for rank in (0, 1)]
    assert sorted(file.name for file in (folder / "nan" / "flight").glob("*.npz")) == names
    batch = read_batch(folder / "nan" / "flight", 5)
    assert np.isnan(batch["features"]).all(axis=1).tolist() == [False] * 8 + [True] * 8


def test_a_run_with_a_flipped_bit_goes_back_and_has_the_bits_of_a_calm_one(folder):
    """Of four copies in two processes one is wrong from step 5 on, and the comparison before step 6's save finds it."""
    seen, digest = results(folder, 0)["calm"]
    assert {str(step): loss for step, loss in rows(folder / "flip", "loss").items()} == seen and len(seen) == 10
    for rank in (0, 1):
        own = results(folder, rank)
        assert own["flip"] == 0 and own["digest of flip"] == digest
    (words,) = (words for words in diagnose(folder / "flip").words if words.startswith("After step 6 device "))
    assert "(cpu, number 1 of process 1) differs from device 0 (cpu, number 0 of process 0), " in words
    back = next(event for event in read_history(folder / "flip" / "history.jsonl") if event["event"] == "rolled back")
    assert [(device["host"], device["number"]) for device in back["wrong_devices"]] == [(socket.gethostname(), 3)]


def test_a_bit_that_flips_twice_ends_the_run_on_every_process_before_it_is_saved(folder):
    said = [results(folder, rank)["twice"] for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("A device must not compute wrong twice; given, for the second time, after step 4 device ")
    assert " in params/layers/0/bias, on host " in said[0] and "It is device 3 of the only host, " in said[0]
    saved = [int(path.name) for path in (folder / "twice" / "checkpoints").iterdir() if path.name.isdecimal()]
    assert saved == [3]


def test_a_copy_is_healed_from_another_process(folder):
    for rank in (0, 1):
        right, healed, paths = results(folder, rank)["healed"]
        assert healed == right and paths == ["params/layers/0/bias"]


def test_a_slow_process_is_named(folder):
    """It sleeps a second a batch; a step takes a hundredth of that on an idle machine, and 0.3 s on a busy one."""
    shown = (folder / "stderr").read_text()
    assert "process 1 is late: its host takes 0." in shown and "process 0 is late" not in shown
    assert results(folder, 0)["slow"] == 0, "a warning only"
    *_, (process, seconds) = rows(folder / "slow", "late_process", "late_seconds").values()
    assert process == 1 and seconds > 0.1
    assert any(words.startswith("Process 1 is late: ") for words in diagnose(folder / "slow").words)
