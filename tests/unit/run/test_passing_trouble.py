"""A disk that is full for a while, storage that is away: after the first step both are tried again, then exit 75."""

import re
import time
from types import SimpleNamespace

import pytest
from damage import small_disk
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows, saved_steps, train

from jdp.checkpoint import errors
from jdp.checkpoint.stored import COMMITTED
from jdp.run import signals

TRAIN = {"steps": 6, "batch_size": 16, "log_every": 1, "eval_every": 0, "checkpoint_every": 2}


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path, points_text(tables(train=TRAIN)))


@pytest.fixture
def hog(file, monkeypatch):
    """A file that fills the disk at the end of step 3, once checkpoint 2 is saved."""
    hog, real = file.parent / "runs" / "hog", signals.StopRequest.at_step
    saved = file.parent / "runs" / "points" / "checkpoints" / "2" / COMMITTED

    def at_step(self, now):
        if now == 3 and not hog.exists():
            until = time.monotonic() + 60
            while not saved.exists() and time.monotonic() < until:  # else the trouble is that of the checkpoint before
                time.sleep(0.02)
            fill(hog)
        return real(self, now)

    monkeypatch.setattr(signals.StopRequest, "at_step", at_step)
    return hog


def test_a_disk_full_for_a_moment(file, hog, capsys, monkeypatch):
    """The state of a save that failed in the background may be gone: the newest one is saved in its place."""
    pause = lambda seconds: (hog.unlink(missing_ok=True), time.sleep(seconds))  # noqa: E731
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    with small_disk(file.parent / "runs", "4m"):
        code, folder = train(file)
        assert code == 0 and {2, 6} <= {*saved_steps(folder)} and list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().out
    assert said.count("No space left on device") == said.count("; retrying for 240 s") > 0
    assert re.search(r"it succeeded after \d+\.\d s, at try \d+\n", said)


def test_a_disk_that_stays_full_exits_with_75(file, hog, capsys, monkeypatch):
    monkeypatch.setattr(errors, "PATIENCE_SECONDS", 0.5)
    with small_disk(file.parent / "runs", "4m"):
        code, folder = train(file)
        said = capsys.readouterr().err
        assert code == 75 and said.count("error:") == 1 and "this may pass: run again to resume" in said
        monkeypatch.undo()
        hog.unlink()
        assert train(file)[0] == 0 and list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6]
    assert "resumed after step 2" in capsys.readouterr().out


def fill(hog):
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
