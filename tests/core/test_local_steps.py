"""Local steps: every replica trains by itself for a round, and the outer step is the published one, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from judged import judged

import jdp
from jdp.base import notices

ROWS, STEPS, ROUNDS = 64, 4, 2
SHAPES = {"a": (16, 24), "b": (24, 8), "c": (8,)}
DILOCO = jdp.LocalSteps(STEPS, lr=0.7, momentum=0.9)


def init(rng):
    random = np.random.default_rng(0)
    return {name: jnp.asarray(0.3 * random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def loss_fn(params, batch, rng):
    out = jnp.tanh(batch["x"] @ params["a"]) @ params["b"] + params["c"]
    return jdp.Loss(((out - batch["y"]) ** 2).sum(), jnp.float32(batch["x"].shape[0]))


def batch(number, rows=ROWS):
    random = np.random.default_rng(number)
    return {"x": random.normal(size=(rows, 16)).astype("f"), "y": random.normal(size=(rows, 8)).astype("f")}


def plan_of(strategy, replica=2, data=4):
    mesh = jdp.make_mesh(devices=jax.devices()[: replica * data], replica=replica, data=data)
    return jdp.Plan(mesh, strategy, min_shard_size=8)


def step_of(plan, local, **settings):
    return jdp.make_train_step(loss_fn, plan, local_steps=local, check_loss=False, **settings)


def start(plan, tx=None):
    return jdp.init_state(init, tx or optax.adamw(1e-2), plan, rng=jax.random.key(0))


@jax.jit
def of_one(params, opt_state, rows):
    """A step of one replica, on one device."""
    grads = jax.grad(lambda p: loss_fn(p, rows, None).total / rows["x"].shape[0])(params)
    updates, opt_state = optax.adamw(1e-2).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def by_hand(replicas, outer_lr, momentum):
    """The weights after each round: replicas one after another on one device, then the outer step."""
    params = jax.device_get(init(None))
    states, held = [optax.adamw(1e-2).init(params)] * replicas, jax.tree.map(np.zeros_like, params)
    for number in range(ROUNDS):
        ends = []
        for r in range(replicas):
            rows = jax.tree.map(lambda x, r=r: np.split(x, replicas)[r], batch(number))
            own = params
            for h in range(STEPS):
                own, states[r] = of_one(own, states[r], jax.tree.map(lambda x, h=h: x[h::STEPS], rows))
            ends.append(jax.device_get(own))
        delta = jax.tree.map(lambda p, *e: p - sum(e) / replicas, params, *ends)
        held = jax.tree.map(lambda m, d: momentum * m + d, held, delta)
        params = jax.tree.map(lambda p, d, m: p - outer_lr * (d + momentum * m), params, delta, held)
    return params


@functools.cache
def expected(replicas, local):
    return by_hand(replicas, local.lr, local.momentum)


@pytest.mark.parametrize(
    ("strategy", "replica", "data", "local", "accumulate"),
    [
        ("ddp", 2, 4, jdp.LocalSteps(STEPS), 1),
        ("zero1", 2, 4, DILOCO, 2),
        ("zero2", 4, 2, DILOCO, 1),
        ("zero3", 2, 4, DILOCO, 1),
        ("zero1", 8, 1, jdp.LocalSteps(STEPS), 1),
    ],
)
def test_a_round_is_the_published_one(strategy, replica, data, local, accumulate):
    plan = plan_of(strategy, replica, data)
    state, step = start(plan), step_of(plan, local, accumulate=accumulate)
    for number in range(ROUNDS):
        state, metrics = step(state, batch(number))
    for name, weights in jax.device_get(state.params).items():
        # AdamW's first steps divide by the gradient's size: float32 rounding of sums in another order grows tenfold
        np.testing.assert_allclose(weights, expected(replica, local)[name], atol=2e-5, rtol=0, err_msg=name)
    assert int(state.step) == ROUNDS and int(state.sync["rounds"]) == ROUNDS
    assert float(metrics["weight"]) == ROWS
    count = jax.tree.leaves(state.opt_state)[0]
    np.testing.assert_array_equal(count, np.full(replica, ROUNDS * STEPS))
    for leaf in jax.tree.leaves(state.params):
        first, *others = leaf.addressable_shards
        assert all(np.array_equal(first.data, shard.data) for shard in others if shard.index == first.index)


def test_one_local_step_of_sgd_is_a_plain_step():
    """The mean of the replicas' weights is a step along the mean of their gradients, as their rows are equally many."""
    plan = plan_of("zero1")
    plain = jdp.make_train_step(loss_fn, plan, check_loss=False, partitioning="manual")
    ends = [step(start(plan, optax.sgd(0.1)), batch(0))[0].params for step in (plain, step_of(plan, 1))]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # float32


def test_the_average_of_one_local_step_of_sgd_is_that_of_a_plain_step():
    """Averages of the replicas' weights average to that of their mean, in the shapes and places of the parameters."""
    plan, tx = plan_of("zero1", 2, 3), jdp.with_ema(optax.sgd(0.1), 0.6, debias=True)  # "c" rests padded
    found, evaluate = [], jdp.make_eval_step(loss_fn, plan)
    for step in (jdp.make_train_step(loss_fn, plan, check_loss=False), step_of(plan, 1)):
        state = start(plan, tx)
        for number in range(2):
            state, _ = step(state, batch(number, 48))
        average = jdp.ema_params(state)
        assert dict(state.static.flat).keys() >= {"params/c", "opt_state/average/c"}
        for a, b in zip(*map(jax.tree.leaves, (average.params, state.params)), strict=True):
            assert a.shape == b.shape and a.sharding == b.sharding
        inside = jax.jit(jdp.ema_params)(state)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), inside.params, average.params)
        found.append((average.model, float(evaluate(average, batch(9, 48))["loss"])))
    (plain, plain_loss), (local, loss) = found
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, local)  # float32
    assert loss == pytest.approx(plain_loss, rel=1e-6)


def test_a_padded_state_is_laid_out_again_for_other_devices_and_the_same_replicas():
    plan, other = plan_of("zero1", 2, 3), plan_of("zero1", 2, 4)
    state, _ = step_of(plan, DILOCO)(start(plan), batch(0, 48))
    there = jdp.place(state, other)
    assert state.static.flat and not there.static.flat and there.sync["momentum"]["c"].shape == (8,)
    for back in (jdp.place(there, plan), jdp.place(state.unpadded(), plan)):
        assert back.static == state.static
        for a, b in zip(*(jax.tree.leaves((s.params, s.opt_state, s.sync)) for s in (back, state)), strict=True):
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"each replica's own optimizer state.*given 2 and a plan of 4"):
        jdp.place(state, plan_of("zero1", 4, 2))


def test_a_round_with_a_gradient_that_is_not_finite_changes_nothing():
    plan = plan_of("zero1")
    step = step_of(plan, DILOCO, donate=False)
    state, _ = step(start(plan), batch(0))
    broken = batch(1)
    broken["x"][-1] = np.nan  # the last step of the last replica
    after, metrics = step(state, broken)
    assert int(after.skipped) == 1 == int(metrics["skipped"]) and int(after.step) == 1
    kept = [jax.device_get((s.params, s.opt_state, s.sync)) for s in (state, after)]
    jax.tree.map(np.testing.assert_array_equal, *kept)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_slow_links_carry_one_shard_of_the_weights_a_round(strategy):
    plan = plan_of(strategy)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(0).items()}
    state = jdp.abstract_state(init, optax.adamw(1e-2), plan, rng=jax.random.key(0))
    report = judged(step_of(plan, STEPS), state, shapes, cache=False)
    assert report.kept, str(report)
    slow = [c for c in report.collectives if c.axes == ("replica",) and c.collective.payload_bytes > 16]
    elements = sum(np.prod(shape) for shape in SHAPES.values()) // (1 if strategy == "ddp" else 4)
    assert 4 * elements <= sum(c.payload_bytes for c in slow) <= 4 * elements + 16  # and counts
    assert not [c for c in report.collectives if set(c.axes) == {"replica", "data"} and c.payload_bytes > 256]


@pytest.mark.aot
def test_a_round_waits_for_a_slow_network_about_as_long_as_one_step(tmp_path):
    """Described H100s, 0.01 GB/s a GPU between two hosts: the same gradient or change of the weights goes over it."""
    (tmp_path / "slow.toml").write_text('like = "h100"\nnetwork_bandwidth_gb_s = 0.01\n')
    plan, waits = plan_of("zero1"), []
    state = jdp.abstract_state(init, optax.adamw(1e-2), plan, rng=jax.random.key(0))
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(0).items()}
    for steps in (None, STEPS):
        target = f"{tmp_path / 'slow.toml'}:2x4"
        report = jdp.foresee(step_of(plan, steps), state, shapes, target, strategies=["zero1"], cache=False)
        (estimate,) = report.estimates
        waits.append(estimate.timeline.exposed_seconds)
    assert any(f"a round of {STEPS}" in note for note in report.notes)
    assert waits[1] < 2 * waits[0]  # four plain steps wait four times; inside a host a round sends four times as much


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_parameters_too_small_to_shard_are_sent_whole_by_plan(strategy):
    """Inside a replica in every step, as the row says of them, and over the slow links once a round."""
    mesh = jdp.make_mesh(replica=2, data=4)
    plan = jdp.Plan(mesh, strategy, min_shard_size=200)  # "a" has 384 elements, "b" 192, "c" 8
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch(0).items()}
    state = jdp.abstract_state(init, optax.adamw(1e-2), plan, rng=jax.random.key(0))
    report = judged(step_of(plan, STEPS), state, shapes, cache=False)
    assert report.kept and not report.strays, str(report)
    promised = {p.axes: p.payload_bytes for p in report.theory.promises if p.kind == "all-reduce"}
    assert promised == {("replica",): 4 * (384 / 4 + 192 + 8)}


def test_momentum_is_sharded_and_the_optimizer_state_is_each_replicas_own():
    plan = plan_of("zero1")
    state = step_of(plan, DILOCO).complete(start(plan))
    placed = {p.path: p for p in plan.placements(state)}
    assert placed["sync/momentum/a"].bytes_per_device == 4 * 16 * 24 // 4
    mu = next(p for path, p in placed.items() if path.endswith("mu/a"))
    assert mu.shape == (2, 16, 24) and mu.bytes_per_device == 4 * 16 * 24 // 4 and "own" in mu.reason


def test_a_checkpoint_goes_to_other_replicas_and_to_plain_steps_and_back(tmp_path):
    plan = plan_of("zero1")
    step = step_of(plan, DILOCO)
    state, _ = step(start(plan), batch(0))
    jdp.save(tmp_path / "two", state)
    moments = jax.device_get(state.opt_state[0].mu["a"])

    def target(plan, local):
        abstract = jdp.abstract_state(init, optax.adamw(1e-2), plan, rng=jax.random.key(0))
        return step_of(plan, local).complete(abstract)

    same = jdp.restore(tmp_path / "two", target(plan, DILOCO))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(same.opt_state), jax.device_get(state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(same.sync), jax.device_get(state.sync))

    notices._said.clear()
    four = jdp.restore(tmp_path / "two", target(plan_of("zero1", 4, 2), DILOCO))
    for replica in jax.device_get(four.opt_state[0].mu["a"]):
        np.testing.assert_allclose(replica, moments.mean(axis=0), rtol=1e-6)
    assert any("mean" in said for said in notices._said)
    assert int(four.opt_state[0].count[3]) == STEPS

    plain = jdp.restore(tmp_path / "two", target(plan, None))
    np.testing.assert_allclose(plain.opt_state[0].mu["a"], moments.mean(axis=0), rtol=1e-6)
    assert plain.sync == {}
    jdp.save(tmp_path / "plain", plain)
    back = jdp.restore(tmp_path / "plain", target(plan, DILOCO))
    np.testing.assert_allclose(back.opt_state[0].mu["a"][1], moments.mean(axis=0), rtol=1e-6)
    assert int(step(back, batch(1))[0].step) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local_steps": 0}, "1 or more"),
        ({"local_steps": 2.5}, "1 or more"),
        ({"local_steps": 4, "wire": "int8"}, "given wire: leave that out"),
        ({"local_steps": 4, "partitioning": "auto"}, 'given partitioning="auto": leave that out'),
    ],
)
def test_settings_that_do_not_fit(given, words):
    with pytest.raises(ValueError, match=words):
        jdp.make_train_step(loss_fn, plan_of("ddp"), **given)


def test_without_replicas_there_is_nobody_to_agree_with():
    with pytest.raises(ValueError, match="replica axis of 2 or more"):
        jdp.make_train_step(loss_fn, jdp.Plan(jdp.make_mesh(), "ddp"), local_steps=4)


@pytest.mark.parametrize("given", [{"lr": 0}, {"lr": 11}, {"momentum": 1}, {"momentum": -0.1}])
def test_an_outer_optimizer_out_of_range(given):
    with pytest.raises(ValueError, match="given"):
        jdp.LocalSteps(4, **given)


def test_rows_of_all_steps_must_divide():
    with pytest.raises(ValueError, match="must divide by replica=2 × data=4 × local_steps=3 = 24; given 64"):
        step_of(plan_of("ddp"), 3)(start(plan_of("ddp")), batch(0))
