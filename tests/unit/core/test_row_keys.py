"""A loss that sees some rows of the batch draws exactly those rows of the global draw; other draws are refused."""

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import plan_of, train

import jdp
from jdp.core.gradients.row_keys import RowDraws, read_draws, row_key_shape
from jdp.core.types import PartsError

KEY = jax.random.key(11)


def test_draws_hash_each_elements_64_bit_index():
    offset, stride, size = 858_993_458, 1, 5  # rows 858,993,458 .. 461: the second crosses 2**32 within itself
    draws = RowDraws(4, ((("random_bits", (4, size)), 1),))
    with jax.numpy_rank_promotion("raise"):  # as some users have it
        row_keys = lambda key: draws.key(key, offset=offset, stride=stride, total=2**31)  # noqa: E731
        drawn = jax.jit(lambda key: jax.random.bits(row_keys(key), (4, size)))(KEY)
    index = (offset + stride * np.arange(4)[:, None]) * size + np.arange(size)
    words = jexr.threefry_2x32(jax.random.key_data(KEY), np.uint32([index >> 32, index & 0xFFFFFFFF]))
    np.testing.assert_array_equal(drawn, np.bitwise_xor(*np.asarray(words)))
    assert offset * size < 2**32 < (offset + 1) * size + size


# The table: every kind of draw, by rows a device and by layout. Each function draws what becomes noise [rows, 2].

R = jax.random
WIDTH = 2


def each(keys_of_rows, draw=lambda key: R.uniform(key, (WIDTH,))):
    return jax.vmap(draw)(keys_of_rows)


def scan_of_splits(key, ids):
    def body(key, _):
        key, own = R.split(key)
        return key, R.uniform(own, (WIDTH,))

    return jax.lax.scan(body, key, ids)[1]


def rematerialised(key, ids):
    @jax.checkpoint
    def block(x, key):
        return x * R.uniform(key, x.shape), None

    return jax.lax.scan(block, jnp.ones((len(ids), WIDTH)), R.split(key, 3))[0]


def in_a_branch(key, ids):
    shape = len(ids), WIDTH
    return jax.lax.cond(ids.sum() >= 0, lambda k: R.uniform(k, shape), lambda k: jnp.zeros(shape), key)


@jax.custom_vjp
def own_gradient(key, x):
    return x + R.uniform(key, x.shape)


own_gradient.defvjp(lambda key, x: (own_gradient(key, x), None), lambda _, g: (None, g))


@jax.jit
def loop_over_rows(key, ids):
    return jnp.stack([R.uniform(R.fold_in(key, i), (WIDTH,)) for i in range(len(ids))])


BY_ROW = {
    "rows lead": lambda k, ids: R.uniform(k, (len(ids), WIDTH)),
    "tokens": lambda k, ids: R.uniform(k, (len(ids) * WIDTH, 1)).reshape(len(ids), WIDTH),
    "time leads": lambda k, ids: R.uniform(k, (WIDTH, len(ids))).T,
    "time leads, rows inside": lambda k, ids: R.uniform(k, (3, len(ids), WIDTH))[1],
    "shared by all": lambda k, ids: jnp.ones((len(ids), 1)) * R.uniform(k, (WIDTH,)),
    "split": lambda k, ids: each(R.split(k, len(ids))),
    "split by time and row": lambda k, ids: each(R.split(k, (WIDTH, len(ids))), jax.vmap(R.uniform)).T,
    "split of a split": lambda k, ids: each(R.split(R.split(k)[1], len(ids))),
    "split, then a loop": lambda k, ids: jax.lax.map(lambda own: R.uniform(own, (WIDTH,)), R.split(k, len(ids))),
    "fold_in by data": lambda k, ids: each(jax.vmap(lambda i: R.fold_in(k, i))(ids)),
    "rematerialised": rematerialised,
    "in a branch": in_a_branch,
    "in a derivative of its own": lambda k, ids: own_gradient(k, jnp.zeros((len(ids), WIDTH))),
    "bytes": lambda k, ids: R.bits(k, (len(ids), WIDTH), jnp.uint8).astype(jnp.float32),
    "width and rows alike": lambda k, ids: R.uniform(k, (len(ids), WIDTH, 8))[:, :, 0] + R.uniform(k, (WIDTH, 4))[0, 0],
}
SAMPLERS = {
    "choice": lambda k, ids: R.choice(k, 10.0 * jnp.arange(9), (len(ids), WIDTH)),
    "shared permutation": lambda k, ids: jnp.ones((len(ids), 1)) * R.permutation(k, 9.0 * jnp.arange(5))[:WIDTH],
    "multivariate normal": lambda k, ids: R.multivariate_normal(k, jnp.zeros(2), jnp.eye(2), (len(ids),)),
    "categorical": lambda k, ids: R.categorical(k, jnp.zeros((len(ids), WIDTH, 9))).astype(jnp.float32),
}
UNREAD = {
    "scan of splits": (scan_of_splits, "a key is carried from row to row"),
    "loop over rows": (loop_over_rows, "the loss draws more often for more rows"),
    "numbered": (lambda k, ids: each(jax.vmap(lambda i: R.fold_in(k, i))(jnp.arange(len(ids)))), "are numbered"),
    "a key of its own": (lambda k, ids: R.uniform(R.key(3), (len(ids), WIDTH)), "from another key than the loss gets"),
    "gamma": (lambda k, ids: R.gamma(k, 2.0, (len(ids), WIDTH)), "random_gamma cannot be drawn by row"),
    "poisson": (lambda k, ids: 1.0 * R.poisson(k, 3.0, (len(ids), WIDTH)), "only implemented for the threefry2x32"),
    "raw words": (lambda k, ids: R.uniform(R.wrap_key_data(R.key_data(k)[:2]), (len(ids), WIDTH)), "random_unwrap"),
    "two meanings": (lambda k, ids: each(R.split(k, len(ids))) * each(R.split(k, 3)).sum(), "two draws have the shape"),
}


def noise_of_a_step(draws, rows, partitioning, accumulate, devices):
    """{name: noise [global rows, 2]} that a training step gives the examples, and the key that it drew from.

    An example has a parameter of its own, so its gradient is its noise.
    """
    total, settings = rows * accumulate * devices, {"partitioning": partitioning, "accumulate": accumulate}
    init = lambda rng: {name: jnp.zeros((total, WIDTH)) for name in draws}  # noqa: E731

    def loss_fn(params, ids, rng):
        each = {name: (params[name][ids] * draw(rng, ids)).sum() for name, draw in draws.items()}
        return jdp.Loss(sum(each.values()), jnp.float32(len(ids)))

    # `in_a_branch` asks for the sum of all rows
    _, state, _ = train(loss_fn, init, optax.sgd(1.0), plan_of("ddp", devices), [jnp.arange(total)], **settings)
    key = jax.device_get(jax.random.key_data(jax.random.fold_in(state.rng, 0)))  # of the first batch
    return {name: -total * np.asarray(leaf) for name, leaf in state.params.items()}, key


def global_noise(draws, words, total):
    key = jax.random.wrap_key_data(words)
    return jax.device_get(jax.jit(lambda: {name: draw(key, jnp.arange(total)) for name, draw in draws.items()})())


LAYOUTS = [(8, "manual", 1, 4), (5, "manual", 2, 2), (1, "manual", 2, 2), (5, "auto", 4, 1)]


@pytest.mark.parametrize(("rows", "partitioning", "accumulate", "devices"), LAYOUTS)
@pytest.mark.default_ids("5-manual-2-2")
def test_every_draw_is_by_global_row(rows, partitioning, accumulate, devices):
    draws = {name: draw for name, draw in BY_ROW.items() if rows > 1 or name != "tokens"}  # the shape of "time leads"
    noise, key = noise_of_a_step(draws, rows, partitioning, accumulate, devices)
    for name, expected in global_noise(draws, key, rows * accumulate * devices).items():  # divided and multiplied again
        np.testing.assert_allclose(noise[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.rest
def test_samplers_are_by_global_row_too():
    """What splits keys, or draws until it accepts: at two rows a device, as many as `split` makes keys."""
    noise, key = noise_of_a_step(SAMPLERS, 2, "manual", 2, 2)
    for name, expected in global_noise(SAMPLERS, key, 8).items():
        np.testing.assert_allclose(noise[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.default_ids("gamma")
def test_unclear_draws_see_the_whole_batch(name):
    """With one microbatch `auto` draws for all rows at once; with more the loss is refused, with the remedy."""
    draw, reason = UNREAD[name]
    noise, key = noise_of_a_step({name: draw}, 3, None, 1, 4)
    expected = global_noise({name: draw}, key, 12)[name]
    np.testing.assert_allclose(noise[name], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=f"{reason}.*({__file__}:|3 rows|use another draw)"):
        noise_of_a_step({name: draw}, 3, "manual", 2, 2)


def test_a_generator_without_indices_is_refused():
    few, many = (jax.make_jaxpr(lambda key, n=n: R.bits(key, (n,)))(row_key_shape(3)).jaxpr for n in (3, 6))
    with pytest.raises(PartsError, match=r"use jax\.random\.key"):
        read_draws(few, many, 3, R.key(0, impl="rbg"))
    with jax.threefry_partitionable(False), pytest.raises(PartsError, match="jax_threefry_partitionable is off"):
        read_draws(few, many, 3, R.key(0))
