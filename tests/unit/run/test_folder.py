"""A run's folder belongs to one experiment; what happened is recorded visit by visit, and only added to."""

import json
import signal
import tomllib

import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import stopped_at, train

from jdp.experiment.file import ExperimentError, from_table, load, to_toml
from jdp.guard.deadline import Deadline
from jdp.guard.watch import watching
from jdp.launch.events import history, read
from jdp.run.folder import FILE, check_same, record
from jdp.run.signals import Stopped


def experiment(**tables):
    table = {
        "name": "try",
        "model": {"name": "mlp", "features_in": 4, "hidden": [8]},
        "data": {"source": "points.npz"},
        "train": {"steps": 10, "batch_size": 8},
    }
    return to_toml(from_table(table | tables))


def test_an_invalid_record_is_compared_by_key(tmp_path):
    record(experiment(), tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write("\n[gone]\nkey = 1\n")
    with pytest.raises(ExperimentError, match=r"another experiment \(gone.key was 1, is None\)"):
        check_same(tmp_path, experiment())


def test_computing_may_change_the_model_may_not(tmp_path):
    def gpt(**model):
        return experiment(model={"name": "gpt-nano", **model}, data={"source": "text.txt"})

    record(gpt(), tmp_path)
    check_same(tmp_path, gpt(remat="full", attention="xla"))
    with pytest.raises(ExperimentError, match=r"another experiment \(model.layers was \d+, is 1\)"):
        check_same(tmp_path, gpt(layers=1, remat="full"))


def test_names_and_paths_may_change(tmp_path):
    """The samples are compared by their fingerprint."""
    record(experiment(), tmp_path)
    check_same(tmp_path, experiment(name="renamed", data={"source": "moved/points.npz"}))
    with pytest.raises(ExperimentError, match=r"another experiment \(data.heldout_fraction was 0.05, is 0.2\)"):
        check_same(tmp_path, experiment(data={"source": "points.npz", "heldout_fraction": 0.2}))


def test_the_base_models_folder_may_be_gone(tmp_path):
    """A run records all fields of its model."""

    def based(folder, **model):
        toml = experiment(model={"name": "gpt-nano", "layers": 1, **model}, data={"source": "text.txt"})
        return toml.replace('name = "gpt-nano"', f'name = "hf:{folder}"')

    record(based("/gone"), tmp_path)
    read = from_table(tomllib.loads((tmp_path / FILE).read_text()))
    assert (read.model.name, read.model.config.layers, read.kind) == ("hf:/gone", 1, "text")
    check_same(tmp_path, based("/moved"))
    with pytest.raises(ExperimentError, match=r"another experiment \(model.layers was 1, is 2\)"):
        check_same(tmp_path, based("/moved", layers=2))
    table = tomllib.loads(based("/gone"))
    del table["model"]["width"]
    with pytest.raises(ExperimentError, match=r"model.name must lead to the config.json of a model"):
        from_table(table)


def test_initial_weights_may_only_be_moved(tmp_path):
    def starting(folder):
        return experiment(train={"steps": 10, "batch_size": 8, "init_from": str(tmp_path / folder)})

    record(starting("base"), tmp_path)
    check_same(tmp_path, starting("moved"))  # nothing is left in its place
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    check_same(tmp_path, starting("link"))
    with pytest.raises(ExperimentError, match=r"another experiment \(train.init_from was '\S+base', is '\S+moved'\)"):
        check_same(tmp_path, starting("moved"))


def test_more_steps_need_a_constant_rate(tmp_path):
    def steps(count, schedule):
        train = {"steps": count, "batch_size": 8}
        return experiment(train=train, optimizer={"lr": 0.1, "schedule": schedule})

    record(steps(10, "constant"), tmp_path)
    check_same(tmp_path, steps(20, "constant"))
    record(steps(10, "linear"), tmp_path)
    with pytest.raises(ExperimentError) as raised:
        check_same(tmp_path, steps(20, "linear"))
    said = str(raised.value)
    assert "train.steps, which was 10 in " in said and "is 20: restore train.steps = 10" in said
    assert said.endswith(f"start a new run from its weights (--name NEW --train.init_from {tmp_path})")


EVENT_LOGS = "events/rank-00000.jsonl"


def visit(folder, *, begin, end, error=None):
    """One visit that does the steps from `begin` to `end` of 10, and ends with an error if one is given."""
    with watching(folder, Deadline(), lambda: {"step": end}) as watch:
        if begin < 10:
            watch.resumed(begin)
        if error is not None:
            raise error


def events(folder):
    return [(event["event"], event["step"]) for event in history(read(folder / EVENT_LOGS))]


def test_each_visit_has_its_beginning_and_its_end(tmp_path):
    with pytest.raises(Stopped):
        visit(tmp_path, begin=0, end=3, error=Stopped(signal.SIGTERM, {}))
    with pytest.raises(ValueError, match="diverged"):
        visit(tmp_path, begin=3, end=5, error=ValueError("diverged " + "x" * 5000))
    with pytest.raises(KeyboardInterrupt):
        visit(tmp_path, begin=3, end=6, error=KeyboardInterrupt())
    visit(tmp_path, begin=3, end=10)
    visit(tmp_path, begin=10, end=10)
    names, steps = zip(*events(tmp_path), strict=True)
    assert names == ("started", "stopped", "resumed", "failed", "resumed", "failed", "resumed", "finished")
    assert steps == (0, 3, 3, 5, 3, 6, 3, 10), "and nothing for a visit to a finished run"
    first, stopped, _, failed, _, interrupted, _, finished = history(read(tmp_path / EVENT_LOGS))
    assert stopped["code"] == 75 and first["time"] <= finished["time"]
    assert len(failed["error"]) < 1100 and interrupted["error"] == "KeyboardInterrupt"


@pytest.mark.rest
def test_a_taken_over_folder_begins_anew(tmp_path):
    once = {"eval_batches": 1, "log_every": 1, "checkpoint_every": 1}
    file = write_tiny(tmp_path, tables(train={"steps": 2, "batch_size": 8, **once}))
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)  # by a visit of another experiment that was killed before its first row
    (folder / "experiment.toml").write_text(to_toml(load(file, {"seed": "7"})))
    (folder / "events").mkdir()
    (folder / EVENT_LOGS).write_text(json.dumps({"time": 1.0, "event": "started", "step": 0}) + "\n")
    (folder / ".lock").touch()
    with stopped_at(1):
        assert train(file)[0] == 130
    assert events(folder) == [("started", 0), ("stopped", 1)]
    assert train(file, "--train.steps", "3", "--compiler", "overlap")[0] == 0
    assert events(folder) == [("started", 0), ("stopped", 1), ("resumed", 1), ("finished", 3)]
    first, stopped, resumed, finished = history(read(folder / EVENT_LOGS))
    assert (first["platform"], first["devices"], first["hosts"]) == ("cpu", 8, 1)
    assert stopped["signal"] == "SIGINT" and finished["stopped_early"] is False
    assert resumed["changed"] == {"compiler": ["auto", "overlap"], "train.steps": [2, 3]}
