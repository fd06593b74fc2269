"""Checkpoints: what was saved under one plan is restored bit by bit onto any other; a half-written one never counts."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

TX = optax.adamw(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}


def init(rng):
    first, second = jax.random.split(rng)
    return {
        "w": jax.random.normal(first, (16, 24)),
        "half": jax.random.normal(second, (24, 8)).astype(jnp.bfloat16),
        "scale": jnp.float32(0.1),
    }


def loss_fn(params, batch, rng):
    y = (batch["x"] @ params["w"] + jax.random.normal(rng, (16, 24))) * params["scale"]
    return jdp.Loss((y @ params["half"].astype(jnp.float32)).sum(), jnp.float32(y.shape[0]))


def plan_of(strategy="zero3", **axes):
    count = int(np.prod(list(axes.values()))) if axes else 8
    return jdp.Plan(jdp.make_mesh(devices=jax.devices()[:count], **axes), strategy, min_shard_size=64)


def small(rng):
    return {"w": jax.random.normal(rng, (16, 24)), "half": jnp.ones((24, 8)), "scale": jnp.float32(0.1)}


@functools.cache
def step():
    return jdp.make_train_step(loss_fn, plan_of())


def trained(steps=1):
    """A state of float32 weights under zero3 on eight devices, after some steps."""
    state = jdp.init_state(small, TX, plan_of(), rng=jax.random.key(4))
    for _ in range(steps):
        state, _ = step()(state, BATCH)
    return state


@jax.jit
def noisy(tree):
    return jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape, x.dtype) if x.ndim else x, tree)


def made_up(count):
    """A state with weights of two dtypes that says it has taken `count` steps; its moments are not zero."""
    state = jdp.init_state(init, TX, plan_of(), rng=jax.random.key(4))
    return replace(state, opt_state=noisy(state.opt_state), step=jnp.int32(count))


def target(plan, init=init, tx=TX, rng=None):
    return jdp.abstract_state(init, tx, plan, rng=jax.random.key(0) if rng is None else rng)


def bits(state):
    words = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(words)}


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for path in want:
        assert got[path].dtype == want[path].dtype and got[path].tobytes() == want[path].tobytes(), path


# Onto another plan.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with one checkpoint, saved under zero3 on eight devices, and its bits."""
    directory = tmp_path_factory.mktemp("saved")
    state = made_up(7)
    with jdp.Checkpoints(directory) as checkpoints:
        checkpoints.save(state, {"name": "run", "seed": 3, "nested": {"list": [1, 2.5, None, True]}})
        checkpoints.wait()
    return directory, bits(state)


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("ddp", {"data": 2}),
        ("zero2", {"data": 4}),
        ("zero3", {"data": 8}),
        ("zero1", {"replica": 2, "data": 4}),
        ("zero3", {"data": 4, "model": 2}),
        ("ddp", {"data": 1}),
    ],
)
def test_a_state_is_restored_bit_by_bit_onto_any_plan(saved, strategy, axes):
    directory, want = saved
    plan = plan_of(strategy, **axes)
    with jdp.Checkpoints(directory) as checkpoints:
        assert checkpoints.latest == 7
        state, record = checkpoints.restore(target(plan))
    assert_same_bits(bits(state), want)
    assert record == {"name": "run", "seed": 3, "nested": {"list": [1, 2.5, None, True]}}
    for place, leaf, sharding in zip(
        plan.placements(state), jax.tree.leaves(state), jax.tree.leaves(plan.shardings(state)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), place.path
    assert state.static == target(plan).static


def test_a_real_state_is_a_target_too_and_its_values_are_not_read(saved):
    directory, want = saved
    with jdp.Checkpoints(directory) as checkpoints:
        state, _ = checkpoints.restore(jdp.init_state(init, TX, plan_of("zero1"), rng=jax.random.key(99)), 7)
    assert_same_bits(bits(state), want)


def test_a_restored_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    with jdp.Checkpoints(tmp_path) as checkpoints:
        state = trained(steps=2)
        checkpoints.save(state)
        for _ in range(2):
            state, _ = step()(state, BATCH)
        resumed, record = checkpoints.restore(target(plan_of(), small))
    assert record == {}
    for _ in range(2):
        resumed, _ = step()(resumed, BATCH)
    assert_same_bits(bits(resumed), bits(state))


def test_the_step_may_donate_what_is_being_saved(tmp_path):
    with jdp.Checkpoints(tmp_path) as checkpoints:
        state = trained()
        want = bits(state)
        checkpoints.save(state)
        for _ in range(5):
            state, _ = step()(state, BATCH)
        checkpoints.wait()
        restored, _ = checkpoints.restore(target(plan_of(), small), 1)
    assert_same_bits(bits(restored), want)


def test_other_generators_keep_their_kind(tmp_path):
    rng = jax.random.key(5, impl="rbg")
    plan = plan_of("ddp", data=1)
    state = jdp.init_state(lambda rng: {"w": jnp.ones(4)}, optax.sgd(0.1), plan, rng=rng)
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        restored, _ = checkpoints.restore(target(plan, lambda rng: {"w": jnp.ones(4)}, optax.sgd(0.1), rng))
    assert jax.random.key_impl(restored.rng) == jax.random.key_impl(rng)
    np.testing.assert_array_equal(jax.random.key_data(restored.rng), jax.random.key_data(state.rng))


# Which checkpoints there are.


def tiny(count, skipped=0):
    made = jdp.init_state(lambda rng: {"w": jnp.ones(4)}, TX, plan_of("ddp", data=1), rng=jax.random.key(0))
    weights = {"w": jnp.full(4, float(count))}
    return replace(made, params=weights, step=jnp.int32(count - skipped), skipped=jnp.int32(skipped))


def tiny_target():
    return target(plan_of("ddp", data=1), lambda rng: {"w": jnp.zeros(4)})


def fill(directory, *counts, keep=3):
    with jdp.Checkpoints(directory, keep=keep) as checkpoints:
        for count in counts:
            checkpoints.save(tiny(count), {"count": count})
        checkpoints.wait()


def steps_in(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.mark.parametrize(("keep", "left"), [(2, [3, 5]), (1, [5]), (None, [1, 2, 3, 5])])
def test_the_newest_are_kept(tmp_path, keep, left):
    fill(tmp_path, 1, 2, 3, 5, keep=keep)
    assert steps_in(tmp_path) == left
    with jdp.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 5
        for count in left:
            state, record = checkpoints.restore(tiny_target(), count)
            assert (record, float(state.params["w"][0])) == ({"count": count}, count)


def test_a_checkpoint_is_named_by_the_batches_consumed(tmp_path):
    """Skipped batches count: the data goes on after them."""
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tiny(9, skipped=2))
        checkpoints.wait()
        assert checkpoints.latest == 9
        state, _ = checkpoints.restore(tiny_target())
    assert (int(state.step), int(state.skipped), int(state.consumed)) == (7, 2, 9)


def test_a_directory_without_checkpoints_has_no_latest(tmp_path):
    with jdp.Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.latest is None
        with pytest.raises(ValueError, match=r"There is no checkpoint.*new/folder; there are: none\."):
            checkpoints.restore(tiny_target())


@pytest.mark.parametrize("step", [0, 4, 99])
def test_a_missing_checkpoint_is_named_with_those_there_are(tmp_path, step):
    fill(tmp_path, 1, 3, 5)
    with (
        jdp.Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=rf"There is no checkpoint {step} in .*; there are: 1, 3, 5\."),
    ):
        checkpoints.restore(tiny_target(), step)


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_that_is_there_already_is_left_as_it_is(tmp_path, step):
    """The newest, or an older one that a run went back to."""
    fill(tmp_path, 1, 2, 3)
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tiny(step), {"again": True})
        checkpoints.wait()
        assert checkpoints.restore(tiny_target(), step)[1] == {"count": step}
        assert checkpoints.latest == 3


@pytest.mark.parametrize("damage", ["no commit file", "empty directory", "temporary directory"])
def test_a_checkpoint_that_was_being_written_when_the_run_died_is_ignored(tmp_path, damage):
    fill(tmp_path, 1, 2)
    if damage == "no commit file":
        (tmp_path / "2" / "commit_success.txt").unlink()
    elif damage == "empty directory":
        (tmp_path / "99").mkdir()
    else:
        (tmp_path / "99.orbax-checkpoint-tmp").mkdir()
    newest = 1 if damage == "no commit file" else 2
    with jdp.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == newest
        assert checkpoints.restore(tiny_target())[1] == {"count": newest}
        checkpoints.save(tiny(3), {"count": 3})  # and the run goes on
        checkpoints.wait()
        assert checkpoints.latest == 3


def test_what_is_still_being_written_can_be_asked_for(tmp_path):
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tiny(1))
        checkpoints.save(tiny(2))
        state, _ = checkpoints.restore(tiny_target())
    assert float(state.params["w"][0]) == 2


def test_the_record_is_plain_json_beside_the_arrays(tmp_path):
    fill(tmp_path, 1)
    texts = [path.read_text() for path in (tmp_path / "1" / "record").iterdir() if path.is_file()]
    assert {"count": 1} in [json.loads(text) for text in texts if text.startswith("{")]


# What does not fit.


@pytest.mark.parametrize(
    ("init", "tx", "leaf"),
    [
        (lambda rng: {"w": jnp.zeros(5)}, TX, "params/w"),
        (lambda rng: {"v": jnp.zeros(4)}, TX, "params/v"),
        (lambda rng: {"w": jnp.zeros(4), "more": jnp.zeros(4)}, TX, "params/more"),
        (lambda rng: {}, optax.identity(), "params/w"),
        (lambda rng: {"w": jnp.zeros(4, jnp.bfloat16)}, TX, "params/w"),  # nothing is cast in silence
        (lambda rng: {"w": jnp.zeros(4)}, optax.sgd(0.1, momentum=0.9), "opt_state/0"),
    ],
    ids=["shape", "name", "leaf missing", "leaf too many", "dtype", "optimizer"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_leafs_name(tmp_path, init, tx, leaf):
    fill(tmp_path, 1)
    aim = target(plan_of("ddp", data=1), lambda rng: init(rng) or {"w": jnp.zeros(4)}, tx)
    aim = aim if init(None) else replace(aim, params={})
    with jdp.Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=leaf):
        checkpoints.restore(aim)
