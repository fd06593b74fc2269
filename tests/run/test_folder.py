"""A run's folder belongs to one experiment."""

import pytest

from jdp.experiment.file import ExperimentError, from_table, to_toml
from jdp.run.folder import FILE, check_same, record


def experiment(**tables):
    table = {
        "name": "try",
        "model": {"name": "mlp", "features_in": 4, "hidden": [8]},
        "data": {"source": "points.npz"},
        "train": {"steps": 10, "batch_size": 8},
    }
    return to_toml(from_table(table | tables))


def test_a_file_that_is_no_experiment_any_more_is_compared_key_by_key(tmp_path):
    record(experiment(), tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write("\n[gone]\nkey = 1\n")
    with pytest.raises(ExperimentError, match=r"another experiment \(gone.key was 1, is None\)"):
        check_same(tmp_path, experiment())


def test_how_a_model_is_computed_may_change_and_the_model_may_not(tmp_path):
    def gpt(**model):
        return experiment(model={"name": "gpt-nano", **model}, data={"source": "text.txt"})

    record(gpt(), tmp_path)
    check_same(tmp_path, gpt(remat="full", attention="xla", scan=True))
    with pytest.raises(ExperimentError, match=r"another experiment \(model.layers was \d+, is 1\)"):
        check_same(tmp_path, gpt(layers=1, remat="full"))
    record(gpt(scan=True), tmp_path)  # as before "auto" was there
    check_same(tmp_path, gpt())
    with pytest.raises(ExperimentError, match=r"another experiment \(model.scan was True, is False\)"):
        check_same(tmp_path, gpt(scan=False))
