"""`jdp report`: a run becomes a page, whatever became of the run; a folder that is no run is one error."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused

from jdp.base.chips import GPUS
from jdp.cli.main import main
from jdp.cli.report import target_of_run
from jdp.run.read_folder import read_run

EVENT_LOGS = "events/rank-00000.jsonl"
TABLES = tables(
    optimizer={"name": "sgd", "lr": 0.1},
    train={"steps": 4, "batch_size": 8, "log_every": 1, "eval_every": 2, "eval_batches": 1, "checkpoint_every": 0},
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that was made by `jdp train` on eight devices, and whose data are gone."""
    folder = tmp_path_factory.mktemp("points")
    assert main(["train", str(write_points(folder, points_text(TABLES))), "--run-dir", str(folder / "runs")]) == 0
    (folder / "points.npz").unlink()
    return folder / "runs" / "points"


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A folder RUNS with a copy of that run, in the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "points", ignore=shutil.ignore_patterns("checkpoints"))
    return Path("runs")


def text_of(page):
    return " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", page.read_text(), flags=re.DOTALL).split())


def test_a_run_becomes_a_page(runs, capsys):
    assert main(["report", "runs/points"]) == 0
    page = runs / "points" / "report.html"
    assert capsys.readouterr().out == f"wrote {page}: points\n"
    text = text_of(page)
    for expected in (
        "Run points",
        "finished",
        "4 of 4",
        "8 × cpu",
        "examples/s",
        "Compiled again for cpu:8, not run",
        "parameters (master weights, at rest)",
        "params/",  # leaves at rest
        "The rates of these devices are unknown.",  # CPUs
        "started on 8 × cpu (jax",
        "checkpoint_every = 0",
    ):
        assert expected in text, expected
    assert "not compiled" not in text and "is damaged" not in text


def test_runs_are_compared_with_json_on_stdout(runs, capfd):
    shutil.copytree(runs / "points", runs / "other")
    experiment = runs / "other" / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("lr = 0.1", "lr = 0.7"))
    assert main(["report", "points", "runs/other", "--no-compile", "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == {"path": "report.html", "runs": ["points", "other"]} and shown.out.count("\n") == 1
    assert "optimizer.lr 0.1 0.7" in text_of(Path("report.html"))
    shutil.copytree(runs, "elsewhere")  # runs of one name go by their paths
    assert main(["report", "points", "elsewhere/points", "--no-compile", "-o", "p.html"]) == 0
    assert capfd.readouterr().out == "wrote p.html: runs/points, elsewhere/points\n"


def damage_metrics(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 9}x\n{"step": 5, "loss": 9}\n')


DAMAGED = {
    "a line that is no row": (damage_metrics, "must have a row of metrics in each line"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), "There is no metrics.jsonl: no step was logged."),
    "empty metrics": (lambda run: (run / "metrics.jsonl").write_text(""), "No step was logged."),
    "bad history": (lambda run: (run / EVENT_LOGS).write_text("[]\n{}\nx\n\x00\n"), f"There is no {EVENT_LOGS}"),
    "no TOML": (lambda run: (run / "experiment.toml").write_bytes(b"\xff[["), "is not valid TOML"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGED.values(), ids=DAMAGED)
def test_the_page_of_a_damaged_run(runs, damage, expected, capsys):
    damage(runs / "points")
    assert main(["report", "points", "--no-compile"]) == 0
    text = text_of(runs / "points" / "report.html")
    assert expected in text and "What happened" in text


def test_a_step_that_cannot_be_compiled_is_explained_on_the_page(runs):
    (runs / "points" / "experiment.toml").write_text('name = "x"\nnew_key = 1\n')
    assert main(["report", "points"]) == 0
    assert "The step was not compiled: runs/points/experiment.toml" in text_of(runs / "points" / "report.html")
    history = runs / "points" / EVENT_LOGS
    history.write_text(history.read_text().replace('"device": "cpu"', '"device": "y"').replace('"cpu"', '"x"'))
    assert main(["report", "points"]) == 0
    said = "the devices of the run are not recorded, or jdp has no description of them; give --target"
    assert said in text_of(runs / "points" / "report.html")


def test_the_target_is_the_last_visits_devices(runs):
    recorded = read_run(runs / "points", "points")
    gpus = {"event": "resumed", "platform": "gpu", "devices": 16, "hosts": 2}
    for kind, chip in GPUS.items():
        later = dataclasses.replace(recorded, history=[*recorded.history, {**gpus, "device": chip.name}])
        assert target_of_run(later) == f"{kind}:2x8"
    assert target_of_run(recorded) == "cpu:8"
    assert target_of_run(dataclasses.replace(recorded, history=[])) is None
    of_file = dataclasses.replace(recorded, history=[], settings={"devices": "4"})
    assert target_of_run(of_file) == "cpu:4", "virtual devices that the experiment names"


MISTAKES = {
    "none": ([], "jdp report takes one or more runs; given none"),
    "nowhere": (["nowhere"], "an experiment.toml, or its name in runs; given nowhere: there is no such"),
    "misspelt": (["pints"], "did you mean runs/points?"),
    "a folder that is no run": (["runs"], "given runs: it has no experiment.toml; runs has points"),
    "twice": (["points", "runs/points"], "given one twice, runs/points and runs/points"),
    "an address": (["memory://bucket/run"], "a path must be on a disk of this machine"),
    "a page nowhere": (["points", "-o", "no/p.html"], "no/p.html cannot be written: there is no folder no"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_error_and_exit_2(runs, arguments, expected, capfd):
    before = sorted(Path().rglob("*"))
    error = refused(capfd, "report", *arguments)
    assert expected in error and error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
