"""A run's folder belongs to one experiment; what happened is recorded visit by visit, and only added to."""

import signal
import tomllib

import pytest

from jdp.experiment.file import ExperimentError, from_table, to_toml
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.launch.events import history, read
from jdp.run.folder import check_same, record
from jdp.run.signals import Stopped

TRAIN = {"steps": 10, "batch_size": 8}


def experiment(**tables):
    table = {"name": "try", "model": {"name": "mlp", "features_in": 4, "hidden": [8]}, "train": TRAIN}
    return to_toml(from_table(table | {"data": {"source": "points.npz"}} | tables))


def gpt(**model):
    return experiment(model={"name": "gpt-nano", **model}, data={"source": "text.txt"})


def steps(count, schedule):
    return experiment(train=TRAIN | {"steps": count}, optimizer={"lr": 0.1, "schedule": schedule})


def based(folder, **model):
    return gpt(layers=1, **model).replace('name = "gpt-nano"', f'name = "hf:{folder}"')


FOLDERS = {  # the recorded experiment, one that may go on in its folder, one that may not, and why
    "computing": (gpt(), gpt(remat="full", attention="xla"), gpt(layers=1), r"model.layers was \d+, is 1"),
    "places": (  # the samples are compared by their fingerprint
        experiment(),
        experiment(name="renamed", data={"source": "moved/points.npz"}),
        experiment(data={"source": "points.npz", "heldout_fraction": 0.2}),
        "data.heldout_fraction was 0.05, is 0.2",
    ),
    "a base model's folder, which may be gone": (
        based("/gone"),
        based("/moved"),
        based("/moved", width=64),
        r"model.width was \d+, is 64",
    ),
    "a key of no experiment": (
        experiment() + "\n[gone]\nkey = 1\n",
        experiment() + "\n[gone]\nkey = 1\n",
        experiment(),
        "gone.key was 1, is None",
    ),
    "steps at a constant rate": (
        steps(10, "constant"),
        steps(20, "constant"),
        steps(20, "linear"),
        "optimizer.schedule was 'constant', is 'linear'; train.steps was 10, is 20",
    ),
}


@pytest.mark.parametrize(("recorded", "same", "other", "why"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_one_experiments(tmp_path, recorded, same, other, why):
    record(recorded, tmp_path)
    check_same(tmp_path, same)
    with pytest.raises(ExperimentError, match=rf"another experiment \({why}\)"):
        check_same(tmp_path, other)


def test_a_recorded_base_model_keeps_its_fields():
    table = tomllib.loads(based("/gone"))
    read = from_table(table)
    assert (read.model.name, read.model.config.layers, read.kind) == ("hf:/gone", 1, "text")
    del table["model"]["width"]
    with pytest.raises(ExperimentError, match=r"model.name must lead to the config.json of a model"):
        from_table(table)


def test_initial_weights_may_only_be_moved(tmp_path):
    def starting(folder):
        return experiment(train=TRAIN | {"init_from": str(tmp_path / folder)})

    record(starting("base"), tmp_path)
    check_same(tmp_path, starting("moved"))  # nothing is left in its place
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    check_same(tmp_path, starting("link"))
    with pytest.raises(ExperimentError, match=r"another experiment \(train.init_from was '\S+base', is '\S+moved'\)"):
        check_same(tmp_path, starting("moved"))


def test_more_steps_need_a_constant_rate(tmp_path):
    record(steps(10, "linear"), tmp_path)
    with pytest.raises(ExperimentError) as raised:
        check_same(tmp_path, steps(20, "linear"))
    said = str(raised.value)
    assert "train.steps, which was 10 in " in said and "is 20: restore train.steps = 10" in said
    assert said.endswith(f"start a new run from its weights (--name NEW --train.init_from {tmp_path})")


def visit(folder, *, begin, end, error=None):
    """One visit that does the steps from `begin` to `end` of 10, and ends with an error if one is given."""
    with watching(folder, Deadline(), lambda: {"step": end}) as watch:
        if begin < 10:
            watch.resumed(begin)
        if error is not None:
            raise error


def test_each_visit_has_its_beginning_and_its_end(tmp_path):
    with pytest.raises(Stopped):
        visit(tmp_path, begin=0, end=3, error=Stopped(signal.SIGTERM, {}))
    with pytest.raises(ValueError, match="diverged"):
        visit(tmp_path, begin=3, end=5, error=ValueError("diverged " + "x" * 5000))
    with pytest.raises(KeyboardInterrupt):
        visit(tmp_path, begin=3, end=6, error=KeyboardInterrupt())
    visit(tmp_path, begin=3, end=10)
    visit(tmp_path, begin=10, end=10)
    events = history(read(tmp_path / "events/rank-00000.jsonl"))
    names, steps = zip(*((event["event"], event["step"]) for event in events), strict=True)
    assert names == ("started", "stopped", "resumed", "failed", "resumed", "failed", "resumed", "finished")
    assert steps == (0, 3, 3, 5, 3, 6, 3, 10), "and nothing for a visit to a finished run"
    first, stopped, _, failed, _, interrupted, _, finished = events
    assert stopped["code"] == 75 and first["time"] <= finished["time"]
    assert len(failed["error"]) < 1100 and interrupted["error"] == "KeyboardInterrupt"
