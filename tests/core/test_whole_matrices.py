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


@pytest.mark.parametrize(
    ("shapes", "whole"), [({"a": {"w": (64, 32), "b": (240,)}, "c": (8, 8, 8)}, "a/w"), ((64, 32), ""), ((33, 31), "")]
)
def test_as_documented(shapes, whole):
    """Matrices have two dimensions; the rest is AdamW's. The parameters may be one array."""
    assert_trains_as_one_device(shapes, optax.contrib.muon(1e-2), plan_of("zero2"), {whole})


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
    whole = {"u", "one", "two"} | (set() if "offload" in settings else {"odd"})  # nothing is padded beside offload
    assert_trains_as_one_device(FEW, few(), plan_of(strategy, **settings), whole)


# Where it cannot: the same numbers, and a notice.


def gram(x):
    return x @ jnp.swapaxes(x, -1, -2) @ x / jnp.square(x).sum()


def placed():
    everywhere = jax.NamedSharding(jdp.make_mesh(), P())
    mix = optax.stateless_with_tree_map(lambda x, _: gram(jax.lax.with_sharding_constraint(x, everywhere)))
    return optax.chain(mix, optax.scale(-1e-2))


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


def test_nothing_is_reported_of_what_mixes_nothing(capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    tx = optax.chain(optax.apply_if_finite(optax.novograd(1e-3), 3), optax.clip_by_global_norm(1.0))
    state, _ = start(plan_of(), FEW, tx)
    assert (state.static.whole, len([path for path, _ in state.static.flat if path.startswith("params")])) == ((), 1)
    assert "mixes" not in capfd.readouterr().err
