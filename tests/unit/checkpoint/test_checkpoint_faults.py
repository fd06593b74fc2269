"""Checkpoints that cannot be written or read: one clear error each, what was saved before stays whole, and nothing
half-written is ever taken for a checkpoint."""

import functools
import gc
import itertools
import logging
import re
import time

import jax.numpy as jnp
import pytest
import tiny_states
from damage import files_of_at_most, small_disk
from tiny_states import names

import jdp

# When one of several reads or writes fails, Orbax leaves the others where they are.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

at = functools.partial(tiny_states.at, size=40_000)  # 160 kB
target = functools.partial(tiny_states.target, 40_000)


def test_a_run_goes_on_after_a_full_disk(tmp_path, caplog):
    with jdp.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(at(1), {"n": 1})
        checkpoints.wait()
        with caplog.at_level(logging.ERROR), files_of_at_most(50_000):
            checkpoints.save(at(2), {"n": 2})  # in the background
            rule = rf"Checkpoint 2 was not saved in {re.escape(str(tmp_path))}: File too large \(.* whole: 1\)\. Free"
            with pytest.raises(jdp.CheckpointError, match=rule):
                checkpoints.wait()
        assert "Traceback" not in caplog.text
        assert (checkpoints.latest, names(tmp_path)) == (1, ["1"])
        checkpoints.wait()  # said once
        assert checkpoints.restore(target())[1] == {"n": 1}
        checkpoints.save(at(2), {"n": 3})  # there is room again
        checkpoints.wait()
        assert checkpoints.restore(target())[1] == {"n": 3}
        assert checkpoints.steps == [2]


def test_the_next_save_or_the_end_raises(tmp_path):
    with jdp.Checkpoints(tmp_path) as checkpoints, files_of_at_most(50_000):
        checkpoints.save(at(1))
        with pytest.raises(jdp.CheckpointError, match="Checkpoint 1 was not saved"):
            checkpoints.save(at(2))
    failing = pytest.raises(jdp.CheckpointError, match="Checkpoint 3 was not saved")
    with files_of_at_most(50_000), failing, jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(3))
    with files_of_at_most(50_000), pytest.raises(KeyError), jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(4))
        raise KeyError  # what ended the run comes first
    assert names(tmp_path) == []


def test_other_code_logs_through_absl_as_before(tmp_path):
    """Orbax' errors are hidden only while a directory is open: a user's own Orbax logs through absl, too."""
    before = [*logging.getLogger("absl").filters]
    with jdp.Checkpoints(tmp_path / "many") as checkpoints:
        checkpoints.save(at(0))
        checkpoints.restore(target())
        assert len(logging.getLogger("absl").filters) == len(before) + 1
    jdp.save(tmp_path / "one", at(0))
    jdp.restore(tmp_path / "one", target())
    assert logging.getLogger("absl").filters == before


def test_a_save_survives_a_clock_that_jumps(tmp_path, monkeypatch):
    """As on a machine that was suspended for hours: by itself Orbax waits 20 minutes for a save."""
    wall, jumps = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: wall() + 100 * next(jumps))
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(1), {"n": 1})
    assert checkpoints.steps == [1]


def test_a_single_save_survives_a_full_disk(tmp_path, caplog):
    refused = functools.partial(pytest.raises, jdp.CheckpointError, match=r"one was not saved: File too large\. Free")
    tree = {str(number): jnp.zeros(40_000) for number in range(20)}
    for _ in range(3):
        with files_of_at_most(50_000), refused():
            jdp.save(tmp_path / "one", tree)
        gc.collect()  # then asyncio logs the errors that Orbax did not raise
    assert list(tmp_path.iterdir()) == [] and "Task exception" not in caplog.text
    jdp.save(tmp_path / "one", at(1))
    with files_of_at_most(50_000), refused():
        jdp.save(tmp_path / "one", at(2), overwrite=True)
    assert int(jdp.restore(tmp_path / "one", target()).step) == 1


def test_no_space_left_on_a_real_disk(tmp_path):
    with small_disk(tmp_path / "disk", "900k"), jdp.Checkpoints(tmp_path / "disk") as checkpoints:
        checkpoints.save(at(1))
        checkpoints.wait()
        checkpoints.save(at(2))
        with pytest.raises(jdp.CheckpointError, match=r"Checkpoint 2 was not saved.*: No space left on device"):
            checkpoints.wait()
        assert checkpoints.restore(target())[0].step == 1


def test_a_read_only_directory_is_read(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as remount:
        with jdp.Checkpoints(tmp_path / "disk") as checkpoints:
            checkpoints.save(at(1))
        (tmp_path / "disk" / "2").mkdir()  # left by a killed run
        remount("ro")
        with jdp.Checkpoints(tmp_path / "disk") as checkpoints:
            assert int(checkpoints.restore(target())[0].step) == 1
            message = r"Checkpoint 3 was not saved in .*disk: Read-only file system .*may write to\."
            with pytest.raises(jdp.CheckpointError, match=message):
                checkpoints.save(at(3))
                checkpoints.wait()
            assert checkpoints.steps == [1]
        with pytest.raises(jdp.CheckpointError, match=r"new cannot be made a directory of checkpoints: Read-only"):
            jdp.Checkpoints(tmp_path / "disk" / "new")
        with pytest.raises(jdp.CheckpointError, match=r"one was not saved: Read-only file system"):
            jdp.save(tmp_path / "disk" / "one", at(0))


def test_a_path_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other" / "7").mkdir(parents=True)
    (tmp_path / "other" / "7" / "notes.txt").write_text("mine")
    why = dict.fromkeys(("file", "other"), "is not a checkpoint and holds none") | {"gone": "does not exist"}
    for name, words in why.items():
        with pytest.raises(jdp.CheckpointError, match=rf"{name} {words}\. Pass a checkpoint of jdp\.save, "):
            jdp.restore(tmp_path / name, target())


def test_a_checkpoint_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    jdp.save(tmp_path / "one", at(0))
    monkeypatch.setattr(type(tmp_path), "is_file", denied)  # the tests' user may read everything
    with pytest.raises(jdp.CheckpointError, match=r"one cannot be read: Permission denied\. Give this user access"):
        jdp.restore(tmp_path / "one", target())
