"""Checkpoints that cannot be written or read: one clear error each, what was saved before stays whole, and nothing
half-written is ever taken for a checkpoint."""

import functools
import itertools
import json
import logging
import re
import shutil
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import cut, files_of_at_most, flip, small_disk, vouch
from tiny_states import TX, names, one_device

import jdp

# When one of several reads or writes fails, Orbax leaves the others where they are.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

SIZE = 200
VALUES = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)  # does not compress: 160 kB


def init(rng):
    return {"w": jnp.asarray(VALUES), "b": jnp.zeros(8)}


def target(init=init, tx=TX):
    return jdp.abstract_state(init, tx, one_device(), rng=jax.random.key(0))


@functools.cache
def born():
    return jdp.init_state(init, TX, one_device(), rng=jax.random.key(0))


def at(count):
    return replace(born(), step=jnp.int32(count))


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


def test_a_single_save_survives_a_full_disk(tmp_path):
    with files_of_at_most(50_000), pytest.raises(jdp.CheckpointError, match=r"one was not saved: File too large\. F"):
        jdp.save(tmp_path / "one", at(0))
    assert list(tmp_path.iterdir()) == []
    jdp.save(tmp_path / "one", at(1))
    with files_of_at_most(50_000), pytest.raises(jdp.CheckpointError, match=r"one was not saved"):
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


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with checkpoints 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    with jdp.Checkpoints(directory) as checkpoints:
        for count in (1, 2):
            checkpoints.save(at(count), {"n": count}, {"loss": -count})
    return directory


def largest(folder):
    """The file with the arrays; the manifest may lead to any of several equal copies, so all are cut."""
    size = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0.9 * size]


def test_a_damaged_checkpoint_is_named_with_the_others(two, tmp_path):
    directory = shutil.copytree(two, tmp_path / "copy")
    flip(largest(directory / "2" / "state")[0], 5000)
    message = rf"{directory}/2 is damaged: state/\S* has changed\. "
    with jdp.Checkpoints(directory, best="loss") as checkpoints:
        for step in (2, "best"):
            with pytest.raises(jdp.CheckpointError, match=message + r"Restore another, with step=.* \(there are: 1\)"):
                checkpoints.restore(target(), step)
        assert checkpoints.restore(target(), 1)[1] == {"n": 1}
    with pytest.raises(jdp.CheckpointError, match=message + "Restore another checkpoint"):
        jdp.restore(directory / "2", target())
    assert names(directory) == ["1", "2"]


def test_the_reason_is_short(two, tmp_path):
    """TensorStore's own account of it is a page; it is asked where checksums vouch for the file."""
    directory = shutil.copytree(two, tmp_path / "copy")
    for file in largest(directory / "2" / "state"):
        cut(file)
    vouch(directory / "2")
    with pytest.raises(jdp.CheckpointError) as error:
        jdp.restore(directory / "2", target())
    assert len(str(error.value)) < len(str(directory)) + 250 and "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_a_path_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other" / "7").mkdir(parents=True)
    (tmp_path / "other" / "7" / "notes.txt").write_text("mine")
    why = dict.fromkeys(("file", "other"), "is not a checkpoint and holds none") | {"gone": "does not exist"}
    for name, words in why.items():
        with pytest.raises(jdp.CheckpointError, match=rf"{name} {words}\. Pass a checkpoint of jdp\.save, "):
            jdp.restore(tmp_path / name, target())


def test_another_optimizer_is_refused_with_a_fix(two):
    message = r"same optimizer; .*/2 has opt_state/0/.* as .*The model is the same: .*\(restore_params\)"
    with jdp.Checkpoints(two) as checkpoints:
        with pytest.raises(jdp.CheckpointError, match=message):
            checkpoints.restore(target(tx=optax.sgd(0.1, momentum=0.9)))
        params = checkpoints.restore_params(target(tx=optax.sgd(0.1, momentum=0.9))).params
    np.testing.assert_array_equal(params["w"], VALUES)


def test_another_versions_checkpoint_is_refused_by_its_format(two, tmp_path):
    directory = shutil.copytree(two, tmp_path / "copy")
    (directory / "2" / "checkpoint.json").write_text(json.dumps({"format": 99, "leaves": {}, "record": {}}))
    vouch(directory / "2")
    with pytest.raises(jdp.CheckpointError, match=r"another version of jdp, in format 99; this version reads format 1"):
        jdp.restore(directory, target())
