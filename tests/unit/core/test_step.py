"""The train and eval step: what is summed, what is guarded, what is donated, where results lie, and what is refused.

That all strategies and partitionings agree with one device is test_equivalence.py; here most models are linear, with
small whole numbers for data, so that sums are exact in float32 in any order and results can be compared bit by bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from trainings import plan_of, train

import jdp

FEATURES, ROWS = 16, 64
SGD = optax.sgd(1.0)


def init(rng):
    return {"w": jnp.arange(FEATURES, dtype=jnp.float32), "b": jnp.zeros(())}


def state_of(plan, tx, init=init):
    return jdp.init_state(init, tx, plan, rng=jax.random.key(5))


def abstract(plan):
    return jdp.abstract_state(init, SGD, plan, rng=jax.random.key(5))


def whole_numbers():
    """A batch of small whole numbers; weights 0 to 3, none at all in a quarter of the rows, 128 together."""
    random = np.random.default_rng(0)
    x = random.integers(-2, 3, (ROWS, FEATURES)).astype(np.float32)
    weight = random.integers(0, 4, ROWS).astype(np.float32)
    weight[: ROWS // 4] = 0  # the first microbatch rows and the first two devices: averages of averages would show
    weight[-1] += 128 - weight.sum()
    return {"x": x, "weight": weight}


def predict(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def weighted_sum(params, batch, rng):
    y = predict(params, batch)
    hits = (y > 0).astype(jnp.float32)
    metrics = {"hits": (hits * batch["weight"]).sum(), "share": (hits.sum(), jnp.float32(y.shape[0]))}
    return jdp.Loss((y * batch["weight"]).sum(), batch["weight"].sum(), metrics)


def mean(params, batch, rng):
    return predict(params, batch).mean()


def shapes(rows=ROWS):
    return {
        "x": jax.ShapeDtypeStruct((rows, FEATURES), jnp.float32),
        "weight": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }


def trace(step, state, batch=None):
    """What the step would return; runs and compiles nothing."""
    return jax.eval_shape(step, state, shapes() if batch is None else batch)


def leaves(state):
    """path -> one numpy array for each device's shard, the key as its words."""
    words = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)
    return {
        jax.tree_util.keystr(path): [np.array(shard.data) for shard in leaf.addressable_shards]
        for path, leaf in jax.tree.leaves_with_path(words)
    }


def differing(before, after):
    """Paths of leaves whose bits changed on some device."""
    changed = lambda pair: pair[0].tobytes() != pair[1].tobytes()  # noqa: E731
    return {path for path in before if any(map(changed, zip(before[path], after[path], strict=True)))}


@pytest.mark.parametrize(
    ("strategy", "partitioning", "axes", "accumulate"),
    [
        ("zero3", "auto", {}, 4),
        ("zero1", "manual", {"replica": 2, "data": 4}, 1),
        ("zero3", "manual", {"data": 4, "model": 2}, 4),
    ],
)
def test_the_objective_is_sum_over_weight_exactly(strategy, partitioning, axes, accumulate):
    """Uneven weights, whole devices and microbatches without any: Σ∇total / Σweight to the last bit."""
    rules = [("w", P("model"))] if "model" in axes else []  # `data` then cuts each part along `model`
    plan, batch = plan_of(strategy, **axes, rules=rules), whole_numbers()
    settings = {"accumulate": accumulate, "partitioning": partitioning}
    _, state, [metrics] = train(weighted_sum, init, SGD, plan, [batch], **settings)

    w = np.arange(FEATURES, dtype=np.float32)
    y = batch["x"] @ w
    gradient = {"w": (batch["weight"] @ batch["x"]) / 128, "b": np.float32(1.0)}
    np.testing.assert_array_equal(state.params["w"], w - gradient["w"])
    np.testing.assert_array_equal(state.params["b"], -gradient["b"])
    expected = {
        "loss": batch["weight"] @ y / 128,
        "weight": 128,
        "hits": batch["weight"] @ (y > 0) / 128,  # a sum is reported over the loss's weight
        "share": (y > 0).sum() / ROWS,  # a pair over its own
        "share_weight": ROWS,
        "grad_norm": np.sqrt((gradient["w"] ** 2).sum() + 1),
        "skipped": 0,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6 if name == "grad_norm" else 0, err_msg=name)
        assert metrics[name].shape == () and metrics[name].is_fully_replicated
        assert metrics[name].dtype == (jnp.int32 if name == "skipped" else jnp.float32)


def breaks(bad):
    """A rate that is `bad` in the second step."""
    return lambda count: jnp.where(count == 1, bad, 0.1)


def breaking_state():
    """Updates are finite, and in the second step a sum in the optimizer's state is not; an infinity may stay."""

    def update(updates, state, params=None):
        total = state["sum"] + breaks(jnp.nan)(state["count"])
        return updates, {"count": state["count"] + 1, "sum": total, "best": jnp.minimum(state["best"], jnp.inf)}

    first = {"count": jnp.int32(0), "sum": jnp.ones(8), "best": jnp.float32(jnp.inf)}
    return optax.chain(optax.GradientTransformation(lambda params: first, update), optax.sgd(0.1))


ADAM = optax.adamw(lambda count: 0.1 / (count + 1))
NONFINITE = {  # how it is trained, and a value that is added to one row of the second batch
    "a row": ("zero3", "auto", ADAM, {"x": np.nan}),
    "a total whose gradient is finite": ("ddp", "manual", ADAM, {"add": np.inf}),
    "an update": ("zero3", "manual", optax.adam(breaks(jnp.nan)), {}),
    "a rate": ("zero1", "manual", optax.sgd(breaks(jnp.inf)), {}),
    "the optimizer's state": ("zero3", "manual", breaking_state(), {}),
}


@pytest.mark.parametrize("case", NONFINITE)
def test_a_nonfinite_step_changes_only_a_counter(case):
    """And then training goes on, as if the batch had not come."""

    def loss_fn(params, batch, rng):
        return jdp.Loss((predict(params, batch) + batch["add"]).sum(), jnp.float32(batch["x"].shape[0]))

    strategy, partitioning, tx, added = NONFINITE[case]
    plan, good = plan_of(strategy), {"x": whole_numbers()["x"], "add": np.zeros(ROWS, np.float32)}
    bad = jax.tree.map(np.copy, good)
    for name, value in added.items():
        bad[name].flat[-1] = value
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, check_loss=False)
    state, metrics = step(state_of(plan, tx), good)
    before = leaves(state)
    assert int(metrics["skipped"]) == 0
    for count in (1, 2):
        state, metrics = step(state, bad)
        after = leaves(state)
        assert differing(before, after) == {".skipped"}
        assert [int(value) for value in after[".skipped"]] == [count] * 8
        assert (int(metrics["skipped"]), int(state.consumed)) == (count, 1 + count)
        assert np.isfinite(metrics["loss"]) == (not added) and np.isfinite(metrics["grad_norm"]) == ("x" not in added)

    if added:
        state, metrics = step(state, good)
        other, _ = step(step(state_of(plan, tx), good)[0], good)
        assert differing(leaves(other), leaves(state)) == {".skipped"}
        assert (int(state.step), int(state.opt_state[0].count), int(metrics["skipped"])) == (2, 2, 2)


def described_as(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), (state.params, state.opt_state))


def test_results_stay_where_the_plan_wants_them(caplog):
    plan = plan_of("zero3", replica=2, data=4)

    def matrices(rng):
        return {"w": jax.random.normal(rng, (FEATURES, 24)), "v": jnp.ones((24, 8)), "odd": jnp.ones((3, 5))}

    def loss_fn(params, batch, rng):
        y = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return jdp.Loss((y**2).sum() + params["odd"].sum() * batch["weight"].sum(), batch["weight"].sum())

    state = state_of(plan, optax.adamw(0.1), matrices)
    wanted = plan.shardings(state)
    assert any(not sharding.is_fully_replicated for sharding in jax.tree.leaves(wanted.opt_state))
    step = jdp.make_train_step(loss_fn, plan, partitioning="manual", clip_norm=1.0, check_loss=False)
    batch = jax.device_put(whole_numbers(), plan.batch_sharding)
    described = described_as(state)  # another weak type would compile the step again
    for _ in range(3):
        with jax.log_compiles():
            state, _ = step(state, batch)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert described_as(state) == described
    assert len([line for line in caplog.messages if "Finished XLA compilation of jit(train_step)" in line]) == 1


ROWS_ALONE = "the loss returns jdp.Loss, a sum over rows, so each device calls it on its own rows"


@pytest.mark.parametrize(
    ("strategy", "settings", "loss_fn", "expected", "why"),
    [
        ("zero3", {"accumulate": 4}, weighted_sum, "manual", ROWS_ALONE),
        ("zero2", {"precision": "bf16"}, mean, "auto", "all rows; XLA then reduces gradients in bf16"),
        ("ddp", {"accumulate": 4, "partitioning": "auto"}, weighted_sum, "auto", "asked for"),
        ("zero3", {"partitioning": "manual"}, weighted_sum, "manual", "asked for"),
    ],
)
def test_the_partitioning_chosen_and_why(strategy, settings, loss_fn, expected, why, reported):
    step = jdp.make_train_step(loss_fn, plan_of(strategy), **settings, check_loss=False)
    asked = settings.get("partitioning")
    assert (step.partitioning, step.why) == (asked, "asked for" if asked else "settled when the step is first traced")
    for _ in range(2):
        trace(step, abstract(plan_of(strategy)))
        trace(step, abstract(plan_of(strategy)), shapes(2 * ROWS))
    assert step.partitioning == expected
    assert why in step.why
    notice = f"train step under {strategy}: partitioning={expected!r}: {step.why}"
    assert [message for message in reported() if " step under " in message] == ([] if asked else [notice])


def test_a_program_grows_with_its_parameters_not_with_their_square():
    """XLA had the check of all updates in the kernel of each: 2.97 times the lines for twice as many parameters."""
    loss = lambda params, batch, rng: jdp.Loss(sum((batch["x"] @ w).sum() for w in params), 1.0)  # noqa: E731
    step, lines = jdp.make_train_step(loss, plan_of(), clip_norm=1.0, check_loss=False), []
    for count in (16, 32):
        weights = lambda rng, count=count: [jnp.ones((FEATURES, 1 + i)) for i in range(count)]  # noqa: E731
        state = jdp.abstract_state(weights, ADAM, plan_of(), rng=jax.random.key(0))
        lines.append(step.compile(state, shapes()).as_text().count("\n"))
    assert lines[1] < 2.2 * lines[0]


@pytest.mark.parametrize(
    ("axes", "accumulate", "batch", "message"),
    [
        ({"replica": 2}, 1, shapes(60), r"by replica=2 × data=4 = 8; given 60: the nearest that fit: 56 or 64"),
        ({"model": 2}, 3, shapes(7), "divide by data=4 × accumulate=3 = 12; given 7: the nearest that fit: 12"),
        ({}, 1, shapes() | {"weight": jax.ShapeDtypeStruct((32,), "f")}, "share their leading dimension.*: 32.*: 64"),
        ({}, 1, shapes() | {"e": jax.ShapeDtypeStruct((16,), "f")}, r"16 rows of 4 \+ 1; or stack a part for"),
        ({}, 1, shapes() | {"rate": jax.ShapeDtypeStruct((), "f")}, r"'rate'\]: a scalar.*np\.full\(rows, value\)"),
        ({}, 1, {}, "share their leading dimension.*given none. Give the batch an array"),
    ],
)
def test_ragged_and_indivisible_batches_are_refused(axes, accumulate, batch, message):
    plan = plan_of("ddp", **axes, data=-1)
    for make in (jdp.make_train_step, jdp.make_eval_step):
        step = make(weighted_sum, plan, accumulate=accumulate, check_loss=False)
        with pytest.raises(ValueError, match=message):
            trace(step, abstract(plan), batch)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda y: y, r"mean over the batch's rows; given an array of shape \(\d+,\)\. Return its \.mean\(\), or"),
        (lambda y: (y.sum(), {"aux": y}), r"returns jdp.Loss\(total, weight, metrics\) or a scalar.*; given tuple"),
        (lambda y: jdp.Loss((y > 0).sum(), len(y)), "a floating-point number; given int32, which has no gradient"),
        (lambda y: jdp.Loss(y.sum(), y), r"Loss.weight must be a scalar"),
        (lambda y: jdp.Loss(y.sum(), y.sum(), {"hits": (y.sum(), y)}), r"'hits' has shapes \(\) and \(\d+,\)"),
        (lambda y: jdp.Loss(y.sum(), y.sum(), {"loss": y.sum()}), "rename the metric 'loss'"),
        (lambda y: jdp.Loss(y.sum(), 9, {"y": y.sum(), "y_weight": 9}), "rename the metric 'y_weight'"),
        (lambda y: jdp.Loss(y.sum(), y.sum(), {"hits": {"a": y.sum()}}), r"metric 'hits' of dict\. Give several"),
        (lambda y: jdp.Loss(y.sum(), y.sum(), {"hits": (y.sum(),)}), r"metric 'hits' of tuple\. Give several"),
        (lambda y: jdp.Loss(y.sum(), y.sum(), {"hits": y}), r"metric 'hits' has shape \(\d+,\) for \d+ rows.* Sum it"),
    ],
)
def test_a_loss_of_several_values_is_refused(value, message):
    loss = lambda params, batch, rng: value(predict(params, batch))  # noqa: E731
    step = jdp.make_train_step(loss, plan_of(), partitioning="manual", check_loss=False)
    with pytest.raises(ValueError, match=message):
        trace(step, abstract(plan_of()))


def test_evaluation_is_the_loss_without_randomness_or_donation():
    given = []

    def loss_fn(params, batch, rng):
        given.append(rng)
        return weighted_sum(params, batch, rng)

    plan, batch = plan_of("zero3"), whole_numbers()
    state, evaluate = state_of(plan, optax.sgd(0.1)), jdp.make_eval_step(loss_fn, plan, check_loss=False)
    first, again = evaluate(state, batch), evaluate(state, batch)
    assert given == [None, None]  # read once, and compiled
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert first.keys() == {"loss", "weight", "hits", "share", "share_weight"}
    assert {k: float(v) for k, v in first.items()} == {k: float(v) for k, v in again.items()}
    folded = jdp.make_eval_step(loss_fn, plan, accumulate=4, check_loss=False)(state, batch)
    manual = jdp.make_eval_step(loss_fn, plan, accumulate=2, partitioning="manual", check_loss=False)(state, batch)
    _, trained = jdp.make_train_step(weighted_sum, plan, check_loss=False)(state, batch)
    for name, value in first.items():
        assert float(value) == float(folded[name]) == float(manual[name]) == float(trained[name]), name


def test_steps_lower_for_their_states_mesh():
    """The step was made for eight devices; an abstract state on four others compiles, and runs, on those."""
    step = jdp.make_train_step(weighted_sum, plan_of("zero3"), partitioning="manual", check_loss=False)
    elsewhere = step.plan.on(jdp.make_mesh(devices=jax.devices()[2:6]))
    compiled = step.compile(abstract(elsewhere), shapes())
    rest, batch_shardings = compiled.input_shardings[0]
    assert rest.params["w"].device_set == set(jax.devices()[2:6])
    assert rest.params["w"].spec == P("data")
    assert all(s.is_equivalent_to(elsewhere.batch_sharding, 1) for s in jax.tree.leaves(batch_shardings))
    state, metrics = compiled(state_of(elsewhere, SGD), jax.device_put(whole_numbers(), elsewhere.batch_sharding))
    assert (float(metrics["weight"]), float(state.params["b"])) == (128.0, -1.0)
    assert step.plan.mesh.shape == {"data": 8}
    assert step.partitioning == "manual"
