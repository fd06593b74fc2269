"""Copies of the state in the hosts' memory: what a restart finds, what never counts, what is left there.

The memory is a folder of the test. `test_two_hosts.py` has two hosts with a folder each.
"""

import errno
import functools
import os
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import flip
from tiny_states import assert_same_bits

import jdp
from jdp.checkpoint.memory import copies, host
from jdp.checkpoint.memory.host import Slot

TX = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch, fresh_notices):
    """This user's folder in what stands for the host's memory; every notice is given anew."""
    monkeypatch.setenv(host.VARIABLE, str(tmp_path))
    return tmp_path / f"jdp-{os.getuid()}"


def init(rng):
    return {"w": jax.random.normal(rng, (6, 10)), "v": jnp.ones(5, jnp.bfloat16), "none": jnp.zeros((0, 4))}


@functools.cache
def first_state(strategy, count):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:count], data=count), strategy, min_shard_size=1)
    return jdp.init_state(init, TX, plan, rng=jax.random.key(0))


def state_at(step, strategy="zero3", count=4):
    """A state whose weights and number are those of the step."""
    state = first_state(strategy, count)
    params = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + step, x.sharding), state.params)
    return replace(state, step=jax.device_put(np.int32(step), state.step.sharding), params=params)


def opened(tmp_path):
    return jdp.Checkpoints(tmp_path / "run", keep_in_memory=1)


def killed(checkpoints):
    """What a kill leaves: everything that was committed."""
    checkpoints._memory._wait()
    checkpoints._memory._folder.close()
    checkpoints._memory._folder.close()  # a second call closes no other file


def left_by(tmp_path, *steps, stored=None):
    """Keep these steps in memory, store one, and be killed."""
    checkpoints = opened(tmp_path)
    for step in sorted({*steps, steps[0] if stored is None else stored}):
        if step in steps:
            checkpoints.save_in_memory(state_at(step), {"said": step})
        if step == stored:
            checkpoints.save(state_at(step), {"said": step})
    checkpoints.wait()
    killed(checkpoints)


@pytest.mark.parametrize(("strategy", "count"), [("zero3", 4), ("ddp", 2), ("zero1", 3), ("zero2", 1)])
def test_a_restart_takes_the_newest_state(strategy, count, tmp_path, capsys):
    left_by(tmp_path, 3, 4, 7, stored=4)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest == 7 and checkpoints.steps == [4]
        state, record = checkpoints.restore(state_at(0, strategy, count))
        assert record == {"said": 7}
        assert_same_bits(state, state_at(7))
        assert "step 7 is restored from the hosts' memory; the newest checkpoint in" in capsys.readouterr().err
        checkpoints.save(state)  # it is in memory alone: this is not taken for a step that was saved
        checkpoints.wait()
        assert checkpoints.steps == [4, 7]


def test_parts_through_pinned_memory_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_PINNED_FOR", ("cpu",))
    monkeypatch.setattr(copies, "_AT_ONCE", 100)
    left_by(tmp_path, 3, 4, 7)
    with opened(tmp_path) as checkpoints:
        assert_same_bits(checkpoints.restore(state_at(0, "zero1", 3))[0], state_at(7))


@pytest.mark.parametrize(
    ("copied", "stored", "without_copies", "newest"),
    [
        ([3], 5, lambda saved: None, 5),
        ([3], 3, lambda saved: saved.save(state_at(8), {"said": 8}), 8),
        ([9], None, lambda saved: saved.save(state_at(6), {"said": 6}), 6),
        ([3, 7], 3, lambda saved: saved.go_back(3), 3),
    ],
    ids=["stored last", "later", "of another history", "gone back"],
)
def test_old_copies_do_not_overtake_storage(copied, stored, without_copies, newest, tmp_path):
    left_by(tmp_path, *copied, stored=stored)
    with jdp.Checkpoints(tmp_path / "run") as checkpoints:
        without_copies(checkpoints)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state_at(0))[1] == {"said": newest}


def test_replaced_copies_are_not_read(tmp_path):
    left_by(tmp_path, 3, 4, 7, stored=4)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state_at(0))[1] == {"said": 7}
        for step in (8, 9):
            checkpoints.save_in_memory(state_at(step))
        assert checkpoints.restore(state_at(0))[1] == {"said": 4}


DAMAGES = {
    "half written": lambda index: index.rename(index.with_suffix(".new")),
    "flipped": lambda index: flip(index.with_suffix(""), 0),
    "changed index": lambda index: index.write_text(index.read_text().replace('"said"', '"lied"')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_does_not_count(damage, memory, tmp_path, capsys):
    left_by(tmp_path, 3, 4, 7, stored=3)
    (index,) = (file for file in memory.glob("*/*.json") if '"key": [7,' in file.read_text())
    DAMAGES[damage](index)
    with opened(tmp_path) as checkpoints:
        state, record = checkpoints.restore(state_at(0))
    assert record == {"said": 4}
    assert_same_bits(state, state_at(4))
    assert ("step 7 in the hosts' memory is damaged" in capsys.readouterr().err) == (damage == "flipped")


def test_the_restored_generation_is_not_overwritten(memory, tmp_path):
    left_by(tmp_path, 3, 4, 7)
    for kill in (9, 10):
        checkpoints = opened(tmp_path)
        checkpoints.restore(state_at(0))
        checkpoints.save_in_memory(state_at(kill))
        indexes = "".join(file.read_text() for file in memory.glob("*/*.json"))
        killed(checkpoints)
        assert re.findall(r'"key": \[(\d+)', indexes).count("7" if kill == 9 else "9") == 1
    assert len(list(memory.glob("*/*.[01]"))) == 2


def test_a_run_that_went_back_forgets(memory, tmp_path):
    left_by(tmp_path, 3, 7, stored=3)
    checkpoints = opened(tmp_path)
    checkpoints.restore(state_at(0), 3)
    checkpoints.save_in_memory(state_at(8), {"said": 8})
    killed(checkpoints)
    indexes = "".join(file.read_text() for file in memory.glob("*/*.json"))
    assert sorted(re.findall(r'"key": \[(\d+)', indexes)) == ["3", "8"], "7 is of another history"


def test_the_memory_is_given_back(memory, tmp_path, capsys):
    left_by(tmp_path, 3)
    with opened(tmp_path) as checkpoints:
        checkpoints.restore(state_at(0))
    assert "step 3 stays in" in capsys.readouterr().err and list(memory.glob("*/*.[01]"))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(checkpoints.restore(state_at(0))[0])
    assert list(memory.iterdir()) == []


def test_a_new_run_finds_nothing_old(memory, tmp_path):
    left_by(tmp_path, 3)
    (tmp_path / "run").rename(tmp_path / "moved")
    (old,) = memory.iterdir()
    os.utime(old, (0, 0))
    with opened(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        checkpoints.save_in_memory(state_at(1))
        checkpoints.save(state_at(1))
        assert len(list(memory.iterdir())) == 1, "what nobody uses was removed"


def test_a_live_runs_copies_are_locked(memory, tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save_in_memory(state_at(3), {"said": 3})
    with pytest.raises(jdp.CheckpointError, match="allow one run at a time"):
        opened(tmp_path)
    checkpoints._memory._wait()  # it writes into the folder
    (live,) = memory.iterdir()
    os.utime(live, (0, 0))
    with jdp.Checkpoints(tmp_path / "another", keep_in_memory=1) as another:
        another.save_in_memory(state_at(1))
    assert live.exists(), "old as it looks, a run uses it"
    killed(checkpoints)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state_at(0))[1] == {"said": 3}


@pytest.mark.parametrize("where", ["save", "save_in_memory"])
def test_a_loop_that_goes_back_forgets(where, tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(state_at(5), {"said": 5})
    for step in (6, 7):
        checkpoints.save_in_memory(state_at(step), {"said": "abandoned"})
    checkpoints.restore(state_at(0), 5)
    checkpoints.go_back(5)
    getattr(checkpoints, where)(state_at(6), {"said": 6})
    checkpoints.wait()
    killed(checkpoints)
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state_at(0))[1] == {"said": 6}


def test_a_full_memory_costs_no_complete_copy(tmp_path, monkeypatch, capsys):
    checkpoints = opened(tmp_path)
    assert checkpoints.save_in_memory(state_at(3), {"said": 3})

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Slot, "open", full)
    assert not any(checkpoints.save_in_memory(state_at(step)) for step in (4, 5, 6))
    killed(checkpoints)
    assert capsys.readouterr().err.count("has no room for a copy of the state (No space left on device)") == 1
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state_at(0))[1] == {"said": 3}


def test_a_host_without_room_says_so_once(tmp_path, monkeypatch, capsys):
    found = os.statvfs(tmp_path)
    full = os.statvfs_result((*found[:4], 0, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with opened(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save_in_memory(state_at(step))
    printed = capsys.readouterr().err
    assert printed.count("keep_in_memory holds two copies of this host's part of the state; they need") == 1
    assert opened(tmp_path).latest is None


def test_a_folder_that_others_may_read_is_refused(memory, tmp_path):
    memory.mkdir(mode=0o755)
    with pytest.raises(jdp.CheckpointError, match=r"closed to other users; .* with mode 0700"):
        opened(tmp_path)
    memory.chmod(0o700)
    with jdp.Checkpoints(tmp_path / "run") as checkpoints, pytest.raises(ValueError, match="keep_in_memory=10"):
        checkpoints.save_in_memory(state_at(1))
