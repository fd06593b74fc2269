"""A sweep: which runs it means, that all are checked before the first starts, and that it is resumed run by run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from own_process import ROOT
from tiny_experiment import points_text, tables, write_points, write_tiny

from jdp.cli.main import main
from jdp.core.cluster.schedulers import Cluster
from jdp.experiment.file import ExperimentError, to_toml
from jdp.run.sweep.children import Children
from jdp.run.sweep.grid import LONGEST_NAME, check, member_name, members
from jdp.run.sweep.results import as_json, failures, ranked, record, table
from jdp.run.sweep.walk import DONE, FAILED, STOPPED, WAITING, Ended, walk

TRAIN = {"steps": 4, "batch_size": 8, "log_every": 1, "eval_batches": 2, "max_skips_in_a_row": 2}
TABLES = tables(optimizer={"name": "sgd", "lr": 0.1}, train=TRAIN)


@pytest.fixture
def file(tmp_path):
    return write_tiny(tmp_path, TABLES, top="devices = 2\n")


def swept(file, *sweeps, **overrides):
    return [dict(member.values) for member in members(file, sweeps, overrides)]


def test_lists_and_ranges_make_a_grid_in_order(file):
    found = members(file, ["optimizer.lr=0.1, 1e-2", "seed = 1:3"], {"train.steps": "9"})
    assert [member.values for member in found] == [
        {"optimizer.lr": lr, "seed": seed} for lr in ("0.1", "1e-2") for seed in ("1", "2", "3")
    ]
    last = found[-1]
    assert (last.base, last.name) == ("tiny", "tiny-optimizer.lr=1e-2-seed=3")
    assert last.experiment.name == last.name
    assert (last.experiment.optimizer.lr, last.experiment.seed, last.experiment.train.steps) == (0.01, 3, 9)


@pytest.mark.parametrize(
    ("listed", "values"),
    [
        ("5", ["5"]),
        ("0:4", ["0", "1", "2", "3", "4"]),
        ("0:10:5", ["0", "5", "10"]),
        ("0:9:5", ["0", "5"]),
        ("1:2,7", ["1", "2", "7"]),
        ("3:3", ["3"]),
    ],
)
def test_both_ends_of_a_range_are_included(file, listed, values):
    assert [v["seed"] for v in swept(file, f"seed={listed}")] == values


def test_commas_in_brackets_and_quotes_belong_to_the_value(file):
    found = members(file, ['data.source=["a.txt", "b,c.txt"],"d,e.txt", text.txt'], {})
    sources = [member.experiment.data.source for member in found]
    assert [Path(source).name for source in sources[0]] == ["a.txt", "b,c.txt"]
    assert [Path(source).name for source in sources[1:]] == ["d,e.txt", "text.txt"]
    assert len({member.name for member in found}) == 3


def test_a_name_is_that_of_a_folder_short_and_different_for_different_values():
    assert member_name("a", {"seed": "1", "optimizer.lr": "1e-4"}) == "a-seed=1-optimizer.lr=1e-4"
    names = [member_name("a", {"data.source": text}) for text in ("x/y", "x y", "x_y", "../../x", '["x"]')]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._=-]+", name) for name in names)
    long = [member_name("a", {"data.source": letter * 300}) for letter in "ab"]
    assert len(set(long)) == 2 and all(len(name) <= LONGEST_NAME for name in long)


MISTAKES = {
    "unknown key": ("--sweep optimizer.lrr=1,2", "did you mean --optimizer.lr?"),
    "a value that does not fit": ("--sweep optimizer.lr=0.1,-1", "--optimizer.lr must be more than 0.0; given -1"),
    "a word for a number": ("--sweep seed=one", "--seed must be a whole number"),
    "a value that fits nothing else": ("--sweep data.length=8,16", "data.length must be at most model.context = 8"),
    "no value": ("--sweep seed=", "--sweep takes KEY=VALUE,VALUE"),
    "no equals": ("--sweep seed", "--sweep takes KEY=VALUE,VALUE"),
    "an empty value": ("--sweep seed=1,,2", "--sweep takes KEY=VALUE,VALUE"),
    "a range backwards": ("--sweep seed=5:1", "from the smaller to the larger number"),
    "a range with a step of 0": ("--sweep seed=1:5:0", "from the smaller to the larger number"),
    "a range without end": ("--sweep seed=1:1000000000", "at most 1,000 runs in all; with seed=1:1000000000 they are"),
    "a range beyond len": (f"--sweep seed=1:{10**30}", "at most 1,000 runs in all"),
    "a grid too large": ("--sweep seed=1:100 --sweep train.steps=1:11", "with train.steps=1:11 they are 1,100"),
    "a key twice": ("--sweep seed=1 --sweep seed=2", "--sweep seed is given twice"),
    "a value twice": ("--sweep seed=1,2,1", "--sweep seed has the value 1 twice"),
    "a value in other words": ("--sweep optimizer.lr=1e-1,0.1", "twice: optimizer.lr=1e-1 and optimizer.lr=0.1"),
    "the name": ("--sweep name=a,b", "the sweep names its runs itself"),
    "an override too": ("--sweep seed=1,2 --seed 3", "--sweep seed and --seed 3 exclude each other"),
    "devices": ("--sweep train.batch_size=8,9", "tiny-train.batch_size=9: train.batch_size must divide by data=2"),
    "steps to profile": ("--sweep train.steps=2,4 --profile 3:4", "LAST <= train.steps = 2; given '3:4'"),
    "another run's folder": ("--sweep seed=1,2 --optimizer.lr 0.5", "optimizer.lr was 0.1, is 0.5"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_error_before_anything_runs(file, capsys, arguments, said):
    runs = file.parent / "runs"
    made = members(file, ["seed=1,2"], {})[1]
    (runs / made.name).mkdir(parents=True)
    (runs / made.name / "experiment.toml").write_text(to_toml(made.experiment))
    before = sorted(runs.rglob("*"))
    assert main(["train", str(file), "--run-dir", str(runs), *arguments.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert not shown.out and sorted(runs.rglob("*")) == before


def test_a_process_of_a_cluster_starts_no_sweep(file, capsys, monkeypatch):
    monkeypatch.setattr("jdp.core.cluster.schedulers.find_cluster", lambda _: Cluster("Slurm", "host:1234", 4, 1))
    assert main(["train", str(file), "--sweep", "seed=1,2"]) == 2
    shown = capsys.readouterr()
    assert "--sweep starts a process for each run" in shown.err and "given one of 4 processes" in shown.err
    assert not shown.out and shown.err.count("\n") == 1


def test_every_process_of_a_launched_run_brings_its_devices(file, tmp_path):
    found = members(file, ["seed=1,2"], {"train.batch_size": "6"})
    check(found, tmp_path)
    with pytest.raises(ExperimentError, match="must divide by data=4"):
        check(found, tmp_path, processes=2)


def scripted(runs, losses):
    """Starts runs as their folders would see it: a loss is a finished run, an exit code above 0 is one that was not."""
    started = []

    def start(member):
        started.append(member.values["seed"])
        came = losses[member.values["seed"]]
        if isinstance(came, Ended):
            return came
        folder = runs / member.name
        folder.mkdir(parents=True, exist_ok=True)
        summary = {"steps": 4, "of_steps": member.experiment.train.steps, "final_eval_loss": came, "seconds": 1.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        return Ended(0)

    return start, started


def last(found, runs, start):
    (*_, results) = walk(found, runs, start, say=lambda _: None)
    return results


def test_a_failed_run_is_noted_and_the_sweep_goes_on_and_only_it_is_tried_again(file, tmp_path):
    found = members(file, ["seed=1:3"], {})
    start, started = scripted(tmp_path, {"1": 2.0, "2": Ended(2, "not finite"), "3": 1.0})
    results = last(found, tmp_path, start)
    assert [result.status for result in results] == [DONE, FAILED, DONE] and started == ["1", "2", "3"]
    assert (results[1].exit_code, results[1].error) == (2, "not finite")
    start, started = scripted(tmp_path, {"2": 0.5})
    results = last(found, tmp_path, start)
    assert started == ["2"] and [result.status for result in results] == [DONE] * 3
    assert [result.summary["final_eval_loss"] for result in results] == [2.0, 0.5, 1.0]


def test_a_signal_stops_the_sweep_and_the_next_visit_goes_on_there(file, tmp_path):
    found = members(file, ["seed=1:3"], {})
    start, started = scripted(tmp_path, {"1": 2.0, "2": Ended(130)})
    results = last(found, tmp_path, start)
    assert started == ["1", "2"]
    assert [result.status for result in results] == [DONE, STOPPED, WAITING] and results[1].exit_code == 130
    start, started = scripted(tmp_path, {"2": 1.0, "3": 1.0})
    assert [result.status for result in last(found, tmp_path, start)] == [DONE] * 3 and started == ["2", "3"]


def test_a_run_that_finished_fewer_steps_is_not_done(file, tmp_path):
    start, _ = scripted(tmp_path, {"1": 2.0})
    last(members(file, ["seed=1"], {}), tmp_path, start)
    start, started = scripted(tmp_path, {"1": 1.0})
    last(members(file, ["seed=1"], {"train.steps": "9"}), tmp_path, start)
    assert started == ["1"]


def test_the_best_is_first_and_what_has_no_score_is_last(file, tmp_path):
    found = members(file, ["seed=1:4"], {})
    start, _ = scripted(tmp_path, {"1": 2.0, "2": Ended(70, "broke"), "3": None, "4": 1.0})
    results = last(found, tmp_path, start)
    assert [result.member.values["seed"] for result in ranked(results)] == ["4", "1", "3", "2"]
    told = as_json("tiny", results)
    assert (told["best"], told["metric"]) == ("tiny-seed=4", "eval_loss")
    assert [run["status"] for run in told["runs"]] == [DONE, DONE, DONE, FAILED]
    failed = {"status": FAILED, "error": "broke", "exit_code": 70, "summary": None}
    assert told["runs"][-1] == {"name": "tiny-seed=2", "values": {"seed": "2"}, **failed}
    assert json.loads(record("tiny", results, tmp_path).read_text()) == told
    headers, rows = table(results)
    assert headers[:3] == ["run", "seed", "eval_loss"] and [row[2] for row in rows] == ["1.0000", "2.0000", "-", "-"]
    assert rows[-1][-1] == FAILED and failures(results) == ["tiny-seed=2: broke"]


def test_an_accuracy_is_better_when_it_is_higher(tmp_path):
    (tmp_path / "m.toml").write_text(
        'name = "m"\n[model]\nname = "mlp"\n[data]\nsource = "digits"\n[train]\nsteps = 4\nbatch_size = 8\n'
        'stop_metric = "eval_accuracy"\n'
    )
    found = members(tmp_path / "m.toml", ["seed=1:2"], {})
    for member, accuracy in zip(found, (0.2, 0.9), strict=True):
        (tmp_path / member.name).mkdir()
        summary = {"of_steps": 4, "final_eval_accuracy": accuracy}
        (tmp_path / member.name / "summary.json").write_text(json.dumps(summary))
    results = last(found, tmp_path, None)
    assert as_json("m", results)["best"] == "m-seed=2"


def test_a_signal_is_passed_on_once_and_a_child_that_could_not_listen_is_stopped_too(file, tmp_path, capfd):
    (member,) = members(file, ["seed=1"], {})
    ready = str(tmp_path / "ready")
    sleeps = f"import sys, time; print('ready', file=sys.stderr, flush=True); open({ready!r}, 'w'); time.sleep(60)"
    waits = f"import os, time\nwhile not os.path.exists({ready!r}): time.sleep(0.02)\n"
    watcher = [sys.executable, "-S", "-c", waits + f"os.kill({os.getpid()}, {int(signal.SIGTERM)})"]
    before = signal.getsignal(signal.SIGTERM)
    with Children(lambda _: [sys.executable, "-S", "-c", sleeps], quiet=True) as children:
        with subprocess.Popen(watcher):
            assert children.start(member) == Ended(75)
        assert children.start(member) == Ended(75), "what comes after a signal is not started"
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err.count("ready") == 1


def test_why_a_child_failed_is_what_it_said_last(file, capfd):
    (member,) = members(file, ["seed=1"], {})
    said = "import sys; print('error: too hot', file=sys.stderr); print('bye', file=sys.stderr); sys.exit(2)"
    with Children(lambda _: [sys.executable, "-S", "-c", said], quiet=False) as children:
        assert children.start(member) == Ended(2, "too hot")
    with Children(lambda _: [sys.executable, "-S", "-c", "import os; os.abort()"], quiet=False) as children:
        assert children.start(member).code == 128 + signal.SIGABRT
    assert "error: too hot\nbye\n" in capfd.readouterr().err


def test_a_sweep_end_to_end_stopped_and_resumed(tmp_path, monkeypatch, capfd):
    """Ctrl-C comes in the second run, which stops both; the same command goes on with it, and not with the first."""
    file = write_points(tmp_path, points_text(TABLES.replace("steps = 4", "steps = 100"), top="devices = 2\n"))
    first, second = (file.parent / "runs" / f"points-optimizer.lr={lr}" for lr in (0.1, 0.2))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "points.toml", "--sweep", "optimizer.lr=0.1,0.2", "--json"]
    ended = threading.Event()

    def ctrl_c():
        while not (there := (second / "experiment.toml").exists()) and not ended.wait(0.02):
            pass
        if there:
            os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=ctrl_c)
    waiting.start()
    code = main(arguments)
    ended.set()
    waiting.join()
    shown = capfd.readouterr()
    assert code == 130 and "Traceback" not in shown.err, shown.err
    told = json.loads(shown.out)
    assert [(run["name"], run["status"]) for run in told["runs"]] == [(first.name, DONE), (second.name, STOPPED)]
    assert not (second / "summary.json").exists()
    code = main(arguments)
    shown = capfd.readouterr()
    assert code == 0, shown.err
    told = json.loads(shown.out)
    assert sorted(run["name"] for run in told["runs"]) == [first.name, second.name]
    assert told["best"] == told["runs"][0]["name"]
    assert f"[1/2] {first.name}: done before" in shown.err
    assert json.loads((file.parent / "runs" / "points.sweep.json").read_text()) == told
