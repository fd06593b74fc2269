"""What a step is called with: a state that was given away, memory that changes, nothing at all."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aligned_arrays import aligned
from trainings import plan_of

import jdp
from jdp.base.tree_paths import PACKAGE

GIVEN_AWAY = r"takes its state's memory over .* `state, metrics = train_step\(state, batch\)`, .*donate=False"


def loss(params, batch, rng):
    return jdp.Loss((batch["x"] @ params["w"]).sum(), jnp.float32(batch["x"].shape[0]))


@pytest.fixture(scope="module")
def plan():
    return plan_of("zero1", min_shard_size=0)


ADAM = optax.adam(0.1)


def fresh(plan):
    return jdp.init_state(lambda rng: {"w": jnp.ones(8)}, ADAM, plan, rng=jax.random.key(0))


def batch(value=1.0, rows=8):
    return {"x": np.full((rows, 8), value, np.float32)}


@pytest.fixture(scope="module")
def train_step(plan):
    return jdp.make_train_step(loss, plan, check_loss=False)


def test_a_state_that_was_given_away_is_refused(plan, train_step):
    """Without the check it ends the process by a signal: several CPU devices."""
    old, placed = fresh(plan), jax.device_put(batch(), plan.batch_sharding)
    new, _ = train_step(old, placed)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old)) and not placed["x"].is_deleted()
    with pytest.raises(ValueError, match=GIVEN_AWAY):
        train_step(old, batch())
    with pytest.raises(ValueError, match=GIVEN_AWAY):
        jdp.make_eval_step(loss, plan, check_loss=False)(old, batch())
    with pytest.raises(ValueError, match=GIVEN_AWAY):  # "the best weights so far", kept without a copy
        train_step(replace(new, params=old.params), batch())
    train_step(new, batch())


def foreign(plan):
    """A plan on half of the devices."""
    return replace(plan, mesh=jdp.make_mesh(data=4, devices=jax.devices()[:4]))


PAIR = r"given a tuple \(TrainState, dict\)\. .*write `state, metrics = step\(state, batch\)`"
ORDER = r"A state is a jdp\.TrainState, as in step\(state, batch\); given a dict\. Write the arguments in this order"
ELSEWHERE = r"on the devices of its plan, 8 cpu devices \(0, .*; given {} on 4 cpu devices \(0, 1, 2, 3\)\. {}"
WRONG = {
    "the whole result": (lambda plan, state: ((state, {}), batch()), PAIR),
    "exchanged": (lambda plan, state: (batch(), state), ORDER),
    "the parameters": (lambda plan, state: (state.params, batch()), r"given a dict\. Make one: .*jdp\.init_state"),
    "text": (lambda plan, state: (state, {**batch(), "name": "a"}), r"numbers; given batch\['name'\] = 'a'\. Leave it"),
    "objects": (lambda plan, state: (state, {"x": np.array([{}] * 8)}), r"given batch\['x'\] = object\[8\]"),
    "a loader": (lambda plan, state: (state, iter([batch()])), r"pytree of arrays; given a list_iterator\. Take b"),
    "state of another mesh": (
        lambda plan, state: (fresh(foreign(plan)), batch()),
        ELSEWHERE.format(r"state\.step", r"Move it: state = jdp\.place\(state, plan\)"),
    ),
    "batch of another mesh": (
        lambda plan, state: (state, jax.device_put(batch(), foreign(plan).batch_sharding)),
        ELSEWHERE.format(r"batch\['x'\]", "Give NumPy arrays"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_step_explains_operands_that_it_cannot_take(plan, train_step, case):
    make, message = WRONG[case]
    state, batch = make(plan, fresh(plan))
    for step in (train_step, jdp.make_eval_step(loss, plan, check_loss=False)):
        with pytest.raises(ValueError, match=message) as caught:
            step(state, batch)
        assert caught.value.__cause__ is None and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def frames(caught):
    """The files of a traceback after the test's own, jdp's under its name; not those of JAX."""
    files = [Path(entry.path) for entry in caught.traceback[1:]]
    return ["jdp" if PACKAGE in file.parents else file.name for file in files if "site-packages" not in file.parts]


def failing(*_):
    raise KeyError("mine")


def test_user_exceptions_show_one_frame_of_jdp(plan):
    """Also through `scan_layers`, which the loss calls; with `JAX_TRACEBACK_FILTERING=off` all are there."""
    layers = {"w": jnp.ones((2, 8))}
    state, here = fresh(plan), Path(__file__).name
    gradient = jdp.value_and_grad(failing, plan, check_loss=False)
    in_layers = lambda params, batch, rng: jdp.scan_layers(failing, layers, batch["x"])  # noqa: E731
    calls = [
        (lambda: jdp.init_state(failing, ADAM, plan, rng=state.rng), ["jdp", here]),
        (lambda: jdp.make_train_step(failing, plan, check_loss=False)(state, batch()), ["jdp", here]),
        (lambda: jdp.make_train_step(failing, plan, check_loss=False).lower(state, batch()), ["jdp", here]),
        (lambda: jdp.make_eval_step(in_layers, plan, check_loss=False)(state, batch()), ["jdp", here, "jdp", here]),
        (lambda: gradient(state.params, batch(), state.rng), ["jdp", here]),
    ]
    for call, expected in calls:
        with pytest.raises(KeyError, match="mine") as caught:
            call()
        assert frames(caught)[1:] == expected
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(KeyError) as caught:
            calls[2][0]()
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    assert frames(caught)[1:].count("jdp") > 3


def test_mistakes_end_in_the_users_line(plan, monkeypatch):
    step = jdp.make_train_step(lambda params, batch, rng: jdp.Loss(batch["x"], 8.0), plan, check_loss=False)
    with pytest.raises(ValueError, match=r"Loss\.total must be a scalar") as caught:
        step(fresh(plan), batch())
    assert "jdp" not in frames(caught)
    monkeypatch.setattr("jdp.core.gradients.loss_call.UserError", RuntimeError)
    with pytest.raises(RuntimeError, match=r"Loss\.total must be a scalar") as caught:
        step(fresh(plan), batch())
    assert frames(caught).count("jdp") > 3


def test_a_step_compiled_ahead_compiles_once(plan):
    step, state = jdp.make_train_step(loss, plan, check_loss=False), fresh(plan)
    step.compile(state, batch())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.loss, "gradients", None)  # a second trace would call it
        for _ in range(2):
            state, _ = step(state, batch())
    assert int(state.step) == 2


def test_a_compiled_step_transfers_nothing_by_itself(plan, train_step):
    """Loops and feeds place a state and its batches; a step that moved anything more would wait for the host."""
    with jdp.shard_batches([batch(), batch()], plan) as feed:
        state, _ = train_step(fresh(plan), next(feed))
        second = next(feed)
    with jax.transfer_guard("disallow"):
        train_step(state, second)


def test_without_donation_the_old_state_stays(plan):
    step, old = jdp.make_train_step(loss, plan, donate=False, check_loss=False), fresh(plan)
    first, again = step(old, batch())[0], step(old, batch())[0]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    np.testing.assert_array_equal(first.params["w"], again.params["w"])
    with pytest.raises(ValueError, match="donate is True, or False to keep the old state; given 'no'"):
        jdp.make_train_step(loss, plan, donate="no", check_loss=False)


def test_debug_nans_names_the_operation(plan):
    """Also after the first step: the compiled program that donates is not the one to run again."""
    step = jdp.make_train_step(lambda p, b, rng: jnp.log(b["x"] @ p["w"]).mean(), plan, check_loss=False)
    state, _ = step(fresh(plan), batch())
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in"):
        step(state, batch(-1.0))
    state, _ = step(state, batch())
    assert int(state.step) == 2


def test_refilled_batches_are_read_as_given(plan):
    """A program that is not done when its call returns; aligned memory, which JAX would read where it lies."""

    def slow(params, batch, rng):
        x = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x.T) @ x * 0 + x, batch["x"])
        return jdp.Loss((x @ params["w"]).sum(), 8.0)

    step, state = jdp.make_eval_step(slow, plan, check_loss=False), fresh(plan)
    x = aligned((8, 8))
    x[:] = 1
    expected = float(step(state, {"x": x})["loss"])
    metrics = step(state, {"x": x})
    x[:] = 0
    assert float(metrics["loss"]) == expected == 8.0


@pytest.mark.parametrize(("partitioning", "accumulate"), [("auto", 1), ("manual", 2)])
def test_a_first_step_calls_the_loss_rarely(partitioning, accumulate):
    """For its form on all rows; under manual on a device's rows, and on twice as many for its draws; to see what layer
    loops send; and to compile it, a scan of microbatches twice, once for what it carries."""
    calls, plan = [], jdp.Plan(jdp.make_mesh(data=8), "zero3", min_shard_size=1)

    def counted(params, batch, rng):
        calls.append(len(batch["x"]))
        x = jdp.scan_layers(lambda w, x: jnp.tanh(x @ w), params["w"], batch["x"])
        return jdp.Loss((x * jax.random.bernoulli(rng, 0.9, x.shape)).sum(), jnp.float32(len(x)))

    state = jdp.abstract_state(lambda rng: {"w": jnp.ones((2, 8, 8))}, ADAM, plan, rng=jax.random.key(0))
    step = jdp.make_train_step(counted, plan, accumulate=accumulate, partitioning=partitioning, check_loss=False)
    step.lower(state, batch(rows=64))
    rows = 64 // accumulate // (8 if partitioning == "manual" else 1)
    assert {*calls} <= {64 // accumulate, rows, 2 * rows} and len(calls) <= 4 + 2 * accumulate
