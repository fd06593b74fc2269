"""Checkpoints do not lie: whatever changes on the disk, in whichever file, is found, and the one before is taken."""

import filecmp
import functools
import json
import os
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import cut, flip, vouch, zero_page
from tiny_states import names, plan_of

import jdp
from jdp.base import notices
from jdp.checkpoint import check, stored

pytestmark = pytest.mark.usefixtures("fresh_notices")
SIZE = 640  # arrays of 1.6 MB: small ones are kept in files that have checksums of their own
TX = optax.sgd(0.1, momentum=0.9)


def init(rng):
    return {"w": jax.random.normal(rng, (SIZE, SIZE)), "b": jnp.zeros(8)}


@functools.cache
def target():
    return jdp.abstract_state(init, TX, plan_of(data=2), rng=jax.random.key(0))


@functools.cache
def born():
    return jdp.init_state(init, TX, plan_of(data=2), rng=jax.random.key(0))


def at(step):
    return replace(born(), step=jnp.int32(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 1 and 2."""
    with jdp.Checkpoints(tmp_path_factory.mktemp("saved")) as checkpoints:
        for step in (1, 2):
            checkpoints.save(at(step), {"n": step}, {"loss": 1.0 / step})
    return checkpoints.directory


@pytest.fixture
def own(saved, tmp_path):
    """A copy of the directory with steps 1 and 2 that a test may change."""
    return shutil.copytree(saved, tmp_path / "own")


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def arrays_of(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_any_damage_to_any_file_is_found(own, saved, capsys):
    """All kinds of damage to all files of a step, and 60 more bits of its arrays: none is restored in silence."""
    directory, copy = own, saved
    step, rng = directory / "2", np.random.default_rng(0)
    kinds = {
        "bit flip": lambda file: flip(file, rng.integers(file.stat().st_size), rng.integers(8)),
        "zeroed page": lambda file: zero_page(file, rng.integers(file.stat().st_size)),
        "truncation": cut,
        "deletion": lambda file: file.unlink(),
    }
    damages = [(name, kind) for name in files_of(step) for kind in kinds]
    damages += [(arrays_of(step).relative_to(step), "bit flip")] * 60
    assert len(damages) >= 100 and arrays_of(step).stat().st_size > 2**20
    for name, kind in damages:
        kinds[kind](step / name)
        if (step / name).exists() and filecmp.cmp(step / name, copy / "2" / name, shallow=False):
            continue  # a page of zeros
        (verdict,) = [found for found in check(directory) if found.step == 2]
        assert verdict.status == "damaged" and verdict.problem, (name, kind)
        shutil.copyfile(copy / "2" / name, step / name)
    assert [found.status for found in check(directory)] == ["whole", "whole"]
    for name in {(path.parts[0], path.parts[-1][:8]): path for path in files_of(step)}.values():  # one of each class
        notices._said.clear()
        kinds["bit flip"](step / name)
        state = jdp.restore(directory, target())
        assert int(state.step) == 1, name
        assert f"checkpoint 2 is damaged ({verdict_of(directory)}); 1 is read instead" in capsys.readouterr().err
        shutil.copyfile(copy / "2" / name, step / name)
    np.testing.assert_array_equal(state.params["w"], born().params["w"])
    assert int(jdp.restore(directory, target()).step) == 2


def verdict_of(directory):
    return next(found.problem for found in check(directory) if found.status == "damaged")


def test_the_damaged_newest_is_set_aside(own, capsys):
    for aside in ("damaged-2", "damaged-2-2"):
        notices._said.clear()
        flip(arrays_of(own / "2"), 5000)
        with jdp.Checkpoints(own, best="loss") as checkpoints:
            state, record = checkpoints.restore(target())
            assert (int(state.step), record, checkpoints.steps, checkpoints.best) == (1, {"n": 1}, [1], 1)
            said = capsys.readouterr().err
            assert "checkpoint 2 is damaged (state/" in said and f"set aside as {aside}; 1 is read instead" in said
            checkpoints.save(at(2), {"n": 2}, {"loss": 0.5})
            assert checkpoints.restore(target())[1] == {"n": 2}
        assert capsys.readouterr().err == "", "the step is saved again without a word"
    assert names(own) == ["1", "2", "damaged-2", "damaged-2-2"]
    assert check(own / "damaged-2")[0].status == "damaged"


def test_a_damaged_checkpoint_is_named_with_the_others(own):
    flip(arrays_of(own / "2"), 5000)
    message = rf"{own}/2 is damaged: state/\S* has changed\. "
    with jdp.Checkpoints(own, best="loss") as checkpoints:
        for step in (2, "best"):
            with pytest.raises(jdp.CheckpointError, match=message + r"Restore another, with step=.* \(there are: 1\)"):
                checkpoints.restore(target(), step)
        assert checkpoints.restore(target(), 1)[1] == {"n": 1}
    with pytest.raises(jdp.CheckpointError, match=message + "Restore another checkpoint"):
        jdp.restore(own / "2", target())
    assert names(own) == ["1", "2"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # Orbax' other reads
def test_the_reason_is_short(own):
    """TensorStore's own account of it is a page; it is asked where checksums vouch for the file."""
    cut(arrays_of(own / "2"))
    vouch(own / "2")
    with pytest.raises(jdp.CheckpointError) as error:
        jdp.restore(own / "2", target())
    assert len(str(error.value)) < len(str(own)) + 250 and "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_another_versions_checkpoint_is_refused_by_its_format(own):
    (own / "2" / "checkpoint.json").write_text(json.dumps({"format": 99, "leaves": {}, "record": {}}))
    vouch(own / "2")
    with pytest.raises(jdp.CheckpointError, match=r"another version of jdp, in format 99; this version reads format 1"):
        jdp.restore(own, target())


def test_weights_alone_fall_back_too(own):
    flip(arrays_of(own / "2"), 5000)
    assert jdp.restore_params(own, target()).params["w"].shape == (SIZE, SIZE)
    assert names(own) == ["1", "2"], "a path that is only read from stays as it is"
    with jdp.Checkpoints(own) as checkpoints:
        checkpoints.restore_params(target())
    assert names(own) == ["1", "damaged-2"]


def test_nothing_is_moved_if_none_is_whole(own):
    flip(arrays_of(own / "1"), 5000)
    cut(own / "2" / "checkpoint.json")
    message = r"No checkpoint in .*own is whole \(2: checkpoint.json has .*; 1: state/.* has changed\)\. Replace"
    with jdp.Checkpoints(own) as checkpoints, pytest.raises(jdp.CheckpointError, match=message):
        checkpoints.restore(target())
    with pytest.raises(jdp.CheckpointError, match=message):
        jdp.restore(own, target())
    assert names(own) == ["1", "2"]


def test_a_checkpoint_with_damaged_metrics_stays(own):
    with jdp.Checkpoints(own, best="loss", keep=1) as checkpoints:
        assert checkpoints.best == 2
        flip(own / "2" / "checkpoint.json", 40)
        assert checkpoints.best == 1
        checkpoints.save(at(3))
    assert names(own) == ["1", "2", "3"]


def test_check_takes_runs_and_single_checkpoints(own, tmp_path):
    (tmp_path / "run").mkdir()
    own.rename(tmp_path / "run" / "checkpoints")
    assert [(found.step, found.status) for found in check(tmp_path / "run")] == [(1, "whole"), (2, "whole")]
    jdp.save(tmp_path / "one", born())
    assert [(found.step, found.status) for found in check(str(tmp_path / "one"))] == [(None, "whole")]
    assert check(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("../outside", "leads out of the checkpoint"), ("link", "leads out of the checkpoint"), ("pipe", "is not a file")],
)
def test_a_forged_table_reads_nothing_outside(own, name, message):
    (own / "outside").write_text("secret")
    (own / "2" / "link").symlink_to(own / "outside")
    os.mkfifo(own / "2" / "pipe")
    stored.commit(own / "2", {name: (0, "0" * 32)})
    with pytest.raises(jdp.CheckpointError, match=message):
        jdp.restore(own / "2", target())
    assert message in verdict_of(own)
