"""The noise scale is McCandlish's, of gradients that a row of data has by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.core.update.noise_scale import SMOOTHING, hint

ROWS, SIZE = 64, 2048


def linear(params, batch, rng):
    """Its gradient for a row is the row itself, as often as the row weighs."""
    weights = batch.get("weights", np.ones(batch["x"].shape[0], np.float32))
    return jdp.Loss((batch["x"] @ params["w"] * weights).sum(), weights.sum())


def batch(number):
    """Rows of mean 0.2 and variance 1: |G|² is 0.04 · 2048 = 82, and S is 2048; their ratio 25 rows."""
    random = np.random.default_rng(number)
    return {"x": (0.2 + random.normal(size=(ROWS, SIZE))).astype(np.float32)}


def weighted(kind):
    """The rows of `batch`, or others that have the same mean and variance, with weights."""

    def made(number):
        x, weights = batch(number)["x"], np.ones(ROWS, np.float32)
        if kind == "padding":  # behind each device's own rows
            x, weights = (np.pad(a.reshape(8, 8, -1), ((0, 0), (0, 8), (0, 0))) for a in (x, weights))
            x, weights = x.reshape(-1, SIZE), weights.ravel()
        if kind == "tokens":
            weights = 32 * weights
        if kind == "uneven":  # devices of 8, 8, 8, 8, 8, 4, 0 and 0 rows that count
            weights[44:] = 0
        return {"x": x, "weights": weights}

    return made


def trained(strategy, steps=3, accumulate=1, batch=batch, **settings):
    plan = jdp.Plan(jdp.make_mesh(replica=2, data=4), strategy)
    state = jdp.init_state(lambda _: {"w": jnp.zeros(SIZE)}, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(linear, plan, noise_scale=True, accumulate=accumulate, check_loss=False, **settings)
    for number in range(steps):
        state, metrics = step(state, batch(number))
    return state, float(metrics["noise_scale"])


def by_hand(steps, parts):
    averages = np.zeros(2)
    for number in range(steps):
        rows = batch(number)["x"].astype(np.float64)
        big = (rows.mean(axis=0) ** 2).sum()
        each = [device[i :: parts // 8] for device in np.split(rows, 8) for i in range(parts // 8)]
        means = [part.mean(axis=0) for part in each]
        small = np.mean([(mean**2).sum() for mean in means])
        b = ROWS / parts
        estimates = np.array([(ROWS * big - b * small) / (ROWS - b), (small - big) / (1 / b - 1 / ROWS)])
        averages = SMOOTHING * averages + (1 - SMOOTHING) * estimates
    return averages[1] / averages[0]


@pytest.mark.parametrize(
    ("strategy", "settings", "parts"),
    [
        ("ddp", {"accumulate": 2}, 8),
        ("zero1", {}, 8),
        ("zero2", {"accumulate": 2}, 16),
        ("zero1", {"buckets": "auto"}, 8),
        ("zero1", {"wire": "int8"}, 8),
    ],
)
def test_it_is_the_estimate_of_the_paper(strategy, settings, parts):
    state, measured = trained(strategy, **settings)
    exact = by_hand(3, parts)
    # float32 sums of 2048 squares; int8 changes the gradient of the whole batch, not the parts'
    assert measured == pytest.approx(exact, rel=0.05 if "wire" in settings else 1e-4)
    assert exact == pytest.approx(25, rel=0.2)  # and that is what the rows were made with
    assert state.sync["noise"].shape == (3,)


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("zero2", 2)])
def test_padding_counts_nothing_and_the_unit_is_that_of_the_weight(strategy, accumulate):
    def measured(**given):
        return trained(strategy, accumulate=accumulate, **given)[1]

    plain = measured()
    assert measured(batch=weighted("padding")) == pytest.approx(plain, rel=1e-4)
    assert measured(batch=weighted("tokens")) == pytest.approx(32 * plain, rel=1e-4)
    assert measured(batch=weighted("uneven")) == pytest.approx(25, rel=0.2)  # 43 if all parts counted alike


def test_rows_of_one_part_alone_say_nothing():
    def alone(number):
        return {"x": batch(number)["x"], "weights": np.arange(ROWS, dtype=np.float32) < 8 if number else np.ones(ROWS)}

    state, measured = trained("ddp", steps=2, batch=lambda n: jax.tree.map(np.float32, alone(n)))
    assert measured == pytest.approx(trained("ddp", steps=1)[1], rel=1e-5) and int(state.skipped) == 0


def test_a_skipped_step_leaves_the_average():
    plan = jdp.Plan(jdp.make_mesh(), "zero1")
    state = jdp.init_state(lambda _: {"w": jnp.zeros(SIZE)}, optax.sgd(0.1), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(linear, plan, noise_scale=True, check_loss=False, donate=False)
    state, before = step(state, batch(0))
    state, after = step(state, {"x": np.full_like(batch(0)["x"], np.nan)})
    assert int(state.skipped) == 1 and float(after["noise_scale"]) == float(before["noise_scale"])


@pytest.mark.parametrize(
    ("strategy", "mesh", "settings", "words"),
    [
        ("zero3", {"data": 8}, {}, "take zero2"),
        ("ddp", {"data": 8}, {"partitioning": "auto"}, "own gradient"),
        ("ddp", {"replica": 2, "data": 4}, {"local_steps": 2}, "local_steps"),
        ("ddp", {"data": 1, "model": 8}, {}, "2 shards"),
    ],
)
def test_where_there_is_nothing_to_compare(strategy, mesh, settings, words):
    plan = jdp.Plan(jdp.make_mesh(**mesh), strategy)
    with pytest.raises(ValueError, match=words):
        jdp.make_train_step(linear, plan, noise_scale=True, **settings)


def test_what_it_says_about_a_batch():
    def said(scale, batch):
        return hint(np.float32([2, 2 * scale, 2 * scale / batch]), "tokens")

    assert "1,000 tokens at the end, and a batch has 64: larger batches would still" in said(1000, 64)
    assert "fair balance" in said(80, 64)
    assert "smaller batches" in said(10, 64)
