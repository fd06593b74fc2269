"""`jdp.muon` is `optax.contrib.muon` of one device under every strategy, and each device computes its share of it.

The gradient is simple and of full rank: (weights - target), times what a batch has. float32 sums over devices run in
another order; Newton-Schulz steps make 1e-6 of that at most.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from judged import judged
from trainings import assert_close
from trainings import plan_of as _plan_of

import jdp

BOUND, ROWS, STEPS = 1e-5, 72, 10
LAST = optax.contrib.MuonDimensionNumbers(-2, -1)


def is_shape(x):
    return isinstance(x, tuple)


def arrays(shapes, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: random.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape)


def loss_of(shapes):
    target = arrays(shapes, 2)

    def loss(params, batch, rng):
        half = jax.tree.map(lambda p, t: ((p - t) ** 2).sum() / 2, params, target)
        return jdp.Loss(batch["w"].sum() * sum(jax.tree.leaves(half)), jnp.float32(batch["w"].shape[0]))

    return loss


def batches():
    random = np.random.default_rng(3)
    return [{"w": random.uniform(0.5, 1.5, ROWS).astype(np.float32)} for _ in range(STEPS)]


def by_hand(shapes, tx):
    """Parameters and optimizer state after the steps on one device."""
    params, loss = arrays(shapes, 1), loss_of(shapes)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch, None).total / ROWS)(params)
        tx_ = optax.with_extra_args_support(tx)
        updates, opt_state = tx_.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches():
        params, opt_state = step(params, opt_state, batch)
    return jax.device_get((params, opt_state))


plan_of = functools.partial(_plan_of, min_shard_size=24)


def start(plan, shapes, tx, accumulate=1):
    init = lambda rng: jax.tree.map(jnp.asarray, arrays(shapes, 1))  # noqa: E731
    state = jdp.init_state(init, tx, plan, rng=jax.random.key(0))
    return state, jdp.make_train_step(loss_of(shapes), plan, accumulate=accumulate, check_loss=False)


def run(state, step):
    for batch in batches():
        state, _ = step(state, batch)
    return jax.device_get((state.params, state.opt_state))


def assert_same(got, wanted, bound=BOUND):
    assert_close(*(jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (got, wanted)), 0, bound)


Numbers = optax.contrib.MuonDimensionNumbers
MATRICES = {
    "layers": {"u": (8, 16, 24), "d": (6, 24, 16)},  # as many matrices as devices, and not
    "q": (3, 24, 4, 8),
    "experts": (3, 2, 16, 24),
    "square": (40, 40),
    "tall": [(64, 32), (64, 32), (64, 32)],
    "odd": (33, 31),
}
SHAPES = {**MATRICES, "bias": (6, 24)}
NUMBERS = {**jax.tree.map(lambda _: LAST, MATRICES, is_leaf=is_shape), "q": Numbers(1, (2, 3)), "bias": None}
SETTINGS = {"weight_decay": 0.1, "adam_learning_rate": 2e-3, "muon_weight_dimension_numbers": NUMBERS}


@functools.cache
def muon():
    return jdp.muon(1e-2, **SETTINGS)


@functools.cache
def wanted():
    return by_hand(SHAPES, optax.contrib.muon(1e-2, **SETTINGS))


@pytest.mark.parametrize(
    "settings",
    [
        {"consistent_rms": 0.2, "beta": 0.9, "eps": 1e-7, "weight_decay": 0.1, "adam_weight_decay": 0.2},
        {"nesterov": False, "mu_dtype": "bfloat16", "adam_b1": 0.8, "adam_b2": 0.99, "adam_eps_root": 1e-8},
        {"ns_coeffs": "dion", "adaptive": True, "adam_learning_rate": 1e-3},
        {"ns_coeffs": ((3.0, -4.0, 1.5), (2.9, -3.9, 1.6)), "ns_steps": 2, "preconditioning": "aol"},
        {"preconditioning": "schatten", "ns_steps": 3, "weight_decay_mask": lambda p: jax.tree.map(jnp.ndim, p)},
        {"muon_weight_dimension_numbers": lambda p: jax.tree.map(lambda x: LAST if x.ndim > 1 else None, p)},
    ],
    ids=["rms", "plain momentum", "dion", "coefficients", "schatten", "function"],
)
@pytest.mark.default_ids("function")
def test_on_one_device_it_is_optaxs(settings):
    """Updates and states, whose structure is optax' too."""
    params, ours, theirs = arrays(SHAPES, 1), jdp.muon(1e-3, **settings), optax.contrib.muon(1e-3, **settings)
    one, other = ours.init(params), theirs.init(params)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for seed in (2, 3):
        u, one = jax.jit(ours.update)(arrays(SHAPES, seed), one, params)
        v, other = jax.jit(theirs.update)(arrays(SHAPES, seed), other, params)
        assert_same((u, one), (v, other), 1e-6)


@pytest.mark.parametrize(
    ("strategy", "devices", "accumulate"), [("ddp", 8, 3), ("zero1", 3, 1), ("zero2", 2, 3), ("zero3", 8, 1)]
)
@pytest.mark.default_ids("zero3-8-1")
def test_equals_one_device(strategy, devices, accumulate):
    plan = plan_of(strategy, devices)
    state, step = start(plan, SHAPES, muon(), accumulate)
    report = judged(step, state, batches()[0])
    assert report.kept and report.ratio <= 1.02, report
    assert_same(run(state, step), wanted())


@pytest.mark.rest
@pytest.mark.parametrize(
    "plan",
    [
        plan_of("zero1", replica=4, data=2),
        replace(plan_of("zero3"), offload="optimizer"),
        plan_of("zero3", data=4, model=2),
    ],
    ids=["replica", "offload", "model"],
)
def test_on_other_meshes(plan):
    assert_same(run(*start(plan, SHAPES, muon())), wanted())


@pytest.mark.parametrize("shapes", [{"a": {"w": (64, 32), "b": (240,)}, "c": (8, 8, 8)}, (33, 31)])
def test_adamw_trains_all_but_matrices(shapes):
    got = run(*start(plan_of("zero2"), shapes, jdp.muon(1e-2)))
    assert_same(got, by_hand(shapes, optax.contrib.muon(1e-2)))


def test_each_device_computes_its_share():
    """Of 12 matrices on 8 devices two each: with one device's 12 in FLOPs, what is left is the loss and AdamW."""
    shapes = {"w": (12, 64, 64)}
    tx = jdp.muon(1e-2, muon_weight_dimension_numbers={"w": LAST})

    def flops(strategy, devices):
        plan = plan_of(strategy, devices)
        state, step = start(plan, shapes, tx)
        return step.compile(state, jax.device_put(batches()[0], plan.batch_sharding)).cost_analysis()["flops"]

    one = flops("ddp", 1)
    assert one > 12 * 5 * 3 * 2 * 64**3  # Newton-Schulz
    for strategy in ("ddp", "zero1", "zero3"):
        assert flops(strategy, 8) == pytest.approx(one * 2 / 12, rel=0.15)


@pytest.mark.rest
def test_in_a_loop_of_ones_own():
    """The mesh is that of the arrays: what is compiled exchanges matrices, and gathers none."""
    plan = plan_of("zero1", min_shard_size=1)
    init = lambda rng: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
    model = jdp.init(init, plan, rng=jax.random.key(0))
    params, tx = {"w": model.kernel[...]}, jdp.muon(1e-2)
    opt_state = jdp.init(tx.init, plan, of=params)
    compiled = jax.jit(tx.update).lower(params, opt_state, params).compile()
    assert "all-to-all" in compiled.as_text()
    got, _ = compiled(params, opt_state, params)
    alone = {"w": np.asarray(params["w"])}
    assert_same(got, optax.contrib.muon(1e-2).update(alone, tx.init(alone), alone)[0], 1e-6)


# Optimizers of matrices that are not jdp's; that they train as on one device is in test_optimizers.


def naive_muon(*names):
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dict.fromkeys(names, LAST))


def test_the_cost_of_products_is_reported_once(reported):
    """Of the sharded leaves alone; and nothing of `jdp.muon`, of norms and factors, or under ddp."""
    shapes = {"u": (6, 16, 24), "one": (32, 24), "odd": (11, 13), "bias": (4, 4)}
    is_matrix = lambda params: jax.tree.map(lambda x: LAST if x.ndim > 2 else None, params)  # noqa: E731
    for tx in (jdp.muon(1e-2, muon_weight_dimension_numbers=is_matrix), optax.adafactor(), optax.lamb(1)):
        start(plan_of("zero3"), shapes, tx)
    start(plan_of("ddp"), shapes, optax.contrib.muon(1e-2))
    assert not [line for line in reported() if "products of" in line]
    for _ in range(2):
        start(plan_of("zero3"), shapes, naive_muon(*shapes))
    [said] = [line for line in reported() if "products of" in line]
    assert said == (
        "the optimizer's update takes matrix or inner products of u [6, 16, 24] and 1 more, 12 KiB that zero3 shards: "
        "XLA gathers them or sums partial products, in addition to the traffic that zero3 promises; jdp.verify counts "
        "it"
    )


def test_verify_counts_what_products_send():
    plan = plan_of("zero1")
    state, step = start(plan, {"u": (6, 16, 24), "one": (32, 24)}, naive_muon("u", "one"))
    report = judged(step, state, batches()[0])
    assert not report.kept
    assert any("the optimizer's update computes with complete arrays" in breach for breach in report.breaches)
