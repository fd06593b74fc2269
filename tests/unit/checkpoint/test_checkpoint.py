"""Checkpoints: what was saved under one plan is restored bit by bit onto any other; a half-written one never counts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_states as tiny
from flax import nnx
from tiny_states import assert_same_bits, names, plan_of

import jdp
from jdp.export import export_safetensors, import_safetensors

TX = optax.adamw(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}


def init(rng):
    first, second = jax.random.split(rng)
    return {
        "w": jax.random.normal(first, (16, 24)),
        "half": jax.random.normal(second, (24, 8)).astype(jnp.bfloat16),
        "odd": jax.random.normal(second, (16, 8)),  # no dimension divides by three
        "scale": jnp.float32(0.1),
    }


def small(rng):
    return {"w": jax.random.normal(rng, (16, 24)), "half": jnp.ones((24, 8)), "scale": jnp.float32(0.1)}


def target(plan, init=init, tx=TX):
    return jdp.abstract_state(init, tx, plan, rng=jax.random.key(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with one checkpoint, saved under zero3 on eight devices, and its state, with moments."""
    directory = tmp_path_factory.mktemp("saved")
    state = jdp.init_state(init, TX, plan_of(), rng=jax.random.key(4))
    noisy = lambda x: x + jax.random.normal(jax.random.key(1), x.shape, x.dtype) if x.ndim else x  # noqa: E731
    state = replace(state, opt_state=jax.jit(jax.tree.map, static_argnums=0)(noisy, state.opt_state), step=jnp.int32(7))
    with jdp.Checkpoints(directory) as checkpoints:
        checkpoints.save(state, {"name": "run", "seed": 3, "nested": {"list": [1, 2.5, None, True]}})
        checkpoints.wait()
    return directory, state


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("ddp", {"data": 2}),
        ("zero2", {"data": 3}),
        ("zero2", {"data": 4}),
        ("zero3", {"data": 8}),
        ("zero1", {"replica": 2, "data": 4}),
        ("zero3", {"data": 4, "model": 2}),
    ],
)
@pytest.mark.default_ids("ddp-axes0", "zero2-axes1", "zero3-axes3", "zero1-axes4")
def test_a_state_is_restored_onto_any_plan(saved, strategy, axes):
    directory, want = saved
    plan = plan_of(strategy, **axes)
    with jdp.Checkpoints(directory) as checkpoints:
        assert checkpoints.latest == 7
        state, record = checkpoints.restore(target(plan))
    assert_same_bits(state, want)
    assert record == {"name": "run", "seed": 3, "nested": {"list": [1, 2.5, None, True]}}
    leaves, shardings = jax.tree.leaves(state), jax.tree.leaves(plan.shardings(state))
    for place, leaf, sharding in zip(plan.placements(state), leaves, shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), place.path
    assert state.static == target(plan).static


def test_another_optimizer_is_refused_with_a_fix(saved):
    directory, want = saved
    other = target(plan_of(), tx=optax.sgd(0.1, momentum=0.9))
    with jdp.Checkpoints(directory) as checkpoints:
        message = r"same optimizer; .*/7 has opt_state/0/.* as .*The model is the same: .*\(restore_params\)"
        with pytest.raises(jdp.CheckpointError, match=message):
            checkpoints.restore(other)
        assert_same_bits(checkpoints.restore_params(other).params, want.params)


def network(rng):
    rngs = nnx.Rngs(rng)
    layers = nnx.Linear(16, 24, use_bias=False, rngs=rngs), nnx.BatchNorm(24, rngs=rngs), nnx.Linear(24, 8, rngs=rngs)
    return nnx.Sequential(*layers)


def test_a_partly_trained_model_is_saved_whole(tmp_path):
    """Frozen parameters have no optimizer state, and may have any dtype."""

    def init(rng):
        return {"w": jnp.ones((16, 24)), "table": jnp.arange(8, dtype=jnp.int8)}

    plan = plan_of(data=2)
    state = jdp.init_state(init, TX, plan, rng=jax.random.key(0), wrt="w")
    jdp.save(tmp_path / "one", state)
    aim = functools.partial(jdp.abstract_state, init, TX, plan_of("ddp", data=1), rng=jax.random.key(1))
    assert_same_bits(jdp.restore(tmp_path / "one", aim(wrt=("w",))), state)
    assert_same_bits(jdp.restore_params(tmp_path / "one", aim(wrt="w")).params, state.params)


def test_only_parameters_are_read(tmp_path):
    state = jdp.init_state(network, TX, plan_of(data=8), rng=jax.random.key(4))
    state = replace(state, model_state=jax.tree.map(lambda x: x + 1, state.model_state))
    jdp.save(tmp_path / "one", state)
    aim = target(plan_of("ddp", data=2), network, optax.identity())
    read = jdp.restore_params(tmp_path / "one", aim)
    abstract = replace(aim, params=state.params, model_state=state.model_state)
    assert_same_bits(read, abstract)  # all else is still abstract
    assert np.isfinite(read.model(BATCH["x"])).all()
    assert_same_bits(jdp.restore_params(tmp_path / "one", aim.params), state.params)


@pytest.mark.parametrize(
    ("rules", "best", "left"),
    [
        ({"keep": 1}, None, [9]),
        ({"keep": None}, None, [*range(10)]),
        ({"keep": 2, "keep_every": 3}, None, [0, 3, 6, 8, 9]),
        ({"keep": 2, "keep_every": 3, "best": "eval_loss"}, 4, [0, 3, 4, 6, 8, 9]),
        ({"keep": 2, "keep_every": 3, "best": "eval_loss", "mode": "max"}, 1, [0, 1, 3, 6, 8, 9]),
    ],
)
def test_rules_of_retention_add_up(tmp_path, rules, best, left):
    losses = {0: float("-inf"), 1: 9.0, 2: jnp.float32(1), 4: 1.0, 5: float("nan"), 8: 2.0}  # the newest of equals
    with jdp.Checkpoints(tmp_path, **rules) as checkpoints:
        for count in range(10):
            metrics = {"eval_loss": losses[count], "other": 1} if count in losses else None
            checkpoints.save(tiny.at(count), {"count": count}, metrics)
            if count == 0:
                assert checkpoints.best is None
                with pytest.raises(jdp.CheckpointError, match=r"finite 'eval_loss'; there are: 0\.|needs a metric"):
                    checkpoints.restore(tiny.target(), "best")
        checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best) == (left, best)
    assert names(tmp_path) == [*map(str, left)]
    with jdp.Checkpoints(tmp_path, **rules) as again:  # from disk
        assert (again.latest, again.best) == (9, best)
        for count in left:
            state, record = again.restore(tiny.target(), count)
            assert (record, tiny.weight_of(state)) == ({"count": count}, count)
        if best:
            assert tiny.weight_of(again.restore(tiny.target(), "best")[0]) == best
            assert tiny.weight_of(again.restore_params(tiny.target(), "best")) == best
        for missing in {7, 99} - {*left}:
            message = rf"There is no checkpoint {missing} in .*; there are: {', '.join(map(str, left))}\."
            with pytest.raises(ValueError, match=message):
                again.restore(tiny.target(), missing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep is a positive number of steps or None; given 0"),
        ({"mode": "max"}, 'given "max" without it'),
        ({"best": "loss", "mode": "least"}, 'mode is "min" or "max"; given \'least\''),
        ({"keep_in_memory": -1}, "keep_in_memory is a number of steps, 0 or more; given -1"),
        ({"directory": "a*b"}, "is a pattern to Orbax"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        jdp.Checkpoints(**arguments | {"directory": tmp_path / arguments.get("directory", "new")})
    assert names(tmp_path) == []


def test_a_checkpoint_is_named_by_the_batches_consumed(tmp_path):
    """Skipped batches count: the data goes on after them."""
    with jdp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tiny.at(9, skipped=2))
        checkpoints.wait()
        assert checkpoints.latest == 9
        state, _ = checkpoints.restore(tiny.target())
    assert (int(state.step), int(state.skipped), int(state.consumed)) == (7, 2, 9)


def test_a_number_set_in_a_state_is_restored(tmp_path):
    """A learning rate of Python's or NumPy's is saved in the dtype that a step gives it."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.5)
    state = jdp.init_state(small, tx, plan_of(), rng=jax.random.key(4))
    state.opt_state.hyperparams.update(learning_rate=0.25, momentum=np.float64(0.75))
    jdp.save(tmp_path / "saved", state)
    again = jdp.restore(tmp_path / "saved", jdp.abstract_state(small, tx, plan_of("ddp"), rng=jax.random.key(4)))
    hyperparams = again.opt_state.hyperparams
    assert (hyperparams["learning_rate"], hyperparams["momentum"]) == (0.25, 0.75)
    assert hyperparams["learning_rate"].dtype == hyperparams["momentum"].dtype == np.float32


def test_a_path_may_lead_to_many_checkpoints(tmp_path):
    tiny.fill(tmp_path / "run" / "checkpoints", 1, 2)
    for path, count in ((tmp_path / "run", 2), (tmp_path / "run/checkpoints", 2), (tmp_path / "run/checkpoints/1", 1)):
        assert int(jdp.restore(path, tiny.target()).step) == count
        assert float(jdp.restore_params(str(path), tiny.target()).params["w"][0]) == count


def test_only_overwrite_replaces_a_checkpoint(tmp_path):
    path = tmp_path / "one"
    path.mkdir()
    jdp.save(path, tiny.at(1))  # an empty folder is free
    with pytest.raises(jdp.CheckpointError, match=r"one holds a checkpoint already.*overwrite=True"):
        jdp.save(path, tiny.at(2))
    assert int(jdp.restore(path, tiny.target()).step) == 1
    jdp.save(path, tiny.at(2), overwrite=True)
    assert int(jdp.restore(path, tiny.target()).step) == 2
    assert [other.name for other in tmp_path.iterdir()] == ["one"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for other in ("mine", "file"):
        with pytest.raises(jdp.CheckpointError, match="is not a checkpoint, so it is left alone"):
            jdp.save(tmp_path / other, tiny.at(1), overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "keep"


@pytest.mark.parametrize(
    ("params", "differs"),
    [
        ({"w": jnp.zeros(5)}, r"params/w as float32\[4\], and float32\[5\] is wanted"),
        ({"w": jnp.zeros(4), "more": jnp.zeros(4)}, r"params/more as nothing, and float32\[4\] is wanted"),
        ({"x": jnp.zeros(4)}, r"params/w as float32\[4\], and nothing is wanted"),
        ({"w": jnp.zeros(4, jnp.bfloat16)}, r"params/w as float32\[4\], and bfloat16\[4\] is wanted"),
    ],
    ids=["shape", "leaf missing", "leaf too many", "dtype"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, params, differs):
    tiny.fill(tmp_path, 1)
    with jdp.Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=differs):
        checkpoints.restore(target(plan_of("ddp", data=1), lambda rng: params))


def with_lora(rng):
    return {"a": {"w": jnp.ones((8, 4)), "lora_a": jnp.ones(2)}}


def saved_among_many(path, state):
    with jdp.Checkpoints(path) as checkpoints:
        checkpoints.save(state)


@pytest.mark.parametrize("write", [jdp.save, saved_among_many, export_safetensors])
def test_an_abstract_state_cannot_be_written(tmp_path, write):
    words = r"a/lora_a is abstract, float32\[2\] .*jdp\.init_state, a train step"
    with pytest.raises(jdp.CheckpointError, match=words):
        write(tmp_path / "m.safetensors", target(plan_of(), with_lora, optax.sgd(0.1)))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("write", "read"), [(jdp.save, jdp.restore_params), (export_safetensors, import_safetensors)])
def test_arrays_beyond_the_model_can_stay_unread(write, read, tmp_path, caplog):
    """Also a head of another size, if `ignore` and `missing` both name it."""
    plan, plain = plan_of(data=4, model=2), target(plan_of(), lambda rng: {"a": {"w": jnp.zeros((8, 4))}}).params
    write(tmp_path / "m.safetensors", jdp.init_state(with_lora, TX, plan, rng=jax.random.key(0)))
    read = functools.partial(read, tmp_path / "m.safetensors")
    with caplog.at_level("INFO", "jdp"):
        got = read(plain, ignore=("*/lora_*",))
    assert jax.tree.map(jnp.shape, got) == {"a": {"w": (8, 4)}} and float(got["a"]["w"].min()) == 1
    assert "`ignore` skips 1 of 2 arrays; the first is" in caplog.text
    other = {"a": {"w": jnp.zeros((8, 4)), "lora_a": jnp.full(3, 5.0)}}
    got = read(other, ignore=("a/lora_*",), missing=("a/lora_*",))
    assert got["a"]["lora_a"].tolist() == [5, 5, 5] and float(got["a"]["w"].min()) == 1
    more = target(plan, lambda rng: {"a": {**with_lora(rng)["a"], "lora_b": jnp.ones(2)}})
    for tree, patterns, words in (
        (plain, {}, r"skip the .*ignore=\('a[./]lora_a',\)"),
        (plain, {"ignore": ("*/lora_*", "*/lora")}, r"'\*/lora' matches none in .*, which has .*a/w"),
        (other, {"ignore": ("a/lora_*",)}, r"the model has a/lora_a.*to `missing`"),
        (more, {}, r"a/lora_b as nothing|no a\.lora_b"),
        (more, {"missing": ("*/lora_b",)}, r"lacks (params/)?a/lora_b.*abstract: pass a real state"),
    ):
        with pytest.raises(jdp.CheckpointError, match=words):
            read(tree, **patterns)
