"""Runs whose folder is behind an address, on a real S3 server on this machine; never a folder `s3:`.

One of two processes is in `test_train.py`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from own_process import start_python
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused

from jdp.base.bucket import Remote, RemoteError
from jdp.cli.main import main
from jdp.run import in_bucket as remote_runs

TRAIN = tables(train={"steps": 6, "batch_size": 16, "log_every": 1, "checkpoint_every": 2})


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_points(tmp_path, points_text(TRAIN))


def files(address):
    return [name for name in Remote(address).files() if not name.startswith("checkpoints/")]


def steps(address):
    content = Remote(address).read("metrics.jsonl")
    return [row["step"] for row in map(json.loads, content.splitlines()) if "loss" in row]


def saved(address):
    return sorted(
        int(name.split("/")[1]) for name in Remote(address).files() if name.count("/") == 2 and "commit_s" in name
    )


def no_folder_of_ours(folder):
    return {path.name for path in folder.iterdir()} == {"points.toml", "points.npz"}


def test_a_run_is_kept_resumed_and_reported_behind_an_address(bucket, file, capsys):
    runs, run = f"{bucket}/some/runs", f"{bucket}/some/runs/points"
    assert main(["train", str(file), "--run-dir", runs, "--train.steps", "4", "--optimizer.schedule", "constant"]) == 0
    assert steps(run) == [1, 2, 3, 4] and saved(run) == [2, 4]
    assert {"experiment.toml", "history.jsonl", "metrics.jsonl", "summary.json"} <= set(files(run))
    assert ".lock" not in files(run) and no_folder_of_ours(file.parent)
    assert json.loads(Remote(run).read("summary.json"))["folder"] == run
    capsys.readouterr()
    assert main(["train", str(file), "--run-dir", f"{runs}/", "--optimizer.schedule", "constant"]) == 0
    assert "resumed after step 4" in capsys.readouterr().out and steps(run) == [1, 2, 3, 4, 5, 6]
    assert main(["train", str(file), "--run-dir", runs, "--optimizer.schedule", "constant"]) == 0
    assert f"{run} has all of its 6 steps" in capsys.readouterr().out
    said = refused(capsys, "train", file, "--run-dir", runs, "--seed", "5")
    assert f"{run} holds a run of another experiment" in said
    assert main(["why", run]) == 0 and main(["why", "points", "--run-dir", runs]) == 0
    assert f"{run}: " in capsys.readouterr().out
    assert no_folder_of_ours(file.parent)
    assert main(["report", run, "--no-compile"]) == 0
    page = (file.parent / "report.html").read_text()
    assert "points" in page and saved(run) == [2, 4, 6]


def test_a_run_behind_an_address_is_exported_once_and_writes_text(bucket, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = tables(train={"steps": 2, "batch_size": 8, "eval_batches": 1, "keep_best": True, "export": "hf"})
    file, run = write_tiny(tmp_path, train), f"{bucket}/runs/tiny"
    assert main(["train", str(file), "--run-dir", f"{bucket}/runs"]) == 0
    assert f"exported the model of step 2, the best by eval_loss, to {run}/export" in capsys.readouterr().out
    sent = Remote(run).files("export")
    assert {"export/config.json", "export/jdp.json", "export/model.safetensors", "export/tokenizer.json"} <= sent.keys()
    assert not [name for name in Remote(run).files() if name.startswith(".export")]
    assert main(["train", str(file), "--run-dir", f"{bucket}/runs"]) == 0
    assert f"{run}/export has the model of step 2" in capsys.readouterr().out and Remote(run).files("export") == sent
    texts = []
    for given in ([run], [run, "--step", "best"], ["tiny", "--run-dir", f"{bucket}/runs"], [f"{run}/export"]):
        assert main(["generate", *given, "--prompt", "me", "--length", "4", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("me") and texts == texts[:1] * 4


def test_what_is_no_run_is_left_alone_and_a_failed_first_visit_leaves_nothing(bucket, file, capsys):
    Remote(f"{bucket}/runs/points").write("notes/mine.txt", b"mine")
    said = refused(capsys, "train", file, "--run-dir", f"{bucket}/runs")
    assert f"{bucket}/runs/points is not empty and has no experiment.toml" in said
    assert files(f"{bucket}/runs/points") == ["notes/mine.txt"]
    refused(capsys, "train", file, "--run-dir", f"{bucket}/other", "--train.init_from", file.parent / "points.npz")
    assert files(f"{bucket}/other") == []
    assert "which has none" in refused(capsys, "report", f"{bucket}/other/points", "--no-compile")


def test_one_run_at_a_time(bucket, file, capsys, monkeypatch):
    monkeypatch.setattr(remote_runs, "EVERY_SECONDS", 1.0)
    monkeypatch.setattr(remote_runs, "LEASE_SECONDS", 3.0)
    remote = Remote(f"{bucket}/runs/points")
    other = {"holder": "process 1 on elsewhere", "host": "elsewhere", "pid": 1, "token": "x"}
    ended = threading.Event()

    def goes_on():
        while not ended.wait(0.3):
            remote.write(".lock", json.dumps(other | {"heard": time.time()}).encode())

    arguments = ["train", str(file), "--run-dir", f"{bucket}/runs", "--train.steps", "1"]
    remote.write(".lock", json.dumps(other).encode())
    renewing = threading.Thread(target=goes_on)
    renewing.start()
    said = refused(capsys, *arguments)
    ended.set()
    renewing.join()
    assert "for one run at a time" in said and "goes on, process 1 on elsewhere" in said
    assert "it is taken over if that does not renew" in " ".join(said.split())
    assert files(remote.address) == [".lock"]
    here = {"host": socket.gethostname(), "within": remote_runs.within(), "pid": os.getppid()}
    remote.write(".lock", json.dumps(other | here).encode())
    assert main(arguments) == 2, "a process of this host that lives"
    lives = remote_runs._lives
    assert lives(here) is True and lives(here | {"pid": 2**22 + 1}) is False
    assert lives(here | {"within": "a container of the same name"}) is None is lives({**here, "within": None})
    remote.write(".lock", json.dumps(other).encode())
    assert main(arguments) == 0 and ".lock" not in files(remote.address), "one that is not renewed is taken over"

    began = remote_runs.RemoteRun.before_commit

    def loses_the_lock(self, checkpoint):
        remote.write(".lock", json.dumps(other | {"heard": time.time()}).encode())
        began(self, checkpoint)

    monkeypatch.setattr(remote_runs.RemoteRun, "before_commit", loses_the_lock)
    arguments[-1] = "2"
    said = refused(capsys, *arguments, "--name", "points", "--optimizer.schedule", "constant")
    assert "Checkpoint 2 was not saved" in said and "was taken over by another run" in said
    assert json.loads(remote.read(".lock"))["token"] == "x" and saved(remote.address) == [1]


@pytest.fixture
def run(bucket, monkeypatch):
    """A run whose files are sent every tenth of a second."""
    monkeypatch.setattr(remote_runs, "EVERY_SECONDS", 0.1)
    return remote_runs.RemoteRun(f"{bucket}/runs/one", together=False)


def failing(times, original, error, *, done=False):
    """Return a function that raises the first times; `done`: after its work, as where only the reply is lost."""
    left = [times]

    def fails(*arguments, **options):
        left[0] -= 1
        if left[0] >= 0 and not done:
            raise error
        result = original(*arguments, **options)
        if left[0] >= 0:
            raise error
        return result

    return fails


@pytest.mark.parametrize("arrived", [False, True])
def test_a_write_of_the_lock_that_fails_once_ends_no_run(run, monkeypatch, arrived):
    with run.held():
        (run.folder / "experiment.toml").write_text("x")
        with run._busy, monkeypatch.context() as patched:
            slow = RemoteError("503, slow down")
            patched.setattr(Remote, "write", failing(1, Remote.write, slow, done=arrived))
            with pytest.raises(RemoteError, match="503"):
                run._renew()
        run.push()
    assert files(run.remote.address) == ["experiment.toml"], "the lock is given back"


def test_the_sender_goes_on_after_any_exception_and_the_last_files_are_sent(run, monkeypatch, capsys):
    gone = FileNotFoundError(2, "a folder went while it was listed")
    tried = threading.Event()
    with run.held():
        with monkeypatch.context() as patched:
            fails = failing(10**9, run._files, gone)
            patched.setattr(run, "_files", lambda: (tried.set(), fails())[1])
            assert tried.wait(20)
        (run.folder / "metrics.jsonl").write_text("first")
        until = time.monotonic() + 20
        while time.monotonic() < until and "metrics.jsonl" not in files(run.remote.address):
            time.sleep(0.05)
        assert "metrics.jsonl" in files(run.remote.address), "sent by the thread"
        (run.folder / "metrics.jsonl").write_text("all that was logged")
    assert run.remote.read("metrics.jsonl") == b"all that was logged" and ".lock" not in files(run.remote.address)
    assert "a folder went while it was listed; it is tried again" in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_sent_at_the_end_is_kept(run, monkeypatch):
    with pytest.raises(RemoteError, match=r"OSError: .*no room.*is kept in") as raised, run.held():
        (run.folder / "metrics.jsonl").write_text("all")
        monkeypatch.setattr(Remote, "send", failing(10**9, Remote.send, OSError(28, "no room")))
    kept = Path(str(raised.value).rpartition(" ")[2])
    run._scratch._closing()
    assert (kept / "metrics.jsonl").read_text() == "all" and ".lock" not in files(run.remote.address)


def test_folders_that_go_while_they_are_listed_are_left_out(run):
    ended = threading.Event()

    def make_and_remove():
        while not ended.is_set():
            for part in range(30):
                (run.folder / "profile" / str(part)).mkdir(parents=True)
            shutil.rmtree(run.folder / "profile")

    beside = threading.Thread(target=make_and_remove)
    beside.start()
    assert [each for each in (run._files() for _ in range(200)) if each] == []
    ended.set()
    beside.join()


def test_a_killed_run_goes_on_from_its_newest_checkpoint(bucket, file, capsys):
    run = f"{bucket}/runs/points"
    more = ["--train.steps", "400", "--train.checkpoint_every", "20", "--optimizer.schedule", "constant"]
    command = ["-m", "jdp", "train", *more, file, "--run-dir", f"{bucket}/runs"]
    process = start_python(*command, stderr=subprocess.STDOUT)
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and not saved(run):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = saved(run)
    assert there and steps(run)[: there[-1]] == [*range(1, there[-1] + 1)], "the rows before a checkpoint are there"
    assert ".lock" in files(run)
    more[1] = str(there[-1] + 5)
    assert main(["train", str(file), "--run-dir", f"{bucket}/runs", *more]) == 0, "here, on other devices"
    assert f"resumed after step {there[-1]}" in capsys.readouterr().out
    assert steps(run) == [*range(1, there[-1] + 6)]


@pytest.mark.parametrize("kind", ["S3://", "s3:/"])
def test_an_address_is_one_in_upper_case_and_with_one_slash(bucket, file, kind):
    box = bucket.removeprefix("s3://")
    assert main(["train", str(file), "--run-dir", f"{kind}{box}/runs", "--train.steps", "1"]) == 0
    assert "summary.json" in files(f"{bucket}/runs/points") and no_folder_of_ours(file.parent)


REFUSED = {
    "no bucket": (["--run-dir", "s3://no-such-bucket-here/runs"], "make that bucket, or fix its name"),
    "no package": (["--run-dir", "az://box/runs"], "--run-dir: az:// needs a package.*pip install adlfs"),
    "no package, one slash": (["--run-dir", "oss:/box/runs"], "--run-dir: oss:// needs a package.*pip install ossfs"),
    "upper case": (["--run-dir", "S3://no-such-bucket-here/runs"], "s3://no-such-bucket-here.* make that bucket"),
    "an unknown kind": (["--run-dir", "Nosuch+1://box/runs"], "of a kind that fsspec knows, given .nosuch"),
    "no slashes": (["--run-dir", "s3:box"], 'two slashes, given "s3:box": write "s3://box"'),
    "no slashes in upper case": (["--run-dir", "S3:box/runs"], 'given "S3:box/runs": write "s3://box/runs"'),
    "a kind alone": (["--run-dir", "s3:"], "must name a bucket"),
    "data without slashes": (["--data.source", "gs:box/points.npz"], 'two slashes|write "gs://box/points.npz"'),
    "a program's file": (["--data.source", "memory://x"], "that other machines reach|on a disk of this machine"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_error_and_nothing_is_made(bucket, file, capsys, arguments, said):
    error = " ".join(refused(capsys, "train", file, *arguments).split())
    assert re.search(said, error), error
    assert no_folder_of_ours(file.parent)
