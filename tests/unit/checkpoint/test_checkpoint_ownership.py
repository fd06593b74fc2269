"""A directory of checkpoints loses nothing: not what a run that went back learns, nor what it left, nor what is not
ours; and what it cannot take is refused in words."""

import errno
import fcntl
import os
import shutil
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_states import at, fill, names, target, weight_of

import jdp
from jdp.checkpoint import stored, upkeep

pytestmark = pytest.mark.usefixtures("fresh_notices")


def weight(directory, step=None):
    with jdp.Checkpoints(directory) as saved:
        return weight_of(saved.restore(target(), step)[0])


@pytest.mark.parametrize(("process", "refused"), [("the same", "3"), ("another", "3"), ("another", "5, after 2")])
def test_a_run_that_goes_back_loses_nothing(tmp_path, process, refused, capsys):
    saved = jdp.Checkpoints(tmp_path, keep=None)
    for step in (1, 2, 3, 4):
        saved.save(at(step))
    if process != "the same":
        saved.close()
        saved = jdp.Checkpoints(tmp_path, keep=None)
    state, _ = saved.restore(target(), 2)
    assert weight_of(state) == 2 and saved.steps == [1, 2, 3, 4], "who only reads changes nothing"
    words = rf"never replaced.* has 3, 4, and the new step is {refused}.*go_back\(2\)"
    with pytest.raises(jdp.CheckpointError, match=words):
        saved.save(at(int(refused[0]), 33.0))
    saved.go_back(2)
    saved.save(at(3, 33.0))
    assert saved.latest == 3 and saved.steps == [1, 2, 3]
    saved.restore(target(), 1)  # to compare
    saved.save(at(4, 44.0))
    saved.close()
    assert [weight(tmp_path, step) for step in (1, 2, 3, 4)] == [1, 2, 33, 44]
    assert [weight(tmp_path / "abandoned-1", step) for step in (3, 4)] == [3, 4]
    assert weight_of(jdp.restore(tmp_path / "abandoned-1", target())) == 4
    messages = capsys.readouterr().err
    assert messages.count("checkpoints 3, 4 set aside in abandoned-1") == 1


@pytest.mark.parametrize("last", ["saved", "restored"])
def test_another_state_under_the_same_step_is_reported(tmp_path, last, capsys):
    fill(tmp_path, 1)
    with jdp.Checkpoints(tmp_path) as saved:
        state = at(2) if last == "saved" else saved.restore(target())[0]
        for record in ({"count": int(state.step)}, {"again": True}):
            saved.save(state, record)
        assert capsys.readouterr().err == "" and saved.restore(target())[1] == {"count": int(state.step)}
        saved.save(at(int(state.step), 7.0))
        said = f"has checkpoint {state.step} already, with other arrays, so these are not saved"
        assert said in capsys.readouterr().err
        assert weight_of(saved.restore(target())[0]) == int(state.step)


def test_a_reader_sees_what_another_process_does(tmp_path):
    with jdp.Checkpoints(tmp_path, best="loss") as reader, jdp.Checkpoints(tmp_path, keep=1) as writer:
        assert reader.latest is None and reader.best is None
        for step in (1, 2):
            writer.save(at(step), metrics={"loss": float(step)})
            writer.wait()
            assert (reader.latest, reader.steps, reader.best) == (step, [step], step)
            assert int(reader.restore(target())[0].step) == step


def user_folder(directory):
    (directory / "2024").mkdir(parents=True)
    (directory / "2024" / "notes.txt").write_text("mine")
    return directory


def test_a_users_numbered_folder_is_refused(tmp_path):
    mine = user_folder(tmp_path / "mine")
    with pytest.raises(jdp.CheckpointError, match=r"mine contains 2024, which is not a .* empty .*mine/checkpoints"):
        jdp.Checkpoints(mine)
    assert (mine / "2024" / "notes.txt").read_text() == "mine"


def test_later_entries_of_a_user_are_not_deleted(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with jdp.Checkpoints(tmp_path / "saved", keep=1) as saved:
        saved.save(at(1))
        saved.wait()
        user_folder(tmp_path / "saved")
        shutil.copytree(tmp_path / "saved" / "1", tmp_path / "elsewhere" / "0")
        (tmp_path / "saved" / "0").symlink_to(tmp_path / "elsewhere" / "0")
        for step in (2, 3):
            saved.save(at(step))
        with pytest.raises(jdp.CheckpointError, match="has 2024, and the new step is 2024"):
            saved.save(at(2024))
        saved.go_back(2023)
        saved.save(at(2024))
        saved.wait()
        assert saved.steps == [0, 2024]
    assert names(tmp_path / "saved") == ["0", "2024", "abandoned-1"]
    assert (tmp_path / "saved" / "abandoned-1" / "2024" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "0" / "state").is_dir(), "a link is not followed"


def test_only_leftovers_of_killed_processes_are_deleted(tmp_path, capsys):
    fill(tmp_path, 0, 1, 2, 3)
    (tmp_path / "0").rename(tmp_path / ".deleted-0")
    (tmp_path / "2" / "checksums.json").unlink()
    (tmp_path / "3").rename(tmp_path / ".saving-3")
    for name in ("mine", ".saving-it"):
        user_folder(tmp_path / name)
    for link in (".saving-4", "5"):
        (tmp_path / link).symlink_to(tmp_path / "mine", target_is_directory=True)
    before = names(tmp_path)
    with jdp.Checkpoints(tmp_path) as saved:
        assert saved.steps == [1] and saved.restore(target())[1] == {"count": 1}
        assert names(tmp_path) == before, "a reader changes nothing: another process may be writing it"
        saved.save(at(6))
    assert names(tmp_path) == [".saving-4", ".saving-it", "1", "2", "5", "6", "mine"]
    assert (tmp_path / "mine" / "2024" / "notes.txt").exists()
    assert "2 has no checksums.json and is ignored" in capsys.readouterr().err


def test_a_single_save_deletes_nothing_of_a_user(tmp_path):
    mine = [user_folder(tmp_path / name) / "2024" / "notes.txt" for name in (".one.saving", ".two.old")]
    (tmp_path / ".three.old").write_text("mine")
    for name, words in {"one": "saving .* did not write it", "two": "old .*Move it away", "three": "old"}.items():
        with pytest.raises(jdp.CheckpointError, match=rf"\.{name}\.{words}"):
            jdp.save(tmp_path / name, at(1))
    assert all(path.exists() for path in (*mine, tmp_path / ".three.old"))
    jdp.save(tmp_path / "real", at(1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    jdp.save(tmp_path / "link", at(2), overwrite=True)
    assert (tmp_path / "link").is_symlink() and int(jdp.restore(tmp_path / "real", target()).step) == 2


def test_a_record_may_have_numpy_and_jax_scalars(tmp_path):
    record = {"a": np.float32(0.5), "b": np.int64(3), "c": jnp.float32(2.0), "d": np.bool_(True), "e": [(np.array(1),)]}
    with jdp.Checkpoints(tmp_path) as saved:
        saved.save(at(1), record, {"loss": np.float32(1)})
        assert saved.restore(target())[1] == {"a": 0.5, "b": 3, "c": 2.0, "d": True, "e": [[1]]}
        for bad, message in (
            ({"deep": [np.zeros(2)]}, r"record\['deep'\]\[0\] must be JSON.*it is ndarray"),
            ({"x": {1: 2}}, r"record\['x'\] must be JSON, whose keys are text; 1 is not"),
        ):
            with pytest.raises(jdp.CheckpointError, match=message):
                saved.save(at(2), bad)
        with pytest.raises(ValueError, match="A metric is one number; 'loss' is None"):
            saved.save(at(2), metrics={"loss": None})
        saved.save(at(2), {"n": 2})
        assert saved.restore(target())[1] == {"n": 2}


def test_two_writers_do_not_share_a_save(tmp_path, monkeypatch):
    ready, commit = threading.Event(), stored.commit
    monkeypatch.setattr(stored, "commit", lambda *given: (ready.wait(60), commit(*given)))
    with jdp.Checkpoints(tmp_path) as first, jdp.Checkpoints(tmp_path) as second:
        first.save(at(1))
        for step in (1, 2):
            with pytest.raises(jdp.CheckpointError, match=f"{step} was not saved in .*: one process at a time"):
                second.save(at(step))
        ready.set()
        first.wait()
        second.save(at(2))
    assert names(tmp_path) == ["1", "2"] and weight(tmp_path, 1) == 1


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_system_without_locks_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    fill(tmp_path, 1, 2)
    assert names(tmp_path) == ["1", "2"]
    monkeypatch.setattr(fcntl, "flock", failing(errno.EACCES))  # how some network file systems say "locked"
    with pytest.raises(jdp.CheckpointError, match=r"3 was not saved in .*: one process at a time"):
        fill(tmp_path, 3)


def test_a_forked_process_does_not_keep_the_claim(tmp_path):
    claim = upkeep.claim(tmp_path)
    inherited = os.dup(claim.fileno())  # shares the lock, as a fork's descriptor does
    upkeep.release(claim)
    upkeep.release(upkeep.claim(tmp_path))
    os.close(inherited)


def test_a_save_that_fails_early_ends_its_claim(tmp_path, monkeypatch):
    with jdp.Checkpoints(tmp_path) as saved:
        with monkeypatch.context() as patched, pytest.raises(jdp.CheckpointError, match="Input/output") as caught:
            patched.setattr(upkeep, "remove_leftovers", failing(errno.EIO))
            saved.save(at(1))
        saved.save(at(1))  # while the error, with its frames, is alive
    assert caught.value and names(tmp_path) == ["1"]


def test_close_ends_an_interrupted_save(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), jdp.Checkpoints(tmp_path) as saved:
        monkeypatch.setattr(saved._arrays, "save", interrupted)
        saved.save(at(1))
    fill(tmp_path, 1)
    assert names(tmp_path) == ["1"]


def test_an_interrupted_close_keeps_the_claim(tmp_path, monkeypatch):
    """Until the save in the background is complete, no other process may save."""
    closing, commit = threading.Event(), stored.commit

    def interrupted():
        closing.set()
        raise KeyboardInterrupt

    def late(*given):
        closing.wait(60)
        time.sleep(0.2)
        with pytest.raises(jdp.CheckpointError, match="one process at a time"):
            upkeep.claim(tmp_path)
        commit(*given)

    monkeypatch.setattr(stored, "commit", late)
    saved = jdp.Checkpoints(tmp_path)
    saved.save(at(1))
    monkeypatch.setattr(saved, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved.close()
    assert names(tmp_path) == ["1"]
