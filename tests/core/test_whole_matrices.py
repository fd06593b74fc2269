"""An update that mixes a matrix' elements runs on whole matrices, each on one device, and is that of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from matrix_runs import (
    LAST,
    ROWS,
    assert_kept,
    assert_same,
    assert_trains_as_one_device,
    batches,
    by_hand,
    few,
    is_shape,
    plan_of,
    run,
    start,
    values,
)

import jdp
from jdp.base import notices
from jdp.core.update import whole_matrices

Numbers = optax.contrib.MuonDimensionNumbers
MATRICES = {
    "layers": {"u": (8, 16, 24), "d": (6, 24, 16)},  # as many matrices as devices, and not
    "q": (3, 16, 4, 8),
    "experts": (3, 2, 16, 24),
    "square": (40, 40),
    "tall": [(64, 32), (64, 32), (64, 32)],
    "odd": (33, 31),
    "odd_layers": (5, 9, 7),
    "tiny": (4, 4),
}
SHAPES = {**MATRICES, "bias": (6, 24)}
NUMBERS = {
    **jax.tree.map(lambda _: LAST, MATRICES, is_leaf=is_shape),
    "q": Numbers(1, (2, 3)),
    "bias": None,
}
FEW = {"u": (6, 16, 24), "one": (64, 32), "two": (64, 32), "odd": (33, 31), "bias": (240,)}


def assert_sharded(plan, state):
    """Each device has its share of the parameters' momentum, and of nothing large more."""
    count = plan.mesh.shape["data"]
    for place in plan.placements(state):
        whole = int(np.prod(place.own_shape)) * 4
        if place.path.startswith("opt_state") and whole >= 4 * plan.min_shard_size:
            assert place.bytes_per_device <= whole / count * 1.2, place


# Equality.


@functools.cache
def muon():
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=NUMBERS)


@functools.cache
def wanted():
    return by_hand(SHAPES, muon())


WHOLE = {"layers/u", "layers/d", "q", "experts", "square", "tall/0", "tall/1", "tall/2", "odd", "odd_layers"}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp", 8), ("zero1", 3), ("zero1", 8), ("zero2", 2), ("zero3", 3), ("zero3", 8)]
)
def test_equals_one_device(strategy, devices, accumulate):
    plan = plan_of(strategy, devices)
    state, step = start(plan, SHAPES, muon(), accumulate)
    alone = {"square", "odd"} if strategy == "ddp" else set()  # every device computes the only one of its kind
    assert set(state.static.whole) == WHOLE - alone
    if strategy != "ddp":
        assert_sharded(plan, state)
    assert_kept(state, step)
    state = run(state, step, batches())
    assert_same(values(state), wanted())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"strategy": "zero1"}, {"strategy": "zero3", "devices": 3}),
        ({"strategy": "zero3", "devices": 3}, {"strategy": "ddp", "devices": 2}),
        ({"strategy": "zero2", "devices": 2}, {"strategy": "ddp", "devices": 1}),
        ({"strategy": "ddp"}, {"strategy": "zero2", "mesh": {"replica": 2, "data": 4}}),
        ({"strategy": "zero1", "whole_matrices": False}, {"strategy": "zero1", "devices": 4}),
    ],
)
def test_training_goes_on_elsewhere(tmp_path, first, then):
    state, step = start(plan_of(**first), SHAPES, muon())
    state = run(state, step, batches()[:5])
    jdp.save(tmp_path, state)
    plan = plan_of(**then)
    other, step = start(plan, SHAPES, muon())
    placed = jdp.place(state, plan)
    assert placed.static == other.static
    for each in (placed, jdp.restore(tmp_path, other)):
        assert_same(values(run(each, step, batches()[5:])), wanted())


# What a user writes.


SETTINGS = {
    "adaptive": {"adaptive": True, "weight_decay": 0.1},
    "aol": {"preconditioning": "aol"},
    "coefficients": {"ns_coeffs": ((3.4, -4.7, 2.0), (3.0, -3.0, 1.2))},
    "dion": {"ns_coeffs": "dion", "preconditioning": "aol"},
    "half": {"mu_dtype": jnp.bfloat16},
    "plain": {"nesterov": False, "consistent_rms": 0.2, "ns_steps": 3},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
}


def test_every_setting_of_muon():
    """In one program, each with parameters of its own: scans, conditions in loops, singular values."""
    txs = {name: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=LAST, **kw) for name, kw in SETTINGS.items()}
    tx = optax.multi_transform(txs, {name: name for name in SETTINGS})
    whole = {f"{name}/{leaf}" for name in SETTINGS for leaf in ("w", "odd")}
    shapes = {name: {"w": (3, 16, 8), "odd": (9, 7)} for name in SETTINGS}
    assert_trains_as_one_device(shapes, tx, plan_of(), whole)


def chained():
    """A norm over all parameters before, and norms of each after."""
    schedule = optax.scale_by_schedule(lambda count: 1e-2 / (1 + count))
    return optax.chain(optax.clip_by_global_norm(1.0), few(), optax.scale_by_trust_ratio(), schedule)


def injected():
    make = optax.inject_hyperparams(lambda learning_rate: optax.chain(few(), optax.scale(learning_rate)))
    return optax.contrib.schedule_free(make(learning_rate=optax.linear_schedule(1e-1, 1e-2, 10)), 1e-2)


@pytest.mark.parametrize("make", [chained, injected])
def test_inside_other_transforms(make):
    assert_trains_as_one_device(FEW, make(), plan_of("zero3"), {"u", "one", "two", "odd"})


@pytest.mark.parametrize(
    ("shapes", "whole"), [({"a": {"w": (64, 32), "b": (240,)}, "c": (8, 8, 8)}, "a/w"), ((64, 32), ""), ((33, 31), "")]
)
def test_as_documented(shapes, whole):
    """Matrices have two dimensions; the rest is AdamW's. The parameters may be one array."""
    assert_trains_as_one_device(shapes, optax.contrib.muon(1e-2), plan_of("zero2"), {whole})


def test_frozen_parameters_and_an_average():
    names = ["u", "odd"]
    plan, tx = plan_of("zero3"), jdp.with_ema(few(), 0.9)
    state, step = start(plan, FEW, tx, wrt=names, clip_norm=1.0)
    assert state.static.whole == ("odd", "u")
    alone, step_alone = start(plan_of("ddp", 1), FEW, tx, wrt=names, clip_norm=1.0)
    alone, state = (run(s, each, batches()) for s, each in ((alone, step_alone), (state, step)))
    assert_same(values(state), values(alone))
    assert_same(*(jax.device_get(jdp.ema_params(s).unpadded().params) for s in (state, alone)))


def test_a_gradient_that_is_no_number_changes_nothing():
    state, step = start(plan_of(), FEW, few())
    state = run(state, step, batches(1))
    before, bad = values(state), {"w": np.full(ROWS, np.nan, np.float32)}
    state = run(state, step, [bad])
    assert_same(values(state), before, 0)
    assert int(state.skipped) == 1


# Other meshes and rules.


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero3", {"mesh": {"replica": 2, "data": 4}}),
        ("zero1", {"mesh": {"replica": 4, "data": 2}}),
        ("zero3", {"offload": "optimizer"}),
    ],
    ids=["replica=2", "replica=4", "offload"],
)
def test_on_other_meshes(strategy, settings):
    assert_trains_as_one_device(FEW, few(), plan_of(strategy, **settings), {"u", "one", "two", "odd"})


def test_beside_an_axis_of_the_models():
    shapes = {"u": (6, 16, 24), "one": (64, 32)}
    plan = plan_of("zero2", mesh={"data": 4, "model": 2}, rules=[("*", P(None, "model"))])
    assert_trains_as_one_device(shapes, few(), plan, {"u", "one"})


def test_layers_that_are_sharded_over_the_matrices_send_nothing():
    shapes = {"layers": {"u": (8, 16, 24), "d": (16, 24, 16)}}
    tx, plan = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=LAST), plan_of(rules=[("layers/*", P("data"))])
    state, step = start(plan, shapes, tx)
    report = jdp.verify(step, state, batches(1)[0])
    assert "all-to-all" not in {each.collective.kind for each in report.collectives}
    assert_trains_as_one_device(shapes, tx, plan, {"layers/u", "layers/d"})


def test_part_by_part(monkeypatch):
    """A device takes a stack larger than its bound matrix by matrix."""
    monkeypatch.setattr(whole_matrices, "TOGETHER", 1)
    assert_trains_as_one_device({"u": (24, 8, 16), "odd": (5, 9, 7)}, few(), plan_of(), {"u", "odd"})


def test_two_updates_of_a_matrix_of_one_shape():
    """Stacks of one matrix each: of a momentum, and of a gradient, whose padded parts XLA:CPU stored differently."""

    def newton_schulz(x, _):
        x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-6)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ jnp.swapaxes(x, -1, -2)) @ x
        return x

    def loss(params, batch, rng):
        waves = sum((jnp.square(x) / 2 + jnp.sin(3 * x)).sum() for x in jax.tree.leaves(params))
        return jdp.Loss(batch["w"].sum() * waves, jnp.float32(len(batch["w"])))

    steps, rate = optax.stateless_with_tree_map(newton_schulz), optax.scale(-1e-2)
    txs = {"x": optax.chain(optax.trace(0.9), steps, rate), "y": optax.chain(steps, optax.scale_by_trust_ratio(), rate)}
    tx, ends = optax.multi_transform(txs, {"x": "x", "y": "y"}), []
    for plan in (plan_of("zero1"), plan_of("ddp", 1)):
        state, _ = start(plan, {"x": {"c": (16, 24)}, "y": {"c": (16, 24)}}, tx)
        ends.append(values(run(state, jdp.make_train_step(loss, plan), batches(3))))
    assert_same(*ends)


# Where it cannot: the same numbers, and a notice.


def gram(x):
    return x @ jnp.swapaxes(x, -1, -2) @ x / jnp.square(x).sum()


def placed():
    everywhere = jax.NamedSharding(jdp.make_mesh(), P())
    mix = optax.stateless_with_tree_map(lambda x, _: gram(jax.lax.with_sharding_constraint(x, everywhere)))
    return optax.chain(mix, optax.scale(-1e-2))


def coupled():
    def update(grads, _):
        one = gram(grads["one"])
        return {"one": one, "u": gram(grads["u"] * jnp.sin(one).sum())}

    return optax.chain(optax.stateless(update), optax.scale(-1e-2))


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda: optax.apply_if_finite(few(), 3), {}, "it computes several parameters at once"),
        (lambda: optax.MultiSteps(few(), 2), {}, "it computes several parameters at once"),
        (placed, {}, "it places arrays by itself"),
        (
            few,
            {"mesh": {"data": 4, "model": 2}, "rules": [("*", P(None, ("model", "data")))]},
            "an axis of the model's shards the dimension that data shards",
        ),
    ],
    ids=["apply_if_finite", "MultiSteps", "placed", "model"],
)
def test_what_cannot_be_whole_is_reported(make, settings, words, capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    shapes = {"u": (6, 16, 24), "one": (64, 32)}
    assert_trains_as_one_device(shapes, make(), plan_of(**settings), ())
    said = capfd.readouterr().err
    assert "every device computes it, of gathered matrices" in said
    assert words in said


def test_a_matrix_that_needs_another_is_reported(capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    assert_trains_as_one_device({"u": (6, 16, 24), "one": (64, 32)}, coupled(), plan_of(), {"one"})
    assert (
        "elements of u (the update), and every device computes it, of gathered matrices: it needs another parameter"
        in (capfd.readouterr().err)
    )


def test_nothing_is_reported_of_what_mixes_nothing(capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    tx = optax.chain(optax.apply_if_finite(optax.novograd(1e-3), 3), optax.clip_by_global_norm(1.0))
    state, _ = start(plan_of(), FEW, tx)
    assert (state.static.whole, len([path for path, _ in state.static.flat if path.startswith("params")])) == ((), 1)
    assert "mixes" not in capfd.readouterr().err
